"""Claims about two encodings or lengths, written in YAML, and what the results say about each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import scipy
from pydantic import BaseModel, Field, model_validator

from megatron.errors import UserError, in_words
from megatron.files import ROOT, read_small
from megatron.results.comparison import ALPHA, FEW, SEEDS, Difference, difference_of
from megatron.results.labels import facts_of, kinds, labels_of, other_differences
from megatron.results.row import (
    ATTENTION_INPUTS,
    DRAWN,
    PROTOCOL_OPTIONS,
    SETTING,
    USUAL,
    Row,
    grouped,
    identity,
    text_of,
    value_of,
    with_facts,
)
from megatron.results.statistics import (
    corrected_for,
    holm,
    mean_over_seeds,
    values_needed,
)
from megatron.results.table import Table
from megatron.strict_yaml import parse

FIELDS = """\
A claim has these fields; a, at, and lower_by or higher_by are needed:

  a, b          an encoding and facts of its rows, such as `rotary` or `rotary, window 512`; of
                layers that differ `rotary/none`. A name alone means the default options.
                Without b, a is compared with itself, at b_at.
  at            a length, several, or all from one on: 4096, [512, 4 L], '>= 8 L'. L is the
                training length. The claim must hold at each.
  b_at          where b is measured, if not at the same length
  lower_by      a is lower by more than this; 0 for any size, -5 for `at most 5 % higher`
  higher_by     likewise. Percent of a perplexity, points of accuracies.
  quantity      perplexity (the default), accuracy (of whole answers), token_accuracy
  protocol      of the rows of both sides
  both          further facts of both sides, such as `github, window 512`
  source        where this is said, if not in the file's source

Rows with a window or a method for longer texts answer only claims that name this key. So do sides
that differ in dtype, windows_per_step, trained_on, parent_model or an axis of their sweep."""
GROUP = (*SETTING, "train_length", "step")  # equal on both sides, if none names them
LARGEST = 1 << 20  # bytes of a file of claims
SHIPPED = ROOT / "configs" / "claims"

Length = int | Annotated[str, Field(pattern=r"^(>= )?(\d{1,12}|(\d{1,12} )?L)$")]


class Source(BaseModel, extra="forbid"):
    """The place in a paper where a file's claims come from."""

    paper: str
    section: str
    url: str


class Claim(BaseModel, extra="forbid"):
    """One claim; `FIELDS` explains its fields."""

    a: str
    b: str | None = None
    at: Length | list[Length]
    b_at: Length | None = None
    lower_by: Annotated[int | float, Field(lt=100)] | None = None
    higher_by: Annotated[int | float, Field(gt=-100)] | None = None
    quantity: Literal["perplexity", "accuracy", "token_accuracy"] = "perplexity"
    protocol: str = ""
    both: str = ""
    source: str = ""

    @model_validator(mode="after")
    def _has_two_sides_and_a_size(self) -> "Claim":
        if (self.lower_by is None) == (self.higher_by is None) or not (self.b or self.b_at):
            raise ValueError("give lower_by or higher_by, and b or b_at")
        return self

    @property
    def text(self) -> str:
        """In words, such as "rotary is more than 20 % higher at 8 L than at L (perplexity)"."""
        size = self.lower_by or self.higher_by or 0
        direction = "higher" if (self.lower_by is None) == (size >= 0) else "lower"
        if size:
            limit = "more than" if size > 0 else "at most"
            direction = f"{limit} {abs(size)} {self.unit} {direction}"
        partner = self.b or ""
        if self.b_at:
            partner = f"{partner} at {self.b_at}".strip()
        facts = ", ".join(filter(None, [self.quantity, self.protocol, self.both]))
        return f"{self.a} is {direction} at {self.at} than {partner} ({facts})"

    @property
    def unit(self) -> str:
        """The unit of its size and of differences."""
        return "%" if self.quantity == "perplexity" else "points"

    def names(self, key: str) -> bool:
        """Whether a side has a fact with this key, such as `window` in `window 512`."""
        return f", {key} " in f"{self.a}, {self.b}, {self.both}"

    def excess(self, difference: float) -> float:
        """By how much a difference exceeds the claim's size, in the claim's direction.

        In nats, or in shares of answers.
        """
        sign = 1 if self.lower_by is None else -1
        size = (self.lower_by or self.higher_by or 0) / 100
        if self.quantity == "perplexity":
            size = sign * math.log1p(sign * size)
        return sign * difference - size


