"""Write results as one HTML page that needs no network, and its figures as files.

python tools/report.py RESULTS.jsonl … -o report.html [--plots FOLDER]
python tools/report.py RESULTS.jsonl … --from my_encoding.py      draws an encoding of your own too
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli_errors import command_parser, guarded
from megatron.errors import UserError
from megatron.positions import load_file
from megatron.report.page import check_page, page_of, write_page


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    results = "rows of evaluate.py or a sweep"
    add("results", type=Path, nargs="+", metavar="FILE", help=results)
    add("-o", "--output", type=Path, default=Path("report.html"), metavar="PAGE")
    plots = "folder for the figures as PNG, SVG and PDF"
    add("--plots", type=Path, metavar="FOLDER", help=plots)
    against = "reference of the comparisons; default: the lowest at the longest length"
    add("--against", metavar="NAME", help=against)
    file = "a Python file of yours that registers encodings of these checkpoints"
    add("--from", dest="files", type="path", action="append", default=[], metavar="FILE", help=file)
    add("--title", default="Results beyond the training length")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    check_page(options.output)
    for file in options.files:
        load_file(file)
    page = page_of(options.results, against=options.against)
    write_page(page, options.output, title=options.title, plots=options.plots)
    counts = f"{len(page.rows)} rows, {len(page.figures)} figures"
    print(f"{options.output}: {counts}")
    if page.faults:
        raise UserError("\n".join(["encodings that are not drawn:", *page.faults]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
