"""Read checkpoints of GPT-NeoX and its forks KERPLE and MEP, joined over tensor-parallel ranks.

A file holds one layer of one rank: layer_02-model_00-model_states.pt. Where pipe_parallel_size was
0 it holds all layers: mp_rank_00_model_states.pt. The numbers of layers are those of GPT-NeoX's
pipeline.
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

from megatron.config import Config
from megatron.errors import UserError, in_words
from megatron.model import GPT, Architecture, from_config, positions_from_config
from megatron.positions import Position
from megatron.positions.base import Fork

logger = logging.getLogger(__name__)

Tensors = dict[str, Tensor]  # by name

FILES = "layer_*-model_*-model_states.pt"
RANKS = "mp_rank_*_model_states.pt"  # of pipe_parallel_size: 0
OF_A_LAYER = re.compile(r"^(?:sequential\.(\d+)\.)?(.+)")  # a name, there after its layer's number
WRAPPERS = re.compile(
    r"\b(?:(?:module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.)+"
)
"""What DDP, torch.compile and others put into names of weights."""
ONE_STAGE = "pipe_parallel_size=1"  # its stages are joined here
RENAMED = {  # names of newer versions of GPT-NeoX, and those that the forks and we have
    "mlp.linear1.": "mlp.dense_h_to_4h.",
    "mlp.linear2.": "mlp.dense_4h_to_h.",
    "norm.scale": "norm.weight",
}
OF_AN_ENCODING = re.compile(
    r"(?:attention\.(?:rpe|alibi_embed|rotary_emb)|position_embeddings)\.(.+)"
)
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


def files_of(folder: Path) -> list[Path]:
    """The files of a checkpoint's weights: those of single layers, else those of ranks."""
    return sorted(folder.glob(FILES)) or sorted(folder.glob(RANKS))


def load_reference(folder: str | Path, config: Config) -> tuple[GPT, Config]:
    """The model in `folder` as `config` describes it, and the configuration that it now has.

    model(ids [batch, length]) -> logits [batch, length, vocab]; the files give the vocabulary.
    If the layers' copies of a shared encoding differ, as a training with pipeline stages leaves
    them, each layer gets its own (`pos_emb_shared: false`).
    Raises UserError if files are missing, damaged or disagree with the configuration.
    """
    folder = Path(folder)
    model = Architecture.of(config.model)
    if model.key_heads != model.num_attention_heads or model.widened != model.mlp_width:
        raise UserError(
            f"{folder}: num_key_value_heads and gated activations are not read from GPT-NeoX's own"
            " files, which order them otherwise - convert it with GPT-NeoX's"
            " tools/ckpts/convert_neox_to_hf.py, and give that folder"
        )

    # The pipeline has the embedding at 0, transformer layers at 2 … count + 1, the final norm at
    # count + 3 and, unless it is tied, the output matrix at count + 4.
    count = config.model.num_layers
    prefixes = {0: "", count + 3: "", count + 4: ""}
    prefixes |= {layer + 2: f"layers.{layer}." for layer in range(count)}
    weights: Tensors = {}
    copies: dict[str, list[Tensor]] = defaultdict(list)  # of the encoding's tensors, by layer
    for number, ranks in sorted(read_ranks(folder).items()):
        where = f"{folder}: layer {number}"
        prefix = prefixes.get(number, f"layer {number}: ")
        for name, tensor in joined(ranks, where, model.parallel_residual).items():
            if model.shared_norm and name.startswith("post_attention_layernorm"):
                continue  # GPT-NeoX keeps it, and does not use it
            encoding_name = OF_AN_ENCODING.fullmatch(name)
            if encoding_name:
                copies[encoding_name[1]].append(tensor)
            else:
                weights[prefix + name] = tensor

    if config.position.pos_emb_shared:
        [position, *_], _ = positions_from_config(config)
        learned = learned_names(position)
        differing = []
        for name, tensors in copies.items():
            if learned.get(name) and not all(torch.equal(x, tensors[0]) for x in tensors):
                differing.append(name)
        if differing:
            logger.warning(
                "%s: the layers' copies of %s differ, it was trained with one copy per pipeline"
                " stage; pos_emb_shared: false keeps them",
                folder,
                ", ".join(differing),
            )
            position = config.position.model_copy(update={"pos_emb_shared": False})
            config = replace(config, position=position)

    gpt = from_config(config, vocab=len(weights.get("word_embeddings.weight", [0])))
    state = gpt.state_dict()
    encodings = {name: state[name] for name in state if "positions." in name}
    try:
        gpt.load_state_dict(weights | encodings)
    except RuntimeError as fault:
        reason = " ".join(str(fault).split())
        raise UserError(
            f"{folder}: the files do not hold this model ({reason:.800}) - check"
            " num_layers, hidden_size, num_attention_heads, no_weight_tying and pos_emb"
        ) from None
    for index, position in enumerate(cast(Sequence[Position], gpt.positions)):
        stored = {name: layers[min(index, len(layers) - 1)] for name, layers in copies.items()}
        load_position(position, stored, folder)
    return gpt.eval(), config


