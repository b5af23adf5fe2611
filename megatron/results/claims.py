"""Claims: lines of YAML about encodings, and what results say of each."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import scipy
from pydantic import BaseModel, Field

from megatron.errors import UserError, did_you_mean, in_words
from megatron.files import read_small
from megatron.results.comparison import ALPHA, SEEDS, Paired, paired
from megatron.results.comparison_table import FEW
from megatron.results.labels import axes_beside, facts_of, kinds, labels_of, other_differences
from megatron.results.row import (
    ATTENTION_INPUTS,
    DEFAULTS,
    DRAWN,
    PROTOCOL_OPTIONS,
    SETTING,
    Row,
    encoding_of,
    grouped,
    identity,
    text_of,
    value_of,
    with_facts,
)
from megatron.results.statistics import (
    Estimate,
    corrected_for,
    holm,
    mean_over_seeds,
    values_needed,
)
from megatron.results.table import ANSWERS_RIGHT, TOKENS_RIGHT, Table
from megatron.strict_yaml import parse

GRAMMAR = """\
A claim is one line:

  A < B [by N %], QUANTITY WHERE [(CONDITIONS)]         kerple_log < alibi, loss from 2048 (tail)
  A > B [by N %], QUANTITY WHERE [(CONDITIONS)]         fox > alibi, accuracy at 4 L (recall)
  A VERB [N %][, QUANTITY] from X to Y [(CONDITIONS)]   rotary loses 20 % from 512 to 4096

  A, B        an encoding, of layers that differ such as rotary/none, with conditions of its own:
              rotary (fraction 0.5) > rotary, …  and  rotary (window 512) < rotary, …
              Of several kinds of rows, a name alone means the one with default options.
  VERB        rises, falls: the number; loses, gains, loses at most: the quality
  N %         of a perplexity, also where the quantity is loss or bits; points of accuracies
  QUANTITY    perplexity (the default), loss, bits per byte, accuracy (of whole answers),
              token accuracy (of their tokens)
  WHERE       at 4096, at 4 L, from 2048, from 512 to 4096. L is the training length.
              The claim must hold at each of several lengths.
  CONDITIONS  separated by commas: a corpus, part or protocol, or a key and its value, such as
              github, tail, window 512. Rows with a window or a method for longer texts answer
              only claims that name this key. So do sides that differ in dtype, windows_per_step,
              trained_on, parent_model or an axis of their sweep."""
ACCURACIES = {"accuracy": ANSWERS_RIGHT, "token accuracy": TOKENS_RIGHT}
QUANTITIES = ("perplexity", "loss", "bits per byte", *ACCURACIES)
GROUP = (*SETTING, "stride", "train_length", "step")  # equal on both sides, if none names them
LONGEST = "1000000000000"  # tokens, of a claim without a limit
LARGEST = 1 << 20  # bytes of a file of claims

_NAME = r"[a-z]\w*(?:/[a-z]\w*)*"
_CONDITIONS = r"[^()\n\t]+"
_PERCENT = r"\d{1,9}(?:\.\d+)?"
_LENGTH = r"\d{1,12}(?: ?L)?|L"
CLAIM = re.compile(
    rf"(?P<name>{_NAME})(?: \((?P<conditions>{_CONDITIONS})\))? "
    rf"(?:(?P<order>[<>]) (?P<other>{_NAME})(?: \((?P<other_conditions>{_CONDITIONS})\))?"
    rf"(?: by (?P<by>{_PERCENT}) ?%)?"
    rf"|(?P<verb>rises|falls|loses|gains)(?P<at_most> at most)?(?: (?P<change>{_PERCENT}) ?%)?)"
    rf"(?:, (?P<quantity>{'|'.join(QUANTITIES)}))?"
    rf" (?:at (?P<at>{_LENGTH})|from (?P<first>{_LENGTH})(?: to (?P<last>{_LENGTH}))?)"
    rf"(?: \((?P<shared>{_CONDITIONS})\))?"
)


class Source(BaseModel, extra="forbid"):
    """Where a paper says what a file claims."""

    paper: str
    section: str
    url: str


class Line(BaseModel, extra="forbid"):
    """A claim, and its place if that is not the file's."""

    claim: str
    source: str = ""


