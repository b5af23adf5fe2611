"""Checks of encodings from elsewhere: a rotation, a bias, scores, or a model of transformers."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.conformance.checks import examine_in_order, title
from megatron.conformance.subject import (
    FAILS,
    HOLDS,
    NOT_APPLICABLE,
    VERY_FAR,
    Finding,
    Subject,
    at_most,
    largest_difference,
    scores,
    table,
)
from megatron.errors import UserError
from megatron.positions import Position
from megatron.positions.alibi import alibi_slopes

TEXT = torch.arange(130)  # two pieces of 64 and a rest
CONTENTS = 61  # different tokens, which any vocabulary has
LEARNED = ("wpe", "embed_positions", "position_embeddings")  # transformers' names of a table


@dataclass(frozen=True)
class Row:
    """How a text reaches a function.

    tokens: numbers of their contents [length]
    positions: [length]; None: 0, 1, …, which a model counts itself
    mask: for a model, 0 for padding [length]
    piece: tokens that are read at once, after those of a cache
    first: the place of the text's first token
    """

    tokens: Tensor = TEXT
    positions: Tensor | None = None
    mask: Tensor | None = None
    piece: int = 2**20
    first: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Probe:
    """A function of the user, and the shape in which it is called.

    scores: of a row, by an adapter: [heads, length, length]; or logits [length, vocab]
    abilities: what checks may need; see MISSING
    length: tokens of the longest text
    like: an encoding of ours that it should equal
    silent: whether queries and keys are 0, so that scores are the bias
    """

    function: Any
    scores: Callable[["Probe", Row], Tensor]
    abilities: set[str]
    length: int
    heads: int = 4
    head_dim: int = 64
    like: Position | None = None
    silent: bool = False

    def content(self, tokens: Tensor) -> Tensor:
        """Queries and keys: [2, 1, heads, length, head_dim]."""
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randn(2, 1, self.heads, CONTENTS, self.head_dim, generator=generator)
        return drawn[..., tokens % CONTENTS, :] * (not self.silent)

    def read(self, row: Row = Row()) -> Tensor:
        """Scores of the text alone [heads, text, text]; or its logits [text, vocab]."""
        text = slice(row.first, row.first + len(TEXT))
        result = self.scores(self, row)[..., text, :].double()
        return relative(result[..., text]) if result.ndim == 3 else result

    def by_distance(self, heads: int) -> Tensor:
        """The bias at distances 0, 1, … relative to that at 0: [heads, text]."""
        return replace(self, heads=heads, silent=True).read()[:, -1].flip(-1)


def relative(scores: Tensor) -> Tensor:
    """Without what is added to all scores of a query, which softmax does not see."""
    return (scores - scores.diagonal(dim1=-2, dim2=-1)[..., None]).tril()


def of_rotation(probe: Probe, row: Row) -> Tensor:
    positions = torch.arange(len(row.tokens)) if row.positions is None else row.positions
    turned = probe.content(row.tokens).to(row.dtype)
    for where in torch.arange(len(positions)).split(row.piece):
        q, k = turned[..., where, :]
        turned[..., where, :] = torch.stack(probe.function(q, k, positions[None, where]))
    q, k = turned[:, 0].double()
    return q @ k.mT / probe.head_dim**0.5


def of_scores(probe: Probe, row: Row) -> Tensor:
    """A shift by n is a text behind n other tokens."""
    start = 0 if row.positions is None else int(row.positions[0])
    length = len(row.tokens)
    result = torch.zeros(probe.heads, length, length, dtype=torch.float64)
    for queries in torch.arange(length).split(row.piece):
        end = int(queries[-1]) + 1
        q, k = probe.content(pad(row.tokens[:end], (start, 0)))
        block = probe.function(q[:, :, -len(queries) :], k)
        # One row for all queries, as Bloom has, is a bias too.
        result[:, queries, :end] = block[..., start:].double()
    return result


def of_model(probe: Probe, row: Row) -> Tensor:
    model = probe.function
    if model.dtype != row.dtype:
        model = copy.deepcopy(model)
        # Not its frequencies, which from_pretrained(dtype=) leaves in float32 too.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(row.dtype)
    inputs: dict[str, Any] = {"use_cache": row.piece < len(row.tokens)}
    if row.positions is not None and "positions" in probe.abilities:
        inputs["position_ids"] = row.positions[None]
    if row.mask is not None:
        inputs["attention_mask"] = row.mask[None]
    logits = []
    for ids in (row.tokens % CONTENTS)[None].split(row.piece, dim=1):
        output = model(ids, **inputs)
        inputs["past_key_values"] = output.get("past_key_values")
        logits.append(output.logits[0])
    return torch.cat(logits)


def same(probe: Probe, rows: Mapping[str, Row], allowed: float = 1e-3) -> Finding:
    """Whether the text gets the same in each row as alone: the first fault, or the last row.

    What bfloat16 rounds is compared with the same row in float32.
    """
    finding = Finding(HOLDS)
    for where, row in rows.items():
        in_float32 = replace(row, dtype=torch.float32)
        expected = probe.read(Row() if row.dtype == torch.float32 else in_float32)
        finding = close(probe.read(row), expected, allowed, where)
        if finding.verdict == FAILS:
            break
    return finding


def difference(result: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number that is expected."""
    return largest_difference(result, expected) / max(float(expected.abs().max()), 1e-3)


