"""Are encodings different, and how sure is that?

python tools/compare.py A.jsonl B.jsonl … [--against NAME] [-o out.md]

Pairs the losses of the same text, as evaluate.py wrote them; the first encoding is the reference.
From three common seeds on a difference is tested over seeds. With fewer, its interval is about
these weights on this text, and nothing is marked as significant.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli_errors import guarded
from megatron.errors import UserError
from megatron.files import write_text
from megatron.results.comparison import Comparison, compared, encodings
from megatron.results.comparison_table import tables
from megatron.results.files import read_results
from megatron.results.probes import is_of_probes


@guarded
def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    rows = read_results(of_evaluation(options.results))
    comparisons = compared(encodings(rows), options.against)
    if options.output:
        write(comparisons, options.output, bits_per_byte=options.bits_per_byte)
    print(tables(comparisons, bits_per_byte=options.bits_per_byte))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="FILE", help="JSON lines that evaluate.py wrote"
    )
    parser.add_argument(
        "--against", metavar="NAME", help="the encoding to compare with; default: the first"
    )
    parser.add_argument(
        "--bits-per-byte", action="store_true", help="a column of them, where rows have them"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also as .md or .json")
    return parser


def of_evaluation(paths: Sequence[Path]) -> list[Path]:
    """The files that do not hold probes, with a note for each that does; UserError without any."""
    kept = [path for path in paths if not is_of_probes(path)]
    if not kept:
        raise UserError("compare.py: every file holds probes - give files of evaluate.py")
    for path in paths:
        if path not in kept:
            print(f"note: {path} holds probes, left out", file=sys.stderr)
    return kept


def write(comparisons: Sequence[Comparison], path: Path, *, bits_per_byte: bool = False) -> None:
    """As Markdown or JSON, by the suffix; Markdown may have a column of bits per byte."""
    if path.suffix == ".md":
        text = tables(comparisons, markdown=True, bits_per_byte=bits_per_byte)
    elif path.suffix == ".json":
        text = json.dumps([one.plain() for one in comparisons], indent=1)
    else:
        raise UserError(f"--output: {path} is neither .md nor .json - name it so")
    write_text(path, text + "\n")


if __name__ == "__main__":
    sys.exit(main())
