"""Results as one HTML page that needs no network, and its figures as files.

python tools/report.py RESULTS.jsonl … [PROBES.jsonl …] -o report.html [--plots FOLDER]
"""

import argparse
import json
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from _path import ROOT as _  # noqa: F401  puts the project on the path

from megatron.config.schema import all_keys
from megatron.errors import UserError
from megatron.evaluation.html_report.gather import Evidence
from megatron.evaluation.html_report.page import Page
from megatron.evaluation.position_plot import write
from megatron.evaluation.probes.rows import read_probes
from megatron.evaluation.report import PICTURES, Beside, Row, read_results
from megatron.training.checkpoint import find, load_for_evaluation, read_meta


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="FILE", help="of evaluate.py, a sweep or tools/probe.py"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="PAGE")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="the figures as PNG, SVG and PDF")
    parser.add_argument(
        "--against", metavar="NAME", help="the encoding that others are compared with; default: the lowest"
    )
    parser.add_argument("--title", default="Perplexity beyond the training length")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    try:
        files = {path: is_of_probes(path) for path in options.results}
        rows = read_results(path for path, probes in files.items() if not probes)
        probes = read_probes(path for path, probes in files.items() if probes)
        check_page(options.output)
        page = Page(rows, probes, gathered([*rows, *probes], options.results), against=options.against)
        text = page.html(options.title)
        with Beside(options.output) as temporary:
            temporary.write_text(text, encoding="utf-8")
        for name, figure in page.figures.items() if options.plots else ():
            for suffix in PICTURES:
                write(figure, options.plots / f"{name}{suffix}")
    except UserError as fault:
        print(fault, file=sys.stderr)
        return 1
    print(f"{options.output}: {len(rows)} rows, {len(probes)} of probes, {len(page.figures)} figures")
    return 0


def is_of_probes(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return "probe" in json.loads(file.readline() or "{}")
    except (OSError, ValueError, TypeError):
        return False  # read_results says what is wrong with it


def check_page(path: Path) -> None:
    if path.suffix != ".html":
        raise UserError(f"--output: {path} is no name of a page - name it {path.with_suffix('.html')}")
    if path.exists() and not path.read_bytes().startswith(b"<!DOCTYPE html>"):
        raise UserError(f"--output: {path} is there and holds something else - choose another name")


def gathered(rows: Sequence[Row], files: Sequence[Path]) -> dict[str, Evidence]:
    """What can be found of every checkpoint that rows name; whatever is not there is a gap, not a fault."""
    names = dict.fromkeys(row["checkpoint"] for row in rows if row.get("checkpoint"))
    return {name: evidence_of(name, files) for name in names}


def evidence_of(name: str, files: Sequence[Path]) -> Evidence:
    found = Evidence()
    folder = next((place for place in places(name, files) if (place / "checkpoint.json").exists()), None)
    if folder is None:
        found.gaps.append(f"{name}: not found from here, so its configuration, training and kernel are not shown")
        return found
    try:
        config, _ = read_meta(folder)
        flat = config.flat()
        keys = [key.name for key in all_keys() if key.said.get("shapes_result", True)]
        found.settings = {key: flat[key] for key in keys if key in flat}
        model, _, _ = load_for_evaluation(find(folder))
        found.positions, found.learned = [one.cpu() for one in model.positions], model.learned()
    except UserError as fault:
        found.gaps.append(str(fault))
    logs = found.settings and config.logging.log_dir
    path = (Path(logs) if logs else folder.parent) / "metrics.jsonl"
    try:
        found.metrics = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as fault:
        found.gaps.append(f"{path}: no training curve ({fault})")
    return found


def places(name: str, files: Sequence[Path]) -> list[Path]:
    """Where a checkpoint may lie: where its row says, or beside the results, of a run or of a sweep."""
    path = Path(name)
    moved = [root for file in files for root in (file.parent.parent / path.name, file.parent / Path(*path.parts[-2:]))]
    return [path, *moved]


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    sys.exit(main())
