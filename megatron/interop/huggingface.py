"""Open a folder of Hugging Face's: config.json and the weights beside it. Nothing in it is run."""

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron import strict_json
from megatron.checkpoints.read import check_memory
from megatron.config import Config
from megatron.errors import UserError
from megatron.files import read_small
from megatron.interop.families import (
    FAMILIES,
    IGNORED_HF_KEYS,
    Family,
    read_weights,
    write_weights,
)
from megatron.model import GPT, Architecture, from_config

logger = logging.getLogger(__name__)

SETTINGS = "config.json"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # the list of shards
LONGEST = 10_000_000  # bytes of config.json and of the list of shards
QUANTIZED = "quantization_config"
OF_WHOLE = {"tie_word_embeddings", QUANTIZED, "auto_map"}  # keys beside text_config that count
MOST = {"vocab_size": LONGEST, "num_hidden_layers": 1000, "n_layer": 1000}
MOST |= {"num_attention_heads": 4096, "n_head": 4096}
BYTES = 8  # of a weight while it is read: theirs and ours in float32


def open_folder(folder: Path) -> tuple[GPT, Config]:
    """The model in float32 and eval mode, and its configuration.

    Raises UserError for another architecture, for a key that changes the result and is not offered,
    and for weights that are damaged, missing, left over or of another shape.
    """
    family, config, vocab = read_settings(folder)
    check_memory(folder, config, vocab, BYTES)
    model = from_config(config, vocab=vocab)
    architecture = Architecture.of(config.model)
    theirs = {}
    left = set()
    for name, tensor in read_tensors(folder).items():
        part = next((part for part in family.parts if name.startswith(part)), "")
        trunk = family.parts.get(part, "")
        if trunk is None:
            left.add(f"{part}*")
        else:
            theirs[trunk + name.removeprefix(part)] = tensor
    if left:
        names = ", ".join(sorted(left))
        logger.warning("%s: %s left out: the text model alone is read", folder, names)
    shapes = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    expected = write_weights(family, shapes, architecture)

    # Old files have another name for the output matrix, and none for the trunk.
    heads = [f"{name}.weight" for name in family.head]
    names = [name for name in heads if name in theirs]
    if names:
        theirs[heads[0]] = theirs.pop(names[0])
    if not any(name.startswith(family.trunk) for name in theirs):
        theirs = {
            name if name == heads[0] else family.trunk + name: theirs[name] for name in theirs
        }

    # A second copy of a tied embedding, and fixed tensors of old files, are left.
    faults = [f"{', '.join(names)} are two names of one matrix"] if len(names) > 1 else []
    if heads[0] in theirs and heads[0] not in expected:
        embedding = f"{family.trunk}{family.modules['word_embeddings'][1]}.weight"
        again = theirs.pop(heads[0])
        if embedding in theirs and not torch.equal(again, theirs[embedding]):
            raise UserError(
                f"{folder / SETTINGS}: tie_word_embeddings: says that {heads[0]} is {embedding},"
                " which differs from it - set it to false for a model with a head of its own, or"
                " copy the folder again"
            )
    faults += [f"{name} missing" for name in expected if name not in theirs]
    for name, tensor in theirs.items():
        if name.endswith(tuple(family.buffers)):
            continue
        if name not in expected:
            faults.append(f"{name} left over")
        elif tensor.shape != expected[name].shape or not tensor.is_floating_point():
            shape = list(expected[name].shape)
            faults.append(f"{name} {list(tensor.shape)} of {tensor.dtype}, not {shape}")
    if faults:
        raise UserError(
            f"{folder}: the weights are not those of its config.json ({'; '.join(faults[:8])}) -"
            " copy the folder again"
        )
    model.load_state_dict(read_weights(family, theirs, architecture))
    return model.eval(), config