class File(BaseModel, extra="forbid"):
    """A file of claims."""

    source: Source
    claims: list[str | Line] = Field(min_length=1)


@dataclass(frozen=True)
class Side:
    """Rows of an encoding that fulfil conditions, between two lengths such as 4096 and 4 L."""

    encoding: str
    conditions: tuple[str, ...]
    lengths: tuple[str, str]

    def has_length(self, row: Row) -> bool:
        """Whether a row has such a length, where L is its training length."""
        trained = row.get("train_length") or math.nan
        shortest, longest = (
            _number(text) * (trained if "L" in text else 1) for text in self.lengths
        )
        return shortest <= row["length"] <= longest


@dataclass(frozen=True)
class Claim:
    """Says that sign * (ours - theirs) is more than size, in nats or shares.

    theirs: of a change, the rows of the same encoding at the first length
    """

    text: str
    source: str
    ours: Side
    theirs: Side
    is_change: bool
    sign: int
    size: float
    quantity: str

    def names(self, key: str) -> bool:
        """Whether a condition of a side has this key, such as `window` of `window 512`."""
        conditions = (*self.ours.conditions, *self.theirs.conditions)
        return any(condition.startswith(f"{key} ") for condition in conditions)


def _number(length: str) -> int:
    return int(length.rstrip(" L") or 1)


def read_claims(path: Path) -> tuple[str, list[Claim]]:
    """The source and the claims of a file; UserError for a fault."""
    try:
        file = File.model_validate(parse(read_small(path, LARGEST).decode()))
    except (OSError, ValueError) as fault:
        raise UserError(
            f"{path}: cannot be read as claims: {in_words(fault)} - write source (paper, section,"
            " url) and claims, a list of lines, as in configs/claims/kerple.yml"
        ) from None
    claims: dict[str, Claim] = {}
    for number, line in enumerate(file.claims, 1):
        text, source = (line, "") if isinstance(line, str) else (line.claim, line.source)
        try:
            if text in claims:
                raise ValueError("is given twice, which makes all others harder - keep one")
            claims[text] = claim_of(text, source)
        except ValueError as fault:
            raise UserError(f"{path}: claim {number}: {text!r} {fault}\n\n{GRAMMAR}") from None
    return ", ".join(file.source.model_dump().values()), [*claims.values()]


def claim_of(text: str, source: str = "") -> Claim:
    """The claim of one line; ValueError with what is wrong."""
    match = CLAIM.fullmatch(text)
    if match is None:
        quantity = re.search(r", ([a-z ]+) (?:at|from) ", text)
        if not re.search(r" (at|from) [\dL]", text):
            raise ValueError("does not say where - end with at 4096, from 2048 or at 4 L")
        if quantity and quantity[1] not in QUANTITIES:
            raise ValueError(f"has no such quantity: {quantity[1]} - use {', '.join(QUANTITIES)}")
        raise ValueError("is no claim - write A < B or A loses 20 %, and see the grammar")
    quantity = match["quantity"] or "perplexity"
    is_accuracy = quantity in ACCURACIES
    percent = float(match["by"] or match["change"] or 0)
    verb, first, last = match["verb"], match["at"] or match["first"], match["last"]
    if verb and not last:
        raise ValueError("is a change without two lengths - end with from 512 to 4096")

    better = 1 if is_accuracy else -1
    signs = {">": 1, "<": -1, "rises": 1, "falls": -1, "gains": better, "loses": -better}
    sign = signs[match["order"] or verb]
    if sign * percent <= -100 and not is_accuracy:
        raise ValueError("lets a perplexity fall by 100 % or more - write less")
    size = percent / 100 if is_accuracy else sign * math.log1p(sign * percent / 100)
    if match["at_most"]:
        sign, size = -sign, -size

    if last and not verb and ("L" in first) == ("L" in last) and _number(first) > _number(last):
        raise ValueError(f"goes from a longer length to a shorter one - from {last} to {first}")
    lengths = (first, match["at"] or last or LONGEST)
    conditions, other_conditions, shared = (
        tuple(words.split(", ")) if words else ()
        for words in match.group("conditions", "other_conditions", "shared")
    )
    ours = Side(match["name"], conditions + shared, (last, last) if verb else lengths)
    if verb:
        theirs = replace(ours, lengths=(first, first))
    else:
        theirs = Side(match["other"], other_conditions + shared, lengths)
    return Claim(text, source, ours, theirs, verb is not None, sign, size, quantity)


