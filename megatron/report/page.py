"""Results as one HTML page that needs no network: here is its data, page.html says how it looks."""

import io
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from matplotlib.figure import Figure

from megatron.checkpoints.manifest import RECORD, read_record
from megatron.checkpoints.read import load_model, read_meta
from megatron.errors import UserError
from megatron.files import check_output, write_output
from megatron.model import GPT
from megatron.protocols import description
from megatron.report.curves import (
    curve,
    draw_accuracy,
    draw_by_position,
    draw_gains,
    draw_perplexity,
    style,
    write,
)
from megatron.report.encoding_figures import NO_PICTURE, figures_of_model
from megatron.results.comparison import compared
from megatron.results.comparison_table import how_made, tables_of
from megatron.results.files import PICTURES, read_rows
from megatron.results.gain import Gain, gains_of, table_of_gains
from megatron.results.labels import kinds, matching, runs, sections, select
from megatron.results.row import (
    COLUMNS,
    SETTING,
    SHOWN_IF_SET,
    TASK,
    VARIANT,
    Row,
    plain,
    seed_in_words,
    shown_fact,
    with_facts,
)
from megatron.results.table import BITS, Table, by_length, quantities_of, table_of_text, with_bits

MARK = b'name="generator" content="megatron/report"'  # of page.html
NOT_FOUND = "not found from here, so its encoding is not drawn"


@dataclass
class PageSection:
    """One text and protocol.

    tables: perplexity and, if rows have them, bits per byte; or the accuracy of a task
    figures: by the names of their files; each has its caption as its label
    coloured: of one run of each encoding, the gains of the tokens of its text
    compared: differences from the reference, with notes; reason: why there are none
    """

    heading: str
    protocol: str
    tables: list[Table]
    figures: dict[str, Figure] = field(default_factory=dict)
    coloured: dict[str, Gain] = field(default_factory=dict)
    compared: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reason: str = ""


