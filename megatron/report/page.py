"""Results as one HTML page that needs no network: here is its data, page.html says how it looks."""

import io
import math
import re
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from matplotlib.figure import Figure

from megatron.errors import UserError
from megatron.files import write_text
from megatron.report.curves import (
    curve_of,
    draw_by_length,
    draw_by_position,
    draw_curves,
    perplexity_curves,
    position_curves,
    style,
    write,
)
from megatron.report.encoding_figures import draw, draw_learned, panels
from megatron.report.evidence import Evidence, Found, Gap, gathered
from megatron.report.probe_figure import draw_probes
from megatron.results.comparison import Comparison, about, compared
from megatron.results.comparison_table import by_seed_text, how_made
from megatron.results.files import PICTURES, read_results
from megatron.results.labels import kinds, labels_of, matching, select, with_sweeps
from megatron.results.probes import ProbeRow, is_of_probes, read_probes
from megatron.results.row import (
    COLUMNS,
    SETTING,
    VARIANT,
    Question,
    Row,
    by_text,
    plain,
    run_of,
    with_facts,
)
from megatron.results.statistics import perplexity_of
from megatron.results.table import (
    Cell,
    Table,
    by_length,
    mean_and_std,
    setting,
    table_of_text,
    with_bits,
)

HERE = Path(__file__).parent
OPENING = b"<!DOCTYPE html>"
KERNEL_LENGTH = 16384
# The costs that a line of metrics.jsonl may have; the page shows their medians.
COSTS = ("tokens_per_second", "seconds_per_step", "model_tflops_per_second", "mfu")


@dataclass
class Page:
    """What page.html shows: sections by text and protocol, what was trained, and what is missing.

    figures: by the names of their files
    """

    rows: Sequence[Row]
    probes: Sequence[ProbeRow]
    lead: list[str] = field(default_factory=list)
    sections: list["Section"] = field(default_factory=list)
    probed: list[tuple[str, str]] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    settings: Table | None = None
    models: Table | None = None
    gaps: dict[str, list[str]] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)

    def html(self, title: str) -> str:
        environment = Environment(loader=FileSystemLoader(HERE), autoescape=True)
        files = {name: Markup((HERE / name).read_text("utf-8")) for name in ("page.css", "page.js")}
        svgs = {}
        for number, (name, figure) in enumerate(self.figures.items()):
            file = io.StringIO()
            with style():
                figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
            _, _, svg = file.getvalue().partition("<svg ")
            svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>f{number}-", svg)
            svgs[name] = Markup(f'<svg role="img" aria-label="{name}" {svg}')
        template = environment.get_template("page.html")
        return template.render(page=self, title=title, svgs=svgs, files=files)


class Section(NamedTuple):
    """The tables of one text and protocol; `prefix` begins the names of its figures.

    paired: differences from the reference; reason: why there are none
    """

    heading: str
    protocol: str
    prefix: str
    table: Table
    bits: Table | None
    reference: str | None
    about: str
    paired: Table | None
    reason: str


def page_of_rows(
    rows: Sequence[Row],
    probes: Sequence[ProbeRow],
    evidence: Found,
    against: str | None = None,
) -> Page:
    """The page of some rows; UserError if `against` means no encoding, or several."""
    rows = with_sweeps(rows)
    page = Page(rows, probes)
    if against is not None:
        select(against, kinds(rows))
    configurations: dict[str, Hashable] = {}
    for name, one in evidence.items():
        known = {key: value for key, value in one.settings.items() if key != "seed"}
        configurations[name] = repr(sorted(known.items())) if known else None
    gaps = [gap for one in evidence.values() for gap in one.gaps]

    for number, members in enumerate(by_text(rows), 1):
        prefix = f"{number}-" if number > 1 else ""
        section = measured(page, members, configurations, against, prefix)
        page.sections.append(section)
        for label, _, *cells in section.table.body:
            for heading, cell in zip(section.table.head[2:], cells, strict=True):
                if isinstance(cell, Cell) and cell.kind == "missing":
                    gaps.append(Gap(f"{section.heading}, {label} at {heading}", cell.title))

    by_run: dict[Hashable, list[ProbeRow]] = {}
    for row in probes:
        by_run.setdefault(run_of(row), []).append(row)
    named = []
    for row, *_ in by_run.values():
        name = f"{row['pos_emb']}, seed {row.get('seed')}, step {row['step']}, {text_of(row)}"
        named.append(with_facts(row, {"pos_emb": name}))
    for label, of_run in zip(labels_of(named), by_run.values(), strict=True):
        name = f"probes-{len(page.probed) + 1}"
        page.probed.append((label, name))
        page.figures[name] = draw_probes(of_run, label)
        for row in of_run:
            if reason := row.get("reason"):
                gaps.append(Gap(f"{row['probe']} of {label} at {row['length']}", reason))

    not_of_model = dict.fromkeys((*SETTING, *VARIANT))
    models = kinds([with_facts(row, not_of_model) for row in (*rows, *probes)], configurations)
    found = {}
    for label, of_model in models.items():
        names = dict.fromkeys(row.get("checkpoint", "") for row in of_model)
        found[label] = [evidence[name] for name in names if name in evidence]
    draw_kernels(page, found)
    draw_training(page, models, found)
    page.settings = differences(found)
    page.models = checkpoints([*rows, *probes], evidence)

    page.lead = [f"{len(models)} models" if len(models) != 1 else "1 model"]
    for key, name in (("corpus", "corpus"), ("seed", "seeds"), ("commit", "code")):
        values = sorted({str(row[key]) for row in rows if row.get(key) is not None})
        page.lead.append(f"{name} {', '.join(values) or 'unknown'}")
    for where, cause in dict.fromkeys(gaps):
        page.gaps.setdefault(cause, []).append(where)
    return page


