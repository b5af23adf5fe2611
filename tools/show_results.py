"""Put results into one table, and into a plot or an HTML page.

python tools/show_results.py RESULTS.jsonl … [-o PLOT.png]
python tools/show_results.py RESULTS.jsonl … -o report.html [--plots FOLDER]

Each corpus, part and protocol has its own table: compare numbers within one table only.
Perplexities of different tokenizers cannot be compared; bits per byte can (--bits-per-byte).
"""

import sys
from pathlib import Path

from megatron.cli_errors import command_parser, guarded
from megatron.files import check_output
from megatron.report.curves import plot_results
from megatron.report.page import MARK, page_of, write_page
from megatron.results.files import read_rows
from megatron.results.table import table


@guarded
def main(argv: list[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("results", type=Path, nargs="+", metavar="FILE", help="JSON lines that evaluate.py wrote")
    add("-o", "--output", type=Path, metavar="FILE", help="a .png, .svg, .pdf or .html")
    add("--over-seeds", action="store_true", help="one line per encoding: mean ± deviation")
    by_step = "plot by step, in a panel for each length"
    add("--over-training", action="store_true", help=by_step)
    in_bytes = "instead of perplexity, for any tokenizers"
    add("--bits-per-byte", action="store_true", help=in_bytes)
    form = {"dest": "form", "action": "store_const", "default": "text"}
    add("--markdown", const="markdown", help="the tables in Markdown", **form)
    add("--latex", const="latex", help="the tables for LaTeX (booktabs)", **form)
    folder = "of a page: a folder for its figures as PNG, SVG and PDF"
    add("--plots", type=Path, metavar="FOLDER", help=folder)
    against = "of a page: what it compares with; default: the first"
    add("--against", metavar="NAME", help=against)
    options = parser.parse_args(argv)
    output = options.output
    page_file = output if output and output.suffix == ".html" else None
    if page_file:
        check_output(page_file, MARK)
    elif options.plots or options.against:
        parser.error("--plots and --against are of a page - give -o report.html")

    rows = read_rows(options.results)
    if page_file:
        page = page_of(rows, options.against)
        write_page(page, page_file, options.plots)
        figures = [name for section in page for name in section.figures]
        print(f"{output}: {len(rows)} rows, {len(figures)} figures")
        return 0
    how = {"bits_per_byte": options.bits_per_byte, "form": options.form}
    print(table(rows, over_seeds=options.over_seeds, **how))
    if output:
        how = {"over_seeds": options.over_seeds, "over_training": options.over_training}
        plot_results(rows, output, **how)
        print(f"\nplot: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
