"""The files that a page is made of, and those that it is written to."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.errors import UserError
from megatron.files import write_text
from megatron.report.evidence import gathered
from megatron.report.figures.positions import write
from megatron.report.html.page import Page
from megatron.results.files import PICTURES, read_results
from megatron.results.probes import ProbeRow, is_of_probes, read_probes
from megatron.results.row import Row

OPENING = b"<!DOCTYPE html>"


def page_of(paths: Sequence[Path], *, against: str | None = None) -> Page:
    """The page of some files of results and probes, with what lies beside their checkpoints."""
    rows, probes = read_files(paths)
    evidence = gathered([*rows, *probes], paths)
    return Page(rows, probes, evidence, against=against)


def read_files(paths: Iterable[Path]) -> tuple[list[Row], list[ProbeRow]]:
    """(rows of results, rows of probes); UserError for a file that holds neither."""
    results, probes = [], []
    for path in paths:
        (probes if is_of_probes(path) else results).append(path)
    return read_results(results), read_probes(probes)


def check_page(path: Path, plots: Path | None = None) -> None:
    """UserError where a page has no name of a page, or something else is in the way.

    plots: the folder for its figures
    """
    if path.suffix != ".html":
        page = path.with_suffix(".html")
        raise UserError(f"--output: {path} is no name of a page - name it {page}")
    if path.exists() and not path.read_bytes().startswith(OPENING):
        raise UserError(f"--output: {path} exists and is no page - choose another name")
    if plots is not None and plots.exists() and not plots.is_dir():
        raise UserError(f"--plots: {plots} is a file - name a folder")


def write_page(page: Page, path: Path, *, title: str, plots: Path | None = None) -> None:
    """Write the page, and with `plots` its figures as files in that folder."""
    write_text(path, page.html(title))
    if plots is None:
        return
    for name, figure in page.figures.items():
        for suffix in PICTURES:
            write(figure, plots / f"{name}{suffix}")