@dataclass
class Page:
    """The contents of page.html: sections by text and protocol, kernels, and gaps.

    kernels: figures by the names of their files
    gaps: what is missing, and its cause; faults: checkpoints that could not be read, and why
    """

    rows: Sequence[Row]
    sections: list[PageSection] = field(default_factory=list)
    kernels: dict[str, Figure] = field(default_factory=dict)
    models: Table | None = None
    gaps: list[tuple[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, Figure]:
        """All figures by the names of their files."""
        figures = {}
        for section in self.sections:
            figures |= section.figures
        return figures | self.kernels

    def html(self, title: str) -> str:
        svgs = {}
        for number, (name, figure) in enumerate(self.figures.items()):
            file = io.StringIO()
            with style():
                metadata = {"Date": None, "Creator": None}
                figure.savefig(file, format="svg", transparent=True, metadata=metadata)
            _, _, svg = file.getvalue().partition("<svg ")
            svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>f{number}-", svg)
            svgs[name] = Markup(svg)
        environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
        template = environment.get_template("page.html")
        return template.render(page=self, title=title, svgs=svgs, description=description)


def page_of(paths: Sequence[Path], *, against: str | None = None) -> Page:
    """The page of some files of results, with the encodings of their checkpoints."""
    return page_of_rows(read_rows(paths), paths, against)


def page_of_rows(
    rows: Sequence[Row],
    files: Sequence[Path] = (),
    against: str | None = None,
) -> Page:
    """The page of some rows; files: where they stand, beside which checkpoints may lie.

    Raises UserError if `against` means no encoding, or several.
    """
    page = Page(rows)
    if against is not None:
        select(against, kinds(rows))
    for heading, members in sections(rows).items():
        _add_text(page, heading, members, against)

    not_of_model = dict.fromkeys((*SETTING, *VARIANT))
    models = kinds([with_facts(row, not_of_model) for row in rows])
    tried: set[str] = set()
    for number, (label, members) in enumerate(models.items(), 1):
        row_of = {name: row for row in members if (name := row.get("checkpoint"))}
        # Rows of a sweep and others of the same checkpoint are two kinds.
        if tried & row_of.keys():
            continue
        for checkpoint, row in row_of.items():
            tried.add(checkpoint)
            try:
                model = model_beside(checkpoint, files, row["config_hash"])
            except ValueError as fault:
                page.gaps.append((checkpoint, str(fault)))
                page.faults.append(str(fault))
                continue
            if model is None:
                page.gaps.append((checkpoint, NOT_FOUND))
                continue
            title = f"{label}{seed_in_words(row)}"
            figures = figures_of_model(model, title)
            page.kernels |= {f"{number}-{name}": figure for name, figure in figures.items()}
            if len(figures) < len(model.placed):
                page.gaps.append((f"an encoding of {title}", NO_PICTURE))
            break  # of each model, the first checkpoint that can be read

    keys = ["checkpoint"]
    for key in COLUMNS:
        if key not in SHOWN_IF_SET or any(key in row for row in rows):
            keys.append(key)
    lines = {}
    for row in rows:
        facts = [shown_fact(row, key) for key in keys]
        line = ["-" if fact in (None, "", {}) else plain(fact) for fact in facts]
        lines[tuple(line)] = line
    page.models = Table([COLUMNS.get(key, key) for key in keys], list(lines.values()))
    return page


def _add_text(page: Page, heading: str, members: Sequence[Row], against: str | None) -> None:
    """The section of rows of one text and protocol, and its figures."""
    rows: list[Row] = []
    for row in members:
        # A pass by position measures doublings of the training length below its own, too.
        trained, length = row.get("train_length") or row["length"], row["length"]
        doublings = {trained << power for power in range(length.bit_length())}
        shorter = doublings.intersection(row.get("position_edges") or [])
        rows += by_length([row], [*sorted(at for at in shorter if at < length), length])
    groups, groups_of_members = kinds(rows), kinds(members)
    shown = quantities_of(rows)
    tables = [table_of_text(rows, quantity, over_seeds=True) for quantity in shown]
    if with_bytes := with_bits(rows):
        tables.append(table_of_text(with_bytes, BITS, over_seeds=True))
    if gains := table_of_gains(members):
        tables.append(gains)
    section = PageSection(heading, rows[0].get("protocol") or "", tables)

    # Accuracies are compared by tools/claims.py.
    is_task = section.protocol == TASK
    reference = None if is_task else reference_of(groups, against)
    highest = {}
    for label, group in groups.items():
        highest[label] = max(filter(None, (row["perplexity"] for row in group)), default=math.inf)
    far = [label for label in groups if highest[label] >= 2 * min(highest.values())]
    figures = {}
    if is_task:
        figures["accuracy"] = draw_accuracy({heading: groups})
    elif len({row["length"] for row in rows}) > 1:
        figures["perplexity"] = draw_perplexity(groups)
        if far and len(groups) >= len(far) + 2:
            figures["perplexity-near"] = draw_perplexity(groups, without=far)
    if reference and any(row.get("position_losses") for row in rows):
        figures["position"] = draw_by_position(groups, reference, far)
    if gains:
        figures["gain"] = draw_gains(groups_of_members)
        for label, group in groups_of_members.items():
            first_run, *_ = runs(group).values()
            for gain in gains_of(first_run)[-1:]:
                lengths = f"{gain.short['length']} to {gain.long['length']}"
                section.coloured[f"{label}, {lengths}"] = gain
    prefix = f"{len(page.sections) + 1}-" if page.sections else ""
    section.figures = {f"{prefix}{kind}": figure for kind, figure in figures.items()}

    if reference and len(groups) > 1:
        try:
            # The beginnings of longer windows have no losses by window.
            comparisons = compared(groups_of_members, reference)
        except UserError as fault:
            section.reason = str(fault)
        else:
            comparisons.sort(key=lambda comparison: comparison.length)  # the last one is open
            section.compared, section.notes = tables_of(comparisons), how_made(comparisons)
    for label, group in groups.items():
        for row in group:
            if shown[0].of(row) is None:
                reason = row.get("reason") or "no number"
                page.gaps.append((f"{heading}, {label} at {row['length']}", reason))
    page.sections.append(section)


def reference_of(groups: Mapping[str, Sequence[Row]], against: str | None) -> str | None:
    """The group that `--against` names; without it or a match, the lowest of them.

    The lowest at the longest length that has a number, of the groups with most seeds: only against
    several seeds can there be a claim about an encoding. UserError if several groups match.
    """
    if against is not None and matching(against, groups):
        return select(against, groups)
    candidates = []
    for label, rows in groups.items():
        seeds = {row.get("seed") for row in rows}
        by_length = curve((row["length"], row["perplexity"]) for row in rows)
        for length, mean, _ in by_length.T[-1:]:
            candidates.append((-len(seeds), -length, mean, label))
    return min(candidates)[-1] if candidates else None


def model_beside(name: str, files: Sequence[Path], config_hash: str | None = None) -> GPT | None:
    """The model of a checkpoint that rows name, or None if it is not found.

    files: results files that name it; config_hash: the one of these rows

    It is where its row says, or beside the results. There lie checkpoints of other models with the
    same step, so the hash of the configuration must be equal. Raises ValueError if it, or the
    record of one that may be it, cannot be read.
    """
    path = Path(name)
    places = [path]
    for file in files:
        places += [file.parent.parent / path.name, file.parent / Path(*path.parts[-2:])]
    for place in places:
        if not os.path.exists(place / RECORD):  # Path's method raises for a name that is too long
            continue
        if config_hash in (None, read_record(place)["config_hash"]):
            return load_model(place, *read_meta(place))
    return None


# --- Files ---


def check_page(path: Path) -> None:
    """Raises UserError if a page has no name of a page, or something else is in the way."""
    if path.suffix not in (".html", ""):
        page = path.with_suffix(".html")
        raise UserError(f"--output: {path} is no name of a page - name it {page}")
    check_output(path, MARK)


def write_page(page: Page, path: Path, *, title: str, plots: Path | None = None) -> None:
    """Write the page, and with `plots` its figures as files in that folder."""
    if plots is not None:
        for (name, figure), suffix in itertools.product(page.figures.items(), PICTURES):
            write(figure, plots / f"{name}{suffix}")
    write_output(path, page.html(title).encode(), MARK)
