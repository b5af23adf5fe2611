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
            f"{path}/{files}: its hash is {config.hash}, the checkpoint says {config_hash}"
            " - it was edited after training"
        )
    return config, meta


def load_for_evaluation(
    folder: str | Path, step: int | None = None
) -> tuple[GPT, Config, dict[str, Any]]:
    """The trained model in float32 and eval mode, the run's configuration, and checkpoint.json.

    To the latter `path` is added, the folder global_stepN. Raises UserError if there is no
    checkpoint, or it does not hold the model that its configuration describes.
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

    It is that of the stage of its step. record: checkpoint.json; weights: those of another kind of
    folder, which are checked already
    In memory are the model and one of the tensors in the file.
    Raises UserError if the weights cannot be read, were changed or are those of another model.
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
            f"{file}: does not hold the model of its config.yml: {fault} - copy the checkpoint"
            " again"
        ) from None
    return model.eval()


def opened(file: Path) -> safe_open:
    """A file of weights. Raises Damaged if it cannot be read, or has been deleted meanwhile."""
    try:
        return safe_open(file, "pt")
    except (OSError, RuntimeError, SafetensorError) as fault:  # the second is torch's own opening
        raise Damaged([f"{file}: cannot be read ({in_words(fault)})"]) from None


def tensors_of(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a file of weights, one after another.

    The file is opened for each: of an open one, all pages that were read stay in memory.
    """
    with opened(file) as weights:
        names = list(weights.keys())
    for name in names:
        with opened(file) as weights:
            yield name, weights.get_tensor(name)


def fill(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Give a model all its weights, float32, by their names.

    Raises ValueError for one that is missing, left over, or of another shape.
    """
    missing = model.state_dict()
    for name, weight in weights:
        parameter = missing.pop(name, None)
        if parameter is None:
            raise ValueError(f"{name} is left over")
        if weight.shape != parameter.shape:
            raise ValueError(f"{name} is {list(weight.shape)}, not {list(parameter.shape)}")
        parameter.copy_(weight)
    if missing:
        raise ValueError(f"{', '.join([*missing][:8])} missing")