class File(BaseModel, extra="forbid"):
    """A file of claims."""

    source: Source
    claims: list[Claim] = Field(min_length=1)


def read_claims(name: str) -> tuple[str, list[Claim]]:
    """The source and claims in a file, or with a name in configs/claims; UserError for a fault."""
    shipped = {path.stem: path for path in sorted(SHIPPED.glob("*.yml"))}
    path = shipped.get(name) or Path(name)
    if not path.exists():
        raise UserError(
            f"{path}: there is no such file of claims - configs/claims has {', '.join(shipped)}"
        )
    try:
        file = File.model_validate(parse(read_small(path, LARGEST).decode()))
    except (OSError, ValueError) as fault:
        raise UserError(
            f"{path}: cannot be read as claims: {in_words(fault)} - write source (paper, section,"
            f" url) and claims, as in configs/claims/kerple.yml\n\n{FIELDS}"
        ) from None
    return ", ".join(file.source.model_dump().values()), file.claims


def has_length(row: Row, length: Length) -> bool:
    """Whether a row has such a length; L is its training length."""
    text = str(length).removeprefix(">= ")
    tokens = int(text.rstrip(" L") or 1)
    if "L" in text:
        tokens *= row.get("train_length", 0)
    return row["length"] == tokens or (text != str(length) and row["length"] > tokens)


# --- What the results say about a claim ---


@dataclass
class Verdict:
    """What the rows of one setting say about a claim.

    word: holds, fails, undecided or no rows; reason: which rows are missing
    rows: of both sides, at the decisive length
    difference: at this length, with its estimate
    p_holds: one-sided; small if the difference supports the claim, near 1 if it contradicts it
    p: two-sided, corrected for all verdicts in the file
    level: of the one-sided test, before this correction
    needed: number of values that would decide with a power of 80 %, if the effect is as large as
        here
    """

    claim: Claim
    word: str = "no rows"
    reason: str = ""
    rows: Sequence[Row] = ()
    difference: Difference | None = None
    p_holds: float = 0.5
    p: float = 1.0
    level: float = ALPHA / 2
    needed: str = ""


def judged(claims: Sequence[Claim], rows: Sequence[Row], alpha: float = ALPHA) -> list[Verdict]:
    """The verdict on each claim in each setting (corpus, part, protocol, training) that has rows.

    alpha: p below which a claim is decided
    """
    # Once for each row: files have thousands of rows, and each claim asks for several facts.
    described = [(row, facts_of(row)) for row in rows]
    verdicts = []
    for claim in claims:
        keys = [key for key in GROUP if not claim.names(key)]
        if claim.names("protocol"):
            keys = [key for key in keys if key not in PROTOCOL_OPTIONS]
        try:
            ours = _chosen(described, claim, claim.a, claim.at)
            theirs = _chosen(described, claim, claim.b or claim.a, claim.b_at or claim.at)
        except UserError as missing:
            verdicts.append(Verdict(claim, reason=str(missing)))
            continue
        answers = []
        for group in grouped(ours, keys):
            place = identity(group[0], keys)
            partners = [row for row in theirs if identity(row, keys) == place]
            if partners:
                answers.append(_verdict(claim, group, partners))
        verdicts += answers or [Verdict(claim, reason=f"the sides share no {', '.join(keys)}")]

    tested = [verdict for verdict in verdicts if verdict.difference]
    corrected = holm([verdict.p for verdict in tested])
    undecided = sum(p >= alpha for p in corrected)
    for verdict, p in zip(tested, corrected, strict=True):
        verdict.p = p
        if p >= alpha:
            verdict.word = "undecided"
            level = verdict.level * alpha / ALPHA
            verdict.needed = _needed(verdict, level / undecided)  # Holm's next step
    return verdicts


