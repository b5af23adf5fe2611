"""Read checkpoints of GPT-NeoX and its forks KERPLE and MEP, joined over tensor-parallel ranks.

Two layouts exist: a file for each layer and rank (`layer_02-model_00-model_states.pt`, written with
pipe_parallel_size >= 1), and one for each rank (`mp_rank_00_model_states.pt`). Layers have the
numbers of GPT-NeoX's pipeline in both.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from megatron.config import Config, load
from megatron.config.yaml_files import read_file
from megatron.errors import UserError
from megatron.files import read_small
from megatron.interop.huggingface import load_plain
from megatron.model import GPT, Architecture, from_config, position_from_config
from megatron.positions import Position

logger = logging.getLogger(__name__)

Tensors = dict[str, Tensor]  # by name

PATTERNS = ("layer_*-model_*-model_states.pt", "mp_rank_*_model_states.pt")
NAME_IN_RANK_FILE = re.compile(r"sequential\.(\d+)\.(.+)")
OF_OURS = ("checkpoint.json", "config.yml")
ONE_RANK = ("model_parallel_size=1", "pipe_parallel_size=1")  # its ranks are joined here
LONGEST_POINTER = 4096  # bytes of `latest`
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
SAME = 2**-6  # relative; ranks keep copies of norms in bf16, and these may drift apart
ROUNDING = 2**-8  # the forks keep fixed tensors in bf16
# GPT-NeoX stores the state of numpy's generator beside the weights.
_RECONSTRUCT = np.array(0).__reduce__()[0]
PLAIN_NUMBERS: list[Any] = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),
    (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
]


def checkpoint_in(source: Path) -> Path | None:
    """The folder of GPT-NeoX's files that `source` is, or that its file `latest` names, or None.

    A checkpoint of ours, which holds such files too, is not one.
    """
    if holds_files(source):
        return source
    pointer = source / "latest"
    if not pointer.is_file():
        return None
    name = read_small(pointer, LONGEST_POINTER).decode("utf-8", "replace").strip()
    is_inside = bool(name) and Path(name).name == name
    return source / name if is_inside and holds_files(source / name) else None


def holds_files(folder: Path) -> bool:
    """Whether a folder is a checkpoint of GPT-NeoX."""
    if any((folder / name).exists() for name in OF_OURS):
        return False
    return any(next(folder.glob(pattern), None) for pattern in PATTERNS)


def configuration(folder: Path) -> Config | None:
    """The configuration in `configs` beside the weights, or None if there are no files.

    Raises UserError if two of them disagree: GPT-NeoX does not store the order in which they were
    given, and in its forks the later file wins.
    """
    files = sorted((folder / "configs").glob("*.yml"))
    if not files:
        return None
    given: dict[str, tuple[Path, Any]] = {}
    for file in files:
        try:
            content = read_file(file)
        except ValueError as fault:
            raise UserError(str(fault)) from None
        for key, value in content.items():
            earlier, before = given.setdefault(key, (file, value))
            if before != value:
                raise UserError(
                    f"{folder}/configs: {earlier.name} has {key}: {before}, {file.name} has"
                    f" {value}, and their order is not stored - name the files in their order"
                )
    return load(files, [*ONE_RANK])


def load_model(folder: str | Path, config: Config) -> GPT:
    """The model of `load_reference` alone."""
    model, _ = load_reference(folder, config)
    return model


def load_reference(folder: str | Path, config: Config) -> tuple[GPT, Config]:
    """The model in `folder` as `config` describes it, and the configuration that it now has.

    model(ids [batch, length]) -> logits [batch, length, vocab]; the files give the vocabulary.
    Tensor-parallel ranks are joined. If the layers' copies of a shared encoding differ, as a
    training with pipeline stages leaves them, each layer gets its own (`pos_emb_shared: false`).
    Raises UserError if files are missing, damaged or disagree with the configuration.
    """
    if config.position.pos_emb_layers:
        raise UserError(
            "pos_emb_layers: a GPT-NeoX checkpoint has one encoding for all layers - give pos_emb"
        )
    folder = Path(folder)
    model = Architecture.of(config.model)

    # Whole tensors by layer, with the names of today.
    layers: dict[int, Tensors] = {}
    for number, ranks in sorted(read_ranks(folder).items()):
        named = [in_our_order(ranks[rank], model) for rank in sorted(ranks)]
        layers[number] = joined(named, f"{folder}: layer {number}", model.parallel_residual)

    # The pipeline has the embedding at 0, transformer layers at 2 … count + 1, the final norm at
    # count + 3 and, unless it is tied, the output matrix at count + 4.
    count = config.model.num_layers
    prefixes = {0: "", count + 3: "", count + 4: ""}
    prefixes |= {layer + 2: f"layers.{layer}." for layer in range(count)}

    # Weights by our names, and the encoding's copies in all layers by the forks' names.
    weights: Tensors = {}
    copies: dict[str, list[Tensor]] = defaultdict(list)
    for number, tensors in layers.items():
        for name, tensor in tensors.items():
            prefix = next((one for one in POSITION_PREFIXES if name.startswith(one)), None)
            if prefix is not None:
                copies[name.removeprefix(prefix)].append(tensor)
            elif GATE not in name:
                gate = tensors.get(name.replace(WIDENING, GATE)) if WIDENING in name else None
                whole = tensor if gate is None else torch.cat([gate, tensor])
                weights[prefixes.get(number, f"layer {number}: ") + name] = whole

    if config.position.pos_emb_shared:
        position = position_from_config(config)
        learned = {id(parameter) for parameter in position.parameters()}
        differing = []
        for name, tensor in position.reference():
            of_layers = copies.get(name, [])
            same = all(torch.equal(one, of_layers[0]) for one in of_layers)
            if id(tensor) in learned and not same:
                differing.append(name)
        if differing:
            logger.warning(
                "%s: the layers' copies of %s differ, it was trained with one copy per pipeline"
                " stage; pos_emb_shared: false keeps them",
                folder,
                ", ".join(differing),
            )
            own = config.position.model_copy(update={"pos_emb_shared": False})
            config = replace(config, position=own)

    gpt = from_config(config, vocab=len(weights.get("word_embeddings.weight", [0])))
    wanted = {name: one for name, one in gpt.state_dict().items() if "positions." not in name}
    faults = [f"missing {name}" for name in wanted if name not in weights]
    faults += [f"unexpected {name}" for name in weights if name not in wanted]
    for name, ours in wanted.items():
        theirs = weights.get(name)
        if theirs is not None and theirs.shape != ours.shape:
            sizes = f"{list(theirs.shape)}, the configuration says {list(ours.shape)}"
            faults.append(f"{name} is {sizes}")
    if faults:
        raise UserError(
            f"{folder}: the files do not hold this model ({'; '.join(faults[:8])}) - check"
            " num_layers, hidden_size, num_attention_heads, no_weight_tying and pos_emb"
        )
    gpt.load_state_dict(weights, strict=False)
    positions = cast(Sequence[Position], gpt.positions)
    for layer, position in enumerate(positions):
        shared = len(positions) == 1
        own_copies = {name: one[0 if shared else layer] for name, one in copies.items()}
        load_position(position, own_copies, folder)
    return gpt.eval(), config


def read_ranks(folder: Path) -> dict[int, dict[int, Tensors]]:
    """Layer -> tensor-parallel rank -> tensors in float32, from either layout."""
    found: dict[int, dict[int, Tensors]] = defaultdict(lambda: defaultdict(dict))
    files = sorted(folder.glob(PATTERNS[0])) or sorted(folder.glob(PATTERNS[1]))
    for path in files:
        numbers = [int(number) for number in re.findall(r"\d+", path.name)]
        of_layer = path.name.startswith("layer_")
        try:
            with torch.serialization.safe_globals(PLAIN_NUMBERS):
                content = load_plain(path)
        except ValueError as fault:
            raise UserError(
                f"{path}: cannot be read as a checkpoint file ({fault}) - copy it again"
            ) from None
        if not of_layer and isinstance(content, Mapping):
            content = content.get("module")
        if not isinstance(content, Mapping):
            raise UserError(f"{path}: holds no model of GPT-NeoX - copy the checkpoint again")
        for name, tensor in content.items():
            place = None if of_layer else NAME_IN_RANK_FILE.fullmatch(name)
            is_weight = isinstance(tensor, Tensor) and tensor.is_floating_point()
            if not is_weight or not (of_layer or place):
                raise UserError(f"{path}: {name} is not a weight of a GPT-NeoX model")
            layer, own_name = (int(place[1]), place[2]) if place else (numbers[0], name)
            found[layer][numbers[-1]][own_name] = tensor.float()
    if not found:
        raise UserError(
            f"{folder}: no layer_NN-model_00-model_states.pt in it - give the folder global_stepN"
            " itself"
        )
    ranks = {rank for parts in found.values() for rank in parts}
    for number, parts in sorted(found.items()):
        missing = sorted({*range(max(ranks) + 1)} - parts.keys())
        if missing:
            raise UserError(
                f"{folder}: layer {number} lacks the part of tensor-parallel rank {missing[0]} of"
                f" {max(ranks) + 1} - copy all files of the checkpoint"
            )
    return found


def in_our_order(tensors: Tensors, model: Architecture) -> Tensors:
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
            rows = renamed[projection]
            key_heads = max(1, model.key_heads * len(rows) // model.projected_width)
            keys = key_heads * model.features_of_head
            parts = rows.split([len(rows) - 2 * keys, keys, keys])
            by_key_head = [part.unflatten(0, (key_heads, -1)) for part in parts]
            renamed[projection] = torch.cat(by_key_head, dim=1).flatten(0, 1)
        if widening in renamed and gated and not has_own_gate:
            renamed[widening], renamed[GATE + kind] = renamed[widening].chunk(2)
    return renamed


def joined(ranks: list[Tensors], where: str, bias_on_every_rank: bool) -> Tensors:
    """The whole tensors of a layer from the parts of all ranks.

    bias_on_every_rank: whether each rank adds OF_SUMS before the sum over ranks, as with
        gpt_j_residual; then the bias is their sum, and otherwise each rank has the whole
    """
    mixed = "its files are those of different checkpoints"
    whole = {}
    for name in ranks[0]:
        if not all(tensors.keys() == ranks[0].keys() for tensors in ranks):
            raise UserError(f"{where}: not every rank has the same tensors - {mixed}")
        parts = [tensors[name] for tensors in ranks]
        try:
            if len(parts) == 1 or name in DIVIDED:
                whole[name] = torch.cat(parts, dim=DIVIDED.get(name, 0))
                continue
            copies = torch.stack(parts)
        except RuntimeError:
            shapes = [list(part.shape) for part in parts]
            raise UserError(
                f"{where}: parts of {name} have the shapes {shapes} - {mixed}"
            ) from None
        mean = copies.mean(dim=0)  # GPT-NeoX's own rule for norms
        apart = (copies - mean).abs().max()
        if bias_on_every_rank and name in OF_SUMS:
            whole[name] = copies.sum(dim=0)
        elif not apart:
            whole[name] = parts[0]
        elif apart <= SAME * mean.abs().max():
            whole[name] = mean
        else:
            raise UserError(
                f"{where}: the ranks' copies of {name} differ by {apart.item():.3g} - {mixed}"
            )
    return whole


def load_position(position: Position, stored: Mapping[str, Tensor], folder: Path) -> None:
    """Fill the encoding's parameters, and compare its fixed tensors with those of the files."""
    learned = {id(parameter) for parameter in position.parameters()}
    unused = set(stored)
    for name, tensor in position.reference():
        is_learned = id(tensor) in learned
        if name not in stored:
            if is_learned:
                raise UserError(
                    f"{folder}: no {name} in the files, which this pos_emb needs - check pos_emb"
                )
            continue
        unused.discard(name)
        if stored[name].numel() != tensor.numel():
            raise UserError(
                f"{folder}: {name} has {stored[name].numel()} numbers, the configuration says"
                f" {tensor.numel()} - check pos_emb_args and num_attention_heads"
            )
        value = stored[name].reshape(tensor.shape).to(tensor.dtype)
        if is_learned:
            tensor.data.copy_(value)
        elif not torch.allclose(value, tensor, rtol=ROUNDING, atol=0):
            raise UserError(
                f"{folder}: {name} differs from what this pos_emb has - check pos_emb and"
                " pos_emb_args"
            )
    foreign = sorted(unused - set(position.reference_unused))
    if foreign:
        raise UserError(f"{folder}: {foreign} belong to another encoding - check pos_emb")
    if unused:
        logger.info("%s: not used by this encoding: %s", folder, ", ".join(sorted(unused)))