def read_ranks(folder: Path) -> dict[int, list[Tensors]]:
    """The tensors of each tensor-parallel rank in float32, by the number of the layer."""
    layers: dict[int, dict[int, Tensors]] = defaultdict(dict)
    for path in files_of(folder):
        *layer, rank = (int(number) for number in re.findall(r"\d+", path.name))
        content = plain_content(path)
        try:
            for name, tensor in (content if layer else content["module"]).items():
                [(number, name)] = OF_A_LAYER.findall(WRAPPERS.sub("", name))
                if not (layer or number):
                    raise UserError(
                        f"{path}: {name} belongs to no layer of GPT-NeoX (sequential.N, of"
                        " pipe_parallel_size: 0) - give a folder with layer_* files, or its own"
                    )
                for theirs, ours in RENAMED.items():
                    name = name.replace(theirs, ours)
                tensors = layers[int(number or layer[0])].setdefault(rank, {})
                tensors[name] = tensor.float()
        except (AttributeError, LookupError, TypeError):  # another name, or another kind of value
            raise unreadable(path) from None
    if not layers:
        raise UserError(
            f"{folder}: no layer_NN-model_00-model_states.pt in it - give the folder global_stepN"
            " itself"
        )
    count = 1 + max(max(parts) for parts in layers.values())
    if any(len(parts) < count for parts in layers.values()):
        raise UserError(
            f"{folder}: files of some of {count} tensor-parallel ranks are missing - copy all files"
            " of the checkpoint"
        )
    return {number: [parts[rank] for rank in range(count)] for number, parts in layers.items()}


def plain_content(path: Path) -> Mapping[str, Any]:
    """What a file of torch.save holds, on the CPU; UserError if code is needed to read it."""
    rebuild = np.zeros(0).__reduce__()[0]
    generator = [  # the state of NumPy's, which GPT-NeoX keeps: numbers in an array
        (rebuild, "numpy.core.multiarray._reconstruct"),
        (rebuild, "numpy._core.multiarray._reconstruct"),
        *(np.ndarray, np.dtype, np.dtypes.UInt32DType),
    ]
    try:
        with torch.serialization.safe_globals(generator):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # torch.load raises a kind of its own for each damage
        raise unreadable(path) from None
    if not isinstance(content, Mapping):
        raise unreadable(path)
    return content


def unreadable(path: Path) -> UserError:
    """The error for a file that holds something else."""
    return UserError(
        f"{path}: is damaged, or holds more than tensors and numbers; code in it is never run -"
        " copy the checkpoint again"
    )


def joined(ranks: list[Tensors], where: str, bias_on_every_rank: bool) -> Tensors:
    """The whole tensors of a layer from the parts of all ranks.

    bias_on_every_rank: whether each rank adds OF_SUMS before the sum over ranks, as with
        gpt_j_residual; then the bias is their sum, and otherwise each rank has the whole
    """
    whole = {}
    try:
        for name in dict.fromkeys(name for tensors in ranks for name in tensors):
            parts = [tensors[name] for tensors in ranks]
            if len(parts) == 1 or name in DIVIDED:
                whole[name] = torch.cat(parts, dim=DIVIDED.get(name, 0))
                continue
            copies = torch.stack(parts)
            mean = copies.mean(dim=0)  # GPT-NeoX's own rule for norms
            apart = (copies - mean).abs().max()
            if bias_on_every_rank and name in OF_SUMS:
                whole[name] = copies.sum(dim=0)
            elif apart > SAME * mean.abs().max():
                raise KeyError(name)
            else:
                whole[name] = mean if apart else parts[0]
    except (KeyError, RuntimeError) as fault:
        raise UserError(
            f"{where}: the ranks' tensors do not fit together ({in_words(fault)}) - its files are"
            " those of different checkpoints"
        ) from None
    return whole


def learned_names(position: Position) -> dict[str, bool]:
    """Whether each tensor that the forks store for an encoding is learned, by its name there."""
    learned = {id(parameter) for parameter in position.parameters()}
    return {name: id(tensor) in learned for name, tensor in position.reference()}


def load_position(position: Position, stored: Mapping[str, Tensor], folder: Path) -> None:
    """Fill the encoding's parameters, and compare its fixed tensors with those of the files."""
    learned = learned_names(position)
    for name, tensor in position.reference():
        value = stored.get(name, tensor if not learned[name] else torch.empty(0)).to(tensor.dtype)
        fits = value.numel() == tensor.numel()
        if fits and learned[name]:
            tensor.data.copy_(value.reshape(tensor.shape))
        elif not fits or not torch.allclose(value.flatten(), tensor.flatten(), ROUNDING, 0):
            raise UserError(
                f"{folder}: {name} is absent or not what this pos_emb has - check pos_emb,"
                " pos_emb_args and num_attention_heads"
            )
    unused = sorted(stored.keys() - learned.keys())
    foreign = sorted({*unused} - {*(position.fork or Fork()).unused})
    if foreign:
        raise UserError(f"{folder}: {foreign} belong to another encoding - check pos_emb")
    if unused:
        logger.info("%s: not used by this encoding: %s", folder, ", ".join(unused))
