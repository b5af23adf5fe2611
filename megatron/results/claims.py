"""Claims: lines of YAML about encodings, and what results say of each."""

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from megatron.errors import UserError, did_you_mean, in_words
from megatron.files import read_small
from megatron.results.comparison import (
    ALPHA,
    SEEDS,
    differences_by_seed,
    of_common_seeds,
    over_text,
    why_not_paired,
)
from megatron.results.comparison_table import FEW
from megatron.results.labels import axes_beside, facts_of, kinds, labels_of, other_differences
from megatron.results.row import (
    ATTENTION_INPUTS,
    DEFAULTS,
    LONGPPL,
    SETTING,
    TASK,
    Row,
    encoding_of,
    identity,
    text_of,
    value_of,
    with_facts,
)
from megatron.results.statistics import (
    Estimate,
    holm,
    mean_over_seeds,
    t_distribution,
    values_needed,
)
from megatron.results.table import ANSWERS_RIGHT, FEW_KEYS, TOKENS_RIGHT, Table
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
  QUANTITY    perplexity (the default), longppl, loss, bits per byte, accuracy (of whole answers),
              token accuracy (of their tokens)
  WHERE       at 4096, at 4 L, from 2048, from 512 to 4096. L is the training length.
              The claim must hold at each of several lengths.
  CONDITIONS  separated by commas: a corpus, part or protocol, or a key and its value, such as
              github, tail, window 512. Rows with a window or a method for longer texts answer
              only claims that name this key. So do sides that differ in dtype, windows_per_step,
              trained_on, parent_model or an axis of their sweep."""
PERPLEXITIES = ("perplexity", LONGPPL)
ACCURACIES = {"accuracy": ANSWERS_RIGHT, "token accuracy": TOKENS_RIGHT}
QUANTITIES = (*PERPLEXITIES, "loss", "bits per byte", *ACCURACIES)
OWN_TEXT = ("paper", TASK)  # protocols that draw other windows at each length
GROUP = (*SETTING, "stride", "train_length", "step")  # equal on both sides, if none names them
LONGEST = "1000000000000"  # tokens, of a claim without a limit
LARGEST = 1 << 20  # bytes of a file of claims

_NAME = r"[a-z]\w*(?:/[a-z]\w*)*"
_CONDITIONS = r"[^()\n\t]+"
_PERCENT = r"\d{1,9}(?:\.\d+)?"
_LENGTH = r"\d{1,12}(?: ?L)?|L"
CLAIM = re.compile(
    rf"(?P<name>{_NAME})(?: \((?P<own>{_CONDITIONS})\))? "
    rf"(?:(?P<order>[<>]) (?P<other>{_NAME})(?: \((?P<others>{_CONDITIONS})\))?"
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


class OwnSource(BaseModel, extra="forbid"):
    """A claim from another place than the others of its file."""

    claim: str
    source: str


class File(BaseModel, extra="forbid"):
    """A file of claims."""

    source: Source
    claims: list[str | OwnSource] = Field(min_length=1)


@dataclass(frozen=True)
class Side:
    """Rows of an encoding that fulfil conditions, between two lengths such as 4096 and 4 L."""

    encoding: str
    conditions: tuple[str, ...]
    shortest: str
    longest: str

    def has_length(self, row: Row) -> bool:
        """Whether a row has such a length, where L is its training length."""
        trained = row.get("train_length") or math.nan
        shortest, longest = (
            _number(text) * (trained if "L" in text else 1)
            for text in (self.shortest, self.longest)
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
    except ValidationError as fault:
        first = fault.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"{path}: {place}: {first['msg']} - write source (paper, section, url) and claims,"
            " a list of lines"
        ) from None
    except (OSError, ValueError) as fault:
        raise UserError(
            f"{path}: cannot be read as claims: {in_words(fault)}"
            " - write a file such as configs/claims/kerple.yml"
        ) from None
    claims: dict[str, Claim] = {}
    for number, one in enumerate(file.claims, 1):
        text, source = (one, "") if isinstance(one, str) else (one.claim, one.source)
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
        given = re.search(r", ([a-z ]+) (?:at|from) ", text)
        if not re.search(r" (at|from) [\dL]", text):
            raise ValueError("does not say where - end with at 4096, from 2048 or at 4 L")
        if given and given[1] not in QUANTITIES:
            raise ValueError(f"has no such quantity: {given[1]} - use {', '.join(QUANTITIES)}")
        raise ValueError("is no claim - write A < B or A loses 20 %, and see the grammar")
    quantity = match["quantity"] or PERPLEXITIES[0]
    is_accuracy = quantity in ACCURACIES
    percent = float(match["by"] or match["change"] or 0)
    verb, last = match["verb"], match["last"]
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

    first = match["at"] or match["first"]
    longest = match["at"] or last or LONGEST
    if last and not verb and ("L" in first) == ("L" in last) and _number(first) > _number(last):
        raise ValueError(f"goes from a longer length to a shorter one - from {last} to {first}")
    own, others, shared = (
        tuple(words.split(", ")) if words else ()
        for words in match.group("own", "others", "shared")
    )
    name, other = match.group("name", "other")
    ours = Side(name, own + shared, last if verb else first, longest)
    theirs = Side(other or name, others + shared, first, first if verb else longest)
    return Claim(
        text,
        source,
        ours,
        theirs,
        is_change=verb is not None,
        sign=sign,
        size=size,
        quantity=quantity,
    )


# --- What results say of a claim ---


@dataclass(frozen=True)
class Effect:
    """The difference at one length.

    unit: seeds, blocks or windows, of which the difference is the mean
    p_holds: one-sided, small where the difference speaks for the claim, near 1 against it
    by_seed: the difference of each common seed, if it has one text
    """

    length: int
    estimate: Estimate
    unit: str
    p_holds: float
    by_seed: Sequence[float]

    @property
    def decides(self) -> tuple[Estimate, str]:
        """The estimate that says how large a sample must be, and its unit: two seeds are seeds."""
        if self.unit == "seeds" or len(self.by_seed) < 2:
            return self.estimate, self.unit
        return mean_over_seeds(self.by_seed), "seeds"


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
        groups: dict[Hashable, tuple[list[Row], list[Row]]] = {}
        shared = [key for key in GROUP if not claim.names(key)]
        try:
            for number, side in enumerate((claim.ours, claim.theirs)):
                for row in _chosen(rows, side, claim.quantity):
                    groups.setdefault(identity(row, shared), ([], []))[number].append(row)
            answers = [pair for pair in groups.values() if all(pair)]
            if not answers:
                raise NoRows(
                    "the two sides share no corpus, protocol and its options, train_length and step"
                )
        except NoRows as missing:
            verdicts.append(Verdict(claim, "no rows", reason=str(missing)))
            continue
        for pair in answers:
            try:
                verdict = _verdict(claim, *pair, axes)
            except NoRows as missing:
                verdict = Verdict(claim, "no rows", reason=str(missing))
            verdict.example = pair[0][0]
            verdicts.append(verdict)

    tested = [one for one in verdicts if one.effect]
    corrected = holm([one.p for one in tested])
    undecided = sum(p >= ALPHA for p in corrected)
    for one, p in zip(tested, corrected, strict=True):
        assert one.effect is not None
        one.p = p
        if p >= ALPHA:
            one.word = "undecided"
            estimate, unit = one.effect.decides
            excess = one.claim.sign * estimate.mean - one.claim.size
            level = one.level / undecided  # Holm's next step
            one.needed = values_needed(estimate, excess, level, unit)
    return verdicts


def _chosen(rows: Sequence[Row], side: Side, quantity: str) -> Sequence[Row]:
    """The rows of one side; NoRows names the first demand that none fulfils."""
    keys = {condition.partition(" ")[0] for condition in side.conditions}
    usual = [key for key in ATTENTION_INPUTS if key not in keys]

    def texts_of(row: Row) -> set[str | None]:
        corpus = row.get("corpus") or ""
        return {corpus, corpus.removeprefix("task:"), row.get("part"), row.get("protocol")}

    def has_quantity(row: Row) -> bool:
        of_key_tokens = row.get("protocol") == LONGPPL
        key = quantity.replace(" ", "_")
        if key == LONGPPL or of_key_tokens:
            return of_key_tokens and key == LONGPPL
        has_bytes = row["loss"] is None or row.get("bits_per_byte") is not None
        return has_bytes if key == "bits_per_byte" else key in row

    pos_emb = side.encoding.replace("/", ", ")
    demands = {"this encoding": lambda row: pos_emb in (row["pos_emb"], encoding_of(row))}
    for word in side.conditions:
        demands[word] = lambda row, word=word: word in texts_of(row) | facts_of(row)
    demands["usual attention (or name window, method, …)"] = lambda row: all(
        value_of(row, key) == DEFAULTS[key] for key in usual
    )
    demands[quantity] = has_quantity
    several = side.longest not in (side.shortest, LONGEST)
    demands[f"length {side.shortest}{f' to {side.longest}' * several}"] = side.has_length
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
        mine = [row for row in ours if row["length"] == length]
        others = [row for row in theirs if claim.is_change or row["length"] == length]
        if others:
            effects.append(_effect(claim, length, mine, others))
    if not effects:
        raise NoRows("the two sides share no length")
    effect = max(effects, key=lambda one: one.p_holds)
    if effect.p_holds < 0.5:
        return Verdict(claim, "holds", effect=effect, p=2 * effect.p_holds)
    k = len(effects)
    p = min(1.0, 2 * k * (1 - effect.p_holds))
    return Verdict(claim, "fails", effect=effect, p=p, level=ALPHA / 2 / k)


def _of_one_kind(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows; of several kinds the one whose options are the defaults."""
    several = kinds(rows)
    if len(several) == 1:
        return rows
    usual = kinds([row for row in rows if not row.get("pos_emb_args")])
    if len(usual) != 1:
        raise NoRows(f"several kinds of rows, add a condition: {'; '.join(several)}")
    (found,) = usual.values()
    return found


