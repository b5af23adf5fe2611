"""One way into every checkpoint: ours, Hugging Face's, GPT-NeoX's and those of its forks."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron.checkpoints.read import load_for_evaluation
from megatron.config import Config
from megatron.errors import UserError
from megatron.interop import hub, huggingface, reference
from megatron.model import GPT


class Kind(NamedTuple):
    """A kind of checkpoint. matches: whether a folder is one; needs_config: for `open_model`."""

    name: str
    matches: Callable[[Path], bool]
    open: Callable[[Path, Config | None], tuple[GPT, Config]]
    needs_config: bool = False


def open_model(source: str | Path, *, config: Config | None = None) -> tuple[GPT, Config]:
    """A model in float32 and eval mode with its configuration, wherever it comes from.

    source: a folder of Hugging Face's, or the name of a model of its hub; a run or checkpoint of
        ours; a folder global_stepN of GPT-NeoX, KERPLE or MEP, which needs `config`
    model(ids [batch, length]) -> logits [batch, length, rows of the source's vocabulary]
    UserError where it cannot be read, or is not what it says.
    """
    folder = local_folder(source)
    kind = kind_of(folder)
    if kind.needs_config and config is None:
        raise UserError(f"{folder}: {kind.name} does not describe itself - give its configuration")
    if config is not None and not kind.needs_config:
        raise UserError(
            f"{folder}: {kind.name} has its own configuration - leave the other one out"
        )
    return kind.open(folder, config)


def local_folder(source: str | Path) -> Path:
    """The folder of a source; a name of the hub is downloaded if it is not on this machine."""
    folder = Path(source)
    if not folder.exists() and hub.is_name(str(source)):
        return hub.folder_of(str(source))
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder - give a checkpoint, or a hub's owner/model")
    return folder


def kind_of(folder: Path) -> Kind:
    """The kind of checkpoint in a folder; UserError for none."""
    for kind in KINDS:
        if kind.matches(folder):
            return kind
    raise UserError(
        f"{folder}: holds no checkpoint that is known here - give a folder with"
        f" {huggingface.SETTINGS}, with global_stepN, or with layer_00-model_00-model_states.pt"
    )


def _is_ours(folder: Path) -> bool:
    return (folder / "checkpoint.json").is_file() or any(folder.glob("global_step*/config.yml"))


def _is_reference(folder: Path) -> bool:
    return any(folder.glob("layer_*-model_states.pt"))


def _open_ours(folder: Path, _: Config | None) -> tuple[GPT, Config]:
    opened = load_for_evaluation(folder)
    return opened[0], opened[1]


def _open_huggingface(folder: Path, _: Config | None) -> tuple[GPT, Config]:
    return huggingface.open_folder(folder)


def _open_reference(folder: Path, config: Config | None) -> tuple[GPT, Config]:
    assert config is not None  # open_model asked for it
    return reference.load_model(folder, config).eval(), config


KINDS = (
    Kind("a checkpoint of ours", _is_ours, _open_ours),
    Kind("a folder of Hugging Face's", huggingface.is_folder, _open_huggingface),
    Kind("a checkpoint of GPT-NeoX", _is_reference, _open_reference, needs_config=True),
)
"""What can be opened, in the order in which it is looked for."""
