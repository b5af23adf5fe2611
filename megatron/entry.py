"""Shared by the entry scripts: `FILE… key=value… [options]`, one message per fault, notes once."""

import argparse
import atexit
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from megatron.checkpoints.saved import find
from megatron.cli_errors import CommandParser, print_line, status_of
from megatron.config import Config, load
from megatron.config.yaml_files import is_override
from megatron.errors import visible
from megatron.files import expanded
from megatron.parallel.grid import learn_place, left_at_the_end
from megatron.parallel.threads import flush_denormals

KEYS_ARE = "Keys of the configuration: see configs/README.md"
NO_EFFECT = ": accepted, has no effect here: "
FEW = 3  # how many notes about keys without effect are printed in full


def run(
    main: Callable[..., int | None],
    *,
    purpose: str | None = None,
    options: Callable[[argparse.ArgumentParser], None] | None = None,
    config_needed: bool = True,
) -> NoReturn:
    """Parse, load the configuration, call main(config, options) and exit with what it returns.

    --help shows the docstring of main's file.
    purpose: "train" or "evaluate", which need more keys than a model
    options: adds the script's own arguments
    config_needed: False: without files and key=value words, main gets None
    A fault prints one message and exits with status 1; see cli_errors.status_of.
    """
    start_logging()
    flush_denormals()
    parser = CommandParser(description=sys.modules[main.__module__].__doc__, epilog=KEYS_ARE)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FILE | key=value",
        help="YAML files, merged in order, then settings",
    )
    add_conf_dir(parser)
    # Launchers pass this option, but the environment has the number too.
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)
    if options:
        options(parser)

    def command() -> int | None:
        arguments = parser.parse_intermixed_args(settings_first(sys.argv[1:]))
        files, overrides = split_words(arguments.words, arguments.conf_dir)
        config = load_configuration(files, overrides, arguments, purpose, needed=config_needed)
        if config is not None:
            print_notes(config.notes)
        with left_at_the_end():
            return main(config, arguments)

    try:
        status = status_of(command)
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        status = ended.code
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    if several and not torch.cuda.is_available():
        # While the interpreter shuts down, gloo's threads abort if DeepSpeed still holds their
        # group (see left_at_the_end). Functions registered with atexit have already run.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(status)
    sys.exit(status)


def add_conf_dir(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the folder of the YAML files."""
    parser.add_argument(
        "-d", "--conf-dir", type="path", metavar="DIR", help="folder of the YAML files"
    )


def split_words(words: Sequence[str], folder: str | None = None) -> tuple[list[str], list[str]]:
    """Split command line words into (files in `folder`, overrides)."""
    files = [str(Path(folder or "") / expanded(word)) for word in words if not is_override(word)]
    overrides = [word for word in words if is_override(word)]
    return files, overrides


def settings_first(words: Sequence[str]) -> list[str]:
    """Move `key=value` words to the front, so that in `--lengths 512 1024 seed=1` the last word is
    not a length.

    The word after an option such as `--text` stays with it.
    """
    settings, words_of_options = [], []
    for before, word in zip(["", *words], words, strict=False):
        is_value_of_option = before.startswith("-") and "=" not in before
        kind = words_of_options if is_value_of_option or not is_override(word) else settings
        kind.append(word)
    return settings + words_of_options


def load_configuration(
    files: list[str],
    overrides: list[str],
    options: argparse.Namespace,
    purpose: str | None,
    *,
    needed: bool = True,
) -> Config | None:
    """The merged configuration; checks the keys that a purpose needs.

    If the checkpoint in the options is not one of ours, it is imported, and the option then names
    the imported one. Settings without a file change its configuration. With a checkpoint, a purpose
    needs no keys.
    needed: False: return None without files and key=value words
    """
    checkpoint = getattr(options, "checkpoint", None)
    if checkpoint:
        from megatron.interop.importing import import_if_foreign  # here, as it needs the model

        checkpoint = options.checkpoint = str(import_if_foreign(checkpoint))
    if not (files or overrides or needed):
        return None
    if overrides and not files and checkpoint:
        step = getattr(options, "step", None)
        folder = find(checkpoint, None if step is None else int(step))
        files = [str(folder / "config.yml")]
    config = load(files, overrides, trains=purpose != "evaluate")
    if purpose and not checkpoint:
        config.require_for(purpose)
    return config


def print_notes(notes: Sequence[str]) -> None:
    """Print notes to stderr; only the first process prints."""
    if not _is_first():
        return
    without_effect = [note.split(":")[0] for note in notes if NO_EFFECT in note]
    if len(without_effect) > FEW:  # a published file: a dozen lines would hide the other notes
        notes = [note for note in notes if NO_EFFECT not in note]
        keys = ", ".join(without_effect)
        notes.append(f"accepted, have no effect here: {keys}")
    for note in notes:
        print_line(f"note: {note}")


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


class _Visible(logging.Formatter):
    """Only the message; control characters in it are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def start_logging() -> None:
    """Send the package's messages to stderr, only from the first process."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Visible("%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    learn_place()
    level = logging.INFO if _is_first() else logging.ERROR
    logging.getLogger("megatron").setLevel(level)
