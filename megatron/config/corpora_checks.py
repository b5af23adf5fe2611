"""Faults between the keys that name corpora: data_path, train_data_paths and those around them."""

from collections.abc import Iterable

from megatron.address import address_fault, is_address, place_of
from megatron.config.faults import contradiction
from megatron.config.paths import CORPORA
from megatron.config.schema import Data, Training
from megatron.errors import UserError
from megatron.splits import PARTS, parse_split

HELD_OUT = ("valid_data_paths", "test_data_paths")


def data_faults(data: Data) -> list[str]:
    """What is wrong with the corpora, their weights and the split."""
    faults = [*_one_corpus(data), *_weights(data), *_by_documents(data), *_known_text(data)]
    named = [key for key in CORPORA if getattr(data, key)]
    if data.data_path and named:
        faults.append(
            f"data_path: {data.data_path} beside {named[0]}; one corpus whose parts split divides"
            f" is data_path, whole corpora for each part are {', '.join(CORPORA)}; drop one kind,"
            " such as with data_path=null"
        )
    for key in CORPORA:
        faults += _prefixes(key, getattr(data, key))
    try:
        parse_split(data.split)
    except UserError as fault:
        faults.append(str(fault))
    return faults


def _one_corpus(data: Data) -> list[str]:
    path = data.data_path or ""
    if "," in path:
        several = ", ".join(part.strip() for part in path.split(","))
        return [
            f"data_path: {path!r} names several files; give one prefix, or a blend of whole corpora"
            f" as train_data_paths: [{several}]"
        ]
    return _prefixes("data_path", [path])


def _prefixes(key: str, paths: Iterable[str]) -> list[str]:
    faults = []
    seen = set()
    for path in paths:
        if is_address(path) and (fault := address_fault(path)):
            faults.append(f"{key}: {fault}")
            continue  # other messages would repeat the address with its secrets
        if path.endswith((".bin", ".idx")):
            faults.append(f"{key}: {path} is a file; give the prefix {path[:-4]}")
        if place_of(path) in seen:
            faults.append(f"{key}: {path} stands there twice; give it once, with a larger weight")
        seen.add(place_of(path))
    return faults


def _weights(data: Data) -> list[str]:
    faults = []
    for part in PARTS:
        key = f"{part}_data_weights"
        weights, paths = getattr(data, key), getattr(data, f"{part}_data_paths")
        if weights and len(weights) != len(paths):
            faults.append(
                f"{key}: {len(weights)} weights for the {len(paths)} corpora of"
                f" {part}_data_paths; give one for each"
            )
    return faults


def _by_documents(data: Data) -> list[str]:
    if not data.weight_by_num_documents:
        return []
    faults = []
    if not data.train_data_paths:
        faults.append("weight_by_num_documents: weighs the corpora of train_data_paths; give them")
    for part in PARTS:
        if getattr(data, f"{part}_data_weights"):
            faults.append(contradiction("weight_by_num_documents", f"{part}_data_weights"))
    return faults


def _known_text(data: Data) -> list[str]:
    """A loss on text of the training is none on held-out text."""
    trained = {place_of(path) for path in data.train_data_paths}
    faults = []
    for key in HELD_OUT:
        for path in getattr(data, key):
            if place_of(path) in trained:
                faults.append(
                    f"{key}: {path} is trained on too (train_data_paths), so a loss there says"
                    " nothing of new text; prepare text that is held out"
                )
    return faults


def epoch_faults(data: Data, training: Training) -> list[str]:
    """train_epochs passes over every window as often, so there is nothing to weigh."""
    if training.train_epochs is None:
        return []
    weighing = [
        key for key in ("train_data_weights", "weight_by_num_documents") if getattr(data, key)
    ]
    return [f"{key}: cannot be combined with train_epochs; set train_iters" for key in weighing]