def family_of(folder: Path) -> tuple[Family, dict[str, Any]]:
    """The family of the model in a folder, and the keys of its config.json."""
    place = folder / SETTINGS
    theirs = read_json(place)
    names = theirs.get("architectures")
    families = FAMILIES | {family.whole: family for family in FAMILIES.values() if family.whole}
    family = families.get(names[0]) if isinstance(names, list) and len(names) == 1 else None
    if family is None:
        raise UserError(
            f"{place}: architectures: {names!r} is not offered; known are {', '.join(FAMILIES)},"
            " and PositionsGPTForCausalLM with the checkpoint.json and config.yml of its export"
        )
    if names == [family.whole]:
        whole, theirs = theirs, theirs.get("text_config")
        if not isinstance(theirs, dict):
            raise UserError(f"{place}: text_config: holds no keys - copy it again")
        theirs |= {key: whole[key] for key in OF_WHOLE & whole.keys()}
    return family, theirs


def read_settings(folder: Path) -> tuple[Family, Config, int]:
    """The family of the model in a folder, its configuration, and the rows of its embedding."""
    place = folder / SETTINGS
    family, theirs = family_of(folder)
    unset = (None, False, {}, [])
    unknown = sorted(
        key
        for key in theirs.keys() - family.known_keys - IGNORED_HF_KEYS
        if theirs[key] not in unset
    )
    if QUANTIZED in unknown:
        raise UserError(
            f"{place}: {QUANTIZED}: quantised weights are not read - take the model's folder in"
            " bfloat16 or float32, or save it anew after transformers' model.dequantize()"
        )
    read = [key for key in unknown if "auto_map" in theirs or family.reads(key, theirs[key])]
    if read:
        raise UserError(
            f"{place}: {', '.join(read[:8])}: not known for {family.architecture}, and may change"
            " what it computes - open a model without it"
        )
    if unknown:
        logger.warning(
            "%s: %s left out: transformers' %s does not read it",
            place,
            ", ".join(unknown[:8]),
            family.architecture,
        )
    theirs.setdefault("vocab_size", None)
    for key in MOST.keys() & theirs.keys():
        number = theirs[key]
        if type(number) is not int or not 1 <= number <= MOST[key]:
            raise UserError(f"{place}: {key}: {number!r} is not a number of 1 to {MOST[key]}")
    try:
        config = family.configuration(theirs)
    except UserError as fault:
        raise UserError(f"{place}: {fault}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as fault:
        raise UserError(f"{place}: has a value of the wrong kind ({fault})") from None
    if "auto_map" in theirs:
        logger.warning(
            "%s: names code of its own, which is not run; %s is computed by our model",
            place,
            family.architecture,
        )
    return family, config, theirs["vocab_size"]


def read_json(path: Path) -> dict[str, Any]:
    """The keys in a file; UserError if it is not such a file."""
    try:
        value = strict_json.parse(read_small(path, LONGEST))
    except (OSError, ValueError) as fault:
        raise UserError(f"{path}: cannot be read ({fault}) - copy it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no keys - copy it again")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: one, or all shards of a set.

    Raises UserError if there are none, or if a shard is missing.
    """
    index = folder / INDEX
    if (folder / WEIGHTS).is_file() or not index.is_file():
        shards = [folder / WEIGHTS]
    else:
        places = read_json(index).get("weight_map")
        shards = [*places.values()] if isinstance(places, dict) else []
        if not shards or not all(isinstance(shard, str) for shard in shards):
            raise UserError(f"{index}: has no list of shards (weight_map) - copy it again")
        shards = [folder / Path(shard).name for shard in sorted({*shards})]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise UserError(
            f"{folder}: {', '.join(missing[:8])} missing - copy all weights beside config.json;"
            " those of a pytorch_model.bin, transformers' save_pretrained writes anew"
        )
    return shards


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All weights in float32, by their names."""
    weights: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            tensors = load_file(file)
        except (SafetensorError, OSError) as fault:
            raise UserError(f"{file}: cannot be read ({fault}) - copy it again") from None
        for name, tensor in tensors.items():
            weights[name] = tensor.float() if tensor.is_floating_point() else tensor
    return weights
