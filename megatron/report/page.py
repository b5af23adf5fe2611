"""Results as one HTML page that needs no network: here is its data, page.html says how it looks."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from jinja2 import Environment, FileSystemLoader
from matplotlib.figure import Figure

from megatron.errors import UserError
from megatron.files import write_output
from megatron.protocols import description
from megatron.report.curves import (
    Groups,
    by_length,
    by_position,
    draw,
    draw_accuracy,
    picture,
)
from megatron.results.comparison import Comparison, compared
from megatron.results.comparison_table import how_made, tables_of
from megatron.results.effective_length import EffectiveLength, effective_lengths
from megatron.results.labels import NAMES, in_words, kinds, matching, sections, select
from megatron.results.row import COLUMNS, TASK, Row, plain, shown_fact
from megatron.results.table import (
    BITS,
    PERPLEXITY,
    Table,
    cell,
    quantities_of,
    table_of_text,
    with_bits,
)

MARK = b'name="generator" content="megatron/report"'  # of head.jinja


class Summary(NamedTuple):
    """Who is best at the longest length, who gains beyond the window, and how sure that is.

    best: numbers by label, the best first
    effective: effective lengths by label
    pairs: the comparisons at this length
    """

    length: int
    quantity: str
    best: pd.Series
    effective: Mapping[str, EffectiveLength]
    pairs: list[Comparison]


@dataclass
class Section:
    """One text and protocol.

    figures: each has its caption as its label
    comparisons: a table for each length; the last one is open
    notes: on the comparisons
    summary: for the top of the page, if there is anything to compare
    """

    heading: str
    about: str
    tables: Sequence[Table]
    figures: Sequence[Figure] = ()
    comparisons: Sequence[Table] = ()
    notes: Sequence[str] = ()
    summary: Summary | None = None


def page_of(rows: Sequence[Row], against: str | None = None) -> list[Section]:
    """The sections of a page: of each text and protocol, and one of the models.

    Raises UserError if `against` means no encoding, or several.
    """
    if against is not None:
        select(against, kinds(rows))
    page = [_section(heading, members, against) for heading, members in sections(rows).items()]
    keys = ["checkpoint", *COLUMNS]
    keys = [key for key in keys if any(shown_fact(row, key) for row in rows)]
    lines = dict.fromkeys(tuple(plain(shown_fact(row, key) or "-") for key in keys) for row in rows)
    head = [NAMES["columns"].get(key, key.replace("_", " ")) for key in keys]
    return [*page, Section("Models", "What was measured.", [Table(head, list(lines))])]


def _section(heading: str, rows: Sequence[Row], against: str | None) -> Section:
    groups = kinds(rows)
    tables = [table_of_text(rows, quantity, over_seeds=True) for quantity in quantities_of(rows)]
    if with_bytes := with_bits(rows):
        tables.append(table_of_text(with_bytes, BITS, over_seeds=True))
    protocol = rows[0].get("protocol") or ""
    section = Section(in_words(heading), description(protocol), tables)
    comparisons = []
    if protocol == TASK:  # accuracies are compared by tools/compare.py
        section.figures = [draw_accuracy({heading: groups})]
    else:
        reference, *_ = (against and matching(against, groups)) or groups
        if panels := [*filter(None, [by_position(groups), by_position(groups, reference)])]:
            section.figures = [draw(panels)]
        elif len({row["length"] for row in rows}) > 1:
            section.figures = [draw([by_length(groups)])]
        try:
            comparisons = compared(groups, reference) if len(groups) > 1 else []
        except UserError as fault:
            section.notes = [str(fault)]
        else:
            section.comparisons = tables_of(sorted(comparisons, key=lambda pair: pair.length))
            section.notes = how_made(comparisons)
    if len(groups) > 1:
        section.summary = _summary(groups, comparisons)
    return section


def _summary(groups: Groups, comparisons: Sequence[Comparison]) -> Summary:
    panel = by_length(groups)
    length = panel.means.index[-1]
    last = panel.means.loc[length].dropna().sort_values(ascending=panel.quantity == PERPLEXITY.name)
    pairs = [pair for pair in comparisons if pair.length == length]
    effective = effective_lengths([row for rows in groups.values() for row in rows])
    return Summary(length, panel.quantity, last[:3].map(cell), effective, pairs)


# --- Files ---


def write_page(page: Sequence[Section], path: Path) -> None:
    """Write the page."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["base64"] = lambda figure: base64.b64encode(
        picture(figure, ".svg")
    ).decode()
    text = environment.get_template("page.html").render(sections=page)
    write_output(path, text.encode(), MARK)
