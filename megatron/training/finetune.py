"""Start a fine-tuning: a parent that fits, and its weights in a new model."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoints.manifest import (
    WEIGHTS,
    Damaged,
    Stamps,
    check_unchanged,
    note_opened,
    read_record,
    stamps,
)
from megatron.checkpoints.parent import checkpoint_to_continue
from megatron.checkpoints.read import READ_BY_EVALUATION, read_meta
from megatron.config import Config
from megatron.config.schema import Model
from megatron.errors import UserError
from megatron.model import GPT, Architecture, positions_from_config
from megatron.parallel.grid import Grid
from megatron.positions import Position
from megatron.positions.layers import name_of_layers
from megatron.positions.outline import Outline
from megatron.training.faults import shared_file_faults
from megatron.training.graft import Graft, Learned, graft, is_of_encoding
from megatron.training.trainer import Trainer
from megatron.training.universal import give_weights

logger = logging.getLogger(__name__)

MAY_CHANGE = frozenset(
    {
        "seq_length",
        "max_position_embeddings",
        "hidden_dropout",
        "attention_dropout",
        "init_method",
        "init_method_std",
        "output_layer_init_method",
        "make_vocab_size_divisible_by",
    }
)
"""Keys of the section `model` that neither shape the parent's weights nor what is computed from
them; the rows of the embedding are the parent's whatever the last one says."""


@dataclass(frozen=True)
class ParentModel:
    """A verified checkpoint whose weights a new run takes.

    stamps: of its files when they were verified
    """

    path: Path
    config: Config
    record: dict[str, Any]
    stamps: Stamps

    @property
    def description(self) -> str:
        """What result rows call it: `rotary step 700`."""
        return f"{name_of_layers(self.config.position)} step {self.record['step']}"


def parent_model(config: Config, grid: Grid) -> ParentModel:
    """The parent of a new fine-tuning. Every rank calls this, and each hashes its share.

    config: with its parent. UserError where the parent is damaged or has another model.
    """
    path = Path(config.checkpoint.parent.path or "")
    seen = stamps(path, READ_BY_EVALUATION)
    faults = shared_file_faults(path, grid, READ_BY_EVALUATION)
    if faults:
        raise Damaged(faults, "copy the parent again, or load another checkpoint")
    trained, record = read_meta(path)
    note_opened(path, record)
    check_same_shapes(config.model, trained.model, path)
    return ParentModel(path, trained, record, seen)


def check_same_shapes(here: Model, there: Model, path: Path) -> None:
    """UserError that names every key in which two models differ outside their encodings."""
    now, then = _fixed(here), _fixed(there)
    differing = [
        f"{key}: {then[key]!r} there, {value!r} here"
        for key, value in now.items()
        if value != then[key]
    ]
    if differing:
        raise UserError(
            f"load: {path} has weights of another model ({'; '.join(differing)})"
            " - fine-tuning changes the encoding, lengths, attention and data alone: set these keys"
            " to the parent's"
        )


def _fixed(section: Model) -> dict[str, Any]:
    """The keys that a fine-tuning cannot change, with their values where they are not set."""
    model = Architecture.of(section)
    keys = {key: getattr(section, key) for key in Model.model_fields if key not in MAY_CHANGE}
    return keys | {
        "num_key_value_heads": model.key_heads,
        "head_dim": model.features_of_head,
        "intermediate_size": model.mlp_width,
        "use_bias_in_attn_output": model.bias_in_attn_output,
    }


def with_rows_of_parent(config: Config, facts: dict[str, Any]) -> dict[str, Any]:
    """Facts of the vocabulary with the rows of embedding that a fine-tuned model has.

    They are its parent's, whatever make_vocab_size_divisible_by says, where the data's tokenizer
    is the parent's. A parent without a record of its tokenizer needs a row for every token.
    """
    parent = config.checkpoint.parent.path
    if parent is None:
        return facts
    try:
        record = read_record(checkpoint_to_continue(config) or Path(parent))
    except Damaged:
        return facts  # what starts from it says what is wrong
    now, then = facts["tokenizer"], (record.get("tokenizer") or {}).get("hash")
    fits = now["vocab_size"] <= record["vocab"] if then is None else now["hash"] == then
    return {**facts, "vocab": record["vocab"]} if fits else facts