# --- What results say of a claim ---


@dataclass(frozen=True)
class Effect:
    """The difference at one length.

    unit: seeds, blocks or windows, of which the difference is the mean
    p_holds: one-sided, small where the difference speaks for the claim, near 1 against it
    """

    length: int
    paired: Paired
    estimate: Estimate
    p_holds: float

    @property
    def decides(self) -> tuple[Estimate, str]:
        """The estimate that says how large a sample must be, and its unit: two seeds are seeds."""
        differences = [*self.paired.by_seed.values()]
        if not self.paired.is_claim and len(differences) > 1:
            return mean_over_seeds(differences), "seeds"
        return self.estimate, self.paired.unit


@dataclass
class Verdict:
    """What the rows of one setting say of a claim.

    word: holds, fails, undecided or no rows
    example: a row of the setting, if there is one
    effect: at the length that decides
    p: two-sided, corrected for all verdicts of the file
    level: of the one-sided test, before this correction
    needed: values that decide with a power of 80 %, were the effect as large as it is here
    reason: which rows are missing
    """

    claim: Claim
    word: str
    example: Row | None = None
    effect: Effect | None = None
    p: float = 1.0
    level: float = ALPHA / 2
    needed: int | None = None
    reason: str = ""


class NoRows(Exception):
    """Results do not answer a claim; the text says which rows are missing."""


def judged(claims: Sequence[Claim], rows: Sequence[Row]) -> list[Verdict]:
    """Each claim in each setting (corpus, part, protocol, training) whose rows answer it."""
    verdicts = []
    axes = axes_beside(rows)
    for claim in claims:
        shared = [key for key in GROUP if not claim.names(key)]
        if claim.names("protocol"):
            shared = [key for key in shared if key not in PROTOCOL_OPTIONS]
        try:
            ours, theirs = (
                _chosen(rows, side, claim.quantity) for side in (claim.ours, claim.theirs)
            )
            theirs_of = {identity(group[0], shared): group for group in grouped(theirs, shared)}
            pairs = [
                (group, theirs_of.get(identity(group[0], shared)))
                for group in grouped(ours, shared)
            ]
            answers = [(group, partners) for group, partners in pairs if partners]
            if not answers:
                raise NoRows(
                    "the two sides share no corpus, protocol and its options, train_length and step"
                )
        except NoRows as missing:
            verdicts.append(Verdict(claim, "no rows", reason=str(missing)))
            continue
        for group, partners in answers:
            try:
                verdict = _verdict(claim, group, partners, axes)
            except NoRows as missing:
                verdict = Verdict(claim, "no rows", reason=str(missing))
            verdict.example = group[0]
            verdicts.append(verdict)

    tested = [(verdict, verdict.effect) for verdict in verdicts if verdict.effect]
    corrected = holm([verdict.p for verdict, _ in tested])
    undecided = sum(p >= ALPHA for p in corrected)
    for (verdict, effect), p in zip(tested, corrected, strict=True):
        verdict.p = p
        if p >= ALPHA:
            verdict.word = "undecided"
            estimate, unit = effect.decides
            excess = verdict.claim.sign * estimate.mean - verdict.claim.size
            level = verdict.level / undecided  # Holm's next step
            verdict.needed = values_needed(estimate, excess, level, unit)
    return verdicts