def close(result: Tensor, expected: Tensor, allowed: float, where: str) -> Finding:
    return at_most(allowed, difference(result, expected), f"{where}: relative difference")


def turns_pairs(probe: Probe) -> Finding:
    """Features turn in pairs"""
    size = probe.head_dim
    features = torch.eye(size).expand(1, probe.heads, -1, -1)  # each token has one
    turned, _ = probe.function(features, features, torch.ones(1, size, dtype=torch.long))
    mixed = turned[0, 0] * (1 - torch.eye(size))
    pairs = mixed.nonzero().tolist()
    if not pairs:
        return Finding(FAILS, "position 1 turns nothing")
    if not torch.equal(mixed != 0, mixed.mT != 0) or len(pairs) > size:
        return Finding(FAILS, "it mixes other features, or does not read positions")
    first, other = pairs[0]
    name = {1: "neighbours", len(pairs) // 2: "halves"}.get(other - first, "other pairs")
    sign = "" if mixed[first, other] > 0 else ", backwards"
    return Finding(HOLDS, f"{name}: {first} turns with {other}{sign}; {len(pairs)} of {size} turn")


def authors_slopes(probe: Probe) -> Finding:
    """Slopes of ALiBi are its authors'"""
    agrees, differs = [], []
    for heads in sorted({probe.heads, 8, 12}):  # those of 12 are not geometric
        bias = probe.by_distance(heads)
        authors = torch.tensor(alibi_slopes(heads)).double()
        if torch.allclose(bias, -authors[:, None] * TEXT, rtol=0.01):
            agrees.append(str(heads))
            continue
        first = -float(bias[0, 1])
        name = "geometric" if abs(first - 0.5 ** (8 / heads)) < 1e-3 else "others"
        first = f"the first is {first:.3g} for {authors[0]:.3g}"
        differs.append(f"{name}, not the authors' at {heads} heads: {first}")
    if not agrees:
        return Finding(NOT_APPLICABLE, "its bias is not that of ALiBi")
    return Finding(FAILS if differs else HOLDS, [f"at {', '.join(agrees)} heads", *differs][-1])


def never_grows(probe: Probe) -> Finding:
    """A bias falls with the distance"""
    bias = probe.by_distance(probe.heads)
    last = bias[:, -1]
    # Smaller numbers may be those of a network that is not trained.
    grows = (bias.diff() >= 0).all() and last.max() > 1
    detail = f"at distance {len(TEXT) - 1} {last.min():.3g} to {last.max():.3g}"
    return Finding(FAILS if grows else HOLDS, detail)


def shifts(probe: Probe) -> Finding:
    """A shift of all positions"""
    rows = {f"by {start}": Row(positions=TEXT + start) for start in (1, 7, 120)}
    return same(probe, rows, 0.01)  # some have tables of cosines in bfloat16


def pieces(probe: Probe) -> Finding:
    """Pieces of 1, 7 and 64, with a cache"""
    return same(probe, {f"pieces of {piece}": Row(piece=piece) for piece in (1, 7, 64)})


def padded(before: int, behind: int) -> dict[str, Row]:
    """The text and padding, which has position 0."""
    tokens, mask = pad(torch.stack([TEXT, torch.ones_like(TEXT)]), (before, behind))
    return {"9 tokens": Row(tokens, tokens, mask, first=before)}


def padding_before(probe: Probe) -> Finding:
    """Padding before a text"""
    return same(probe, padded(9, 0))


def padding_behind(probe: Probe) -> Finding:
    """Padding behind a text"""
    return same(probe, padded(0, 9))


def packed(probe: Probe) -> Finding:
    """Texts packed into a row"""
    twice = TEXT.repeat(2)
    # transformers looks for packed texts where no mask is given.
    return same(probe, {"the second text": Row(twice, twice, first=len(TEXT))})


def starts(probe: Probe) -> dict[str, int]:
    """Where the last tokens of a text start, for texts up to the longest."""
    ends = (512, 4096, 32768, probe.length)
    return {f"{end:,} tokens": end - len(TEXT) for end in ends if end <= probe.length}


def far_in_float32(probe: Probe) -> Finding:
    """float32, the last tokens of a long text"""
    rows = {where: Row(positions=TEXT + start) for where, start in starts(probe).items()}
    return same(probe, rows, 0.02)


def far_in_bfloat16(probe: Probe) -> Finding:
    """bfloat16, positions of a long text"""
    short = Row(mask=torch.ones_like(TEXT), dtype=torch.bfloat16)
    rows = {}
    for where, start in starts(probe).items():
        rows[where] = replace(short, positions=TEXT * (1 + start // len(TEXT)))
    # A short text shows what else bfloat16 rounds.
    return same(probe, rows, 0.05 + 3 * difference(probe.read(short), probe.read()))


def later_tokens(probe: Probe) -> Finding:
    """Later tokens"""
    many = min(3000, probe.length - len(TEXT))
    rows = {f"{later} more": Row(torch.arange(len(TEXT) + later)) for later in (1, 64, many)}
    return same(probe, rows)


def agrees_with_ours(probe: Probe) -> Finding:
    """Agreement with an encoding of ours"""
    if probe.like is None:
        return Finding(NOT_APPLICABLE, "name it with --as, or encoding=")
    q, k = probe.content(TEXT).double()
    ours = relative(scores(probe.like.double(), q, k)[0])
    return close(probe.read(), ours, 1e-3, "scores")


# What each check needs, and what to say without.
CHECKS = {
    turns_pairs: "pairs",
    authors_slopes: "bias",
    never_grows: "bias",
    shifts: "shift",
    pieces: "",
    padding_before: "mask",
    padding_behind: "mask",
    packed: "positions",
    far_in_float32: "shift",
    far_in_bfloat16: "positions",
    later_tokens: "",
    agrees_with_ours: "",
}
MISSING = {
    "pairs": "it is no function that turns q and k",
    "bias": "it is no function that adds a bias",
    "mask": "it sees neither positions nor a mask",
    "positions": "it takes no positions",
    "shift": "it takes no positions, or adds learned ones to embeddings",
}


def probe_of(subject: Any, length: int | None, **shape: Any) -> Probe:
    """What a callable is by the names of its parameters; or a model."""
    names = ", ".join(inspect.signature(getattr(subject, "forward", subject)).parameters)
    if hasattr(subject, "config"):
        abilities = {"", "mask"}
        if "position_ids" in names:
            abilities.add("positions")
            if not any(name in str(subject) for name in LEARNED):
                abilities.add("shift")
        longest = length or getattr(subject.config, "max_position_embeddings", VERY_FAR)
        return Probe(subject.eval(), of_model, abilities, longest)
    length = length or VERY_FAR
    if names.startswith("q, k, positions"):
        abilities = {"", "pairs", "mask", "positions", "shift"}
        return Probe(subject, of_rotation, abilities, length, **shape)
    abilities = {"", "bias", "shift"}
    if names.startswith("q, k"):
        return Probe(subject, of_scores, abilities, length, **shape)
    if not names.startswith("heads, queries, keys"):
        raise UserError(
            f"parameters ({names}) do not say what it is; "
            "take (q, k, positions), (heads, queries, keys) or (q, k)"
        )

    def as_scores(q, k):
        return subject(q.shape[1], q.shape[2], k.shape[2])

    return Probe(as_scores, of_scores, abilities, length, **shape, silent=True)


@torch.no_grad()
def examine_anything(
    subject: Any, like: Subject | None = None, length: int | None = None, **shape: Any
) -> list[Finding]:
    """The findings of all checks, in order; UserError for what cannot be called.

    shape: heads and head_dim of a function
    """
    if like and hasattr(subject, "config"):
        raise UserError("--as: a model has more than its encoding; give the function alone")
    position = replace(like, **shape).position() if like else None
    try:
        probe = probe_of(subject, length, **shape, like=position)
        probe.read()
    except UserError:
        raise
    except Exception as fault:
        raise UserError(f"it stops with {type(fault).__name__}: {fault}") from fault
    findings = []
    for trial, need in CHECKS.items():
        if need in probe.abilities:
            findings += examine_in_order(probe, [trial])
        else:
            findings.append(Finding(NOT_APPLICABLE, MISSING[need], title(trial)))
    return findings


def check(
    subject: Any,
    encoding: str | None = None,
    *,
    heads: int = 4,
    head_dim: int = 64,
    length: int | None = None,
    **options: Any,
) -> list[Finding]:
    """Raise AssertionError with the table of findings if something fails: for tests of anybody.

    subject: a function (q, k, positions), (heads, queries, keys) or (q, k), or a model
    encoding, options: what it should equal, as pos_emb and pos_emb_args
    length: tokens of the longest text, at least 256; by default 131072, or what a model names
    """
    like = Subject(encoding, options) if encoding else None
    findings = examine_anything(subject, like, length, heads=heads, head_dim=head_dim)
    if any(finding.verdict == FAILS for finding in findings):
        raise AssertionError("\n" + table(findings))
    return findings
