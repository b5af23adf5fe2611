"""Results as one HTML page that needs no network: here is its data, page.html says how it looks."""

import io
import itertools
import math
import os
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from megatron.checkpoints.manifest import RECORD, read_record
from megatron.checkpoints.read import load_model, read_meta
from megatron.errors import UserError
from megatron.files import check_output, write_output
from megatron.model import GPT
from megatron.report.curves import (
    draw_accuracy,
    draw_by_position,
    draw_gains,
    draw_perplexity,
    how_to_read,
    style,
    write,
)
from megatron.report.encoding_figures import NO_PICTURE, figures_of_model
from megatron.results.comparison import compared
from megatron.results.comparison_table import how_made, tables_of, two_by_two
from megatron.results.files import PICTURES, read_results
from megatron.results.gain import THRESHOLDS, gains_of, table_of_gains
from megatron.results.labels import kinds, labels_of, matching, runs, sections, select
from megatron.results.probes import ProbeRow, is_of_probes, read_probes, tables_of_probes
from megatron.results.row import (
    COLUMNS,
    LABELS,
    SETTING,
    SHOWN_IF_SET,
    TASK,
    VARIANT,
    Row,
    plain,
    run_of,
    seed_in_words,
    shown_fact,
    text_of,
    with_facts,
)
from megatron.results.table import (
    BITS,
    Table,
    by_length,
    mean_and_std,
    quantities_of,
    table_of_text,
    with_bits,
)

HERE = Path(__file__).parent
MARK = b'name="generator" content="megatron/report"'  # of page.html
NOT_FOUND = "not found from here, so its encoding is not drawn"


@dataclass
class PageSection:
    """One text and protocol.

    tables: perplexity and, if rows have them, bits per byte; or the accuracy of a task
    figures: their names by what they show
    coloured: texts of one run of each encoding, window by window: tokens with class and gain
    over_seeds: whether a curve is a mean over several seeds
    compared: differences from the reference, with notes; reason: why there are none
    """

    heading: str
    protocol: str
    tables: list[Table]
    figures: dict[str, str] = field(default_factory=dict)
    coloured: dict[str, list[list[tuple[str, str, str]]]] = field(default_factory=dict)
    over_seeds: bool = False
    compared: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reason: str = ""


