"""Read checkpoints of GPT-NeoX and its forks KERPLE and MEP.

A checkpoint is a folder of `layer_NN-model_00-model_states.pt`.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
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
Tensors = dict[str, Tensor]  # by name
Copies = dict[str, list[Tensor]]  # the encoding's tensors by the fork's names, one for each layer


def load_model(folder: str | Path, config: Config) -> GPT:
    """The model in `folder` as `config` describes it.

    model(ids [batch, length]) -> logits [batch, length, vocab]; the files give the vocabulary.
    Raises UserError where files are missing or disagree with the configuration, or where the
    layers' copies of the shared encoding disagree with each other.
    """
    folder = Path(folder)
    weights, copies = _translate(_read_layers(folder), config.model.num_layers, folder)
    embedding = weights.get("word_embeddings.weight")
    if embedding is None:
        raise UserError(
            f"{folder}: no word embeddings in layer_00 - give the folder of a whole GPT-NeoX "
            "checkpoint"
        )
    model = from_config(config, vocab=len(embedding))
    _load_weights(model, weights, folder)
    positions = cast(Sequence[Position], model.positions)
    shared = len(positions) == 1
    for layer, position in enumerate(positions):
        own = copies if shared else _of_layer(copies, layer)
        _load_position(position, own, folder)
    return model


def _of_layer(copies: Copies, layer: int) -> Copies:
    return {name: tensors[layer : layer + 1] for name, tensors in copies.items()}


def _read_layers(folder: Path) -> dict[int, Tensors]:
    """Layer number -> its tensors."""
    layers = {}
    for path in sorted(folder.glob("layer_*-model_states.pt")):
        match = FILE_NAME.fullmatch(path.name)
        if match is None or match[2] != "00":
            raise UserError(
                f"{path}: is a shard of a model-parallel checkpoint - merge it with the fork's "
                "tools first"
            )
        try:
            layers[int(match[1])] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as fault:
            raise UserError(
                f"{path}: cannot be read as a checkpoint file ({fault}) - copy it again"
            ) from fault
    if not layers:
        raise UserError(
            f"{folder}: no layer_NN-model_00-model_states.pt in it - give the folder global_stepN "
            "itself"
        )
    return layers


def _translate(layers: dict[int, Tensors], count: int, folder: Path) -> tuple[Tensors, Copies]:
    """The model's weights by our names, and the encoding's copies by the fork's names.

    count: transformer layers of the configuration
    """
    prefixes = _prefixes(layers.keys(), count, folder)
    weights: Tensors = {}
    copies: Copies = defaultdict(list)
    for number, tensors in layers.items():
        for name, tensor in tensors.items():
            of_encoding = [prefix for prefix in POSITION_PREFIXES if name.startswith(prefix)]
            if of_encoding:
                copies[name.removeprefix(of_encoding[0])].append(tensor)
            else:
                weights[prefixes[number] + name] = tensor
    return weights, copies


def _prefixes(numbers: Collection[int], count: int, folder: Path) -> dict[int, str]:
    """Number of a file -> what our names of its weights begin with.

    The fork's pipeline has the embedding at 0, transformer layers at 2 … count + 1, the final norm
    at count + 3 and, where it is not tied, the output matrix at count + 4.
    """
    output = count + 4
    prefixes = {0: "", count + 3: "", output: ""}
    for layer in range(count):
        prefixes[layer + 2] = f"layers.{layer}."
    unknown = sorted(set(numbers) - prefixes.keys())
    missing = sorted(prefixes.keys() - {output} - set(numbers))
    if unknown or missing:
        raise UserError(
            f"{folder}: layer files {sorted(numbers)} do not belong to num_layers = {count} "
            f"(unexpected {unknown}, missing {missing}) - set num_layers to what was trained"
        )
    return prefixes


def _load_weights(model: nn.Module, weights: Tensors, folder: Path) -> None:
    """Copy all weights but the encoding's."""
    state = model.state_dict()
    wanted = {name: state[name] for name in state if not name.startswith("positions.")}
    missing = sorted(wanted.keys() - weights.keys())
    unexpected = sorted(weights.keys() - wanted.keys())
    if missing or unexpected:
        raise UserError(
            f"{folder}: the files do not hold this model (missing {missing}, unexpected "
            f"{unexpected}) - check no_weight_tying, pos_emb and num_layers"
        )
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise UserError(
                f"{folder}: {name} is {list(tensor.shape)}, the configuration says "
                f"{list(wanted[name].shape)} - check hidden_size and num_attention_heads"
            )
    model.load_state_dict(weights, strict=False)


def _load_position(position: Position, copies: Copies, folder: Path) -> None:
    """Fill the encoding's parameters and compare its fixed tensors with those of the files."""
    learned = {id(parameter) for parameter in position.parameters()}
    compared = set()
    for name, tensor in position.reference():
        is_learned = id(tensor) in learned
        if name not in copies:
            if is_learned:
                raise UserError(
                    f"{folder}: no {name} in the files, which this pos_emb needs - check pos_emb"
                )
            continue
        compared.add(name)
        value = _one_value(name, copies[name], tensor, folder)
        if is_learned:
            tensor.data.copy_(value)
        elif not torch.allclose(value, tensor, rtol=ROUNDING, atol=0):
            raise UserError(
                f"{folder}: {name} differs from what this pos_emb has - check pos_emb and "
                "pos_emb_args"
            )
    unused = copies.keys() - compared
    foreign = sorted(unused - set(position.reference_unused))
    if foreign:
        raise UserError(f"{folder}: {foreign} belong to another encoding - check pos_emb")
    for name in sorted(unused):
        logger.info("%s: %s is stored there but this encoding does not use it", folder, name)


def _one_value(name: str, copies: Sequence[Tensor], like: Tensor, folder: Path) -> Tensor:
    """The value that all layers' copies agree on, in the shape and dtype of `like`."""
    first, *others = copies
    if not all(torch.equal(first, other) for other in others):
        raise UserError(
            f"{folder}: the layers' copies of {name} differ, it was trained with one copy per "
            "pipeline stage - such a checkpoint cannot be read"
        )
    if first.numel() != like.numel():
        raise UserError(
            f"{folder}: {name} has {first.numel()} numbers, the configuration says {like.numel()} "
            "- check pos_emb_args and num_attention_heads"
        )
    return first.reshape(like.shape).to(like.dtype)
