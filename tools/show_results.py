"""Results of several runs as tables and one plot: python tools/show_results.py A.jsonl … [-o PLOT]

Each corpus, part and protocol has its own table: compare numbers within one table only.
Perplexities of different tokenizers cannot be compared; bits per byte can (--bits-per-byte).
"""

import argparse
import sys
from pathlib import Path

from megatron.cli_errors import command_parser, guarded
from megatron.report.curves import plot_results
from megatron.results.files import read_rows
from megatron.results.gain import table_of_gains
from megatron.results.labels import sections
from megatron.results.table import table


@guarded
def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    rows = read_rows(options.results)
    print(
        table(
            rows,
            over_seeds=options.over_seeds,
            bits_per_byte=options.bits_per_byte,
            form=options.form,
        )
    )
    for heading, members in sections(rows).items():
        if gains := table_of_gains(members):
            print(f"\n{heading}\n{gains.text()}")
    if options.output:
        how = {"over_seeds": options.over_seeds, "over_training": options.over_training}
        plot_results(rows, options.output, **how)
        print(f"\nplot: {options.output}")
        if any(row.get("position_losses") for row in rows):
            print("loss by position: tools/report.py draws it")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(__doc__)
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="FILE", help="JSON lines that evaluate.py wrote"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PLOT", help="a .png, .svg or .pdf")
    parser.add_argument(
        "--over-seeds", action="store_true", help="one line per encoding: mean ± standard deviation"
    )
    parser.add_argument(
        "--over-training",
        action="store_true",
        help="plot by step: the lengths of a run, or runs at each length",
    )
    parser.add_argument(
        "--bits-per-byte", action="store_true", help="instead of perplexity, for any tokenizers"
    )
    form = {"dest": "form", "action": "store_const", "default": "text"}
    parser.add_argument("--markdown", const="markdown", help="the table in Markdown", **form)
    parser.add_argument("--latex", const="latex", help="the table for LaTeX (booktabs)", **form)
    return parser


if __name__ == "__main__":
    sys.exit(main())