def _chosen(rows: Sequence[Row], side: Side, quantity: str) -> Sequence[Row]:
    """The rows of one side; NoRows names the first demand that none fulfils."""
    pos_emb = side.encoding.replace("/", ", ")
    shortest, longest = side.lengths
    several = longest not in (shortest, LONGEST)
    keys = {condition.partition(" ")[0] for condition in side.conditions}
    usual = [key for key in ATTENTION_INPUTS if key not in keys]

    def texts_of(row: Row) -> set[str | None]:
        corpus = row.get("corpus") or ""
        return {corpus, corpus.removeprefix("task:"), row.get("part"), row.get("protocol")}

    def has_quantity(row: Row) -> bool:
        key = quantity.replace(" ", "_")
        if key == "bits_per_byte":
            return row["loss"] is None or row.get(key) is not None
        return key in row

    demands = {"this encoding": lambda row: pos_emb in (row["pos_emb"], encoding_of(row))}
    for word in side.conditions:
        demands[word] = lambda row, word=word: word in texts_of(row) | facts_of(row)
    demands["usual attention (or name window, method, …)"] = lambda row: all(
        value_of(row, key) == DEFAULTS[key] for key in usual
    )
    demands[quantity] = has_quantity
    demands[f"length {shortest}{f' to {longest}' if several else ''}"] = side.has_length
    for name, demand in demands.items():
        fulfilling = [row for row in rows if demand(row)]
        if not fulfilling:
            words = {word for row in rows for word in (row["pos_emb"], *texts_of(row)) if word}
            hint = did_you_mean(pos_emb if name == "this encoding" else name, words)
            raise NoRows(f"{side.encoding}: no row with {name}{hint and f' - {hint}'}")
        rows = fulfilling
    return rows


def _verdict(
    claim: Claim, ours: Sequence[Row], theirs: Sequence[Row], axes: Sequence[str]
) -> Verdict:
    """The verdict in one setting, with a p that is not corrected.

    Of several lengths the largest p counts for the claim. Against it counts the smallest of k,
    times k.
    """
    ours, theirs = _of_one_kind(ours), _of_one_kind(theirs)
    differences = other_differences(ours[0], theirs[0], axes)
    unnamed = [words for key, words in differences.items() if not claim.names(key)]
    if unnamed:
        raise NoRows(
            f"the two sides differ in more than the encoding: {'; '.join(unnamed)}"
            " - measure models that share this, or name it as a condition"
        )
    effects = []
    for length in sorted({row["length"] for row in ours}):
        sides = [
            [row for row in ours if row["length"] == length],
            [row for row in theirs if claim.is_change or row["length"] == length],
        ]
        if all(sides):
            effects.append(_effect(claim, length, sides))
    if not effects:
        raise NoRows("the two sides share no length")
    effect = max(effects, key=lambda effect: effect.p_holds)
    if effect.p_holds < 0.5:
        return Verdict(claim, "holds", effect=effect, p=2 * effect.p_holds)
    k = len(effects)
    p = min(1.0, 2 * k * (1 - effect.p_holds))
    return Verdict(claim, "fails", effect=effect, p=p, level=ALPHA / 2 / k)


