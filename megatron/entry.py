"""What the entry scripts share: `FILES… key=value… [options]`, one message per fault, notes said once."""

import argparse
import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from megatron.config import Config, load
from megatron.config.document import help_text
from megatron.config.read import is_override
from megatron.errors import UserError
from megatron.parallel.grid import left_at_the_end
from megatron.training.checkpoint import find

NOTES_SAID = "MEGATRON_NOTES_SAID"
PATIENCE = 5  # seconds
NO_EFFECT, FEW = ": accepted, has no effect here: ", 3


def run(
    main: Callable[..., int | None],
    *,
    description: str | None = None,
    purpose: str | None = None,
    options: Callable[[argparse.ArgumentParser], None] | None = None,
    config_needed: bool = True,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Parse, load the configuration, call main(config, options), exit with what it returns. A UserError is one message.

    description: the docstring of main's file if not given; options adds the script's own arguments;
    purpose: "train" or "evaluate", which keys are needed beyond a model's;
    without config_needed, main gets None when neither a file nor key=value is given.
    """
    _log()
    parser = parser_for(description or sys.modules[main.__module__].__doc__ or "", options)
    try:
        given = parser.parse_intermixed_args(settings_first(sys.argv[1:] if argv is None else argv))
        config = None
        if given.words or config_needed:
            config = load_given(*split(given.words, given.conf_dir), given)
            require(config, purpose, given)
            say(config.notes)
        with left_at_the_end():
            status = main(config, given) or 0
    except UserError as fault:
        complain(str(fault))
        status = 1
    except KeyboardInterrupt:
        status = 130
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        status = ended.code
    _end(status)


def _end(status: int) -> NoReturn:
    """Exit. Of several processes on CPU each ends without the interpreter's last part, which gloo's threads abort where
    DeepSpeed still holds their group (see left_at_the_end); what is registered to run at the end has run."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not torch.cuda.is_available():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def parser_for(
    description: str, options: Callable[[argparse.ArgumentParser], None] | None = None
) -> argparse.ArgumentParser:
    """`FILE… key=value… [-d DIR]` and the script's own options; --help lists every key."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog=help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FILE | key=value",
        help="YAML files, merged in order, then settings",
    )
    add_conf_dir(parser)
    parser.add_argument(
        "--local_rank", "--local-rank", help=argparse.SUPPRESS
    )  # launchers pass it; the environment says it too
    if options:
        options(parser)
    return parser


def add_conf_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-d", "--conf_dir", metavar="DIR", help="folder of the YAML files")


def split(words: Sequence[str], folder: str | None = None) -> tuple[list[str], list[str]]:
    """Words of the command line -> (files, overrides)."""
    files = [word for word in words if not is_override(word)]
    overrides = [word for word in words if is_override(word)]
    return [str(Path(folder or "") / file) for file in files], overrides


def settings_first(words: Sequence[str]) -> list[str]:
    """key=value words before everything else, so that `--lengths 512 1024 eval_tokens=4096` is no third length."""
    found = [
        is_override(word) and not (before.startswith("-") and "=" not in before)
        for before, word in zip(["", *words], words, strict=False)
    ]
    settings = [word for word, moves in zip(words, found, strict=True) if moves]
    return settings + [word for word, moves in zip(words, found, strict=True) if not moves]


def load_given(files: list[str], overrides: list[str], options: argparse.Namespace) -> Config:
    """The merged configuration; settings without a file are laid over that of the checkpoint named as an option."""
    if overrides and not files and getattr(options, "checkpoint", None):
        step = getattr(options, "step", None)
        files = [str(find(options.checkpoint, None if step is None else int(step)) / "config.yml")]
    return load(files, overrides)


def require(config: Config, purpose: str | None, options: argparse.Namespace) -> None:
    """Keys that this script needs; a checkpoint named as an option needs no key for it."""
    if purpose and not getattr(options, "checkpoint", None):
        config.require_for(purpose)


def say(notes: Sequence[str]) -> None:
    """Print notes to stderr, once: by deepy.py, or by the first process where there is no deepy.py."""
    if int(os.environ.get("RANK", 0)) == 0 and NOTES_SAID not in os.environ:
        idle = [note for note in notes if NO_EFFECT in note]
        if (
            len(idle) > FEW
        ):  # a published file: one line instead of a dozen, or the notes that matter drown
            keys = ", ".join(note.split(":")[0] for note in idle)
            notes = [
                *(note for note in notes if note not in idle),
                f"accepted, have no effect here: {keys}",
            ]
        for note in notes:
            print(f"note: {note}", file=sys.stderr)


def complain(text: str) -> None:
    """Print a fault to stderr; other processes wait for the first one, so that a common fault appears once."""
    rank = int(os.environ.get("RANK", 0))
    if rank:
        time.sleep(PATIENCE)  # the launcher ends this process meanwhile if the first one failed too
        text = f"rank {rank}: {text}"
    print(text, file=sys.stderr, flush=True)


def _log() -> None:
    """Messages of the package go to stderr, from the first process only."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("megatron").setLevel(
        logging.INFO if int(os.environ.get("RANK", 0)) == 0 else logging.ERROR
    )
