"""Put results into one table, and into a plot or an HTML page.

python tools/show_results.py RESULTS.jsonl … [-o PLOT.svg]
python tools/show_results.py RESULTS.jsonl … -o report.html

Each corpus, part and protocol has its own table: compare numbers within one table only. A plot of
rows with losses by position shows perplexity by position (--protocol position).
Perplexities of different tokenizers cannot be compared; bits per byte can (--bits-per-byte).
"""

import sys
from pathlib import Path

from megatron.cli_errors import command_parser, guarded
from megatron.errors import UserError
from megatron.files import check_output
from megatron.report.curves import Design, plot_results
from megatron.report.page import MARK, page_of, write_page
from megatron.results.files import read_rows
from megatron.results.labels import arranged
from megatron.results.table import table


@guarded
def main(argv: list[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("results", type=Path, nargs="+", metavar="FILE", help="JSON lines that evaluate.py wrote")
    add("-o", "--output", type=Path, metavar="FILE", help="a .png, .svg, .pdf or .html")
    add("--over-seeds", action="store_true", help="one line per encoding: mean ± deviation")
    add("--over-training", action="store_true", help="plot by step, in a panel for each length")
    add("--bits-per-byte", action="store_true", help="instead of perplexity, for any tokenizers")
    form = {"dest": "form", "action": "store_const", "default": "text"}
    add("--markdown", const="markdown", help="the tables in Markdown", **form)
    add("--latex", const="latex", help="the tables for LaTeX (booktabs)", **form)
    add(
        "--against",
        metavar="NAME",
        help="of a page: what it compares with; of a plot by position: what it subtracts",
    )
    add("--protocol", help="rows of this protocol alone")
    several = {"nargs": "+", "default": [], "metavar": "LABEL"}
    add("--only", help="labels to show, in this order", **several)
    add("--highlight", help="of a plot: all other curves are grey", **several)
    add("--names", help="other names for labels", **several | {"metavar": "OLD=NEW"})
    add("--title", default="", help="of a plot")
    add("--size", type=float, nargs=2, metavar="INCHES", help="width and height of a plot")
    add("--style", type=Path, metavar="FILE.mplstyle", help="matplotlib's settings for a plot")
    options = parser.parse_args(argv)
    output = options.output
    page_file = output if output and output.suffix == ".html" else None
    if page_file:
        check_output(page_file, MARK)
    if options.style and not options.style.is_file():
        raise UserError(f"--style: {options.style} is no file - give a .mplstyle of matplotlib")
    rows = read_rows(options.results)
    if options.protocol:
        rows = [row for row in rows if row.get("protocol") == options.protocol]
        if not rows:
            raise UserError(
                f"--protocol: no row has {options.protocol} - leave it out, or measure with"
                f" evaluate.py --protocol {options.protocol}"
            )
    rows = arranged(rows, options.only, options.names)
    if page_file:
        write_page(page_of(rows, options.against), page_file)
        print(f"{output}: {len(rows)} rows")
        return 0
    how = {"bits_per_byte": options.bits_per_byte, "form": options.form}
    print(table(rows, over_seeds=options.over_seeds, **how))
    if output:
        plot_results(
            rows,
            output,
            over_seeds=options.over_seeds,
            over_training=options.over_training,
            against=options.against,
            design=Design(options.title, options.size, options.highlight, options.style),
        )
        print(f"\nplot: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