def _of_one_kind(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows; of several kinds the one whose options are the defaults."""
    several = kinds(rows)
    usual = kinds([row for row in rows if not row.get("pos_emb_args")])
    for choices in (several, usual):
        if len(choices) == 1:
            return next(iter(choices.values()))
    raise NoRows(f"several kinds of rows, add a condition: {'; '.join(several)}")


def _effect(claim: Claim, length: int, sides: Sequence[Sequence[Row]]) -> Effect:
    """The mean difference over seeds, or with too few of them over the text."""
    for rows in sides:
        if len({row.get("seed") for row in rows}) < len(rows):
            raise NoRows(f"a seed was measured twice at {length} - give the results of one text")
        for row in rows:
            if row["loss"] is None:
                raise NoRows(f"{row['pos_emb']} at {row['length']}: {row.get('reason')}")
    example = sides[0][0]
    ours, theirs = ([_measured(claim.quantity, row) for row in rows] for rows in sides)
    any_text = claim.is_change and example.get("protocol") in DRAWN
    pair = paired(ours, theirs, "the other side", any_text=any_text)
    estimate = pair.difference
    if estimate is None and any_text:
        raise NoRows(
            f"protocol {example.get('protocol')} has other windows at each length, so a change"
            f" needs {SEEDS} seeds, and {len({row.get('seed') for row in ours})} were measured"
            " - train and measure more seeds"
        )
    if estimate is None:
        raise NoRows(pair.reason)
    if claim.quantity in ACCURACIES and estimate.stderr is not None:
        # Half an answer: a share is not known better.
        answers = example["windows" if claim.quantity == "accuracy" else "tokens"]
        estimate = replace(estimate, stderr=max(estimate.stderr, 0.5 / answers))
    p_holds = 0.5
    if estimate.stderr:
        excess = claim.sign * estimate.mean - claim.size
        p_holds = 1 - float(scipy.stats.t.cdf(excess / estimate.stderr, estimate.df))
    return Effect(length, pair, estimate, p_holds)


def _measured(quantity: str, row: Row) -> Row:
    """The row with the quantity in the place of the loss."""
    if quantity not in ACCURACIES:
        return row
    shares = row.get("window_accuracies") or []
    facts = {"loss": row.get(quantity.replace(" ", "_")), "block_losses": None}
    if quantity == "accuracy":
        shares = [float(share == 1) for share in shares]
        facts["window_tokens"] = None
    return with_facts(row, {**facts, "window_losses": shares})


# --- Tables ---


def table_of(verdicts: Sequence[Verdict], source: str) -> Table:
    """One line for each claim and setting, with the notes that its words need."""
    examples = [verdict.example for verdict in verdicts if verdict.example]
    names = [f"{text_of(row)}: {row.get('protocol')}" for row in examples]
    settings = iter(labels_of(examples, GROUP, (), names=names))
    head = ("claim", "on", "verdict", "effect", "95 %", "p", "sample", "would decide")
    body, notes = [], []
    tests = sum(verdict.effect is not None for verdict in verdicts)
    for verdict in verdicts:
        claim, effect, example = verdict.claim, verdict.effect, verdict.example
        line = [claim.text, next(settings) if example else "", verdict.word]
        if claim.source:
            notes.append(f"{claim.text}: {claim.source}")
        if effect is None or example is None:
            body.append([*line, *[""] * 5])
            notes.append(f"no rows for {claim.text}: {verdict.reason}")
            continue
        estimate, unit = effect.estimate, effect.paired.unit
        words = []
        for difference in (estimate.mean, *(estimate.interval() or ())):
            if claim.quantity == "perplexity":
                words.append(f"{100 * math.expm1(min(difference, 100)):+.3g} %")
            elif claim.quantity in ACCURACIES:
                words.append(f"{100 * difference:+.1f} points")
            else:
                if claim.quantity != "loss":
                    difference *= (example.get("bits_per_byte") or math.nan) / (
                        example["loss"] or math.nan
                    )
                words.append(f"{difference:+z.4f}")
        if unit != "seeds":
            line[2] += "*"
        if claim.quantity in ACCURACIES:
            notes.append(ACCURACIES[claim.quantity].name)
        if unit == "windows" and estimate.n < FEW:
            notes.append(f"{estimate.n} windows are few: p is too small if neighbours correlate")
        would_decide = [f"{verdict.needed:,} {effect.decides[1]}"] if verdict.needed else []
        if len(effect.paired.by_seed) == 2 and effect.paired.seeds_disagree:
            would_decide.append("seeds disagree in sign")
        line += [
            f"{words[0]} at {effect.length}",
            " to ".join(words[1:]),
            f"{verdict.p:.3f}" if verdict.p >= 0.001 else "<0.001",
            f"{estimate.n:,} {unit}",
            "; ".join(would_decide),
        ]
        body.append(line)
    notes += [
        f"p: two-sided{corrected_for(tests)}; below {ALPHA:g} one is decided",
        "effect: first minus second at the length that decides; the interval is not corrected",
        "would decide: a sample that decides with a power of 80 %, were the effect the one seen",
        f"* fewer than {SEEDS} common seeds: about these weights on this text, not the encodings",
    ]
    return Table(head, body, list(dict.fromkeys(notes)), title=source)
