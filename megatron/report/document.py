"""Write configs/README.md, the pages of encodings, the atlas and docs/commands (`make docs`)."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.cli_errors import command_parser, purpose
from megatron.config import legacy
from megatron.config.schema import SECTIONS, all_keys, default_of
from megatron.errors import UserError
from megatron.files import ROOT, write_text
from megatron.report.catalogue import rendered, renew
from megatron.strict_yaml import parse

README = ROOT / "configs" / "README.md"
PAGES = ROOT / "docs" / "commands"
IN_CLONE = ("megatron", "tools", "configs", "docs", "README.md", "LICENSE")
SHOWN = 20  # lines of one command's output; more are left out in the middle
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}

Runner = Callable[[Sequence[str], Path], tuple[int, str]]
"""Runs words of a Python command in a folder: status, and what it printed."""


def readme() -> str:
    """The text of configs/README.md: each key with its default, first sentence and choices."""
    values = {"sections": SECTIONS, "keys": all_keys(), "default_of": default_of}
    return rendered("configuration.jinja", legacy=legacy, **values)


def session() -> list[dict[str, Any]]:
    """The pages in the order in which their commands run; session.yml says what their keys mean."""
    return parse((PAGES / "session.yml").read_text(encoding="utf-8"))


def make_clone(folder: Path) -> None:
    """Put into a folder what commands of a clone find, and the configuration of the session."""
    for name in (*(path.name for path in ROOT.glob("*.py")), *IN_CLONE):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(PAGES / "tiny.yml", folder)


def text_of(page: dict[str, Any], folder: Path, run: Runner) -> str:
    """The commands of a page with what they print, and the options of its script."""
    shown = []
    for command in page["run"]:
        status, output = run(shlex.split(command)[1:], folder)
        if status != 0:
            raise UserError(f"session.yml: {command}: ended with status {status}\n{output}")
        output = output.replace(f"{folder}/", "").replace(sys.prefix, ".venv")
        lines = [line.rstrip() for line in output.strip("\n").splitlines()]
        if len(lines) > SHOWN:
            lines[SHOWN // 2 : -SHOWN // 2] = ["…"]
        shown.append((command, lines))
    script = page["script"]
    _, options = run([script, "--help"], folder)
    values = {"purpose": purpose(ROOT / script), "shown": shown, "options": options}
    return rendered("command.jinja", **page, **values)


def in_process(words: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run a command as a user does."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def main() -> None:
    command_parser(__doc__).parse_args()
    write_text(README, readme())
    renew()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_clone(folder)
        for page in session():
            write_text(PAGES / f"{page['page']}.md", text_of(page, folder, in_process))


if __name__ == "__main__":
    main()
