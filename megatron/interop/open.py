"""One way into every checkpoint: ours, Hugging Face's, GPT-NeoX's and those of its forks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoints.manifest import RECORD, SETTINGS, WEIGHTS
from megatron.checkpoints.read import load_for_evaluation
from megatron.checkpoints.saved import chosen, folder_of, step_of, steps_in, without_record
from megatron.config import Config
from megatron.config.config import COPY
from megatron.errors import UserError
from megatron.interop import exported_folder, hub, huggingface, neox_folder
from megatron.interop.reference import load_reference
from megatron.model import GPT


@dataclass(frozen=True)
class Opened:
    """A checkpoint from anywhere.

    model: float32, eval mode; config: what it is, in our keys; step: of its training, 0 if unknown
    record: what a checkpoint of ours says of itself, empty for others
    """

    model: GPT
    config: Config
    step: int = 0
    record: dict[str, Any] = field(default_factory=dict)


class Kind(NamedTuple):
    """A kind of checkpoint.

    find: the folder of the checkpoint that a source is or holds, or None
    files: the files of weights and settings in such a folder
    """

    name: str
    described: str
    find: Callable[[Path], Path | None]
    files: Callable[[Path], list[Path]]
    open: Callable[[Path, Config | None], Opened]


def open_model(source: str | Path, *, config: Config | None = None) -> tuple[GPT, Config]:
    """A model in float32 and eval mode with its configuration, wherever it comes from.

    source: a folder of Hugging Face's, or the name of a model of its hub; a run or checkpoint of
        ours; a run or checkpoint of GPT-NeoX, KERPLE or MEP, with its configuration as `config`
        unless the folder `configs` lies with it
    model(ids [batch, length]) -> logits [batch, length, rows of the source's vocabulary]
    UserError where it cannot be read, or is not what it says.
    """
    kind, folder = kind_of(local_folder(source))
    opened = kind.open(folder, config)
    return opened.model, opened.config


def local_folder(source: str | Path) -> Path:
    """The folder of a source; a name of the hub is downloaded if it is not on this machine."""
    folder = Path(source)
    if not folder.exists() and hub.is_name(str(source)):
        return hub.folder_of(str(source))
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder - give a checkpoint, or a hub's owner/model")
    return folder


def kind_of(folder: Path) -> tuple[Kind, Path]:
    """The kind of checkpoint that a folder is or holds, and its own folder; UserError for none."""
    for kind in KINDS:
        found = kind.find(folder)
        if found is not None:
            return kind, found
    steps = neox_folder.steps_in(folder)
    if steps:
        raise UserError(
            f"{folder}: its file `latest` names none of {', '.join(steps[:8])} - give the folder of"
            " one of them"
        )
    raise UserError(
        f"{folder}: holds no checkpoint that is known here - give a folder with"
        f" {huggingface.SETTINGS}, with global_stepN, or with layer_00-model_00-model_states.pt"
    )


def is_known(folder: Path) -> bool:
    """Whether a folder is or holds a checkpoint of any kind."""
    return any(kind.find(folder) is not None for kind in KINDS)


def is_ours(folder: Path) -> bool:
    """Whether this is a run or a checkpoint of ours, damaged ones included."""
    if steps_in(folder) or (folder / RECORD).is_file():
        return True
    without = [folder_of(folder, step) for step in without_record(folder)]
    return any(_holds_our_files(place) for place in (folder, *without))


def _holds_our_files(folder: Path) -> bool:
    return (folder / SETTINGS).is_file() and (folder / WEIGHTS).is_file()


def _refuse(config: Config | None, folder: Path) -> None:
    if config is not None:
        raise UserError(f"{folder}: has its own configuration - leave the other one out")


def _find_ours(folder: Path) -> Path | None:
    return chosen(folder) if is_ours(folder) else None


def _files_of_ours(folder: Path) -> list[Path]:
    names = (SETTINGS, COPY, WEIGHTS)
    return [folder / name for name in names if (folder / name).is_file()]


def _open_ours(folder: Path, config: Config | None) -> Opened:
    _refuse(config, folder)
    model, trained, record = load_for_evaluation(folder)
    return Opened(model, trained, record["step"], record)


def _find_exported(folder: Path) -> Path | None:
    return folder if exported_folder.is_folder(folder) else None


def _open_exported(folder: Path, config: Config | None) -> Opened:
    _refuse(config, folder)
    return Opened(*exported_folder.open_folder(folder))


def _find_huggingface(folder: Path) -> Path | None:
    return folder if huggingface.is_folder(folder) else None


def _files_of_huggingface(folder: Path) -> list[Path]:
    return [folder / huggingface.SETTINGS, *huggingface.weight_files(folder)]


def _open_huggingface(folder: Path, config: Config | None) -> Opened:
    _refuse(config, folder)
    return Opened(*huggingface.open_folder(folder))


def _files_of_neox(folder: Path) -> list[Path]:
    files = [file for pattern in neox_folder.PATTERNS for file in sorted(folder.glob(pattern))]
    return [*sorted((folder / "configs").glob("*.yml")), *files]


def _open_neox(folder: Path, config: Config | None) -> Opened:
    config = config or neox_folder.configuration(folder)
    if config is None:
        raise UserError(
            f"{folder}: has no configuration with it (configs/*.yml) - give that of its training"
        )
    return Opened(*load_reference(folder, config), step=step_of(folder) or 0)


KINDS = (
    Kind("ours", "a checkpoint of ours", _find_ours, _files_of_ours, _open_ours),
    Kind(
        "gpt-neox",
        "a checkpoint of GPT-NeoX",
        neox_folder.checkpoint_in,
        _files_of_neox,
        _open_neox,
    ),
    Kind(
        "exported",
        "an exported model of ours",
        _find_exported,
        _files_of_huggingface,
        _open_exported,
    ),
    Kind(
        "huggingface",
        "a folder of Hugging Face's",
        _find_huggingface,
        _files_of_huggingface,
        _open_huggingface,
    ),
)
"""What can be opened, in the order in which it is looked for."""