def _needed(verdict: Verdict, level: float) -> str:
    """In words, the sample size that would decide."""
    assert verdict.difference
    estimate, unit = verdict.difference.estimate, verdict.difference.unit
    by_seed = [*verdict.difference.by_seed.values()]
    if 1 < len(by_seed) < SEEDS:  # more seeds would decide, not more text
        estimate, unit = mean_over_seeds(by_seed), "seeds"
    needed = values_needed(estimate, verdict.claim.excess(estimate.mean), level, unit)
    words = f"{needed:,} {unit}" if needed else ""
    disagree = unit == "seeds" and len(by_seed) < SEEDS and verdict.difference.seeds_disagree
    return f"{words}; seeds disagree in sign" if disagree else words


def _chosen(
    described: Sequence[tuple[Row, set[str]]], claim: Claim, side: str, at: Length | list[Length]
) -> list[Row]:
    """The rows of one side; UserError names the first fact that no row has."""
    facts = [*side.split(", "), claim.protocol, *claim.both.split(", ")]
    for fact in filter(None, facts):
        described = [(row, texts) for row, texts in described if fact in texts]
        if not described:
            raise UserError(f"{side}: no row with {fact}")
    keys = {fact.partition(" ")[0] for fact in facts}
    usual = [key for key in ATTENTION_INPUTS if key not in keys]
    lengths = at if isinstance(at, list) else [at]
    answers = []
    for row, _ in described:
        is_usual = all(value_of(row, key) == USUAL[key] for key in usual)
        is_long = any(has_length(row, length) for length in lengths)
        if is_usual and is_long and claim.quantity in row:
            answers.append(row)
    if not answers:
        raise UserError(
            f"{side}: no row with {claim.quantity} at {', '.join(map(str, lengths))} and with usual"
            " attention (or name window, method, …)"
        )
    return answers


def _verdict(claim: Claim, ours: Sequence[Row], theirs: Sequence[Row]) -> Verdict:
    """The verdict in one setting, with an uncorrected p.

    For several lengths, the largest p counts in favour of the claim. Against it, the smallest of k
    values counts, times k.
    """
    verdicts = []
    try:
        ours, theirs = _of_one_kind(ours), _of_one_kind(theirs)
        differences = other_differences(ours[0], theirs[0])
        unnamed = [words for key, words in differences.items() if not claim.names(key)]
        if unnamed:
            raise UserError(
                f"the two sides differ in more than the encoding: {'; '.join(unnamed)}"
                " - measure models that share this, or name it in a, b or both"
            )
        for group in grouped(ours, ["length"]):
            at = group[0]["length"]
            their_rows = [row for row in theirs if claim.b_at or row["length"] == at]
            if their_rows:
                verdicts.append(_at_length(claim, group, their_rows))
        if not verdicts:
            raise UserError("the two sides share no length")
    except UserError as missing:
        return Verdict(claim, reason=str(missing), rows=ours)
    verdict = max(verdicts, key=lambda verdict: verdict.p_holds)
    verdict.word, verdict.p = "holds", 2 * verdict.p_holds
    if verdict.p_holds >= 0.5:
        k = len(verdicts)
        verdict.word, verdict.level = "fails", ALPHA / 2 / k
        verdict.p = min(1.0, 2 * k * (1 - verdict.p_holds))
    return verdict


