"""Open a folder of Hugging Face's: config.json and the weights beside it. Nothing in it is run."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron import strict_json
from megatron.config import Config, load
from megatron.errors import UserError
from megatron.files import read_small
from megatron.interop.families import FAMILIES
from megatron.interop.family import Family
from megatron.interop.harmless import HARMLESS
from megatron.interop.pickled import load_plain
from megatron.interop.weights import read_weights
from megatron.model import GPT, Architecture, from_config
from megatron.model.size import parameters
from megatron.parallel.machine import in_bytes, total_memory

logger = logging.getLogger(__name__)

SETTINGS = "config.json"
LONGEST = 10_000_000  # bytes of config.json and of the list of shards
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files with all weights, the preferred first; `.index.json` behind the name lists shards."""
BYTES = 8  # of a weight while it is read: theirs and ours in float32
WRONG_KIND = (TypeError, ValueError, AttributeError, KeyError, ArithmeticError)


def is_folder(folder: Path) -> bool:
    """Whether this looks like a folder of Hugging Face's."""
    return (folder / SETTINGS).is_file()


def open_folder(folder: Path) -> tuple[GPT, Config]:
    """The model in float32 and eval mode, and its configuration.

    UserError for another architecture, for a key that changes the result and is not offered, and
    for weights that are damaged, missing, left over or of another shape.
    """
    family, config, vocab = read_settings(folder)
    return read_model(folder, family, config, vocab), config


def read_settings(folder: Path) -> tuple[Family, Config, int]:
    """The family of the model in a folder, its configuration, and the rows of its embedding."""
    place = folder / SETTINGS
    theirs = read_json(place)
    family = _family_of(theirs, place)
    _check_known(theirs, family, place)
    vocab = theirs.get("vocab_size")
    if not isinstance(vocab, int) or vocab < 1:
        raise UserError(f"{place}: vocab_size: {vocab!r} is no number of tokens")
    try:
        settings = family.settings_of(theirs)
        words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        config = load([], [*words, f"make_vocab_size_divisible_by={vocab}"])
    except UserError as fault:
        raise UserError(f"{place}: {fault}") from None
    except WRONG_KIND as fault:
        raise UserError(f"{place}: has a value of the wrong kind ({fault})") from None
    if "auto_map" in theirs:
        logger.warning(
            "%s: names code of its own, which is not run; %s is computed by our model",
            place,
            family.architecture,
        )
    return family, config, vocab


def read_model(folder: Path, family: Family, config: Config, vocab: int) -> GPT:
    """The model of `read_settings` with the folder's weights, in float32 and eval mode."""
    check_memory(folder, config, vocab)
    tensors = read_tensors(folder)
    model = from_config(config, vocab=vocab)
    wanted = model.state_dict()
    try:
        theirs = _named_fully(tensors, family)
        weights = read_weights(family, theirs, wanted, Architecture.of(config.model))
        _check_left_over(theirs, weights, family)
    except UserError as fault:
        raise UserError(
            f"{folder}: the weights are not those of its config.json ({fault}) - copy the folder"
            " again"
        ) from None
    model.load_state_dict(weights)
    return model.eval()


def check_memory(folder: Path, config: Config, vocab: int) -> None:
    """UserError where the weights in a folder are more than this machine's memory."""
    needed = BYTES * parameters(config, vocab).whole
    if needed > total_memory():
        raise UserError(
            f"{folder}: opening it needs {in_bytes(needed)}, and there are"
            f" {in_bytes(total_memory())} of memory - open it on a larger machine"
        )


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: one, or all shards of a set.

    UserError where there are none, or where a shard is missing.
    """
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return [folder / shard for shard in sorted(set(_shards(index).values()))]
    raise UserError(
        f"{folder}: holds no weights ({WEIGHTS[0]}, or {WEIGHTS[0]}.index.json with its shards)"
        " - copy them beside config.json"
    )


def _family_of(theirs: Mapping[str, Any], place: Path) -> Family:
    names = theirs.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UserError(
            f"{place}: architectures: {names!r} does not name one class; known are"
            f" {', '.join(FAMILIES)}"
        )
    family = FAMILIES.get(names[0])
    if family is None:
        # No nearest name: all of them end alike, so Gemma would be called a misspelt Llama.
        raise UserError(
            f"{place}: architectures: {names[0]} is not offered; known are {', '.join(FAMILIES)}"
        )
    return family


def _check_known(theirs: Mapping[str, Any], family: Family, place: Path) -> None:
    """UserError for keys whose meaning we do not know: one of them may change the logits."""
    known = family.known_keys | HARMLESS
    unset = (None, False, {}, [])
    unknown = [key for key in theirs if key not in known and theirs[key] not in unset]
    if unknown:
        raise UserError(
            f"{place}: {', '.join(sorted(unknown)[:8])}: not known for {family.architecture}, and"
            " may change what it computes - remove it from config.json only if it does not"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The keys in a file; UserError where it is no such file."""
    try:
        value = strict_json.parse(read_small(path, LONGEST))
    except (OSError, ValueError) as fault:
        raise UserError(f"{path}: cannot be read ({fault}) - copy it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no keys - copy it again")
    return value


