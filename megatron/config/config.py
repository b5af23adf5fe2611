"""The merged configuration: its sections, its hash, its file."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron.config.faults import bad_configuration
from megatron.config.keys import Key, all_keys, default_of, file_names
from megatron.config.paths import exists, is_relative, paths_of, places
from megatron.config.schema import (
    KEYS,
    Attention,
    Checkpoint,
    Data,
    Evaluation,
    Launch,
    Logging,
    Model,
    Optimizer,
    Parallel,
    Position,
    Precision,
    Section,
    Training,
)
from megatron.config.user_file import COPY
from megatron.errors import UserError
from megatron.files import write_text
from megatron.positions import fingerprint, options_of
from megatron.positions.layers import Entry, entries_of

NEEDED = {
    "train": {
        "data_path": "the prefix of the .bin and .idx files that prepare_data.py made",
        "train_iters": "the number of steps, at least 1; 0 measures the checkpoint in load",
        "save": "the folder for checkpoints",
    },
}
INSTEAD_OF = {"data_path": "train_data_paths", "train_iters": "train_epochs"}


@dataclass(frozen=True)
class Config:
    """A complete and checked configuration. Sections cannot be changed."""

    model: Model
    position: Position
    attention: Attention
    data: Data
    training: Training
    optimizer: Optimizer
    precision: Precision
    parallel: Parallel
    checkpoint: Checkpoint
    evaluation: Evaluation
    logging: Logging
    launch: Launch
    pos_emb_code: str | None = None
    """The text of the file that pos_emb_file names."""
    sources: tuple[str, ...] = field(default=(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What the user should know at the start, such as keys without effect."""
    named_in: dict[str, str | None] = field(default_factory=dict, compare=False)
    """The YAML file that names each input, beside which it is looked for; None: nowhere else."""
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """Keys that somebody chose, also where the value is the default."""

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
        not count.
        """
        shaping = {}
        for key in all_keys():
            value = plain(self[key.name])
            if key.shapes_result and value != self._default(key):
                shaping[key.name] = file_names(value) if key.hash_by_file_name else value
        if self.training.train_epochs is not None:  # train_iters follows from the data
            shaping.pop("train_iters", None)
        shaping["pos_emb_args"] = self._chosen_options()
        if self.position.pos_emb_layers:
            shaping["pos_emb_layers"] = self._chosen_layers()
        if self.pos_emb_code is not None:  # the text counts, not where the file is
            shaping["pos_emb_file"] = fingerprint(self.pos_emb_code)
        not_empty = {key: value for key, value in shaping.items() if value != {}}
        text = json.dumps(_canonical(not_empty), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def model_keys(self) -> dict[str, Any]:
        """What makes two models the same: sections model and position, without default options."""
        names = {*type(self.model).model_fields, *type(self.position).model_fields}
        names.remove("pos_emb_file")  # its text counts
        entries = entries_of(self.position)
        if not any("max_positions" in options_of(entry.name) for entry in entries):
            names.remove("max_position_embeddings")
        keys = {key: value for key, value in self.flat().items() if key in names}
        keys["pos_emb_args"] = _canonical(plain(self._chosen_options()))
        keys["pos_emb_layers"] = _canonical(plain(self._chosen_layers()))
        return keys

    @property
    def only_measures(self) -> bool:
        """Whether somebody chose train_iters: 0, with which KERPLE and MEP measure a checkpoint."""
        return "train_iters" in self.given and self.training.train_iters == 0

    def require_for(self, purpose: str) -> None:
        """Check what only `train` or `evaluate` needs; UserError with all keys that are missing."""
        if purpose == "train" and self.only_measures:
            purpose = "evaluate"
        needed = NEEDED.get(purpose, {})
        faults = []
        for key, what in needed.items():
            if not self[key] and not self[INSTEAD_OF.get(key, key)]:
                faults.append(f"{key}: not given; {what}")
        if purpose == "train" and self._lacks_validation():
            faults.append(
                "valid_data_paths: not given; train_data_paths leaves no text for validations;"
                " give corpora for them, or eval_interval: 0"
            )
        if purpose == "train" and self["finetune"] and not self["load"]:
            faults.append("load: not given; finetune starts from the checkpoint in this folder")
        if purpose == "evaluate" and not (self["load"] or self["save"]):
            faults.append(
                "load: not given; the folder with the checkpoint"
                " (save and --checkpoint are understood too)"
            )
        if faults:
            raise bad_configuration(self.sources, faults)

    def _lacks_validation(self) -> bool:
        validates = self.training.eval_interval and self.training.eval_iters
        blended = self.data.train_data_paths and not self.data.valid_data_paths
        return bool(validates and blended)

    def check_batch(self, devices: int) -> None:
        """UserError if train_batch_size is given and is not what this many devices make."""
        whole = self.training.train_batch_size
        micro = self.training.train_micro_batch_size_per_gpu
        steps = self.training.gradient_accumulation_steps
        if whole is None or whole == micro * steps * devices:
            return
        if whole % (steps * devices) == 0:
            hint = f"train_micro_batch_size_per_gpu = {whole // (steps * devices)}"
        elif whole % (micro * devices) == 0:
            hint = f"gradient_accumulation_steps = {whole // (micro * devices)}"
        else:
            hint = f"train_batch_size = {micro * steps * devices}"
        fault = (
            f"train_batch_size: {whole} is not train_micro_batch_size_per_gpu {micro} *"
            f" gradient_accumulation_steps {steps} * {devices} devices; try {hint}"
        )
        raise bad_configuration(self.sources, [fault])

    @contextmanager
    def naming_places(self, *keys: str) -> Iterator[None]:
        """Add to a UserError where a file of these keys was looked for, if it does not exist."""
        try:
            yield
        except UserError as fault:
            lines = [
                places(key, path, self.named_in.get(key))
                for key in keys
                for path in paths_of(self[key])
                if is_relative(path) and not exists(key, path)
            ]
            if not lines:
                raise
            raise UserError("\n  ".join([str(fault), *lines])) from None

    def __getitem__(self, name: str) -> Any:
        """The value of a key by its YAML name, with dots for nested ones."""
        first, *rest = name.split(".")
        value = getattr(getattr(self, KEYS[first]), first)
        for part in rest:
            value = getattr(value, part)
        return value

    def _default(self, key: Key) -> Any:
        """The value that a key has here if nobody sets it."""
        return self[key.follows] if key.follows else plain(default_of(key.info))

    def _chosen_options(self) -> dict[str, Any]:
        """The options of the encoding that differ from the encoding's own defaults."""
        if self.position.pos_emb_layers:
            return {}
        [entry] = entries_of(self.position)
        return _chosen(entry)

    def _chosen_layers(self) -> list[dict[str, Any]]:
        """The entries of pos_emb_layers, without default options, however they are spelt."""
        if not self.position.pos_emb_layers:
            return []
        return [{entry.name: plain(_chosen(entry))} for entry in entries_of(self.position)]


def _chosen(entry: Entry) -> dict[str, Any]:
    """The options of an encoding that differ from its own defaults."""
    options = options_of(entry.name)
    chosen = {}
    for name, value in entry.options.items():
        if name not in options or plain(value) != plain(options[name].default):
            chosen[name] = value
    return chosen


def plain(value: Any) -> Any:
    """Sections become dictionaries and tuples lists, at every depth."""
    if isinstance(value, Section):
        return {key: plain(getattr(value, key)) for key in type(value).model_fields}
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def _canonical(value: Any) -> Any:
    """500000.0 and 500000 are the same setting."""
    if isinstance(value, dict):
        return {key: _canonical(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
