"""A model of the Hugging Face hub by its name: found on this machine, or downloaded."""

import re
from pathlib import Path

from megatron.errors import UserError
from megatron.network import hub, hub_is_reachable

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
FILES = ("*.safetensors", "*.json", "tokenizer.model", "merges.txt", "vocab.txt")
"""What is downloaded: weights, settings and tokenizer, and no code."""
OLD_WEIGHTS = ("pytorch_model*.bin",)
"""And these, where a model has no safetensors."""
OF_ANOTHER_PROGRAM = ("consolidated*",)  # a second copy of Mistral's weights


def is_name(source: str) -> bool:
    """Whether a text looks like owner/model."""
    return NAME.fullmatch(source) is not None


def folder_of(name: str) -> Path:
    """The folder with a model's files.

    UserError, which says which files to copy, where they are not here and no network is.
    """
    reachable = hub_is_reachable()
    try:
        folder = _snapshot(name, FILES, only_local=not reachable)
        if not any(folder.glob("*.safetensors")):
            folder = _snapshot(name, FILES + OLD_WEIGHTS, only_local=not reachable)
    except (OSError, ValueError) as fault:
        if not reachable:  # and it was not downloaded earlier
            raise _without_network(name) from None
        reason = (str(fault).splitlines() or [repr(fault)])[0]
        raise UserError(
            f"{name}: cannot be downloaded ({reason}) - check the name and your rights, or copy"
            " the folder here and give its path"
        ) from None
    return folder


def _snapshot(name: str, patterns: tuple[str, ...], *, only_local: bool) -> Path:
    """The local folder with a model's files; OSError or ValueError where they cannot be had."""
    from huggingface_hub import snapshot_download  # only here: importing it takes long

    folder = snapshot_download(
        name,
        allow_patterns=list(patterns),
        ignore_patterns=list(OF_ANOTHER_PROGRAM),
        local_files_only=only_local,
    )
    return Path(folder)


def _without_network(name: str) -> UserError:
    wanted = " ".join(f"--include '{pattern}'" for pattern in FILES)
    return UserError(
        f"{name}: is no folder here, and {hub()} cannot be reached - where there is a"
        f" network, run `hf download {name} {wanted} --local-dir {name.split('/')[1]}`; copy"
        " that folder here and give its path"
    )