@dataclass
class Page:
    """The contents of page.html: sections by text and protocol, probes, kernels, and gaps.

    tasks: captions by the names of figures; kernels: names of figures
    probed: tables of each probed model, by its label
    gaps: what is missing, and its cause; faults: checkpoints that could not be read, and why
    figures: by the names of their files
    """

    rows: Sequence[Row]
    probes: Sequence[ProbeRow]
    sections: list[PageSection] = field(default_factory=list)
    tasks: dict[str, str] = field(default_factory=dict)
    probed: dict[str, list[Table]] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)
    models: Table | None = None
    gaps: list[tuple[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)

    def html(self, title: str) -> str:
        environment = Environment(loader=FileSystemLoader(HERE), autoescape=True)
        svgs = {}
        for number, (name, figure) in enumerate(self.figures.items()):
            file = io.StringIO()
            with style():
                metadata = {"Date": None, "Creator": None}
                figure.savefig(file, format="svg", transparent=True, metadata=metadata)
            _, _, svg = file.getvalue().partition("<svg ")
            svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>f{number}-", svg)
            first, *_ = figure.axes
            curves = [bars.get_label() for bars in first.containers]
            if legend := first.get_legend():
                curves = [text.get_text() for text in legend.get_texts()]
            title_of = [figure.get_suptitle(), first.get_title(loc="left")]
            words = [*title_of, first.get_ylabel(), *curves]
            spoken = "; ".join(filter(None, words))
            svgs[name] = Markup(f'<svg role="img" aria-label="{escape(spoken)}" {svg}')
        template = environment.get_template("page.html")
        return template.render(page=self, title=title, svgs=svgs)


def page_of(paths: Sequence[Path], *, against: str | None = None) -> Page:
    """The page of some files of results and probes, with the encodings of their checkpoints."""
    results = [path for path in paths if not is_of_probes(path)]
    rows = read_results(results)
    probes = read_probes([path for path in paths if path not in results])
    return page_of_rows(rows, probes, paths, against)


def page_of_rows(
    rows: Sequence[Row],
    probes: Sequence[ProbeRow] = (),
    files: Sequence[Path] = (),
    against: str | None = None,
) -> Page:
    """The page of some rows; files: where they stand, beside which checkpoints may lie.

    Raises UserError if `against` means no encoding, or several.
    """
    page = Page(rows, probes)
    if against is not None:
        select(against, kinds(page.rows))
    for heading, members in sections(page.rows).items():
        _add_text(page, heading, members, against)

    probes_of_runs: dict[Hashable, list[ProbeRow]] = {}
    for row in page.probes:
        probes_of_runs.setdefault(run_of(row), []).append(row)
    first_rows = [of_run[0] for of_run in probes_of_runs.values()]
    names = []
    for row in first_rows:
        model = f"{row['pos_emb']}{seed_in_words(row)}, step {row['step']}"
        names.append(f"{model}, {text_of(row) or 'a text'}")
    labels = labels_of(first_rows, LABELS, names=names)
    for label, of_run in zip(labels, probes_of_runs.values(), strict=True):
        page.probed[label] = tables_of_probes(of_run)
        for row in of_run:
            if reason := row.get("reason"):
                place = f"{row['probe']} of {label} at {row['length']}"
                page.gaps.append((place, reason))

    every_row = [*page.rows, *probes]
    not_of_model = dict.fromkeys((*SETTING, *VARIANT))
    models = kinds([with_facts(row, not_of_model) for row in every_row])
    tried: set[str] = set()
    for number, (label, of_model) in enumerate(models.items(), 1):
        row_of = {row.get("checkpoint", ""): row for row in of_model}
        row_of.pop("", None)
        # Rows of a sweep and probes of the same checkpoint are two kinds.
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
            for name, figure in figures.items():
                page.kernels.append(f"{number}-{name}")
                page.figures[f"{number}-{name}"] = figure
            if len(figures) < len(model.placed):
                page.gaps.append((f"an encoding of {title}", NO_PICTURE))
            break  # of each model, the first checkpoint that can be read

    keys = ["checkpoint", *COLUMNS]
    for key in SHOWN_IF_SET:
        if not any(key in row for row in every_row):
            keys.remove(key)
    head = [COLUMNS.get(key, key) for key in keys]
    lines = {}
    for row in every_row:
        facts = [shown_fact(row, key) for key in keys]
        line = ["-" if fact in (None, "", {}) else plain(fact) for fact in facts]
        lines.setdefault(tuple(line), line)
    page.models = Table(head, list(lines.values()))
    return page


def _add_text(page: Page, heading: str, members: Sequence[Row], against: str | None) -> None:
    """The section of rows of one text and protocol, and its figures."""
    rows: list[Row] = []
    for row in members:
        # A pass by position tells also about doublings of the training length below its own.
        edges, trained = row.get("position_edges") or [], row.get("train_length") or row["length"]
        doublings = [trained * 2**power for power in range(row["length"].bit_length())]
        shorter = [length for length in doublings if length in edges and length < row["length"]]
        rows += by_length([row], [*shorter, row["length"]])
    groups = kinds(rows)
    protocol = rows[0].get("protocol") or ""
    shown = quantities_of(rows)
    section_tables = [table_of_text(rows, quantity, over_seeds=True) for quantity in shown]
    section = PageSection(heading, protocol, section_tables)
    seeds = [{row.get("seed") for row in of_kind} for of_kind in groups.values()]
    section.over_seeds = max(map(len, seeds)) > 1
    if known := with_bits(rows):
        section.tables.append(table_of_text(known, BITS, over_seeds=True))

    if repairs := two_by_two(members, "Which of two breaks longer texts"):
        section.tables.append(repairs)

    # Accuracies are compared by tools/claims.py.
    reference = None if protocol == TASK else reference_of(groups, against)
    highest = {}
    for label, of_kind in groups.items():
        numbers = [row["perplexity"] for row in of_kind if row["perplexity"] is not None]
        highest[label] = max(numbers, default=math.inf)
    limit = 2 * min(highest.values())
    far = [label for label, number in highest.items() if number >= limit]
    figures = {}
    prefix = f"{len(page.sections) + 1}-" if page.sections else ""
    if protocol == TASK:
        page.tasks[f"{prefix}accuracy"] = how_to_read({heading: groups})
        page.figures[f"{prefix}accuracy"] = draw_accuracy({heading: groups})
    elif len({row["length"] for row in rows}) > 1:
        figures["perplexity"] = draw_perplexity(groups)
        if far and len(groups) >= len(far) + 2:
            figures["perplexity-near"] = draw_perplexity(groups, without=far)
    if reference and any(row.get("position_losses") for row in rows):
        figures["position"] = draw_by_position(groups, reference, far)
    if gains := table_of_gains(members):
        section.tables.append(gains)
        figures["gain"] = draw_gains(kinds(members))
        for label, of_kind in kinds(members).items():
            first_run, *_ = runs(of_kind).values()
            for gain in gains_of(first_run)[-1:]:
                texts = iter(gain.long.get("token_texts", []))
                nats = iter(gain.gains.tolist())
                title = f"{label}, {gain.short['length']} to {gain.long['length']}"
                section.coloured[title] = [
                    [_coloured(text, next(nats)) for text in itertools.islice(texts, size)]
                    for size in gain.sizes
                ]
    for kind, figure in figures.items():
        section.figures[kind] = f"{prefix}{kind}"
        page.figures[f"{prefix}{kind}"] = figure

    if reference and len(groups) > 1:
        try:
            # The beginnings of longer windows have no losses by window.
            comparisons = compared(kinds(members), reference)
        except UserError as fault:
            section.reason = str(fault)
        else:
            section.compared, section.notes = tables_of(comparisons), how_made(comparisons)
    for label, of_kind in groups.items():
        for row in of_kind:
            if shown[0].of(row) is None:
                reason = row.get("reason") or "no number"
                page.gaps.append((f"{heading}, {label} at {row['length']}", reason))
    page.sections.append(section)


def _coloured(text: str, gain: float) -> tuple[str, str, str]:
    """A token with the class of its gain, which page.css colours, and the gain in words."""
    level = sum(abs(gain) > least for least in THRESHOLDS)
    kind = "gain" if gain > 0 else "lose"
    return text.replace("␊", "↵\n"), f"{kind}{level}", f"{gain:+.2f}"


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
        for length in {row["length"] for row in rows}:
            perplexities = [row["perplexity"] for row in rows if row["length"] == length]
            mean, _ = mean_and_std(perplexities)
            if mean is not None:
                candidates.append((-len(seeds), -length, mean, label))
    if not candidates:
        return None
    *_, lowest = min(candidates)
    return lowest


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
        record = read_record(place)
        if config_hash in (None, record["config_hash"]):
            config, meta = read_meta(place)
            return load_model(place, config, meta)
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
