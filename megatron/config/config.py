"""The merged configuration: its sections, hash and file, and the dictionary for DeepSpeed."""

import json
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from megatron.config.messages import bad_configuration
from megatron.config.schema import (
    BY_FILE_NAME,
    KEYS,
    Attention,
    Position,
    Sections,
    Stage,
    all_keys,
    default_of,
    file_names,
    plain,
)
from megatron.files import write_text
from megatron.positions import (
    fingerprint,
    options_of,
    syntax_fingerprint,
)
from megatron.positions.layers import Entry, entries_of, name_of_layers
from megatron.positions.registry import encoding_called
from megatron.results.row import SHOWN_IF_SET

COPY = "pos_emb_file.py"  # the user's own encoding, saved next to a checkpoint's configuration


@dataclass(frozen=True)
class Config(Sections):
    """A complete and checked configuration. Its sections are immutable.

    pos_emb_code: the text of the file that pos_emb_file names
    sources: the files that were read, and `command line`
    notes: what the user should know at the start, such as keys that have no effect
    chosen: keys that somebody set, even to the default value
    origins: the source that set each key, by the key's dotted name; keys that nobody set are absent
    """

    pos_emb_code: str | None = None
    sources: tuple[str, ...] = field(default=(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    chosen: frozenset[str] = field(default=frozenset(), compare=False)
    origins: dict[str, str] = field(default_factory=dict, compare=False)

    def __getitem__(self, name: str) -> Any:
        """The value of a key by its YAML name; nested keys are written with dots."""
        first, *rest = name.split(".")
        value = getattr(getattr(self, KEYS[first]), first)
        for part in rest:
            value = getattr(value, part)
        return value

    def at_step(self, step: int) -> "Config":
        """The configuration at a step: with its stage's changes to encoding and attention."""
        stage = self.training.stage_of(step)
        if stage is None:
            return self
        position, attention = staged(self.position, self.attention, stage)
        return replace(self, position=position, attention=attention)

    def flat(self) -> dict[str, Any]:
        """Every key with its plain value (number, text, list, dictionary), in documented order."""
        return {key: plain(self[key]) for key in KEYS}

    def save(self, path: str | Path) -> None:
        """Write every key as YAML, and a copy of pos_emb_file next to it; all or nothing."""
        path = Path(path)
        if self.pos_emb_code is not None:
            write_text(path.with_name(COPY), self.pos_emb_code)
        write_text(path, yaml.safe_dump(self.flat(), sort_keys=False, allow_unicode=True))

    @property
    def hash(self) -> str:
        """12 hex digits that identify the trained model, from the keys that shape it and differ
        from their defaults.

        So a new key with a default changes no old hash. Folders, logging, launching, evaluation and
        comments in pos_emb_file don't count.
        """
        shaping = {}
        for key in all_keys():
            value = plain(self[key.name])
            default = self[key.follows] if key.follows else plain(default_of(key.info))
            if key.shapes_result and value != default:
                shaping[key.name] = file_names(value) if key.name in BY_FILE_NAME else value
        arguments = shaping.pop("layer_args", {})
        shaping |= {key: value for key, value in arguments.items() if value is not None}
        shaping |= self._chosen()
        if not shaping["pos_emb_layers"]:
            del shaping["pos_emb_layers"]
        not_empty = {key: value for key, value in shaping.items() if value != {}}
        not_empty.pop("pos_emb_file", None)
        if self.precision.dtype != "fp32":
            not_empty.pop("float32_matmul_precision", None)
        if self.pos_emb_code is not None:  # the file's text counts, not its path
            not_empty["pos_emb_file"] = syntax_fingerprint(self.pos_emb_code)
        return fingerprint(json.dumps(_canonical(not_empty), sort_keys=True))[:12]

    def model_keys(self) -> dict[str, Any]:
        """The keys that identify a model: sections `model` and `position`, without default
        options."""
        names = {*type(self.model).model_fields, *type(self.position).model_fields}
        names.remove("pos_emb_file")  # the file's text counts
        entries = entries_of(self.position)
        if not any("max_positions" in options_of(entry.name) for entry in entries):
            names.remove("max_position_embeddings")
        keys = {key: value for key, value in self.flat().items() if key in names}
        return keys | _canonical(self._chosen())

    def _chosen(self) -> dict[str, Any]:
        """The encoding's options that differ from its defaults, whatever their spelling."""
        entries = entries_of(self.position)
        chosen = {"pos_emb_args": {}, "pos_emb_layers": []}
        if not self.position.pos_emb_layers:
            return chosen | {"pos_emb_args": _not_default(entries[0])}
        layers = [{entry.name: _not_default(entry)} for entry in entries]
        return chosen | {"pos_emb_layers": layers}

    @property
    def beside_encoding(self) -> dict[str, str]:
        """What labels name in addition to the encoding, by row key; empty if nothing is unusual."""
        counts = [(kind, len([*alike])) for kind, alike in groupby(self.model.layers)]
        softmax_type = self.model.softmax_type
        facts = {"layer_kinds": " + ".join(f"{count} {kind}" for kind, count in counts)}
        for key, value in self.model.layer_args.items():
            if key in SHOWN_IF_SET:
                entries = value.items() if isinstance(value, dict) else [(value,)]
                facts[key] = ", ".join(str(Entry(*entry)) for entry in entries)
        facts |= {
            "softmax_type": "" if softmax_type == "vanilla" else softmax_type,
            "optimizer_type": "Muon" if self.optimizer.optimizer.type == "Muon" else "",
        }
        return {key: value for key, value in facts.items() if value}

    @property
    def label(self) -> str:
        """The model's name in logs and model cards: its encoding, and whatever else is unusual."""
        facts = [f"{key} {value}" for key, value in self.beside_encoding.items()]
        return ", ".join([name_of_layers(self.position), *facts])

    @property
    def only_measures(self) -> bool:
        """Whether train_iters: 0 was set, which measures a checkpoint as KERPLE and MEP do."""
        return "train_iters" in self.chosen and self.training.train_iters == 0

    def require_for(self, purpose: str) -> None:
        """Check the keys that only `train` or `evaluate` needs; UserError lists all missing
        ones."""
        data, training, checkpoint = self.data, self.training, self.checkpoint
        measures = purpose == "evaluate" or self.only_measures
        trains = purpose == "train" and not measures
        validates = training.validation_interval
        whole_corpora = bool(data.train_data_paths)
        needs = [
            (
                measures and not (checkpoint.load or checkpoint.save),
                "load: is not set; give the folder with the checkpoint"
                " (save or --checkpoint will do, too)",
            ),
            (
                trains and not (data.data_path or whole_corpora),
                "data_path: is not set; give the prefix of the .bin and .idx files that"
                " prepare_data.py made",
            ),
            (
                trains and not training.train_iters,
                "train_iters: is not set; give the number of steps, at least 1 (0 measures the"
                " checkpoint in load)",
            ),
            (trains and not checkpoint.save, "save: is not set; give a folder for the checkpoints"),
            (
                trains and validates and whole_corpora and not data.valid_data_paths,
                "valid_data_paths: is not set, and train_data_paths leaves no text for validation;"
                " give corpora for validation, or set eval_interval: 0",
            ),
        ]
        faults = [message for is_missing, message in needs if is_missing]
        if faults:
            raise bad_configuration(self.sources, faults)

    def check_batch(self, devices: int) -> None:
        """Raises UserError if train_batch_size is set and doesn't fit this number of devices."""
        training = self.training
        micro, steps = training.train_micro_batch_size_per_gpu, training.gradient_accumulation_steps
        made = micro * steps * devices
        if training.train_batch_size not in (None, made):
            fault = (
                f"train_batch_size: {training.train_batch_size} is not"
                f" train_micro_batch_size_per_gpu {micro} * gradient_accumulation_steps {steps} *"
                f" {devices} devices = {made}; change one of them"
            )
            raise bad_configuration(self.sources, [fault])


def staged(position: Position, attention: Attention, stage: Stage) -> tuple[Position, Attention]:
    """Both sections with a stage's changes; each encoding gets only the options that it may
    change."""
    entries = []
    for entry in entries_of(position):
        options = encoding_called(entry.name).changeable(stage.pos_emb_args)
        entries.append({entry.name: entry.options | options})
    update: dict[str, Any] = {"pos_emb_layers": tuple(entries)}
    if not position.pos_emb_layers:
        update = {"pos_emb_args": entries[0][position.pos_emb]}
    position = position.model_copy(update=update)
    keys = stage.model_fields_set & Attention.model_fields.keys()
    changes = {key: getattr(stage, key) for key in keys}
    if any(key.startswith("window") for key in keys):
        changes = {"window": None, "window_layers": ()} | changes
    return position, attention.model_copy(update=changes)


def _not_default(entry: Entry) -> dict[str, Any]:
    """The options of an encoding that differ from its defaults."""
    encoding, _ = encoding_called(entry.name).joined(entry.options)
    known_options = options_of(encoding)
    chosen = {}
    for name, value in entry.options.items():
        if name not in known_options or plain(value) != plain(known_options[name].default):
            chosen[name] = value
    return plain(chosen)


def _canonical(value: Any) -> Any:
    """Make 500000.0 and 500000 the same setting."""
    return json.loads(json.dumps(value), parse_float=_shortest)


def _shortest(digits: str) -> float:
    number = float(digits)
    return int(number) if number.is_integer() else number


def deepspeed_config(config: Config, ranks: int = 1) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize(config=…)`, without our optimizer and schedule.

    The only place that knows DeepSpeed's names for our keys.
    """
    zero = plain(config.parallel.zero_optimization)
    if zero["stage"] == 0:  # buckets are used from stage 1 on
        zero = {"stage": 0}
    elif zero["stage"] < 3 and zero["overlap_comm"] is None:  # at stage 3 DeepSpeed's own default
        # With one rank there is nothing to exchange, so overlapping would only cost a second
        # buffer.
        zero["overlap_comm"] = ranks > 1
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.training.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": config.training.gradient_accumulation_steps,
        "gradient_clipping": config.optimizer.gradient_clipping,
        "steps_per_print": 10**9,
        "zero_optimization": {key: value for key, value in zero.items() if value is not None},
    }
    if config.precision.dtype == "bf16":
        settings["bf16"] = {"enabled": True}
        # Gradients of accumulated batches are summed in float32. Stage 0 can't do that, so bf16
        # needs 1.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.precision.dtype == "fp16":
        settings["fp16"] = {"enabled": True, **plain(config.precision.fp16)}
    if config.precision.fp32_allreduce:
        settings["communication_data_type"] = "fp32"
    return settings
