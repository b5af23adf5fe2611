"""Read checkpoints of GPT-NeoX and its forks KERPLE and MEP: a folder of `layer_NN-model_00-model_states.pt`."""

import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from megatron.config import Config
from megatron.errors import UserError
from megatron.model import GPT, from_config
from megatron.positions import Position

logger = logging.getLogger(__name__)

FILE_NAME = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
POSITION_PREFIXES = (
    "attention.rpe.",
    "attention.alibi_embed.",
    "attention.rotary_emb.",
    "position_embeddings.",
)
ROUNDING = 2**-8  # the forks keep fixed tensors in bf16


def load_model(folder: str | Path, config: Config) -> GPT:
    """The model in `folder` as `config` describes it: model(ids [batch, length]) -> logits [batch, length, vocab].

    The vocabulary is what the files say. UserError where files are missing or disagree with the configuration, or where
    the layers' copies of the shared encoding disagree with each other.
    """
    folder = Path(folder)
    ours, copies = _translate(_read_layers(folder), config.model.num_layers, folder)
    embedding = ours.get("word_embeddings.weight")
    if embedding is None:
        raise UserError(
            f"{folder}: no word embeddings in layer_00; is this a whole GPT-NeoX checkpoint?"
        )
    model = from_config(config, vocab=len(embedding))
    _load_weights(model, ours, folder)
    for layer, position in enumerate(cast(Sequence[Position], model.positions)):
        own = {name: found[layer : layer + 1] for name, found in copies.items()}
        _load_position(position, copies if len(model.positions) == 1 else own, folder)
    return model


def _read_layers(folder: Path) -> dict[int, dict[str, Tensor]]:
    """Layer number -> its tensors."""
    layers = {}
    for path in sorted(folder.glob("layer_*-model_states.pt")):
        match = FILE_NAME.fullmatch(path.name)
        if match is None or match[2] != "00":
            raise UserError(
                f"{path}: a shard of a model-parallel checkpoint; merge it with the fork's tools first"
            )
        try:
            layers[int(match[1])] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as fault:
            raise UserError(
                f"{path}: cannot be read as a checkpoint file ({fault}); copy it again"
            ) from fault
    if not layers:
        raise UserError(
            f"{folder}: no layer_NN-model_00-model_states.pt there; name the folder global_stepN itself"
        )
    return layers


def _translate(
    layers: dict[int, dict[str, Tensor]], count: int, folder: Path
) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """Our weights by our names, and every copy of the encoding's tensors by the fork's names.

    The fork's pipeline numbers: 0 embedding, 2 … count + 1 transformer layers, count + 3 norm, count + 4 output matrix.
    """
    prefixes = {0: "", **{number + 2: f"layers.{number}." for number in range(count)}}
    prefixes |= {count + 3: "", count + 4: ""}
    unknown, missing = (
        sorted(layers.keys() - prefixes.keys()),
        sorted(prefixes.keys() - {count + 4} - layers.keys()),
    )
    if unknown or missing:
        raise UserError(
            f"{folder}: layer files {sorted(layers)} do not belong to num_layers = {count}"
            f" (unexpected {unknown}, missing {missing}); set num_layers to what was trained"
        )
    ours, copies = {}, defaultdict(list)
    for number, tensors in layers.items():
        for name, tensor in tensors.items():
            owner = next((prefix for prefix in POSITION_PREFIXES if name.startswith(prefix)), None)
            if owner is None:
                ours[prefixes[number] + name] = tensor
            else:
                copies[name.removeprefix(owner)].append(tensor)
    return ours, copies


def _load_weights(model: nn.Module, ours: dict[str, Tensor], folder: Path) -> None:
    wanted = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("positions.")
    }
    absent, extra = sorted(wanted.keys() - ours.keys()), sorted(ours.keys() - wanted.keys())
    if absent or extra:
        raise UserError(
            f"{folder}: the files do not hold this model (missing {absent}, unexpected {extra});"
            " check no_weight_tying, pos_emb and num_layers"
        )
    for name, tensor in ours.items():
        if tensor.shape != wanted[name].shape:
            raise UserError(
                f"{folder}: {name} is {list(tensor.shape)}, the configuration says {list(wanted[name].shape)};"
                " check hidden_size and num_attention_heads"
            )
    model.load_state_dict(ours, strict=False)


def _load_position(position: Position, copies: dict[str, list[Tensor]], folder: Path) -> None:
    """Fill the encoding's parameters and compare its fixed tensors with those of the files."""
    used = set(position.reference_unused)
    learned = {id(parameter) for parameter in position.parameters()}
    for theirs, tensor in position.reference():
        found = copies.get(theirs)
        if found is None and id(tensor) in learned:
            raise UserError(
                f"{folder}: no {theirs} in the files, which this pos_emb needs; check pos_emb"
            )
        if found is None:
            continue
        used.add(theirs)
        value = _one_value(theirs, found, tensor, folder)
        if id(tensor) in learned:
            tensor.data.copy_(value)
        elif not torch.allclose(value, tensor, rtol=ROUNDING, atol=0):
            raise UserError(
                f"{folder}: {theirs} differs from what this pos_emb has; check pos_emb and pos_emb_args"
            )
    if copies.keys() - used:
        raise UserError(
            f"{folder}: {sorted(copies.keys() - used)} belong to another encoding; check pos_emb"
        )
    for name in sorted(
        copies.keys() & set(position.reference_unused) - {name for name, _ in position.reference()}
    ):
        logger.info("%s: %s is stored there but this encoding does not use it", folder, name)


def _one_value(name: str, found: list[Tensor], like: Tensor, folder: Path) -> Tensor:
    """The value that all layers' copies agree on, in the shape of ours."""
    if any(not torch.equal(found[0], copy) for copy in found[1:]):
        raise UserError(
            f"{folder}: the layers' copies of {name} differ; it was trained with one copy per pipeline stage"
        )
    if found[0].numel() != like.numel():
        raise UserError(
            f"{folder}: {name} has {found[0].numel()} numbers, the configuration says {like.numel()}"
        )
    return found[0].reshape(like.shape).to(like.dtype)
