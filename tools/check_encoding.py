"""Try on one encoding what every encoding must keep; exit status 1 if something fails.

python tools/check_encoding.py kerple_log
python tools/check_encoding.py mep --option "kernels=[exp, kerple_log]" --option weights=learned
python tools/check_encoding.py bump --from my_encoding.py --heads 12 --head_dim 64
python tools/check_encoding.py --checkpoint runs/kerple [--step 2000]    what it has learned
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron.checkpoints.read import load_for_evaluation
from megatron.cli_errors import guarded
from megatron.config.yaml_files import read_overrides
from megatron.conformance.checks import examine
from megatron.conformance.finding import FACT, FAILS, HOLDS, NOT_APPLICABLE, Finding
from megatron.conformance.learned import examine_learned
from megatron.conformance.subject import Subject
from megatron.errors import UserError
from megatron.positions import load_file
from megatron.positions.layers import name_of_layers

COLOURS = {HOLDS: "green", FAILS: "bold red", FACT: "yellow", NOT_APPLICABLE: "dim"}
LEGEND = (
    f"{HOLDS}: holds · {FAILS}: must hold and does not"
    f" · {FACT}: does not hold, which is no fault · {NOT_APPLICABLE}: does not apply"
)


def add_encoding_options(parser: argparse.ArgumentParser) -> None:
    """--from and --option, which the tools on encodings share."""
    parser.add_argument(
        "--from",
        dest="file",
        metavar="FILE",
        help="a Python file of yours that registers encodings",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the encoding, as in pos_emb_args; may be repeated",
    )


def options_in(words: Sequence[str]) -> dict[str, Any]:
    """pos_emb_args from KEY=VALUE words; UserError for a word of another form."""
    faults: list[str] = []
    options = read_overrides(words, faults.append)
    if faults:
        raise UserError(f"--option: {faults[0]}; write --option key=value")
    return options


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    if arguments.checkpoint:
        findings = _of_checkpoint(arguments)
    else:
        subject = _subject(arguments)
        findings = examine(subject)
        report(subject, findings)
    failed = any(finding.verdict == FAILS for finding in findings)
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="the encoding, as in pos_emb")
    add_encoding_options(parser)
    parser.add_argument("--heads", type=int, default=Subject.heads, help="number of heads")
    parser.add_argument("--head_dim", type=int, default=Subject.head_dim, help="features per head")
    parser.add_argument(
        "--train_length",
        type=int,
        default=Subject.train_length,
        help="seq_length of the model; most checks use texts of this length",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="folder of a run or of one checkpoint: check the numbers that it has learned",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="which checkpoint of the run; default: the latest"
    )
    return parser


def _of_checkpoint(arguments: argparse.Namespace) -> list[Finding]:
    """Print and return what is found of the encodings of a trained model."""
    if arguments.name or arguments.option:
        raise UserError(
            "--checkpoint: a checkpoint knows its encoding and its options; leave out the name and"
            " --option"
        )
    if arguments.file:
        load_file(arguments.file)
    model, config, meta = load_for_evaluation(arguments.checkpoint, arguments.step)
    findings = examine_learned(model.placed)
    name = name_of_layers(config.position)
    _print(f"{name}, step {meta['step']} of {arguments.checkpoint}", findings)
    _console().print(_counts(findings))
    return findings


def _subject(arguments: argparse.Namespace) -> Subject:
    if arguments.name is None:
        raise UserError("give the name of an encoding, or --checkpoint DIR")
    if arguments.step is not None:
        raise UserError("--step: it chooses a checkpoint of a run; give --checkpoint DIR too")
    if min(arguments.heads, arguments.head_dim) < 1:
        raise UserError("--heads and --head_dim are at least 1")
    if arguments.train_length < 32:
        raise UserError(f"--train_length: {arguments.train_length} is less than 32; make it longer")
    if arguments.file:
        load_file(arguments.file)
    return Subject(
        arguments.name,
        options_in(arguments.option),
        heads=arguments.heads,
        head_dim=arguments.head_dim,
        train_length=arguments.train_length,
    )


def report(subject: Subject, findings: Sequence[Finding]) -> None:
    """Print a table of the findings, what the verdicts mean, and one line of summary."""
    _print(_heading(subject), findings)
    _console().print(_summary(findings))


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=120)


def _print(heading: str, findings: Sequence[Finding]) -> None:
    """Print a table of the findings, and what the verdicts mean."""
    console = _console()
    table = Table(title=escape(heading))
    table.add_column("what must hold", no_wrap=True)
    table.add_column("", justify="center", no_wrap=True)
    table.add_column("details")
    for finding in findings:
        colour = COLOURS[finding.verdict]
        verdict = f"[{colour}]{finding.verdict}[/]"
        table.add_row(escape(finding.check), verdict, escape(finding.detail))
    console.print(table)
    console.print(LEGEND, style="dim")


def _heading(subject: Subject) -> str:
    shape = f"{subject.heads} heads of {subject.head_dim}, trained at {subject.train_length} tokens"
    if not subject.options:
        return f"{subject.name}, {shape}"
    options = ", ".join(f"{key}: {value}" for key, value in subject.options.items())
    return f"{subject.name} {{{options}}}, {shape}"


def _counts(findings: Sequence[Finding]) -> str:
    verdicts = [finding.verdict for finding in findings]
    return f"{verdicts.count(HOLDS)} hold, {verdicts.count(FAILS)} fail"


def _summary(findings: Sequence[Finding]) -> str:
    if any(finding.verdict == FAILS for finding in findings):
        return _counts(findings)
    return f"{_counts(findings)}: the encoding keeps what it must"


if __name__ == "__main__":
    sys.exit(main())