def text_of(row: Question) -> str:
    """The name of the text that was scored, such as "github valid"."""
    words = [row.get("corpus"), row.get("part")]
    return " ".join(word for word in words if word) or "a text"


# --- One text and protocol ---


def measured(
    page: Page,
    members: Sequence[Row],
    configurations: Mapping[str, Hashable],
    against: str | None,
    prefix: str,
) -> Section:
    """The section of rows of one text; its figures are added to the page."""
    rows: list[Row] = []
    for row in members:
        # A pass by position tells also about doublings of the training length below its own.
        edges, trained = row.get("position_edges") or [], row.get("train_length") or row["length"]
        doublings = [trained * 2**power for power in range(row["length"].bit_length())]
        shorter = [length for length in doublings if length in edges and length < row["length"]]
        rows += by_length([row], [*shorter, row["length"]])
    groups = kinds(rows, configurations)
    first = rows[0]
    protocol = first.get("protocol") or "unknown protocol"
    heading = f"{text_of(first)}: {protocol}"
    if any(section.heading == heading for section in page.sections):
        tokenizer, text = first.get("tokenizer"), first.get("text")
        heading = f"{heading}, tokenizer {tokenizer}, {setting(members)}, text {text}"

    if len({row["length"] for row in rows}) > 1:
        curves = perplexity_curves(groups)
        page.figures[f"{prefix}perplexity"] = draw_by_length(curves, rows)
        highest = {curve.label: max(curve.values, default=math.inf) for curve in curves}
        near = [one for one in curves if highest[one.label] < 2 * min(highest.values())]
        if 2 <= len(near) < len(curves):
            page.figures[f"{prefix}perplexity-near"] = draw_by_length(near, rows)
    curves = position_curves(groups)
    if any(curve.at for curve in curves):
        page.figures[f"{prefix}position"] = draw_by_position(curves, rows)

    bits, known = None, with_bits(rows)
    if known:
        bits = table_of_text(known, kinds(known, configurations), "bits_per_byte", True)
    reference = reference_of(groups, against)
    comparisons: list[Comparison] = []
    reason = ""
    if reference and len(groups) > 1:
        try:
            # The beginnings of longer windows have no losses by window.
            comparisons = compared(kinds(members, configurations), reference)
        except UserError as fault:
            reason = str(fault)
    return Section(
        heading,
        protocol,
        prefix,
        table_of_text(rows, groups, over_seeds=True),
        bits,
        reference,
        " or ".join(dict.fromkeys(about(one.is_claim) for one in comparisons if one.difference)),
        paired(comparisons) if comparisons else None,
        reason,
    )


def reference_of(groups: Mapping[str, Sequence[Row]], against: str | None) -> str | None:
    """What `--against` means among these groups; without it or a match, the lowest of them.

    The lowest at the longest length that has a number, of the groups with most seeds: only against
    several seeds can there be a claim about an encoding. UserError if several groups match.
    """
    if against is not None and matching(against, groups):
        return select(against, groups)
    candidates: dict[tuple[int, int, float], str] = {}
    for label, rows in groups.items():
        seeds = {row.get("seed") for row in rows}
        by_length: dict[int, list[float | None]] = {}
        for row in rows:
            by_length.setdefault(row["length"], []).append(row["perplexity"])
        for length, perplexities in by_length.items():
            mean, _ = mean_and_std(perplexities)
            if mean is not None:
                order = (-len(seeds), -length, mean)
                candidates.setdefault(order, label)
    return candidates[min(candidates)] if candidates else None