def _shards(index: Path) -> dict[str, str]:
    """The shard of each weight, by the list of shards; UserError where one is missing."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(map(_is_file_name, places.values())):
        raise UserError(f"{index}: has no list of shards (weight_map) - copy it again")
    shards = sorted(set(places.values()))
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing:
        raise UserError(
            f"{index.parent}: {', '.join(missing[:8])} missing, which {index.name} names - copy"
            " all shards"
        )
    return places


def _is_file_name(name: Any) -> bool:
    """Whether this names a file in the same folder, of a kind that is read."""
    suffixes = {Path(whole).suffix for whole in WEIGHTS}
    return isinstance(name, str) and Path(name).name == name and Path(name).suffix in suffixes


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All weights in float32, by their names."""
    files = weight_files(folder)
    found: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _tensors_of(file).items():
            if name in found:
                raise UserError(f"{file}: {name} is in another shard too - copy the shards again")
            found[name] = tensor.float() if tensor.is_floating_point() else tensor
    index = folder / f"{_whole_name(files[0])}.index.json"
    if index.is_file() and len(files) > 1:
        absent = sorted(_shards(index).keys() - found.keys())
        if absent:
            raise UserError(
                f"{folder}: {', '.join(absent[:8])} missing in the shards that {index.name} names"
                " - copy the shards again"
            )
    return found


def _whole_name(file: Path) -> str:
    return next(name for name in WEIGHTS if Path(name).suffix == file.suffix)


def _tensors_of(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = load_plain(file)
    except (SafetensorError, OSError) as fault:
        raise UserError(f"{file}: cannot be read ({fault}) - copy it again") from None
    except ValueError as fault:
        raise UserError(
            f"{file}: cannot be read as plain weights ({fault}) - copy it again, or take the"
            " safetensors file"
        ) from None
    plain = isinstance(tensors, dict) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    )
    if not plain:
        raise UserError(f"{file}: holds something other than weights by name")
    return tensors


def _named_fully(tensors: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Names as in the class's own files; those of the bare model leave out the trunk's name."""
    heads = {f"{name}.weight" for name in family.head}
    named = sorted(heads & tensors.keys())
    if len(named) > 1:
        raise UserError(f"{', '.join(named)} are two names of one matrix")
    bare = not any(name.startswith(family.trunk) for name in tensors)
    found = {}
    for name, tensor in tensors.items():
        if name in heads:
            name = f"{family.head[0]}.weight"
        elif bare:
            name = family.trunk + name
        found[name] = tensor
    return found


def _check_left_over(theirs: dict[str, Tensor], ours: Mapping[str, Tensor], family: Family) -> None:
    """UserError for weights that our model does not have.

    Fixed tensors of old files are left, and so is a second copy of a tied embedding.
    """
    head = theirs.pop(f"{family.head[0]}.weight", None)
    embedding = ours["word_embeddings.weight"]
    if head is not None and not torch.equal(head, embedding):
        raise UserError(
            f"{family.head[0]}.weight differs from the embedding, and tie_word_embeddings is true"
        )
    left = sorted(name for name in theirs if not name.endswith(family.buffers or ("\0",)))
    if left:
        raise UserError(f"{', '.join(left[:8])} left over")
