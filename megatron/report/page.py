"""Results as one HTML page that needs no network: here is its data, page.html says how it looks."""

import base64
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from matplotlib.figure import Figure

from megatron.errors import UserError
from megatron.files import write_output
from megatron.protocols import description
from megatron.report.curves import (
    draw_accuracy,
    draw_by_position,
    draw_perplexity,
    picture,
    write,
)
from megatron.results.comparison import compared
from megatron.results.comparison_table import how_made, tables_of
from megatron.results.files import PICTURES
from megatron.results.labels import kinds, matching, sections, select
from megatron.results.row import COLUMNS, TASK, Row, plain, shown_fact
from megatron.results.table import BITS, Table, quantities_of, table_of_text, with_bits

MARK = b'name="generator" content="megatron/report"'  # of page.html


@dataclass
class Section:
    """One text and protocol.

    figures: by the names of their files; each has its caption as its label
    notes: on the tables
    """

    heading: str
    about: str
    tables: list[Table]
    figures: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def page_of(rows: Sequence[Row], against: str | None = None) -> list[Section]:
    """The sections of a page: of each text and protocol, and one of the models.

    Raises UserError if `against` means no encoding, or several.
    """
    if against is not None:
        select(against, kinds(rows))
    page = []
    for number, (heading, members) in enumerate(sections(rows).items(), 1):
        prefix = f"{number}-" if number > 1 else ""
        page.append(_section(heading, members, against, prefix))
    keys = ["checkpoint", *COLUMNS]
    keys = [key for key in keys if any(shown_fact(row, key) for row in rows)]
    lines = {tuple(plain(shown_fact(row, key) or "-") for key in keys): None for row in rows}
    models = Table(keys, list(lines))
    return [*page, Section("Models", "What was measured.", [models])]


def _section(heading: str, rows: Sequence[Row], against: str | None, prefix: str) -> Section:
    groups = kinds(rows)
    tables = [table_of_text(rows, quantity, over_seeds=True) for quantity in quantities_of(rows)]
    if with_bytes := with_bits(rows):
        tables.append(table_of_text(with_bytes, BITS, over_seeds=True))
    protocol = rows[0].get("protocol") or ""
    section = Section(heading, description(protocol), tables)

    highest = {}
    for label, group in groups.items():
        highest[label] = max(filter(None, (row["perplexity"] for row in group)), default=math.inf)
    far = [label for label in groups if highest[label] >= 2 * min(highest.values())]
    reference = None
    if protocol != TASK:  # accuracies are compared by tools/compare.py
        named = against is not None and matching(against, groups)
        reference = select(against or "", groups) if named else next(iter(groups))
    figures = {}
    if len({row["length"] for row in rows}) > 1:
        if protocol == TASK:
            figures["accuracy"] = draw_accuracy({heading: groups})
        else:
            figures["perplexity"] = draw_perplexity(groups)
        if far and protocol != TASK and len(groups) >= len(far) + 2:
            figures["perplexity-near"] = draw_perplexity(groups, without=far)
    if reference and any(row.get("position_losses") for row in rows):
        figures["position"] = draw_by_position(groups, minus=reference, without=far)
    section.figures = {f"{prefix}{name}": figure for name, figure in figures.items()}

    if reference and len(groups) > 1:
        try:
            comparisons = compared(groups, reference)
        except UserError as fault:
            section.notes = [str(fault)]
        else:
            section.tables += tables_of(sorted(comparisons, key=lambda pair: pair.length))
            section.notes = how_made(comparisons)
    return section


# --- Files ---


def write_page(page: Sequence[Section], path: Path, plots: Path | None = None) -> None:
    """Write the page, and with `plots` its figures as files in that folder."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["base64"] = lambda figure: base64.b64encode(
        picture(figure, ".svg")
    ).decode()
    text = environment.get_template("page.html").render(sections=page)
    if plots is not None:
        for section, suffix in itertools.product(page, PICTURES):
            for name, figure in section.figures.items():
                write(figure, plots / f"{name}{suffix}")
    write_output(path, text.encode(), MARK)
