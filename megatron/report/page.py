"""Results as one HTML page that needs no network: its sections are data for page.html."""

import io
import math
import re
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from matplotlib.figure import Figure

from megatron.errors import UserError
from megatron.files import write_text
from megatron.report.curves import (
    Curve,
    curve_of,
    draw_by_length,
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
from megatron.results.labels import kinds, labels_of, matching, runs, select, with_sweeps
from megatron.results.probes import ProbeRow, axis_of, is_of_probes, read_probes
from megatron.results.row import (
    COLUMNS,
    SETTING,
    VARIANT,
    AnyQuestion,
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
SHOWN = 3  # places of one gap that are named
MISSING = Cell("-", kind="missing", title="not measured")

PROTOCOLS = {
    "equal_tokens": "The same held-out tokens for every model and length, cut into windows. Tokens"
    " near the start of a window have little context.",
    "paper": "As in the KERPLE and MEP papers: equally many windows at every length, shuffled by"
    " the run's seed. The text differs between lengths and between seeds.",
    "tail": "Only the last tokens of each window are scored: the same tokens at every length, with"
    " more context at longer ones.",
    "position": "One pass over the longest windows. A shorter length is the mean over their first"
    " tokens.",
    "sliding": "Windows overlap. Each scores only new tokens, so nearly all have a long context.",
    "within_document": "Every window lies inside one document.",
}
PROBES = {
    "passkey": "Held-out text contains a cue and random tokens after it; the cue is repeated at"
    " the end. Does the model repeat the tokens?",
    "copy": "A random string stands twice. Does the model predict the second one? Depth: position"
    " in the string.",
    "recall": "Held-out text contains keys with values; each key is repeated at the end. Does the"
    " model repeat its value?",
    "multikey": "Held-out text contains four needles, each a key of two tokens and a value. Keys"
    " share their tokens, so only both together name a needle. One key is repeated at the end. Does"
    " the model name its value?",
    "multikey_dense": "The same where needles fill the whole context.",
    "variable_tracking": "Held-out text contains chains of assignments: a variable has a value, the"
    " next one has the first, and so on. Does the model name the value of a variable that is some"
    " assignments away?",
    "common_words": "Of 36 words in a list, 4 occur four times as often as the others. Does the"
    " model name them?",
    "frequent_words": "The words of a list have counts that fall as 1 / rank. Does the model name"
    " the first three in their order?",
    "receptive_field": "The gradient of the last token's loss: its fraction within a distance"
    " (Sandwich, arXiv 2212.10356).",
    "attention": "The probability of attention at a distance or further, mean over heads and the"
    " last 256 queries.",
}
ACCURACY = (
    "Accuracy: the fraction of answer tokens with the highest logit; in brackets: 95 % Wilson"
    " interval over contexts. Guess: the accuracy of a model that draws among what the context"
    " offers. Gain: how much the answer in the context raises its log-probability, in nats. Reach:"
    " tokens with 99 % of the gradient. Entropy: of attention, in nats."
)
BANDS = "Means over seeds; bands: one standard deviation over seeds."
PAIRED = (
    "Loss minus the loss of {reference} on the same text, in nats. In brackets: 95 % interval,"
    " {about}. Hover for the ratio of perplexities and each seed's difference."
)
NEAR = "Only the curves that stay below twice the highest value of the best one."
POSITIONS = (
    "Loss by position in the longest windows. Each point is a mean from position p to about 1.4 p."
)
# The costs that a line of metrics.jsonl may have, with their headings.
COSTS = {
    "tokens_per_second": "tokens per second",
    "seconds_per_step": "seconds per step",
    "model_tflops_per_second": "model TFLOP/s",
    "mfu": "MFU",
    "peak_memory_gib": "peak memory (GiB)",
}


@dataclass
class Part:
    """One of: a table, a drawing with its caption, a heading, a paragraph."""

    text: str = ""
    table: Table | None = None
    svg: str = ""
    heading: str = ""


@dataclass
class Section:
    heading: str
    parts: list[Part]


@dataclass
class Page:
    """The sections of a page, its figures by the names of their files, and what it lacks."""

    rows: Sequence[Row]
    probes: Sequence[ProbeRow]
    evidence: Found
    against: str | None = None
    sections: list[Section] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Fill the sections; UserError if `against` means no encoding, or several."""
        self.rows = with_sweeps(self.rows)
        self.settings = {name: canonical(one.settings) for name, one in self.evidence.items()}
        if self.against is not None:
            select(self.against, kinds(self.rows))
        trained = self.models([*self.rows, *self.probes])
        for number, members in enumerate(by_text(self.rows), 1):
            self.sections.append(self.measured(members, f"{number}-" if number > 1 else ""))
        self.sections += self.over_tokenizers()
        self.sections += [
            Section("Probes", self.probed()),
            Section("Kernels", self.kernels(trained)),
            Section("Training", self.training(trained)),
            Section("Models", self.trained(trained)),
            Section("What is missing", self.missing()),
        ]
        facts = [f"{len(trained)} models" if len(trained) != 1 else "1 model"]
        for key, name in (("corpus", "corpus"), ("seed", "seeds"), ("commit", "code")):
            known = sorted({str(row[key]) for row in self.rows if row.get(key) is not None})
            facts.append(f"{name} {', '.join(known) or 'unknown'}")
        self.lead = " · ".join(facts)

    def html(self, title: str) -> str:
        """The whole page."""
        loader = FileSystemLoader(HERE)
        template = Environment(loader=loader, autoescape=True).get_template("page.html")
        return template.render(
            title=title,
            lead=self.lead,
            sections=self.sections,
            style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
            script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        )

    def drawing(self, name: str, figure: Figure, caption: str = "") -> Part:
        """A figure under the name of its file; its number keeps the ids of the SVG its own."""
        self.figures[name] = figure
        file = io.StringIO()
        with style():
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        text = file.getvalue()
        text = text[text.index("<svg") :]
        prefix = f"f{len(self.figures)}-"
        text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}", text)
        text = text.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
        return Part(caption, svg=Markup(text))

    def models(self, rows: Sequence[AnyQuestion]) -> dict[str, list[AnyQuestion]]:
        """Rows by what was trained, not by what was measured."""
        ignored = dict.fromkeys((*SETTING, *VARIANT))
        return kinds([with_facts(row, ignored) for row in rows], self.settings)

    def evidence_of(self, rows: Iterable[Question]) -> list[Evidence]:
        names = dict.fromkeys(row.get("checkpoint", "") for row in rows)
        return [self.evidence[name] for name in names if name in self.evidence]

    # --- Measured ---

    def measured(self, members: Sequence[Row], prefix: str) -> Section:
        """The section of rows of one text; `prefix` begins the names of its figures."""
        rows = [row for one in members for row in by_length([one], lengths_of(one))]
        groups = kinds(rows, self.settings)
        first = rows[0]
        protocol = first.get("protocol") or "unknown protocol"
        parts = [Part(PROTOCOLS.get(protocol, "This page has no description of this protocol."))]
        if len({row["length"] for row in rows}) > 1:
            curves = perplexity_curves(groups)
            parts.append(self.drawing(f"{prefix}perplexity", draw_by_length(curves, rows), BANDS))
            highest = {curve.label: max(curve.values, default=math.inf) for curve in curves}
            near = [one for one in curves if highest[one.label] < 2 * min(highest.values())]
            if 2 <= len(near) < len(curves):
                figure = draw_by_length(near, rows)
                parts.append(self.drawing(f"{prefix}perplexity-near", figure, NEAR))
        table = table_of_text(rows, groups, over_seeds=True)
        for label, *cells in table.body:
            for heading, cell in zip(table.head[1:], cells, strict=True):
                if isinstance(cell, Cell) and cell.kind == "missing":
                    where = f"{text_of(first)}, {protocol}, {label} at {heading.rstrip('*')}"
                    self.gaps.append(Gap(where, cell.title))
        parts.append(Part(table=table))
        if known := with_bits(rows):
            of_bits = table_of_text(known, kinds(known, self.settings), "bits_per_byte", True)
            of_bits.head = ["bits per byte", *of_bits.head[1:]]
            parts.append(Part(table=of_bits))
        parts += self.paired(groups)
        curves = position_curves(groups)
        if any(curve.at for curve in curves):
            longest = int(max(place for curve in curves for place in curve.at))
            ticks = [2**power for power in range(4, longest.bit_length() + 1, 2)]
            value = "loss (nats per token)"
            figure = draw_curves(curves, "position (tokens)", value, ticks, rows=rows)
            parts.append(self.drawing(f"{prefix}position", figure, POSITIONS))
        heading = f"{text_of(first)}: {protocol}"
        if any(section.heading == heading for section in self.sections):
            tokenizer, text = first.get("tokenizer"), first.get("text")
            heading = f"{heading}, tokenizer {tokenizer}, {setting(members)}, text {text}"
        return Section(heading, parts)

    def paired(self, groups: Mapping[str, Sequence[Row]]) -> list[Part]:
        """A table of differences from the reference and how they were made, or why none."""
        reference = reference_of(groups, self.against)
        if len(groups) < 2 or reference is None:
            return []
        # The beginnings of longer windows have no losses by window.
        whole = {
            label: [row for row in rows if row["length"] == (row.get("position_edges") or [-1])[-1]]
            or list(rows)
            for label, rows in groups.items()
        }
        try:
            found = compared(whole, reference)
        except UserError as fault:
            first, *lines = str(fault).splitlines()
            return [Part(first), Part(table=Table(["why"], [[line.strip()] for line in lines]))]
        lengths = sorted({one.length for one in found})
        by_place = {(one.encoding, one.length): one for one in found}
        body = []
        for label in groups:
            if label != reference:
                cells = [difference_cell(by_place.get((label, length))) for length in lengths]
                body.append([label, *cells])
        subjects = dict.fromkeys(about(one.is_claim) for one in found if one.difference)
        caption = PAIRED.format(reference=reference, about=" or ".join(subjects))
        head = [f"loss - {reference}", *map(str, lengths)]
        return [Part(caption), Part(table=Table(head, body, how_made(found)))]

    def over_tokenizers(self) -> list[Section]:
        """Bits per byte of texts that runs of several tokenizers were measured on."""
        parts = []
        keys = [key for key in SETTING if key != "tokenizer"]
        for rows in by_text(with_bits(self.rows), keys):
            if len({row.get("tokenizer") for row in rows}) > 1:
                parts.append(Part(table=table_of_text(rows, runs(rows), "bits_per_byte")))
        return [Section("Bits per byte of all tokenizers", parts)] if parts else []

    # --- Probed and trained ---

    def probed(self) -> list[Part]:
        """A figure and a table for each model that was probed; seeds are models of their own."""
        if not self.probes:
            self.gaps.append(Gap("probes", "no rows of tools/probe.py were given"))
            return [Part("No rows of tools/probe.py were given.")]
        measured = {row["probe"] for row in self.probes}
        parts = [Part(f"{name}: {text}") for name, text in PROBES.items() if name in measured]
        parts.append(Part(ACCURACY))
        by_run: dict[Hashable, list[ProbeRow]] = {}
        for row in self.probes:
            by_run.setdefault(run_of(row), []).append(row)
        named = []
        for row, *_ in by_run.values():
            name = f"{row['pos_emb']}, seed {row.get('seed')}, step {row['step']}, {text_of(row)}"
            named.append(with_facts(row, {"pos_emb": name}))
        for number, (label, rows) in enumerate(
            zip(labels_of(named), by_run.values(), strict=True), 1
        ):
            figure = draw_probes(rows, label)
            parts += [
                Part(heading=label),
                self.drawing(f"probes-{number}", figure),
                Part(table=probe_table(rows)),
            ]
            for row in rows:
                if reason := row.get("reason"):
                    self.gaps.append(Gap(f"{row['probe']} of {label} at {row['length']}", reason))
        return parts

    def kernels(self, trained: Mapping[str, Sequence[Question]]) -> list[Part]:
        """The encoding of one loaded checkpoint of each model, and what it learned."""
        parts = []
        for number, (label, rows) in enumerate(trained.items(), 1):
            loaded = [one for one in self.evidence_of(rows) if one.positions]
            for one in loaded[:1]:
                for placed in one.positions:
                    shown = panels(placed.position, KERNEL_LENGTH)
                    title = f"{label}: {placed.label}" if len(one.positions) > 1 else label
                    name = f"{number}-kernel-layer{placed.layers[0]}"
                    if len(one.positions) == 1:
                        name = f"{number}-kernel"
                    if shown:
                        parts.append(self.drawing(name, draw(shown, title)))
                if one.learned:
                    heads = one.positions[0].position.shape.heads
                    figure = draw_learned(one.learned, heads, f"{label}: learned numbers")
                    parts.append(self.drawing(f"{number}-learned", figure))
        return parts or [Part("No checkpoint was found whose encoding could be drawn.")]

    def training(self, trained: Mapping[str, Sequence[Question]]) -> list[Part]:
        """Training and validation loss by step, mean over the seeds at steps that all logged."""
        parts = []
        for kind in ("train", "valid"):
            curves: list[Curve] = []
            for label, rows in trained.items():
                of_seeds = []
                for one in self.evidence_of(rows):
                    logged = {
                        record["step"]: record.get("loss")
                        for record in one.metrics
                        if record.get("kind") == kind and record.get("loss") is not None
                    }
                    of_seeds += [logged] if logged else []
                common = set.intersection(*map(set, of_seeds)) if of_seeds else set()
                points: Any = {step: [one[step] for one in of_seeds] for step in common}
                curves.append(curve_of(label, rows, points))
            if any(curve.at for curve in curves):
                figure = draw_curves(curves, "step", f"{kind} loss (nats per token)")
                parts.append(self.drawing(f"training-{kind}", figure, BANDS))
        return parts or [Part("No metrics.jsonl was found beside the checkpoints.")]

    def trained(self, trained: Mapping[str, Sequence[Question]]) -> list[Part]:
        """The settings in which models differ, then what identifies and cost each checkpoint."""
        values_of: dict[str, dict[str, list[str]]] = {}
        for label, rows in trained.items():
            settings = next((one.settings for one in self.evidence_of(rows) if one.settings), {})
            for key, value in settings.items():
                values_of.setdefault(key, {}).setdefault(shown(value), []).append(label)
        values_of.pop("seed", None)
        body: list[list[Cell | str]] = []
        for key, models in values_of.items():
            if len(models) > 1:
                body += [[key, long(value), long("; ".join(of))] for value, of in models.items()]
        parts = [Part("No settings are known in which the models differ, but for their seeds.")]
        if body:
            parts = [Part(table=Table(["key", "value", "models"], body))]
        lines: dict[tuple, list[Cell | str]] = {}
        recorded = {key for one in self.evidence.values() for line in one.metrics for key in line}
        costs = [key for key in COSTS if key in recorded]
        for row in (*self.rows, *self.probes):
            name = row.get("checkpoint") or "-"
            words = tuple(shown(row.get(key)) for key in COLUMNS)
            metrics = self.evidence[name].metrics if name in self.evidence else []
            cells = [median_cell([one.get(key) for one in metrics]) for key in costs]
            lines[name, words] = [name, *map(long, words), *cells]
        head = ["checkpoint", *COLUMNS.values(), *(COSTS[key] for key in costs)]
        notes = ["Costs are medians of the training's log."] if costs else []
        return [*parts, Part(table=Table(head, list(lines.values()), notes))]

    def missing(self) -> list[Part]:
        """What the sections lack and what could not be read, one line for each cause."""
        unread = [gap for one in self.evidence.values() for gap in one.gaps]
        by_cause: dict[str, list[str]] = {}
        for where, cause in dict.fromkeys([*self.gaps, *unread]):
            by_cause.setdefault(cause, []).append(where)
        parts = []
        for cause, places in by_cause.items():
            named = "; ".join(places[:SHOWN])
            if len(places) > SHOWN:
                named += f"; and {len(places) - SHOWN} more"
            count = f"{len(places)} times: " if len(places) > 1 else ""
            parts.append(Part(f"{count}{named}: {cause}"))
        return parts or [Part("Nothing that this page asks for.")]


def text_of(row: Question) -> str:
    """The name of the text that was scored, such as "github valid"."""
    words = [row.get("corpus"), row.get("part")]
    return " ".join(word for word in words if word) or "a text"


def lengths_of(row: Row) -> list[int]:
    """The lengths that a row tells about: doublings of the training length up to its own."""
    edges = row.get("position_edges") or []
    trained = row.get("train_length") or row["length"]
    doublings = [trained * 2**power for power in range(row["length"].bit_length())]
    shorter = [length for length in doublings if length in edges and length < row["length"]]
    return [*shorter, row["length"]]


def reference_of(groups: Mapping[str, Sequence[Row]], against: str | None) -> str | None:
    """What `--against` means among these groups; without it or a match, the lowest of them.

    The lowest at the longest length that has a number, of the groups with most seeds: only against
    several seeds can there be a claim about an encoding. UserError if several groups match.
    """
    if against is not None and matching(against, groups):
        return select(against, groups)
    seeds = {label: len({row.get("seed") for row in rows}) for label, rows in groups.items()}
    means: dict[tuple[int, float], str] = {}
    for label, rows in groups.items():
        for length in {row["length"] for row in rows}:
            mean, _ = mean_and_std([row["perplexity"] for row in rows if row["length"] == length])
            if mean is not None and seeds[label] == max(seeds.values()):
                means.setdefault((-length, mean), label)
    return means[min(means)] if means else None


def difference_cell(one: Comparison | None) -> Cell:
    """A difference with its mark and interval; on hover its ratio, p, seeds and n_eff."""
    if one is None or one.difference is None:
        reason = one.reason if one is not None else None
        return Cell("-", kind="missing", title=reason or "not measured")
    mean = one.difference.mean
    details = [f"ratio {perplexity_of(mean) or float('inf'):.4f}"]
    if one.p is not None:
        details.append(f"p {one.p:.2g} over {one.unit}")
    if len(one.by_seed) > 1:
        details.append(f"by seed: {by_seed_text(one)}")
    interval = "[{:+.3f}, {:+.3f}]".format(*one.interval) if one.interval else ""
    return Cell(f"{one.mark}{mean:+.3f}", interval, mean, "; ".join(details))


def probe_table(rows: Sequence[ProbeRow]) -> Table:
    """A line for each row that was measured."""
    forms = {"accuracy": ".3f", "guess": ".3g", "gain": "+.3f", "reach": ".0f", "entropy": ".4g"}
    body = []
    for row in rows:
        place = cast("dict[str, float]", row).get(axis_of(row["probe"]))
        answer, without = row.get("log_probability"), row.get("without")
        numbers = {
            "accuracy": row.get("accuracy"),
            "guess": row.get("guess"),
            "gain": None if answer is None or without is None else answer - without,
            "reach": row.get("reach"),
            "entropy": row.get("mean_entropy"),
        }
        cells = [number_cell(value, forms[key]) for key, value in numbers.items()]
        low, high = row.get("low"), row.get("high")
        if low is not None and high is not None:
            cells[0] = cells[0]._replace(spread=f"[{low:.2f}, {high:.2f}]")
        body.append([row["probe"], number_cell(place, "g"), str(row["length"]), *cells])
    return Table(["probe", "place", "length", *forms], body)


def number_cell(value: float | None, form: str) -> Cell:
    return MISSING if value is None else Cell(format(value, form), value=value)


def median_cell(values: Sequence[float | None]) -> Cell:
    known = [value for value in values if value is not None]
    middle = statistics.median(known) if known else None
    return number_cell(middle, ",.0f" if middle and middle >= 100 else ".3g")


def long(text: str) -> Cell:
    """Words that may break."""
    return Cell(text, kind="text long")


def shown(value: Any) -> str:
    """A value of a configuration for people: width 64, slopes none, kernels [exp, gaussian]."""
    return "-" if value in (None, "", {}) else plain(value)


def canonical(settings: Mapping[str, Any]) -> Hashable:
    """The settings without the seed, so that two can be compared, or None if nothing is known."""
    known = {key: value for key, value in settings.items() if key != "seed"}
    return repr(sorted(known.items())) if known else None


# --- Files ---


def page_of(paths: Sequence[Path], *, against: str | None = None) -> Page:
    """The page of some files of results and probes, with what lies beside their checkpoints."""
    results = [path for path in paths if not is_of_probes(path)]
    rows = read_results(results)
    probes = read_probes([path for path in paths if path not in results])
    return Page(rows, probes, gathered([*rows, *probes], paths), against)


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
