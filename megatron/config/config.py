"""The merged configuration: its sections, its hash, its file."""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron.config.schema import (
    KEYS,
    Attention,
    Checkpoint,
    Data,
    Evaluation,
    Key,
    Launch,
    Logging,
    Model,
    Optimizer,
    Parallel,
    Position,
    Precision,
    Section,
    Training,
    all_keys,
)
from megatron.config.user_file import COPY
from megatron.errors import UserError
from megatron.positions import fingerprint, options_of

NEEDED = {
    "train": {
        "data_path": "the prefix of the .bin and .idx files that prepare_data.py made",
        "train_iters": "the number of steps, at least 1; to measure a checkpoint use evaluate.py",
        "save": "the folder for checkpoints",
    },
}


@dataclass(frozen=True)
class Config:
    """A complete and checked configuration. Sections are immutable; `notes` are to be said once at the start."""

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

    def flat(self) -> dict[str, Any]:
        """Every key and its value, in the order of the documentation; plain numbers, texts, lists and dictionaries."""
        return {key: plain(self[key]) for key in KEYS}

    def save(self, path: str | Path) -> None:
        """Write every key as YAML, and the text of pos_emb_file beside it; each is there complete or not at all."""
        path = Path(path)
        if self.pos_emb_code is not None:
            _write(path.with_name(COPY), self.pos_emb_code)
        _write(path, yaml.safe_dump(self.flat(), sort_keys=False, allow_unicode=True))

    @property
    def hash(self) -> str:
        """12 hex digits that name the trained model: keys that shape it and differ from their default.

        A new key with a default changes no old hash. Folders, logging, launching and evaluation do not count.
        """
        told = {}
        for key in all_keys():
            value = plain(self[key.name])
            default = self[key.follows] if key.follows else plain(_default(key))
            if key.said.get("shapes_result", True) and value != default:
                told[key.name] = Path(value).name if key.said.get("hash_by_file_name") else value
        told["pos_emb_args"] = self._telling_args()
        if self.pos_emb_code is not None:
            told["pos_emb_file"] = fingerprint(
                self.pos_emb_code
            )  # the text counts, not where it lies
        text = json.dumps(
            _canonical({key: value for key, value in told.items() if value != {}}), sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def model_keys(self) -> dict[str, Any]:
        """What makes two models one: the keys of the sections model and position, options at their default left out."""
        flat, options = self.flat(), options_of(self.position.pos_emb)
        keys = {*type(self.model).model_fields, *type(self.position).model_fields} - {
            "pos_emb_file"
        }  # its text counts
        found = {key: flat[key] for key in flat if key in keys}
        if "max_positions" not in options:
            del found["max_position_embeddings"]
        return found | {"pos_emb_args": _canonical(plain(self._telling_args()))}

    def require_for(self, purpose: str) -> None:
        """Check what only `train` or `evaluate` need; UserError that names all missing keys at once."""
        faults = [
            f"{key}: not given; {what}"
            for key, what in NEEDED.get(purpose, {}).items()
            if not self[key]
        ]
        if purpose == "evaluate" and not (self["load"] or self["save"]):
            faults.append(
                "load: not given; the folder with the checkpoint (save and --checkpoint are understood too)"
            )
        if faults:
            raise UserError(message(self.sources, faults))

    def check_batch(self, devices: int) -> None:
        """UserError if train_batch_size is given and is not what this many devices make."""
        training, wanted = self.training, self.training.train_batch_size
        micro, steps = training.train_micro_batch_size_per_gpu, training.gradient_accumulation_steps
        if wanted is None or wanted == micro * steps * devices:
            return
        if wanted % (steps * devices) == 0:
            hint = f"train_micro_batch_size_per_gpu = {wanted // (steps * devices)}"
        elif wanted % (micro * devices) == 0:
            hint = f"gradient_accumulation_steps = {wanted // (micro * devices)}"
        else:
            hint = f"train_batch_size = {micro * steps * devices}"
        fault = (
            f"train_batch_size: {wanted} is not train_micro_batch_size_per_gpu {micro} *"
            f" gradient_accumulation_steps {steps} * {devices} devices; try {hint}"
        )
        raise UserError(message(self.sources, [fault]))

    def __getitem__(self, name: str) -> Any:
        """The value of a key by its YAML name, with dots for nested ones."""
        first, *rest = name.split(".")
        value = getattr(getattr(self, KEYS[first]), first)
        for part in rest:
            value = getattr(value, part)
        return value

    def _telling_args(self) -> dict[str, Any]:
        """The options of the encoding that differ from the encoding's own defaults."""
        options = options_of(self.position.pos_emb)
        return {
            key: value
            for key, value in self.position.pos_emb_args.items()
            if key not in options or plain(value) != plain(options[key].default)
        }


def message(sources: tuple[str, ...] | list[str], faults: list[str]) -> str:
    """All faults in one text, under the sources they come from."""
    return "\n  ".join([f"bad configuration ({', '.join(sources) or 'nothing given'})", *faults])


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.write_text(text, encoding="utf-8", newline="")
    os.replace(beside, path)


def plain(value: Any) -> Any:
    """Sections become dictionaries and tuples lists, at every depth."""
    if isinstance(value, Section):
        return {key: plain(getattr(value, key)) for key in type(value).model_fields}
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _default(key: Key) -> Any:
    return None if key.info.is_required() else key.info.get_default(call_default_factory=True)


def _canonical(value: Any) -> Any:
    """500000.0 and 500000 are the same setting."""
    if isinstance(value, dict):
        return {key: _canonical(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