def _effect(claim: Claim, length: int, ours: Sequence[Row], theirs: Sequence[Row]) -> Effect:
    """The mean difference over seeds, or with too few of them over the text."""
    sides = []
    for rows in (ours, theirs):
        if len({row.get("seed") for row in rows}) < len(rows):
            raise NoRows(f"a seed was measured twice at {length} - give the results of one text")
        side = [_measured(claim.quantity, row) for row in rows]
        for row in side:
            if row["loss"] is None:
                raise NoRows(f"{row['pos_emb']} at {row['length']}: {row.get('reason')}")
        sides.append(side)
    first, second = of_common_seeds(*sides)
    any_text = claim.is_change and ours[0].get("protocol") in OWN_TEXT
    by_seed = [*differences_by_seed(first, second, any_text=any_text).values()]
    if len(by_seed) >= SEEDS:
        unit = "seeds"
        estimate = mean_over_seeds(by_seed)
    else:
        if reason := why_not_paired(first, second, "the other side"):
            raise NoRows(reason)
        rows = [*first, *second]
        key = "block_losses" if all(row.get("block_losses") for row in rows) else "window_losses"
        if len({len(row.get(key) or ()) for row in rows}) > 1:
            raise NoRows("old rows without losses of blocks - measure them again")
        text = over_text(first, second)
        estimate, unit = text.estimate, text.unit

    if claim.quantity in ACCURACIES and estimate.stderr is not None:
        # Half an answer: a share is not known better.
        answers = ours[0]["windows" if claim.quantity == "accuracy" else "tokens"]
        estimate = replace(estimate, stderr=max(estimate.stderr, 0.5 / answers))
    excess = claim.sign * estimate.mean - claim.size
    p_holds = 0.5
    if estimate.stderr:
        p_holds = 1 - t_distribution(excess / estimate.stderr, estimate.df)
    return Effect(length, estimate, unit, p_holds, by_seed)


