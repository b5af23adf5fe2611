"""One way into every checkpoint: ours, Hugging Face's, GPT-NeoX's and other trainers'."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoints.manifest import RECORD, SETTINGS, SHOWN, faults_of
from megatron.checkpoints.read import load_for_evaluation, load_model, read_meta, tensors_of
from megatron.checkpoints.saved import step_of
from megatron.config import Config
from megatron.errors import UserError, in_words, missing_package
from megatron.interop import huggingface, reference, trainers
from megatron.model import GPT

logger = logging.getLogger(__name__)

HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")  # and a revision
PIECES = "tokenizer.model"  # of SentencePiece
HUB_FILES = ("*.safetensors", "*.json", PIECES, "merges.txt", "chat_template.jinja", SETTINGS)
"""Files that are downloaded: weights, settings, tokenizer and chat template, and no code."""
OF_ANOTHER_PROGRAM = "consolidated*"  # a second copy of Mistral's weights
PREFIX = "gpt."  # of the names of weights in an export that has our own class


class OpenedModel(NamedTuple):
    """A checkpoint from anywhere.

    kind: what `kind_of` calls it; folder: the source's own
    model: float32, eval mode; config: what it is, in our keys; step: of its training, 0 if unknown
    record: checkpoint.json of an export; theirs: transformers' own model of a Hugging Face folder
    """

    kind: str
    folder: Path
    model: GPT
    config: Config
    step: int = 0
    record: Mapping[str, Any] = {}
    theirs: Any = None


def open_model(source: str | Path, *, config: Config | None = None) -> tuple[GPT, Config]:
    """A model in float32 and eval mode with its configuration, wherever it comes from.

    source: a folder of Hugging Face's, or the name of a model of its hub; a run or
        checkpoint of ours; a checkpoint of nanoGPT or litgpt; one of GPT-NeoX, KERPLE, MEP,
        torchtitan or flame, with its configuration as `config`
    model(ids [batch, length]) -> logits [batch, length, rows of the source's vocabulary]
    Raises UserError if it cannot be read, or is not what it says. An import compares logits with
    those of transformers. This does not, because it would take twice the memory.
    """
    opened = open_checkpoint(source, config)
    return opened.model, opened.config


def open_checkpoint(source: str | Path, config: Config | None) -> OpenedModel:
    """The checkpoint of a source; arguments and errors as for `open_model`."""
    folder = local_folder(source)
    kind = kind_of(folder)
    faults = faults_of(folder) if has_sums(folder) else []
    if faults:
        raise UserError(
            f"{'; '.join(faults[:SHOWN])} - copy the folder again, or export its checkpoint again"
        )
    if config is not None and kind not in ("gpt-neox", trainers.DISTRIBUTED, None):
        raise UserError(f"{folder}: has its own configuration - leave the other one out")
    if kind == "ours":
        model, trained, record = load_for_evaluation(folder)
        return OpenedModel(kind, folder, model, trained, record["step"])
    if kind == "gpt-neox":
        if config is None:
            raise UserError(
                f"{folder}: has no configuration with it - give the files of its training, as in"
                f" tools/import_checkpoint.py {folder} FILES -o RUN"
            )
        model, config = reference.load_reference(folder, config)
        return OpenedModel(kind, folder, model, config, step_of(folder) or 0)
    if kind in trainers.TRAINERS:
        model, config, step = trainers.open_folder(folder, kind, config)
        return OpenedModel(kind, folder, model, config, step)
    if kind == "huggingface":
        model, config, theirs = huggingface.open_folder(folder)
        return OpenedModel(kind, folder, model, config, theirs=theirs)
    if kind == "exported":
        config, record = read_meta(folder)
        weights = (
            (name.removeprefix(PREFIX), tensor)
            for file in huggingface.weight_files(folder)
            for name, tensor in tensors_of(file)
        )
        model = load_model(folder, config, record, weights)
        return OpenedModel(kind, folder, model, config, record["step"], record)
    raise UserError(
        f"{folder}: holds no checkpoint that is known here - give a folder with"
        f" {huggingface.SETTINGS}, a run or global_stepN of ours, global_stepN of GPT-NeoX with"
        f" its {reference.FILES} or {reference.RANKS}, or another trainer's (docs/importing.md)"
    )


def kind_of(folder: Path) -> str | None:
    """The kind of checkpoint that a folder is or holds, or None.

    exported: by export.py as our own class; an export as a class of transformers is huggingface
    """
    if has_sums(folder):
        return "exported" if (folder / SETTINGS).is_file() else "huggingface"
    if (folder / RECORD).exists() or any(folder.glob(f"global_step*/{RECORD}")):
        return "ours"
    if reference.files_of(folder):
        return "gpt-neox"
    other = "huggingface" if (folder / huggingface.SETTINGS).is_file() else None
    return trainers.kind_of(folder) or other  # litgpt, too, has a config.json beside its own file


def has_sums(folder: Path) -> bool:
    """Whether a folder is an export of ours, whose checkpoint.json has the sum of each file."""
    return (folder / RECORD).exists() and (folder / huggingface.SETTINGS).is_file()


def local_folder(source: str | Path) -> Path:
    """The folder of a source; a model of the hub is downloaded if need be."""
    folder, name = trainers.folder_of(Path(source)), str(source)
    if folder.is_dir():
        return folder
    on_hub = HUB_NAME.fullmatch(name)
    if folder.exists() or on_hub is None:
        raise UserError(
            f"{folder}: is not a folder - give a checkpoint or a hub's owner/model; a GGUF file is"
            " made a folder by transformers (docs/importing.md)"
        )
    name, revision = on_hub.groups()
    try:
        from huggingface_hub import snapshot_download  # only here: importing it takes long

        # Without a network this finds what was downloaded before.
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(HUB_FILES),
                ignore_patterns=OF_ANOTHER_PROGRAM,
            )
        )
    except (ImportError, OSError, ValueError, RuntimeError) as fault:
        reason = missing_package(fault) or in_words(fault)
        raise UserError(
            f"{folder}: is not a folder here, and cannot be downloaded ({reason}) - check"
            f" the name, your rights and the network; or run `hf download {name} --revision"
            f" {revision or 'main'} --local-dir {folder.name}` elsewhere, copy that folder here and"
            " give its path"
        ) from None
