"""One way into every checkpoint: ours, Hugging Face's, GPT-NeoX's and those of its forks."""

import re
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
from megatron.interop import exported_folder, huggingface, reference
from megatron.model import GPT
from megatron.network import hub, hub_is_reachable

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ("*.safetensors", "*.json", "tokenizer.model", "merges.txt", "vocab.txt")
"""Files that are downloaded: weights, settings and tokenizer, and no code."""
OLD_WEIGHTS = ("pytorch_model*.bin",)
"""And these, if a model has no safetensors."""
OF_ANOTHER_PROGRAM = ("consolidated*",)  # a second copy of Mistral's weights


@dataclass(frozen=True)
class OpenedModel:
    """A checkpoint from anywhere.

    model: float32, eval mode; config: what it is, in our keys; step: of its training, 0 if unknown
    record: what a checkpoint of ours says of itself, empty for others
    """

    model: GPT
    config: Config
    step: int = 0
    record: dict[str, Any] = field(default_factory=dict)


class CheckpointKind(NamedTuple):
    """A kind of checkpoint.

    find: the folder of the checkpoint that a source is or holds, or None
    files: the files of weights and settings in such a folder
    """

    name: str
    find: Callable[[Path], Path | None]
    files: Callable[[Path], list[Path]]
    open: Callable[[Path, Config | None], OpenedModel]


def open_model(source: str | Path, *, config: Config | None = None) -> tuple[GPT, Config]:
    """A model in float32 and eval mode with its configuration, wherever it comes from.

    source: a folder of Hugging Face's, or the name of a model of its hub; a run or checkpoint of
        ours; a run or checkpoint of GPT-NeoX, KERPLE or MEP, with its configuration as `config`
        unless the folder `configs` lies with it
    model(ids [batch, length]) -> logits [batch, length, rows of the source's vocabulary]
    Raises UserError if it cannot be read, or is not what it says.
    """
    kind, folder = kind_of(local_folder(source))
    opened = open_kind(kind, folder, config)
    return opened.model, opened.config


def open_kind(kind: CheckpointKind, folder: Path, config: Config | None) -> OpenedModel:
    """The checkpoint in a folder of a kind; config: of a GPT-NeoX checkpoint alone."""
    if config is not None and kind.name != "gpt-neox":
        raise UserError(f"{folder}: has its own configuration - leave the other one out")
    return kind.open(folder, config)


def local_folder(source: str | Path) -> Path:
    """The folder of a source; a model of the hub is downloaded if it is not on this machine."""
    folder, name = Path(source), str(source)
    if folder.is_dir():
        return folder
    if folder.exists() or not HUB_NAME.fullmatch(name):
        raise UserError(f"{folder}: is not a folder - give a checkpoint, or a hub's owner/model")
    from huggingface_hub import snapshot_download  # only here: importing it takes long

    reachable = hub_is_reachable()
    try:
        for patterns in (HUB_FILES, HUB_FILES + OLD_WEIGHTS):
            found = snapshot_download(
                name,
                allow_patterns=list(patterns),
                ignore_patterns=list(OF_ANOTHER_PROGRAM),
                local_files_only=not reachable,
            )
            if any(Path(found).glob("*.safetensors")):
                break
        return Path(found)
    except (OSError, ValueError) as fault:
        if reachable:
            reason = (str(fault).splitlines() or [repr(fault)])[0]
            raise UserError(
                f"{name}: cannot be downloaded ({reason}) - check the name and your rights, or copy"
                " the folder here and give its path"
            ) from None
    wanted = " ".join(f"--include '{pattern}'" for pattern in HUB_FILES)
    raise UserError(
        f"{name}: is not a folder here, and {hub()} cannot be reached - where there is a"
        f" network, run `hf download {name} {wanted} --local-dir {folder.name}`; copy that folder"
        " here and give its path"
    )


def kind_of(folder: Path) -> tuple[CheckpointKind, Path]:
    """The kind of checkpoint that a folder is or holds, and its own folder; UserError for none."""
    for kind in KINDS:
        found = kind.find(folder)
        if found is not None:
            return kind, found
    raise UserError(
        f"{folder}: holds no checkpoint that is known here - give a folder with"
        f" {huggingface.SETTINGS}, a run or global_stepN of ours, or one of GPT-NeoX"
    )


def is_known(folder: Path) -> bool:
    """Whether a folder is or holds a checkpoint of any kind."""
    return any(kind.find(folder) is not None for kind in KINDS)


def is_ours(folder: Path) -> bool:
    """Whether this is a run or a checkpoint of ours, damaged ones included."""
    if steps_in(folder) or (folder / RECORD).is_file():
        return True
    without = [folder_of(folder, step) for step in without_record(folder)]
    for place in (folder, *without):
        if (place / SETTINGS).is_file() and (place / WEIGHTS).is_file():
            return True
    return False


def _files_of_ours(folder: Path) -> list[Path]:
    names = (SETTINGS, COPY, WEIGHTS)
    return [folder / name for name in names if (folder / name).is_file()]


def _open_ours(folder: Path, _: Config | None) -> OpenedModel:
    model, trained, record = load_for_evaluation(folder)
    return OpenedModel(model, trained, record["step"], record)


def _files_of_huggingface(folder: Path) -> list[Path]:
    return [folder / huggingface.SETTINGS, *huggingface.weight_files(folder)]


def _files_of_neox(folder: Path) -> list[Path]:
    patterns = ("configs/*.yml", *reference.PATTERNS)
    return [file for pattern in patterns for file in sorted(folder.glob(pattern))]


def _open_neox(folder: Path, config: Config | None) -> OpenedModel:
    config = config or reference.configuration(folder)
    if config is None:
        raise UserError(
            f"{folder}: has no configuration with it (configs/*.yml) - give that of its training"
        )
    return OpenedModel(*reference.load_reference(folder, config), step=step_of(folder) or 0)


KINDS = (
    CheckpointKind(
        "ours",
        lambda folder: chosen(folder) if is_ours(folder) else None,
        _files_of_ours,
        _open_ours,
    ),
    CheckpointKind("gpt-neox", reference.checkpoint_in, _files_of_neox, _open_neox),
    CheckpointKind(
        "exported",
        lambda folder: folder if exported_folder.is_folder(folder) else None,
        _files_of_huggingface,
        lambda folder, _: OpenedModel(*exported_folder.open_folder(folder)),
    ),
    CheckpointKind(
        "huggingface",
        lambda folder: folder if (folder / huggingface.SETTINGS).is_file() else None,
        _files_of_huggingface,
        lambda folder, _: OpenedModel(*huggingface.open_folder(folder)),
    ),
)
"""All kinds that can be opened, in the order in which they are looked for."""