def _measured(quantity: str, row: Row) -> Row:
    """The row with the quantity in the place of the loss, and the hash of what it is about."""
    if quantity == LONGPPL:  # the key tokens are the text
        return with_facts(row, {"text": row.get("key_text")})
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
    examples = [one.example for one in verdicts if one.example]
    names = [f"{text_of(row)}: {row.get('protocol')}" for row in examples]
    settings = iter(labels_of(examples, GROUP, (), names=names))
    head = ("claim", "on", "verdict", "effect", "95 %", "p", "sample", "would decide")
    body, notes = [], []
    tests = sum(one.effect is not None for one in verdicts)
    for one in verdicts:
        line = [one.claim.text, next(settings) if one.example else "", one.word]
        if one.claim.source:
            notes.append(f"{one.claim.text}: {one.claim.source}")
        if one.effect is None or one.example is None:
            body.append([*line, *[""] * 5])
            notes.append(f"no rows for {one.claim.text}: {one.reason}")
            continue
        estimate, unit = one.effect.estimate, one.effect.unit
        quantity, example = one.claim.quantity, one.example
        bits = (example.get("bits_per_byte") or math.nan) / (example["loss"] or math.nan)
        effect = []
        for difference in (estimate.mean, *(estimate.interval() or ())):
            if quantity in PERPLEXITIES:
                effect.append(f"{100 * math.expm1(min(difference, 100)):+.3g} %")
            elif quantity in ACCURACIES:
                effect.append(f"{100 * difference:+.1f} points")
            else:
                effect.append(f"{difference * (bits if quantity != 'loss' else 1):+.4f}")
        if unit != "seeds":
            line[2] += "*"
        if quantity in ACCURACIES:
            notes.append(ACCURACIES[quantity].name)
        if quantity == LONGPPL and example["tokens"] < FEW_KEYS:
            notes.append(f"few key tokens: {example['tokens']}")
        if unit == "windows" and estimate.n < FEW:
            notes.append(f"{estimate.n} windows are few: p is too small if neighbours correlate")
        would_decide = [f"{one.needed:,} {one.effect.decides[1]}"] if one.needed else []
        if len(one.effect.by_seed) == 2 and math.prod(one.effect.by_seed) < 0:
            would_decide.append("seeds disagree in sign")
        line += [
            f"{effect[0]} at {one.effect.length}",
            " to ".join(effect[1:]),
            f"{one.p:.3f}" if one.p >= 0.001 else "<0.001",
            f"{estimate.n:,} {unit}",
            "; ".join(would_decide),
        ]
        body.append(line)
    notes += [
        f"p: two-sided, with Holm's correction for {tests} comparisons; below {ALPHA:g} one is"
        " decided",
        "effect: first minus second at the length that decides; the interval is not corrected",
        "would decide: a sample that decides with a power of 80 %, were the effect the one seen",
        f"* fewer than {SEEDS} common seeds: about these weights on this text, not the encodings",
    ]
    return Table(head, body, list(dict.fromkeys(notes)), title=source)
