"""Checkpoints of nanoGPT, litgpt, torchtitan and flame in their own forms. Nothing in them is run.

families.yml has their names of weights, and the keys of the first two. A folder of the others
(torch.distributed.checkpoint) has no configuration: the user gives it in our keys.
"""

import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor

from megatron import strict_yaml
from megatron.checkpoints.read import fill
from megatron.config import Config
from megatron.errors import UserError, in_words
from megatron.files import read_small
from megatron.interop.families import ENDINGS, TABLE, Family, each_weight
from megatron.interop.reference import WRAPPERS, plain_content
from megatron.model import GPT, Architecture, from_config

TRAINERS: dict[str, dict[str, str]] = TABLE["trainers"]
NANOGPT, LITGPT, DISTRIBUTED, _ = TRAINERS
FAMILIES = [Family(name, **table) for name, table in TABLE["families_of_trainers"].items()]
SETTINGS = "model_config.yaml"  # of litgpt
LONGEST = 1_000_000  # bytes of it


def folder_of(source: Path) -> Path:
    """The folder of a checkpoint that is given by its file."""
    is_known = any(source.match(trainer["file"]) for trainer in TRAINERS.values())
    return source.parent if is_known and source.is_file() else source


def kind_of(folder: Path) -> str | None:
    """The trainer whose checkpoint a folder holds, or None."""
    kinds = (kind for kind, trainer in TRAINERS.items() if any(folder.glob(trainer["file"])))
    return next(kinds, None)


def open_folder(folder: Path, kind: str, config: Config | None) -> tuple[GPT, Config, int]:
    """The model in eval mode, its configuration, and the step of its training, 0 if unknown.

    config: of a folder of torch.distributed.checkpoint; what all of its trainer's models share
        (Llama's norms, activation and biases) is set here
    Raises UserError, which says how the trainer's tool converts it, for a model that is not ours.
    """
    [file, *_] = sorted(folder.glob(TRAINERS[kind]["file"]))
    try:
        content = distributed_tensors(folder) if kind == DISTRIBUTED else plain_content(file)
        weights, settings = content.get("model", content), content.get("model_args", {})
        if kind == LITGPT:
            settings = strict_yaml.parse(read_small(folder / SETTINGS, LONGEST).decode())
        weights = {WRAPPERS.sub("", name): tensor for name, tensor in weights.items()}
        model, config = model_of(kind, weights, settings, config)
    except Exception as fault:  # each damage raises a kind of its own
        reason = in_words(fault)
        raise UserError(
            f"{file}: cannot be read as {kind}'s ({reason:.400}); code in it is never run -"
            f" {TRAINERS[kind]['cure']}"
        ) from None
    return model, config, content.get("step_count", content.get("iter_num", 0))


@torch.no_grad()
def model_of(
    kind: str, weights: dict[str, Tensor], settings: Mapping[str, Any], config: Config | None
) -> tuple[GPT, Config]:
    """The model with such weights, by the family that has their names."""
    families = [family for family in FAMILIES if weights.keys() >= {*family.names}]
    if not families:
        raise UserError("its names of weights are those of another model")
    [family] = families
    rows = weights[family.names[0]]
    if kind != DISTRIBUTED:
        unknown = {key for key in settings if settings[key]} - family.known_keys
        if unknown:
            raise UserError(f"{sorted(unknown)}: not known")
        config = family.configuration({**settings, "vocab_size": len(rows)})
    elif config is None:
        raise UserError("it has no configuration with it")
    else:
        arguments = {**config.position.pos_emb_args, **family.position_args}
        position = config.position.model_copy(update={"pos_emb_args": arguments})
        trunk = config.model.model_copy(update=dict(family.fixed))
        config = replace(config, model=trunk, position=position)

    head = f"{family.head}.weight"
    if not config.model.no_weight_tying and torch.equal(weights.get(head, rows), rows):
        weights.pop(head, None)
    model = from_config(config, vocab=len(rows))
    architecture = Architecture.of(config.model)
    fill(model, each_weight(family, weights, architecture))
    left_over = set(weights)
    for _, modules, _ in family.places(architecture):
        left_over -= {module + ending for module in modules for ending in ENDINGS}
    if left_over:
        raise ValueError(f"left over: {sorted(left_over)}")
    return model.eval(), config


class Descriptions(pickle.Unpickler):
    """Reads .metadata, a pickle, and refuses every class that does not describe tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in TABLE["descriptions"]:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def distributed_tensors(folder: Path) -> dict[str, Any]:
    """The model's tensors in a folder of torch.distributed.checkpoint, joined over ranks."""
    # Only here: importing them takes a second.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with (folder / TRAINERS[DISTRIBUTED]["file"]).open("rb") as file:
        metadata = Descriptions(file).load()
    reader = FileSystemReader(folder)
    reader.read_metadata = lambda: metadata  # in place of an unrestricted pickle
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "chunks") and not name.startswith(tuple(TABLE["beside_model"]))
    }
    try:
        with catch_warnings(action="ignore"):  # of a single process
            load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as fault:
        [(reason, _)] = fault.failures.values()
        raise ValueError(repr(reason)) from None
    return tensors
