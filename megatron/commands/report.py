"""Results as one HTML page that needs no network, and its figures as files.

python tools/report.py RESULTS.jsonl … [PROBES.jsonl …] -o report.html [--plots FOLDER]
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import UserError
from megatron.files import Beside
from megatron.report.evidence import gathered
from megatron.report.figures.positions import write
from megatron.report.html.page import Page
from megatron.results.files import PICTURES, read_results
from megatron.results.probes import read_probes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="of evaluate.py, a sweep or tools/probe.py",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="PAGE")
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="the figures as PNG, SVG and PDF"
    )
    parser.add_argument(
        "--against",
        metavar="NAME",
        help="the encoding that others are compared with; default: the lowest",
    )
    parser.add_argument("--title", default="Perplexity beyond the training length")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    try:
        files = {path: is_of_probes(path) for path in options.results}
        rows = read_results(path for path, probes in files.items() if not probes)
        probes = read_probes(path for path, probes in files.items() if probes)
        check_page(options.output)
        page = Page(
            rows, probes, gathered([*rows, *probes], options.results), against=options.against
        )
        text = page.html(options.title)
        with Beside(options.output) as temporary:
            temporary.write_text(text, encoding="utf-8")
        for name, figure in page.figures.items() if options.plots else ():
            for suffix in PICTURES:
                write(figure, options.plots / f"{name}{suffix}")
    except UserError as fault:
        print(fault, file=sys.stderr)
        return 1
    print(
        f"{options.output}: {len(rows)} rows, {len(probes)} of probes, {len(page.figures)} figures"
    )
    return 0


def is_of_probes(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return "probe" in json.loads(file.readline() or "{}")
    except (OSError, ValueError, TypeError):
        return False  # read_results says what is wrong with it


def check_page(path: Path) -> None:
    if path.suffix != ".html":
        raise UserError(
            f"--output: {path} is no name of a page - name it {path.with_suffix('.html')}"
        )
    if path.exists() and not path.read_bytes().startswith(b"<!DOCTYPE html>"):
        raise UserError(f"--output: {path} is there and holds something else - choose another name")
