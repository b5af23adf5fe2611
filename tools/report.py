"""Write results as one HTML page that needs no network, and its figures as files.

python tools/report.py RESULTS.jsonl … [PROBES.jsonl …] -o report.html [--plots FOLDER]
python tools/report.py RESULTS.jsonl … --from my_encoding.py      draws an encoding of your own too
"""

import argparse
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
    given = parsed(argv)
    logging.basicConfig(level=logging.ERROR)
    check_page(given.output)
    for file in given.files:
        load_file(file)
    page = page_of(given.results, against=given.against)
    write_page(page, given.output, title=given.title, plots=given.plots)
    counts = f"{len(page.rows)} rows, {len(page.probes)} of probes, {len(page.figures)} figures"
    print(f"{given.output}: {counts}")
    if page.faults:
        raise UserError("\n".join(["encodings that are not drawn:", *page.faults]))
    return 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument(
        "results",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="rows of evaluate.py, a sweep or tools/probe.py",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="PAGE")
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="folder for the figures as PNG, SVG and PDF"
    )
    parser.add_argument(
        "--against",
        metavar="NAME",
        help="reference of the comparisons; default: the lowest at the longest length",
    )
    parser.add_argument(
        "--from",
        dest="files",
        type="path",
        action="append",
        default=[],
        metavar="FILE",
        help="a Python file of yours that registers encodings of these checkpoints",
    )
    parser.add_argument("--title", default="Results beyond the training length")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
