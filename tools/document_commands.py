"""Run docs/commands/session.yml and write docs/commands, a page for each command (`make docs`).

python tools/document_commands.py --options    the options of each page anew, without its examples
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.cli_errors import command_parser, guarded
from megatron.errors import UserError
from megatron.files import ROOT, write_text
from megatron.strict_yaml import parse

PAGES = ROOT / "docs" / "commands"
FILES = ("tiny.yml", "published.yml")  # of docs/commands, which commands of the session read
IN_CLONE = ("megatron", "tools", "configs", "docs", "README.md", "LICENSE")
SHOWN = 34  # lines of one command's output; more are left out in the middle
OPTIONS = "## Options"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}

Runner = Callable[[Sequence[str], Path], tuple[int, str]]
"""Runs words of a Python command in a folder: status, and what it printed."""


def session() -> list[dict[str, Any]]:
    """The pages in the order in which their commands run; session.yml says what their keys mean."""
    return parse((PAGES / "session.yml").read_text(encoding="utf-8"))


def make_clone(folder: Path) -> None:
    """Put into a folder what commands of a clone find, and the files of the session."""
    scripts = [path.name for path in ROOT.glob("*.py")]
    for name in (*scripts, *IN_CLONE):
        (folder / name).symlink_to(ROOT / name)
    for name in FILES:
        shutil.copy(PAGES / name, folder)


def text_of(page: dict[str, Any], folder: Path, run: Runner) -> str:
    """The commands of a page with what they print, and the options of its script.

    Raises UserError if a command fails.
    """
    parts = [f"# `{page['script']}`", "", f"{page['about']} [More]({page['more']}).", ""]
    for command in page["run"]:
        status, output = run(shlex.split(command)[1:], folder)
        if status != 0:
            raise UserError(f"session.yml: {command}: ended with status {status}\n{output}")
        output = output.replace(f"{folder}/", "")
        output = output.replace(sys.prefix, ".venv")
        output = output.replace(str(Path.home()), "~")
        lines = [line.rstrip() for line in output.strip("\n").splitlines()]
        left_out = len(lines) - SHOWN + 1
        if left_out > 1:
            half = SHOWN // 2
            lines[half : half + left_out] = [f"… {left_out} more lines …"]
        parts += ["```sh", command, "```", ""]
        parts += ["```text", *lines, "```", ""]
    return "\n".join([*parts, options_of(page, folder, run)])


def options_of(page: dict[str, Any], folder: Path, run: Runner) -> str:
    """The section of a page that shows the help of its script."""
    _, output = run([page["script"], "--help"], folder)
    return f"{OPTIONS}\n\n```text\n{output.strip()}\n```\n\n[All commands](README.md)\n"


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


@guarded
def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--options", action="store_true", help="keep the examples as they are")
    only_options = parser.parse_args().options
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_clone(folder)
        for page in session():
            path = PAGES / f"{page['page']}.md"
            if only_options:
                examples, _, _ = path.read_text(encoding="utf-8").partition(OPTIONS)
                text = examples + options_of(page, folder, in_process)
            else:
                text = text_of(page, folder, in_process)
            write_text(path, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
