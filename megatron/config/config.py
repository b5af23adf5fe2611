"""The merged configuration: its sections, its hash, its file, and its form for DeepSpeed."""

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
    defaults_of,
    fingerprint,
    options_of,
    syntax_fingerprint,
)
from megatron.positions.layers import Entry, entries_of, name_of_layers
from megatron.positions.registry import encoding_called
from megatron.results.row import SHOWN_IF_SET

COPY = "pos_emb_file.py"  # the user's own encoding, beside the configuration of a checkpoint


@dataclass(frozen=True)
class Config(Sections):
    """A complete and checked configuration. Sections cannot be changed.

    pos_emb_code: the text of the file that pos_emb_file names
    sources: files, and `command line`
    notes: what the user should know at the start, such as keys without effect
    chosen: keys that somebody chose, also if the value is the default
    origins: who set a key, by its name with dots; without keys that nobody set
    """

    pos_emb_code: str | None = None
    sources: tuple[str, ...] = field(default=(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    chosen: frozenset[str] = field(default=frozenset(), compare=False)
    origins: dict[str, str] = field(default_factory=dict, compare=False)

    def __getitem__(self, name: str) -> Any:
        """The value of a key by its YAML name, with dots for nested ones."""
        first, *rest = name.split(".")
        value = getattr(getattr(self, KEYS[first]), first)
        for part in rest:
            value = getattr(value, part)
        return value

    def at_step(self, step: int) -> "Config":
        """The configuration with what the stage of a step changes of encoding and attention."""
        stage = self.training.stage_of(step)
        if stage is None:
            return self
        position, attention = staged(self.position, self.attention, stage)
        return replace(self, position=position, attention=attention)

    def flat(self) -> dict[str, Any]:
        """Every key and its plain value (number, text, list, dictionary), in documented order."""
        return {key: plain(self[key]) for key in KEYS}

    def save(self, path: str | Path) -> None:
        """Write every key as YAML, and the text of pos_emb_file beside it, whole or not at all."""
        path = Path(path)
        if self.pos_emb_code is not None:
            write_text(path.with_name(COPY), self.pos_emb_code)
        write_text(path, yaml.safe_dump(self.flat(), sort_keys=False, allow_unicode=True))

    @property
    def hash(self) -> str:
        """12 hex digits that name the trained model: keys that shape it and are not at their
        default.

        A new key with a default changes no old hash. Folders, logging, launching and evaluation do
        not count, nor do comments in pos_emb_file.
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
        if self.pos_emb_code is not None:  # the text counts, not where the file is
            not_empty["pos_emb_file"] = syntax_fingerprint(self.pos_emb_code)
        return fingerprint(json.dumps(_canonical(not_empty), sort_keys=True))[:12]

    def model_keys(self) -> dict[str, Any]:
        """The keys that make two models the same: model and position, without default options."""
        names = {*type(self.model).model_fields, *type(self.position).model_fields}
        names.remove("pos_emb_file")  # its text counts
        entries = entries_of(self.position)
        if not any("max_positions" in options_of(entry.name) for entry in entries):
            names.remove("max_position_embeddings")
        keys = {key: value for key, value in self.flat().items() if key in names}
        return keys | _canonical(self._chosen())

    def _chosen(self) -> dict[str, Any]:
        """The encoding's options that differ from its own defaults, however they are spelt."""
        entries = entries_of(self.position)
        chosen = {"pos_emb_args": {}, "pos_emb_layers": []}
        if not self.position.pos_emb_layers:
            return chosen | {"pos_emb_args": _not_default(entries[0])}
        layers = [{entry.name: _not_default(entry)} for entry in entries]
        return chosen | {"pos_emb_layers": layers}

    @property
    def beside_encoding(self) -> dict[str, str]:
        """What labels name beside the encoding, by the keys of rows; empty where all is usual."""
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
        """The model as logs and cards call it: its encoding, and what else is unusual."""
        facts = [f"{key} {value}" for key, value in self.beside_encoding.items()]
        return ", ".join([name_of_layers(self.position), *facts])

    @property
    def only_measures(self) -> bool:
        """Whether somebody chose train_iters: 0, with which KERPLE and MEP measure a checkpoint."""
        return "train_iters" in self.chosen and self.training.train_iters == 0

    def require_for(self, purpose: str) -> None:
        """Check what only `train` or `evaluate` needs; raises UserError with all missing keys."""
        data, training, checkpoint = self.data, self.training, self.checkpoint
        measures = purpose == "evaluate" or self.only_measures
        trains = purpose == "train" and not measures
        validates = training.validation_interval
        whole_corpora = bool(data.train_data_paths)
        needs = [
            (
                measures and not (checkpoint.load or checkpoint.save),
                "load: not given; the folder with the checkpoint"
                " (save and --checkpoint are understood too)",
            ),
            (
                trains and not (data.data_path or whole_corpora),
                "data_path: not given; the prefix of the .bin and .idx files that prepare_data.py"
                " made",
            ),
            (
                trains and not training.train_iters,
                "train_iters: not given; the number of steps, at least 1; 0 measures the"
                " checkpoint in load",
            ),
            (trains and not checkpoint.save, "save: not given; the folder for checkpoints"),
            (
                trains and validates and whole_corpora and not data.valid_data_paths,
                "valid_data_paths: not given; train_data_paths leaves no text for validations;"
                " give corpora for them, or eval_interval: 0",
            ),
        ]
        faults = [message for is_missing, message in needs if is_missing]
        if faults:
            raise bad_configuration(self.sources, faults)

    def check_batch(self, devices: int) -> None:
        """Raises UserError if train_batch_size is given and these devices make another one."""
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
    """Both sections as a stage changes them; each encoding takes the options that it may change."""
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
    """The options of an encoding that differ from its own defaults."""
    defaults = defaults_of(entry.name, entry.options)
    chosen = {}
    for name, value in entry.options.items():
        if name not in defaults or plain(value) != plain(defaults[name]):
            chosen[name] = value
    return plain(chosen)


def _canonical(value: Any) -> Any:
    """500000.0 and 500000 are the same setting."""
    return json.loads(json.dumps(value), parse_float=_shortest)


def _shortest(digits: str) -> float:
    number = float(digits)
    return int(number) if number.is_integer() else number


def deepspeed_config(config: Config, ranks: int = 1) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize(config=…)`, without our optimizer and schedule.

    The only place that knows DeepSpeed's names for our keys.
    """
    zero = plain(config.parallel.zero_optimization)
    if zero["stage"] == 0:  # buckets act from stage 1 on
        zero = {"stage": 0}
    elif zero["stage"] < 3 and zero["overlap_comm"] is None:  # at stage 3 DeepSpeed's own default
        # One rank exchanges nothing: overlapping costs a second buffer and waits for the device.
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
        # Gradients of accumulated batches are summed in float32. Stage 0 cannot, so bf16 needs 1.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.precision.dtype == "fp16":
        settings["fp16"] = {"enabled": True, **plain(config.precision.fp16)}
    if config.precision.fp32_allreduce:
        settings["communication_data_type"] = "fp32"
    return settings