def _of_one_kind(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows; if there are several kinds, those with default options."""
    several = kinds(rows)
    usual = kinds([row for row in rows if not row.get("pos_emb_args")])
    for choices in (several, usual):
        if len(choices) == 1:
            return next(iter(choices.values()))
    raise UserError(f"several kinds of rows, add a fact: {'; '.join(several)}")


def _at_length(claim: Claim, ours: Sequence[Row], theirs: Sequence[Row]) -> Verdict:
    """The mean difference over seeds, or over the text if there are too few seeds."""
    example = ours[0]
    any_text = claim.b_at is not None and example.get("protocol") in DRAWN
    first, second = ([_measured(claim.quantity, row) for row in rows] for rows in (ours, theirs))
    difference = difference_of(first, second, any_text=any_text)
    estimate = difference.estimate
    if claim.quantity != "perplexity" and estimate.stderr is not None:
        # Half an answer: a share cannot be known more exactly.
        answers = example["windows" if claim.quantity == "accuracy" else "tokens"]
        estimate = replace(estimate, stderr=max(estimate.stderr, 0.5 / answers))
    p_holds = 0.5
    if estimate.stderr:
        t = claim.excess(estimate.mean) / estimate.stderr
        p_holds = 1 - float(scipy.stats.t.cdf(t, estimate.df))
    difference = replace(difference, estimate=estimate)
    return Verdict(claim, rows=[*ours, *theirs], difference=difference, p_holds=p_holds)


def _measured(quantity: str, row: Row) -> Row:
    """The row with the quantity instead of the loss."""
    if quantity == "perplexity":
        return row
    shares = row.get("window_accuracies") or []
    facts = {"loss": row.get(quantity), "block_losses": None, "window_losses": shares}
    if quantity == "accuracy":
        facts |= {"window_losses": [float(share == 1) for share in shares], "window_tokens": None}
    return with_facts(row, facts)


# --- Tables ---


def table_of(verdicts: Sequence[Verdict], source: str) -> Table:
    """One line per claim and setting, with the notes that explain it."""
    examples = [verdict.rows[0] for verdict in verdicts if verdict.rows]
    names = [f"{text_of(row)}: {row.get('protocol')}" for row in examples]
    settings = iter(labels_of(examples, GROUP, names))
    head = ("claim", "on", "verdict", "effect [95 %]", "p", "sample", "would decide")
    body, notes = [], []
    for verdict in verdicts:
        claim, difference = verdict.claim, verdict.difference
        line = [claim.text, next(settings) if verdict.rows else "", verdict.word]
        body.append(line)
        if claim.source:
            notes.append(f"{claim.text}: {claim.source}")
        if difference is None:
            line += [""] * 4
            notes.append(f"no rows: {claim.text}: {verdict.reason}")
            continue
        estimate, unit = difference.estimate, difference.unit
        numbers = np.array([estimate.mean, *estimate.interval()])
        mean, *bounds = [f"{100 * number:+.1f}" for number in numbers]
        if claim.quantity == "perplexity":
            mean, *bounds = [f"{number:+.3g}" for number in 100 * np.expm1(numbers)]
        interval = f" [{', '.join(bounds)}]" if bounds else ""
        if unit != "seeds":
            line[2] += "*"
        if unit == "windows" and estimate.n < FEW:
            notes.append(f"{estimate.n} windows are few: if neighbours correlate, p is too small")
        p = f"{verdict.p:.3f}" if verdict.p >= 0.001 else "<0.001"
        line += [f"{mean} {claim.unit}{interval} at {verdict.rows[0]['length']}", p]
        line += [f"{estimate.n:,} {unit}", verdict.needed]
    tests = sum(verdict.difference is not None for verdict in verdicts)
    notes += [
        f"p: two-sided{corrected_for(tests)}; a claim is decided if p is below {ALPHA:g}",
        "effect: first side minus second, at the length that decides; the interval is not"
        " corrected",
        "would decide: the sample that decides with a power of 80 %, if the effect is as seen",
        f"* fewer than {SEEDS} common seeds: this is about these weights on this text, not about"
        " the encodings",
    ]
    return Table(head, body, list(dict.fromkeys(notes)), title=source)


def table_of_origins(verdicts: Sequence[Verdict]) -> Table:
    """The runs and commits of each claim's rows, for the appendix of a paper."""
    body = []
    for verdict in verdicts:
        runs = {row.get("checkpoint") or row["config_hash"]: None for row in verdict.rows}
        commits = {row.get("commit") or "unknown": None for row in verdict.rows}
        body.append([verdict.claim.text, ", ".join(runs), ", ".join(commits)])
    return Table(("claim", "runs", "commits"), body, title="where the claims come from")