class Heritage:
    """What a new model takes from its parent, and what it has itself.

    UserError where the parent's file of weights is not that of its configuration.
    """

    def __init__(self, parent: ParentModel, model: GPT) -> None:
        self.parent = parent
        self.file = parent.path / WEIGHTS
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        self.initial: dict[str, Tensor] = {}
        for name, weight in model.named_parameters():
            if is_of_encoding(name):
                self.initial[name] = weight.detach().clone()
        kinds = [kinds_of(placed.position) for placed in model.placed]
        self.graft = self._graft(_with_kinds(shapes, kinds), model.position_of_layer)

    def _graft(self, new: dict[str, Learned], of_layers: Sequence[int]) -> Graft:
        try:
            with safe_open(self.file, framework="pt") as weights:
                shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as fault:
            raise Damaged([f"{self.file}: cannot be read ({fault})"]) from None
        with torch.random.fork_rng(devices=[]), Outline():
            positions, of_layers_there = positions_from_config(self.parent.config)
        kinds = [kinds_of(position) for position in positions]
        try:
            return graft(_with_kinds(shapes, kinds), new, of_layers_there, of_layers)
        except UserError as fault:
            raise UserError(
                f"{self.file}: does not hold the model of its config.yml ({fault})"
            ) from None

    def log(self) -> None:
        """Say what is kept, dropped and new."""
        logger.info("fine-tuning %s (%s):", self.parent.path, self.parent.description)
        for line in self.graft.lines():
            logger.info("  %s", line)

    def give(self, trainer: Trainer) -> None:
        """Let a new engine start from these weights. Every rank calls this."""
        with safe_open(self.file, framework="pt") as weights:

            def weight(name: str) -> Tensor:
                source = self.graft.sources.get(name)
                if source is None:
                    return self.initial[name]
                taken = weights.get_tensor(source)
                return self._with_new_rows(name, taken) if name in self.initial else taken

            give_weights(trainer.engine, trainer.config, weight)
        check_unchanged(self.parent.path, self.parent.stamps)
        trainer.restore_exact_positions()

    def _with_new_rows(self, name: str, taken: Tensor) -> Tensor:
        rows = self.graft.rows.get(name)
        if rows is None:
            return taken[: len(self.initial[name])]
        return torch.cat([taken[:rows], self.initial[name][rows:]])


Kinds = dict[str, tuple[str, bool]]
"""Of each tensor of an encoding: the kind of module, and whether its rows are positions."""


def kinds_of(position: Position) -> Kinds:
    """The kinds of an encoding's tensors, by their names in it."""
    paths = {id(module): path for path, module in position.named_modules()}
    kinds: Kinds = {}
    for owner, name, _ in position.own_parameters():
        path = paths[id(owner)]
        whole = f"{path}.{name}" if path else name
        by_position = isinstance(owner, Position) and name in owner.rows_are_positions
        kinds[whole] = (type(owner).__qualname__, by_position)
    return kinds


def _with_kinds(
    shapes: Mapping[str, tuple[int, ...]], kinds: Sequence[Kinds]
) -> dict[str, Learned]:
    """Tensors by name; kinds: those of each encoding of the model."""
    tensors = {}
    for name, shape in shapes.items():
        kind, by_position = "", False
        if is_of_encoding(name):
            _, index, rest = name.split(".", 2)
            kinds_of_one = kinds[int(index)] if int(index) < len(kinds) else {}
            kind, by_position = kinds_of_one.get(rest, ("", False))
        tensors[name] = Learned(tuple(shape), kind, by_position)
    return tensors
