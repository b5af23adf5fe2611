"""Compare encodings, with 95 % intervals of their differences.

python tools/compare.py A.jsonl B.jsonl … [--against NAME] [-o out.md]

It pairs losses of the same targets, as evaluate.py wrote them; the first encoding is the reference.
The name of a protocol, such as --against gap, compares each model with itself under that protocol.
From three common seeds on, differences are tested over seeds. With fewer, intervals hold for these
weights on this text, and nothing is marked as significant.
"""

import argparse
import sys
from pathlib import Path

from megatron.cli_errors import command_parser, guarded
from megatron.errors import UserError
from megatron.files import write_output
from megatron.results.comparison import compared
from megatron.results.comparison_table import tables
from megatron.results.files import read_rows
from megatron.results.labels import kinds
from megatron.results.row import TASK

MARKS = {"markdown": "<!-- by tools/compare.py -->", "latex": "% by tools/compare.py"}


@guarded
def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    rows = read_rows(options.results)
    if any(row.get("protocol") == TASK for row in rows):
        raise UserError(
            "compare.py: rows of tasks have accuracies, and losses are compared here - leave their"
            " files out, or use tools/claims.py"
        )
    comparisons = compared(kinds(rows), options.against)
    if options.output:
        if options.output.suffix not in (".md", ".tex"):
            raise UserError(f"--output: {options.output} is no .md and no .tex - name it so")
        form = "latex" if options.output.suffix == ".tex" else "markdown"
        written = tables(comparisons, form=form, bits_per_byte=options.bits_per_byte)
        mark = MARKS[form]
        write_output(options.output, f"{mark}\n\n{written}\n".encode(), mark.encode())
    print(tables(comparisons, bits_per_byte=options.bits_per_byte))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(__doc__)
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="FILE", help="JSON lines that evaluate.py wrote"
    )
    parser.add_argument(
        "--against", metavar="NAME", help="reference of the comparison; default: the first encoding"
    )
    parser.add_argument(
        "--bits-per-byte", action="store_true", help="add a column with them, if rows have them"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="a .md or a .tex to write too"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
