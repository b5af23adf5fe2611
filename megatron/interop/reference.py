"""Read checkpoints of GPT-NeoX and its forks KERPLE and MEP."""

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from megatron.config import Config
from megatron.errors import UserError
from megatron.interop.shards import Layers, Tensors, read_layers
from megatron.model import GPT, Architecture, from_config, position_from_config
from megatron.positions import Position

logger = logging.getLogger(__name__)

POSITION_PREFIXES = (
    "attention.rpe.",
    "attention.alibi_embed.",
    "attention.rotary_emb.",
    "position_embeddings.",
)
# Names in newer versions of GPT-NeoX, and those that the forks and we have.
RENAMED = {
    "mlp.linear1.": "mlp.dense_h_to_4h.",
    "mlp.linear2.": "mlp.dense_4h_to_h.",
    "mlp.w1.": "mlp.gate.",
    "mlp.w2.": "mlp.dense_4h_to_h.",
    "mlp.w3.": "mlp.dense_h_to_4h.",
}
WIDENING, GATE = "mlp.dense_h_to_4h.", "mlp.gate."
PROJECTION = "attention.query_key_value."
RMS_NORM = re.compile(r"norm\.scale$")
ROUNDING = 2**-8  # the forks keep fixed tensors in bf16
Copies = dict[str, list[Tensor]]  # the encoding's tensors by the fork's names, one for each layer


def load_model(folder: str | Path, config: Config) -> GPT:
    """The model of `load_reference` alone."""
    model, _ = load_reference(folder, config)
    return model


def load_reference(folder: str | Path, config: Config) -> tuple[GPT, Config]:
    """The model in `folder` as `config` describes it, and the configuration that it now has.

    model(ids [batch, length]) -> logits [batch, length, vocab]; the files give the vocabulary.
    Tensor-parallel ranks are joined. Where the layers' copies of a shared encoding differ, as a
    training with pipeline stages leaves them, each layer gets its own (`pos_emb_shared: false`).
    Raises UserError where files are missing, damaged or disagree with the configuration.
    """
    if config.position.pos_emb_layers:
        raise UserError(
            "pos_emb_layers: a GPT-NeoX checkpoint has one encoding for all layers - give pos_emb"
        )
    folder = Path(folder)
    model = Architecture.of(config.model)
    layers = read_layers(
        folder,
        partial(_of_rank, model=model, folder=folder),
        bias_on_every_rank=model.parallel_residual,
    )
    weights, copies = _translate(layers, config.model.num_layers, folder)
    embedding = weights.get("word_embeddings.weight")
    if embedding is None:
        raise UserError(
            f"{folder}: no word embeddings in layer_00 - give the folder of a whole GPT-NeoX "
            "checkpoint"
        )
    config = _with_own_numbers(config, copies, folder)
    gpt = from_config(config, vocab=len(embedding))
    _load_weights(gpt, weights, folder)
    positions = cast(Sequence[Position], gpt.positions)
    shared = len(positions) == 1
    for layer, position in enumerate(positions):
        own = copies if shared else _of_layer(copies, layer)
        _load_position(position, own, folder)
    return gpt.eval(), config


def _of_rank(tensors: Tensors, model: Architecture, folder: Path) -> Tensors:
    """One layer of one rank by the names that we have, and in the order of rows that ranks share.

    GPT-NeoX's rank stores grouped queries as all queries, all keys, all values, and a gated
    activation's matrix as up, gate. So both are taken apart here, and joined rank by rank.
    """
    renamed = {}
    for name, tensor in tensors.items():
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        renamed[RMS_NORM.sub("norm.weight", name)] = tensor
    gated = model.widened != model.mlp_width
    has_own_gate = f"{GATE}weight" in renamed
    for kind in ("weight", "bias"):
        projection, widening = PROJECTION + kind, WIDENING + kind
        if projection in renamed and model.key_heads != model.num_attention_heads:
            renamed[projection] = _by_group(renamed[projection], model, folder)
        if widening in renamed and gated and not has_own_gate:
            renamed[widening], renamed[GATE + kind] = renamed[widening].chunk(2)
    return renamed


def _by_group(rows: Tensor, model: Architecture, folder: Path) -> Tensor:
    """Rows of a rank's queries, keys and values, from [q, k, v] to [key heads, (q …, k, v)].

    rows [features of the rank, …] -> same
    """
    features = model.features_of_head
    ranks, rest = divmod(model.projected_width, len(rows))
    if rest or model.key_heads % ranks:
        raise UserError(
            f"{folder}: {PROJECTION}weight has {len(rows)} rows on a rank, the configuration says"
            f" {model.projected_width} in all - check num_attention_heads and num_key_value_heads"
        )
    key_heads = model.key_heads // ranks
    queries = model.num_attention_heads // ranks * features
    keys = key_heads * features
    parts = [part.unflatten(0, (key_heads, -1)) for part in rows.split([queries, keys, keys])]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _with_own_numbers(config: Config, copies: Copies, folder: Path) -> Config:
    """The configuration; with learned numbers for each layer where the layers' copies differ."""
    if not config.position.pos_emb_shared:
        return config
    position = position_from_config(config)
    learned = {id(parameter) for parameter in position.parameters()}
    names = [name for name, tensor in position.reference() if id(tensor) in learned]
    differing = [name for name in names if not _equal(copies.get(name, []))]
    if not differing:
        return config
    logger.warning(
        "%s: the layers' copies of %s differ, it was trained with one copy per pipeline stage;"
        " pos_emb_shared: false keeps them",
        folder,
        ", ".join(differing),
    )
    return replace(config, position=config.position.model_copy(update={"pos_emb_shared": False}))


def _equal(tensors: Sequence[Tensor]) -> bool:
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)


def _of_layer(copies: Copies, layer: int) -> Copies:
    return {name: tensors[layer : layer + 1] for name, tensors in copies.items()}


def _translate(layers: Layers, count: int, folder: Path) -> tuple[Tensors, Copies]:
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
    return _with_gates(weights), copies


def _with_gates(weights: Tensors) -> Tensors:
    """Weights with each gate in one matrix with what it multiplies, the gate first."""
    fused = {}
    for name, tensor in weights.items():
        if GATE in name:
            continue
        gate = weights.get(name.replace(WIDENING, GATE)) if WIDENING in name else None
        fused[name] = tensor if gate is None else torch.cat([gate, tensor])
    return fused


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
    """Fill the encoding's parameters, and compare its fixed tensors with those of the files."""
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
    """The value that the copies have, which are equal, in the shape and dtype of `like`."""
    first = copies[0]
    if first.numel() != like.numel():
        raise UserError(
            f"{folder}: {name} has {first.numel()} numbers, the configuration says {like.numel()} "
            "- check pos_emb_args and num_attention_heads"
        )
    return first.reshape(like.shape).to(like.dtype)