def paired(comparisons: Sequence[Comparison]) -> Table:
    """Differences from the reference: a line for each encoding, a column for each length."""
    reference = comparisons[0].reference
    lengths = sorted({one.length for one in comparisons})
    lines: dict[str, dict[int, Cell]] = {}
    for one in comparisons:
        if one.encoding == reference:
            continue
        cell = Cell("-", kind="missing", title=one.reason or "not measured")
        if one.difference:
            mean = one.difference.mean
            interval = "[{:+.3f}, {:+.3f}]".format(*one.interval) if one.interval else ""
            details = [f"ratio {perplexity_of(mean) or math.inf:.4f}", by_seed_text(one)]
            if one.p is not None:
                details.append(f"p {one.p:.2g} over {one.unit}")
            cell = Cell(f"{one.mark}{mean:+.3f}", interval, mean, "; ".join(details))
        lines.setdefault(one.encoding, {})[one.length] = cell
    missing = Cell("-", kind="missing", title="not measured")
    body = [
        [label, *(cells.get(length, missing) for length in lengths)]
        for label, cells in lines.items()
    ]
    return Table([f"loss - {reference}", *map(str, lengths)], body, how_made(comparisons))


# --- What was trained ---


def draw_kernels(page: Page, found: Mapping[str, Sequence[Evidence]]) -> None:
    """The encoding of one loaded checkpoint of each model, and what it learned."""
    for number, (label, of_model) in enumerate(found.items(), 1):
        loaded = [one for one in of_model if one.positions]
        for one in loaded[:1]:
            figures = {}
            for placed in one.positions:
                several = len(one.positions) > 1
                name = f"{number}-kernel-layer{placed.layers[0]}" if several else f"{number}-kernel"
                if shown := panels(placed.position, KERNEL_LENGTH):
                    figures[name] = draw(shown, f"{label}: {placed.label}" if several else label)
            if one.learned:
                heads = one.positions[0].position.shape.heads
                title = f"{label}: learned numbers"
                figures[f"{number}-learned"] = draw_learned(one.learned, heads, title)
            page.kernels += figures
            page.figures |= figures


def draw_training(
    page: Page,
    models: Mapping[str, Sequence[Question]],
    found: Mapping[str, Sequence[Evidence]],
) -> None:
    """Training and validation loss by step, mean over the seeds at steps that all logged."""
    for kind in ("train", "valid"):
        curves = []
        for label, rows in models.items():
            of_seeds = []
            for one in found[label]:
                records = [record for record in one.metrics if record.get("kind") == kind]
                logged = {record["step"]: record.get("loss") for record in records}
                if logged:
                    of_seeds.append(logged)
            points: dict[float, Any] = {}
            for step in of_seeds[0] if of_seeds else ():
                losses = [one.get(step) for one in of_seeds]
                if None not in losses:
                    points[step] = losses
            curves.append(curve_of(label, rows, points))
        if any(curve.at for curve in curves):
            figure = draw_curves(curves, "step", f"{kind} loss (nats per token)")
            page.figures[f"training-{kind}"] = figure


def differences(found: Mapping[str, Sequence[Evidence]]) -> Table | None:
    """Each value of a setting in which models differ, and the models that have it."""
    labels_of_value: dict[str, dict[str, list[str]]] = {}
    for label, of_model in found.items():
        known = [one.settings for one in of_model if one.settings]
        settings = known[0] if known else {}
        for key, value in settings.items():
            labels_of = labels_of_value.setdefault(key, {})
            labels_of.setdefault(plain(value), []).append(label)
    body = []
    for key, labels_of in labels_of_value.items():
        if key == "seed" or len(labels_of) == 1:
            continue
        for value, labels in labels_of.items():
            models = "; ".join(labels)
            body.append([key, words(value), words(models)])
    return Table(["key", "value", "models"], body) if body else None


def checkpoints(rows: Sequence[Question], evidence: Found) -> Table:
    """What identifies and cost each checkpoint that rows name."""
    lines: dict[tuple[str, ...], list[Cell | str]] = {}
    for row in rows:
        name = row.get("checkpoint") or "-"
        texts = []
        for key in COLUMNS:
            value = row.get(key)
            texts.append(plain(value) if value else "-")
        line: list[Cell | str] = [name]
        line += map(words, texts)
        metrics = evidence[name].metrics if name in evidence else []
        for key in COSTS:
            known = [value for one in metrics if (value := one.get(key))]
            text = f"{statistics.median(known):,.4g}" if known else "-"
            line.append(text)
        lines[name, *texts] = line
    head = ["checkpoint", *COLUMNS.values()]
    head += [key.replace("_", " ") for key in COSTS]
    notes = ["costs: medians of the training's log"]
    return Table(head, list(lines.values()), notes)


def words(text: str) -> Cell:
    """Words in place of a number, which may break."""
    return Cell(text, kind="text long")


# --- Files ---


def page_of(paths: Sequence[Path], *, against: str | None = None) -> Page:
    """The page of some files of results and probes, with what lies beside their checkpoints."""
    results = [path for path in paths if not is_of_probes(path)]
    rows = read_results(results)
    probes = read_probes([path for path in paths if path not in results])
    return page_of_rows(rows, probes, gathered([*rows, *probes], paths), against)


def check_page(path: Path, plots: Path | None = None) -> None:
    """Raises UserError if a page has no name of a page, or something else is in the way.

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
