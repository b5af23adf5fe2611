"""The files of a GPT-NeoX checkpoint, read and joined over its tensor-parallel ranks.

Two layouts exist: a file for each layer and rank (`layer_02-model_00-model_states.pt`, written with
pipe_parallel_size >= 1), and one for each rank (`mp_rank_00_model_states.pt`). Layers have the
numbers of GPT-NeoX's pipeline in both.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.interop.pickled import load_plain

Tensors = dict[str, Tensor]  # by name
Layers = dict[int, Tensors]  # by number in the pipeline
OfRank = Callable[[Tensors], Tensors]

LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
NAME_IN_RANK_FILE = re.compile(r"sequential\.(\d+)\.(.+)")
SAME = 2**-6  # relative; ranks keep copies of norms in bf16, and these may drift apart

# Which dimension the ranks share out. Everything else has a copy on every rank.
DIVIDED = {
    "word_embeddings.weight": 0,
    "final_linear.weight": 0,
    "attention.query_key_value.weight": 0,
    "attention.query_key_value.bias": 0,
    "attention.dense.weight": 1,
    "mlp.dense_h_to_4h.weight": 0,
    "mlp.dense_h_to_4h.bias": 0,
    "mlp.dense_4h_to_h.weight": 1,
    "mlp.gate.weight": 0,
    "mlp.gate.bias": 0,
    "attention.alibi_embed.slopes": 0,
    "attention.rpe.slopes": 0,
    "attention.rpe.bias_p": 0,
    "attention.rpe.bias_a": 0,
    "attention.rpe.wei_p": 0,
    "attention.rpe.wei_a": 0,
    "attention.rpe.weight": 1,  # T5: [buckets, heads]
}
# Biases of matrices whose ranks' products are summed.
OF_SUMS = ("attention.dense.bias", "mlp.dense_4h_to_h.bias")

# GPT-NeoX stores the state of numpy's generator beside the weights.
_RECONSTRUCT = np.array(0).__reduce__()[0]
PLAIN_NUMBERS: list[Any] = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),
    (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
]


def read_layers(folder: Path, of_rank: OfRank, *, bias_on_every_rank: bool) -> Layers:
    """The whole tensors of every layer, in float32.

    of_rank: gives the tensors of one layer and rank their names of today; rows that a rank stores
        in an order of its own are ordered here, before ranks are joined
    bias_on_every_rank: whether each rank adds OF_SUMS before the sum over ranks, as with
        gpt_j_residual; then the bias is their sum, and otherwise each rank has the whole
    UserError where files are missing, damaged or do not belong together.
    """
    ranks_of_layers = _by_layer_files(folder) or _by_rank_files(folder)
    if not ranks_of_layers:
        raise UserError(
            f"{folder}: no layer_NN-model_00-model_states.pt in it - give the folder global_stepN"
            " itself"
        )
    _check_complete(folder, ranks_of_layers)
    layers = {}
    for number, ranks in sorted(ranks_of_layers.items()):
        renamed = [of_rank(ranks[rank]) for rank in sorted(ranks)]
        layers[number] = _joined(folder, number, renamed, bias_on_every_rank)
    return layers


def _by_layer_files(folder: Path) -> dict[int, dict[int, Tensors]]:
    """Layer -> rank -> tensors, from a file for each."""
    found: dict[int, dict[int, Tensors]] = defaultdict(dict)
    for path in sorted(folder.glob("layer_*-model_states.pt")):
        match = LAYER_FILE.fullmatch(path.name)
        if match is None:
            raise UserError(f"{path}: has no name of GPT-NeoX - copy the checkpoint again")
        found[int(match[1])][int(match[2])] = _tensors(path, _loaded(path))
    return found


def _by_rank_files(folder: Path) -> dict[int, dict[int, Tensors]]:
    """The same from files that hold all layers of a rank."""
    found: dict[int, dict[int, Tensors]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(folder.glob("mp_rank_*_model_states.pt")):
        match = RANK_FILE.fullmatch(path.name)
        content = _loaded(path)
        module = content.get("module") if isinstance(content, Mapping) else None
        if match is None or not module:
            raise UserError(f"{path}: holds no model of GPT-NeoX - copy the checkpoint again")
        for name, tensor in _tensors(path, module).items():
            place = NAME_IN_RANK_FILE.fullmatch(name)
            if place is None:
                raise UserError(f"{path}: {name} is no weight of a GPT-NeoX model")
            found[int(place[1])][int(match[1])][place[2]] = tensor
    return found


def _loaded(path: Path) -> Any:
    """The content of a file; code that it names is not run."""
    try:
        with torch.serialization.safe_globals(PLAIN_NUMBERS):
            return load_plain(path)
    except ValueError as fault:
        raise UserError(
            f"{path}: cannot be read as a checkpoint file ({fault}) - copy it again"
        ) from None


def _tensors(path: Path, content: Any) -> Tensors:
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: holds no tensors by name - copy it again")
    wrong = [name for name, value in content.items() if not isinstance(value, Tensor)]
    if wrong:
        raise UserError(f"{path}: {wrong[0]} is no tensor - copy it again")
    for name, tensor in content.items():
        if not tensor.is_floating_point():
            raise UserError(f"{path}: {name} is {tensor.dtype}, no weight - copy it again")
    return {name: tensor.float() for name, tensor in content.items()}


def _check_complete(folder: Path, ranks_of_layers: Mapping[int, Mapping[int, Tensors]]) -> None:
    """UserError where a layer lacks the part of a rank that another layer has."""
    ranks = set[int]().union(*ranks_of_layers.values())
    expected = set(range(max(ranks) + 1))
    for number, parts in sorted(ranks_of_layers.items()):
        missing = sorted(expected - parts.keys())
        if missing:
            raise UserError(
                f"{folder}: layer {number} lacks the part of tensor-parallel rank {missing[0]} of"
                f" {len(expected)} - copy all files of the checkpoint"
            )


def _joined(folder: Path, number: int, ranks: list[Tensors], bias_on_every_rank: bool) -> Tensors:
    names = set[str]().union(*ranks)
    lacking = [name for name in sorted(names) if not all(name in tensors for tensors in ranks)]
    if lacking:
        raise UserError(
            f"{folder}: not every rank of layer {number} has {lacking[0]} - its files are those of"
            " different checkpoints"
        )
    whole = {}
    for name in ranks[0]:
        parts = [tensors[name] for tensors in ranks]
        try:
            whole[name] = _one(name, parts, bias_on_every_rank)
        except RuntimeError:
            shapes = [list(part.shape) for part in parts]
            raise UserError(
                f"{folder}: the parts of {name} in layer {number} have the shapes {shapes} - its"
                " files are those of different checkpoints"
            ) from None
        except ValueError as fault:
            raise UserError(f"{folder}: layer {number}: {fault}") from None
    return whole


def _one(name: str, parts: list[Tensor], bias_on_every_rank: bool) -> Tensor:
    """The whole of a tensor from the parts of all ranks."""
    if len(parts) == 1:
        return parts[0]
    if name in DIVIDED:
        return torch.cat(parts, dim=DIVIDED[name])
    copies = torch.stack(parts)
    if bias_on_every_rank and name in OF_SUMS:
        return copies.sum(dim=0)
    if all(torch.equal(part, parts[0]) for part in parts):
        return parts[0]
    mean = copies.mean(dim=0)
    apart = (copies - mean).abs().max()
    if apart > SAME * mean.abs().max():
        raise ValueError(
            f"the ranks' copies of {name} differ by {apart.item():.3g} - its files are those of"
            " different checkpoints"
        )
    return mean  # GPT-NeoX's own rule for norms
