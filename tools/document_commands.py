"""Run docs/commands/session.yml and write docs/commands, a page for each command (`make docs`).

python tools/document_commands.py            what the session prints
python tools/document_commands.py --write    the pages
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.cli_errors import guarded
from megatron.config.safe_yaml import parse
from megatron.errors import UserError
from megatron.files import ROOT, write_text

PAGES = ROOT / "docs" / "commands"
SESSION = PAGES / "session.yml"
FILES = ("tiny.yml", "published.yml")  # of docs/commands, which commands of the session read
IN_CLONE = ("megatron", "tools", "configs", "docs", "README.md", "LICENSE")
SHOWN = 34  # lines of one command's output; more are left out in the middle
KEYS = re.compile(r"\n\n(?:Keys[^\n]*\n\n)?model: ")  # where --help begins to list them all
WIDTH = "100"  # columns of --help
INDEX = """# Commands

A page for each command: what it does, an example with its real output, and all of its options. The
examples ran one after another with [a model that trains in seconds](tiny.yml): their numbers mean
nothing. `make docs` runs them again ([session.yml](session.yml)), and so do tests.

| command | what it does |
|---|---|
"""


@dataclass(frozen=True)
class Page:
    """One command. Its fields are those of docs/commands/session.yml, which says what they mean."""

    page: str
    script: str
    about: str
    more: str
    run: list[str]
    varies: bool = False


Runner = Callable[[Sequence[str], Path, Mapping[str, str]], tuple[int, str]]
"""Runs words of a Python command in a folder: status, and what it printed."""


def session() -> list[Page]:
    """The pages in the order in which their commands run."""
    loaded = parse(SESSION.read_text(encoding="utf-8"))
    return [Page(**fields) for fields in loaded]


def make_clone(folder: Path) -> None:
    """Put into a folder what commands of a clone find, and the files of the session."""
    scripts = [path.name for path in ROOT.glob("*.py")]
    for name in (*scripts, *IN_CLONE):
        (folder / name).symlink_to(ROOT / name)
    for name in FILES:
        (folder / name).write_text((PAGES / name).read_text(encoding="utf-8"), encoding="utf-8")


def outputs_of(page: Page, folder: Path, run: Runner) -> list[str]:
    """What the commands of a page print; UserError for one that fails."""
    outputs = []
    for command in page.run:
        python, *words = shlex.split(command)
        assert python == "python", command
        status, output = run(words, folder, {"COLUMNS": WIDTH})
        if status != 0:
            raise UserError(f"{SESSION}: {command}: ended with status {status}\n{output}")
        for place, name in ((f"{folder}/", ""), (sys.prefix, ".venv"), (str(Path.home()), "~")):
            output = output.replace(place, name)
        outputs.append(output)
    return outputs


def help_of(page: Page, folder: Path, run: Runner) -> str:
    """The options of a page's script."""
    _, output = run([page.script, "--help"], folder, {"COLUMNS": WIDTH})
    options, *keys = KEYS.split(output, maxsplit=1)
    return options + ("\n\nKeys of the configuration: see configs/README.md\n" if keys else "")


def text_of(page: Page, outputs: Sequence[str], options: str) -> str:
    """The Markdown of a page."""
    parts = [f"# `{page.script}`", "", f"{page.about} [More]({page.more}).", ""]
    for command, output in zip(page.run, outputs, strict=True):
        parts += ["```sh", command, "```", "", *_block(shown(output)), ""]
    parts += ["## Options", "", *_block(options), "", "[All commands](README.md)"]
    return "\n".join(parts) + "\n"


def index_of(pages: Sequence[Page]) -> str:
    """The Markdown of the list of all pages, by name."""
    lines = []
    for page in sorted(pages, key=lambda one: one.page):
        lines.append(f"| [`{page.script}`]({page.page}.md) | {page.about} |")
    return INDEX + "\n".join(lines) + "\n"


def outputs_in(text: str) -> list[str]:
    """The outputs of the commands that a page shows, in order, as `shown` cut them."""
    example, _, _ = text.partition("\n## Options\n")
    return re.findall(r"```text\n(.*?)\n?```", example, flags=re.DOTALL)


def shown(output: str) -> str:
    """The first and the last lines of an output, without spaces at their ends."""
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    if len(lines) <= SHOWN:
        return "\n".join(lines)
    left_out = len(lines) - SHOWN + 1
    half = SHOWN // 2
    middle = f"… {left_out} more lines …"
    return "\n".join([*lines[:half], middle, *lines[half + left_out :]])


def without_numbers(output: str) -> str:
    """An output in which numbers, and the widths that follow from them, are alike.

    Speeds, times, hashes and last digits differ between machines; a commit ends with + where files
    were changed after it.
    """
    hashes = re.sub(r"\b(?=[a-f]*\d)[0-9a-f]{8,}\b\+?", "#", output)
    numbers = re.sub(r"[+-]?\d[\d.,:]*(e[+-]\d+)?", "#", hashes)
    numbers = numbers.replace("# to #", "#")  # a range of equal numbers is one
    return re.sub(r"[ \-─━]{2,}", "  ", numbers)


def environment_of_child(project: Path) -> dict[str, str]:
    """What a documented command finds: this project, no hub, one thread."""
    own = {"PYTHONPATH": str(project), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | own


def in_process(
    words: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Run a command as a user does."""
    command = [sys.executable, *words]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment_of_child(ROOT) | dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def _block(text: str) -> list[str]:
    return ["```text", text.strip("\n"), "```"]


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write docs/commands/*.md")
    given = parser.parse_args(argv)
    pages = session()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_clone(folder)
        for page in pages:
            outputs = outputs_of(page, folder, in_process)
            text = text_of(page, outputs, help_of(page, folder, in_process))
            if given.write:
                write_text(PAGES / f"{page.page}.md", text)
            else:
                print(text)
    if given.write:
        write_text(PAGES / "README.md", index_of(pages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
