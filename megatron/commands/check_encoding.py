"""Try on one encoding what every encoding must keep, and report it; exit status 1 where something fails.

python tools/check_encoding.py kerple_log
python tools/check_encoding.py mep --option "kernels=[exp, kerple_log]" --option weights=learned
python tools/check_encoding.py bump --from my_encoding.py
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron.config.read import read_overrides
from megatron.conformance.checks import FACT, FAILS, HOLDS, NOT_APPLICABLE, Finding, examine
from megatron.conformance.subject import Subject
from megatron.errors import UserError
from megatron.positions import load_file

COLOURS = {HOLDS: "green", FAILS: "bold red", FACT: "yellow", NOT_APPLICABLE: "dim"}
MEANING = "ok: holds · FAIL: must hold and does not · no: a fact, not a fault · n/a: does not apply, and why"


def add_encoding_options(parser: argparse.ArgumentParser) -> None:
    """--from and --option, which the tools on encodings share."""
    parser.add_argument(
        "--from",
        dest="file",
        metavar="FILE",
        help="a Python file of yours that registers encodings",
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="an option, as in YAML"
    )


def options_in(words: Sequence[str]) -> dict[str, Any]:
    """pos_emb_args from KEY=VALUE words; UserError for a word of another form."""
    faults: list[str] = []
    found = read_overrides(words, faults.append)
    if faults:
        raise UserError(f"--option: {faults[0]}; write --option key=value")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="the encoding, as in pos_emb")
    add_encoding_options(parser)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head_dim", type=int, default=8)
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    try:
        if min(given.heads, given.head_dim) < 1:
            raise UserError("--heads and --head_dim are at least 1")
        if given.file:
            load_file(given.file)
        subject = Subject(given.name, options_in(given.option), given.heads, given.head_dim)
        findings = examine(subject)
    except UserError as fault:
        print(fault, file=sys.stderr)
        return 1
    report(subject, findings)
    return int(any(found.verdict == FAILS for found in findings))


def report(subject: Subject, findings: Sequence[Finding]) -> None:
    """A table on the terminal, and one line of summary."""
    console = Console()
    console = console if console.is_terminal else Console(width=120)
    options = ", ".join(f"{key}: {value}" for key, value in subject.options.items())
    shape = f"{subject.heads} heads of {subject.head_dim}"
    table = Table(
        title=escape(
            f"{subject.name} {{{options}}}, {shape}" if options else f"{subject.name}, {shape}"
        )
    )
    table.add_column("what must hold")
    table.add_column("", justify="center", no_wrap=True)
    table.add_column("found")
    for found in findings:
        colour = COLOURS[found.verdict]
        table.add_row(escape(found.check), f"[{colour}]{found.verdict}[/]", escape(found.detail))
    console.print(table)
    console.print(MEANING, style="dim")
    failed = [found for found in findings if found.verdict == FAILS]
    held = sum(found.verdict == HOLDS for found in findings)
    console.print(
        f"{held} hold, {len(failed)} fail" + ("" if failed else ": the encoding keeps what it must")
    )
