"""Read a checkpoint: its configuration, its record and its model in float32."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megatron.checkpoints.manifest import (
    SETTINGS,
    WEIGHTS,
    Damaged,
    check_files,
    note_opened,
    read_record,
)
from megatron.checkpoints.saved import find
from megatron.config import Config, load
from megatron.config.config import COPY
from megatron.errors import UserError, in_words
from megatron.model import GPT, from_config

READ_BY_EVALUATION = (SETTINGS, COPY, WEIGHTS)


def read_meta(path: Path) -> tuple[Config, dict[str, Any]]:
    """The configuration and checkpoint.json of a folder global_stepN.

    Raises UserError if they are damaged or disagree.
    """
    meta = read_record(path)
    config_hash = meta["config_hash"]
    check_files(path, (SETTINGS, COPY))
    config = load([path / SETTINGS])
    if config_hash != config.hash:
        files = SETTINGS if config.pos_emb_code is None else f"{SETTINGS} with {COPY}"
        raise UserError(
            f"{path}/{files}: its hash is {config.hash}, but the checkpoint says {config_hash} - it"
            " was edited after training"
        )
    return config, meta


def load_for_evaluation(
    folder: str | Path, step: int | None = None
) -> tuple[GPT, Config, dict[str, Any]]:
    """The trained model in float32 and eval mode, the run's configuration, and checkpoint.json.

    The record also gets `path`, the folder global_stepN. Raises UserError if there is no
    checkpoint, or if it doesn't have the model that its configuration describes.
    """
    path = find(folder, step)
    config, meta = read_meta(path)
    note_opened(path, meta)
    model = load_model(path, config, meta)
    return model, config, {**meta, "path": str(path)}


def load_model(
    path: Path,
    config: Config,
    record: Mapping[str, Any],
    weights: Iterable[tuple[str, Tensor]] | None = None,
) -> GPT:
    """The model of a configuration with the weights of a folder global_stepN, in eval mode.

    It has the settings of its step's stage. record: checkpoint.json; weights: from another kind of
    folder, already checked. Memory holds the model and one tensor of the file at a time.
    Raises UserError if the weights cannot be read, were changed or belong to another model.
    """
    vocab = record["vocab"]
    file = path / WEIGHTS
    if weights is None:
        check_files(path, (WEIGHTS,))
        weights = tensors_of(file)
    tokenizer = record.get("tokenizer") or {}
    model = from_config(config.at_step(record["step"]), vocab, tokenizer.get("eod"))
    model.begin_of_text = tokenizer.get("bos")
    try:
        fill(model, weights)
    except ValueError as fault:
        raise UserError(
            f"{file}: does not fit the model of its config.yml: {fault} - copy the checkpoint again"
        ) from None
    return model.eval()


def opened(file: Path) -> safe_open:
    """Open a weights file. Raises Damaged if it cannot be read or was deleted meanwhile."""
    try:
        return safe_open(file, "pt")
    except (OSError, RuntimeError, SafetensorError) as fault:  # torch opens it a second time
        raise Damaged([f"{file}: cannot be read ({in_words(fault)})"]) from None


def tensors_of(file: Path) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of a weights file, one after another.

    The file is opened for each tensor, because all pages read from an open file stay in memory.
    """
    with opened(file) as weights:
        names = list(weights.keys())
    for name in names:
        with opened(file) as weights:
            yield name, weights.get_tensor(name)


def fill(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Set all weights of a model (float32) by name.

    Raises ValueError if a weight is missing, left over, or has another shape.
    """
    missing = model.state_dict()
    for name, weight in weights:
        parameter = missing.pop(name, None)
        if parameter is None:
            raise ValueError(f"{name} is left over")
        if weight.shape != parameter.shape:
            raise ValueError(f"{name} has shape {list(weight.shape)}, not {list(parameter.shape)}")
        parameter.copy_(weight)
    if missing:
        raise ValueError(f"{', '.join([*missing][:8])} missing")
