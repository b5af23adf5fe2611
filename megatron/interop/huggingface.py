"""Open a folder of Hugging Face's: config.json and the weights beside it. Nothing in it is run."""

import logging
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron import strict_json
from megatron.config import Config
from megatron.errors import UserError
from megatron.files import read_small
from megatron.interop.families import FAMILIES, IGNORED_HF_KEYS, Family, read_weights
from megatron.model import GPT, Architecture, from_config
from megatron.model.size import parameters
from megatron.parallel.machine import in_bytes, total_memory

logger = logging.getLogger(__name__)

SETTINGS = "config.json"
LONGEST = 10_000_000  # bytes of config.json and of the list of shards
MOST_LAYERS = 1000
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files with all weights, the preferred first; `.index.json` behind the name lists shards."""
BYTES = 8  # of a weight while it is read: theirs and ours in float32


def open_folder(folder: Path) -> tuple[GPT, Config]:
    """The model in float32 and eval mode, and its configuration.

    Raises UserError for another architecture, for a key that changes the result and is not offered,
    and for weights that are damaged, missing, left over or of another shape.
    """
    family, config, vocab = read_settings(folder)
    check_memory(folder, config, vocab)
    model = from_config(config, vocab=vocab)
    theirs = read_tensors(folder)
    try:
        names = [f"{name}.weight" for name in family.head if f"{name}.weight" in theirs]
        if len(names) > 1:
            raise UserError(f"{', '.join(names)} are two names of one matrix")
        head = f"{family.head[0]}.weight"
        if names:
            theirs[head] = theirs.pop(names[0])
        if not any(name.startswith(family.trunk) for name in theirs):  # files of the bare model
            theirs = {
                name if name == head else family.trunk + name: theirs[name] for name in theirs
            }

        architecture = Architecture.of(config.model)
        weights = read_weights(family, theirs, model.state_dict(), architecture)
        # A second copy of a tied embedding, and fixed tensors of old files, are left.
        again = theirs.pop(head, None)
        if again is not None and not torch.equal(again, weights["word_embeddings.weight"]):
            raise UserError(f"{head} differs from the embedding, and tie_word_embeddings is true")
        left = sorted(name for name in theirs if not name.endswith(tuple(family.buffers)))
        if left:
            raise UserError(f"{', '.join(left[:8])} left over")
    except UserError as fault:
        raise UserError(
            f"{folder}: the weights are not those of its config.json ({fault}) - copy the folder"
            " again"
        ) from None
    model.load_state_dict(weights)
    return model.eval(), config


def read_settings(folder: Path) -> tuple[Family, Config, int]:
    """The family of the model in a folder, its configuration, and the rows of its embedding."""
    place = folder / SETTINGS
    theirs = read_json(place)
    names = theirs.get("architectures")
    family = FAMILIES.get(names[0]) if isinstance(names, list) and len(names) == 1 else None
    if family is None:
        raise UserError(
            f"{place}: architectures: {names!r} is not offered; known are {', '.join(FAMILIES)}"
        )
    known = family.known_keys | IGNORED_HF_KEYS
    unset = (None, False, {}, [])
    unknown = [key for key in theirs if key not in known and theirs[key] not in unset]
    if unknown:
        raise UserError(
            f"{place}: {', '.join(sorted(unknown)[:8])}: not known for {family.architecture}, and"
            " may change what it computes - remove it from config.json only if it does not"
        )
    for key in ("vocab_size", "num_hidden_layers", "n_layer"):
        most = LONGEST if key == "vocab_size" else MOST_LAYERS
        number = theirs.get(key, None if key == "vocab_size" else 1)
        if type(number) is not int or not 1 <= number <= most:
            raise UserError(f"{place}: {key}: {number!r} is not a number of 1 to {most}")
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


def check_memory(folder: Path, config: Config, vocab: int) -> None:
    """Raises UserError if the weights in a folder are more than this machine's memory."""
    needed = BYTES * parameters(config, vocab).whole
    if needed > total_memory():
        raise UserError(
            f"{folder}: opening it needs {in_bytes(needed)}, and there are"
            f" {in_bytes(total_memory())} of memory - open it on a larger machine"
        )


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
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if not index.is_file():
            continue
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise UserError(f"{index}: has no list of shards (weight_map) - copy it again")
        shards = [folder / Path(str(shard)).name for shard in sorted({*places.values()})]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise UserError(
                f"{folder}: {', '.join(missing[:8])} missing, which {index.name} names - copy all"
                " shards"
            )
        return shards
    raise UserError(
        f"{folder}: holds no weights ({WEIGHTS[0]}, or {WEIGHTS[0]}.index.json with its shards)"
        " - copy them beside config.json"
    )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All weights in float32, by their names."""
    found: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            tensors = load_plain(file) if file.suffix == ".bin" else load_file(file)
        except (SafetensorError, OSError, ValueError) as fault:
            raise UserError(f"{file}: cannot be read ({fault}) - copy it again") from None
        if not isinstance(tensors, dict):
            raise UserError(f"{file}: holds something other than weights by name")
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise UserError(f"{file}: holds something other than weights by name")
            found[name] = tensor.float() if tensor.is_floating_point() else tensor
    return found


def load_plain(path: Path) -> Any:
    """The content of a file of torch.save, on the CPU; ValueError if it is more than tensors."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as fault:  # torch.load raises a kind of its own for each damage
        reason = str(fault).partition("\n")[0] or repr(fault)
        # torch's own words advise to load such a file in the way that runs its code.
        if isinstance(fault, UnpicklingError) or "weights_only" in reason:
            reason = "it is damaged, or holds more than plain tensors; code in it is never run"
        raise ValueError(f"{reason:.200}") from None
