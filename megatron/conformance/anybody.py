"""Checks of encodings from elsewhere: a rotation, a bias, scores, or a model of transformers."""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from megatron.conformance.checks import examine, title
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
READ = 2 * len(TEXT)  # the first queries of a piece, behind which no check looks
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
    dtype: of queries and keys
    """

    tokens: Tensor = TEXT
    positions: Tensor | None = None
    mask: Tensor | None = None
    piece: int = 2**20
    first: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Probe:
    """What is checked, and the shape in which it is called.

    function: (q, k, positions of q, positions of k) -> scores [1, heads, queries, keys]; or a model
    abilities: what it has of that which checks need
    length: tokens of the longest text
    like: an encoding of ours that it should equal
    """

    function: Any
    abilities: set[str]
    length: int
    heads: int = 4
    head_dim: int = 64
    like: Position | None = None

    def content(self, tokens: Tensor) -> Tensor:
        """Queries and keys: [2, 1, heads, length, head_dim]."""
        torch.manual_seed(1)
        drawn = torch.randn(2, 1, self.heads, CONTENTS, self.head_dim)
        return drawn[..., tokens % CONTENTS, :]

    def read(self, row: Row = Row()) -> Tensor:
        """Scores of the text [heads, text, text]; or its logits [text, vocab]."""
        text = slice(row.first, row.first + len(TEXT))
        if isinstance(self.function, nn.Module):
            return logits(self, row)[text]
        return relative(scores_in_pieces(self, row)[:, text, text])


def relative(scores: Tensor) -> Tensor:
    """Without what is added to all scores of a query, which softmax does not see."""
    return (scores - scores.diagonal(dim1=-2, dim2=-1)[..., None]).tril()


def scores_in_pieces(probe: Probe, row: Row) -> Tensor:
    """[heads, length, length]; a row that starts later stands behind other tokens."""
    positions = torch.arange(len(row.tokens)) if row.positions is None else row.positions
    start = int(positions[0])
    positions = torch.cat([torch.arange(start), positions])[None]
    q, k = probe.content(pad(row.tokens, (start, 0))).to(row.dtype)
    result = torch.zeros(probe.heads, len(row.tokens), q.shape[2], dtype=torch.float64)
    for piece in torch.arange(start, q.shape[2]).split(row.piece):
        end = int(piece[-1]) + 1
        block = probe.function(
            q[:, :, piece], k[:, :, :end], positions[:, piece], positions[:, :end]
        )
        result[:, piece[:READ] - start, :end] = block[..., :READ, :].double()
    return result[..., start:]


def logits(probe: Probe, row: Row) -> Tensor:
    """[length, vocab]"""
    inputs: dict[str, Any] = {"use_cache": row.piece < len(row.tokens)}
    if row.positions is not None and "positions" in probe.abilities:
        inputs["position_ids"] = row.positions[None]
    if row.mask is not None:
        inputs["attention_mask"] = row.mask[None]
    pieces = []
    for ids in (row.tokens[None] % CONTENTS).split(row.piece, dim=1):
        output = probe.function(ids, **inputs)
        inputs["past_key_values"] = output.get("past_key_values")
        pieces.append(output.logits[0])
    return torch.cat(pieces)


def difference(result: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number that is expected."""
    return largest_difference(result, expected) / max(float(expected.abs().max()), 1e-3)


def same(
    probe: Probe, rows: Mapping[str, Row], allowed: float = 1e-3, alone: Row = Row()
) -> Finding:
    """Whether the text gets the same in each row as alone: the worst row."""
    expected = probe.read(alone)
    worst = {difference(probe.read(row), expected): where for where, row in rows.items()}
    return at_most(allowed, max(worst), f"{worst[max(worst)]}: relative difference")


def turns_pairs(probe: Probe) -> Finding:
    """Features turn in pairs"""
    features = torch.eye(probe.head_dim).expand(1, probe.heads, -1, -1)  # one for each token
    zeros = torch.zeros(1, probe.head_dim, dtype=torch.long)
    turned = probe.function(features, features, zeros + 1, zeros)[0, 0]
    pairs = turned.triu(1).nonzero()  # [pairs, 2]
    if len(pairs.unique()) < max(2, pairs.numel()):
        return Finding(FAILS, f"position 1 mixes {len(pairs)} pairs of features")
    first, other = pairs[0].tolist()
    name = {1: "neighbours", len(pairs): "halves"}.get(other - first, "other pairs")
    sign = "" if turned[first, other] > 0 else ", backwards"
    return Finding(HOLDS, f"{len(pairs)} pairs, {name}: {first} turns with {other}{sign}")


def by_distance(probe: Probe, heads: int) -> Tensor:
    """The bias at distances 0, 1, … relative to that at 0: [heads, text]."""
    zeros = torch.zeros(1, heads, len(TEXT), probe.head_dim)
    return relative(probe.function(zeros, zeros)[0].double())[:, -1].flip(-1)


def authors_slopes(probe: Probe) -> Finding:
    """Slopes of ALiBi are its authors'"""
    for heads in (8, probe.heads, 12):
        authors = torch.tensor(alibi_slopes(heads)).double()
        slopes = -by_distance(probe, heads)[:, -1] / (len(TEXT) - 1)
        if torch.allclose(slopes, authors, rtol=0.01):
            continue
        if heads == 8:
            return Finding(NOT_APPLICABLE, "its bias is not that of ALiBi")
        first = float(slopes[0])
        name = "geometric" if abs(first - 0.5 ** (8 / heads)) < 1e-3 else "others"
        numbers = f"the first is {first:.3g} for {authors[0]:.3g}"
        return Finding(FAILS, f"{name}, not the authors' at {heads} heads: {numbers}")
    return Finding(HOLDS, f"at 8, {probe.heads} and 12 heads")


def never_grows(probe: Probe) -> Finding:
    """A bias falls with the distance"""
    bias = by_distance(probe, probe.heads)
    # Smaller numbers may be those of a network that is not trained.
    grows = (bias.diff() >= 0).all() and bias.max() > 1
    low, high = bias[:, -1].aminmax()
    return Finding(FAILS if grows else HOLDS, f"at distance 129 {low:.3g} to {high:.3g}")


def shifts(probe: Probe) -> Finding:
    """A shift of all positions"""
    rows = {f"by {start}": Row(positions=TEXT + start) for start in (1, 7, 120)}
    return same(probe, rows, 0.01)  # some have tables of cosines in bfloat16


def pieces(probe: Probe) -> Finding:
    """Pieces of 1, 7 and 64, with a cache"""
    return same(probe, {f"pieces of {piece}": Row(piece=piece) for piece in (1, 7, 64)})


def padded(probe: Probe, before: int, behind: int) -> Finding:
    tokens, mask = pad(torch.stack([TEXT, torch.ones_like(TEXT)]), (before, behind))
    return same(probe, {"9 tokens": Row(tokens, tokens, mask, first=before)})


def padding_before(probe: Probe) -> Finding:
    """Padding before a text"""
    return padded(probe, 9, 0)


def padding_behind(probe: Probe) -> Finding:
    """Padding behind a text"""
    return padded(probe, 0, 9)


def packed(probe: Probe) -> Finding:
    """Texts packed into a row"""
    twice = TEXT.repeat(2)
    # transformers looks for packed texts where no mask is given.
    return same(probe, {"the second text": Row(twice, twice, first=len(TEXT))})


def far_in_float32(probe: Probe) -> Finding:
    """float32, the last tokens of a long text"""
    positions = TEXT + probe.length - len(TEXT)
    return same(probe, {f"at {probe.length:,}": Row(positions=positions)}, 0.02)


def far_in_bfloat16(probe: Probe) -> Finding:
    """bfloat16, positions of a long text"""
    exact = Row(positions=TEXT * (probe.length // len(TEXT)))
    rounded = replace(exact, dtype=torch.bfloat16)
    return same(probe, {f"up to {probe.length:,}": rounded}, 0.05, exact)


def later_tokens(probe: Probe) -> Finding:
    """Later tokens"""
    lengths = (131, 194, min(3000, probe.length))
    return same(probe, {f"a text of {length:,}": Row(torch.arange(length)) for length in lengths})


def agrees_with_ours(probe: Probe) -> Finding:
    """Agreement with an encoding of ours"""
    if probe.like is None:
        return Finding(NOT_APPLICABLE, "name it with --as, or encoding=")
    q, k = probe.content(TEXT).double()
    ours = relative(scores(probe.like.double(), q, k)[0])
    return at_most(1e-3, difference(probe.read(), ours), "relative difference")


SHIFT = "positions that can be shifted"
# What each check needs.
CHECKS = {
    turns_pairs: "turned q and k",
    authors_slopes: "bias",
    never_grows: "bias",
    shifts: SHIFT,
    pieces: "",
    padding_before: "mask",
    padding_behind: "mask",
    packed: "positions",
    far_in_float32: SHIFT,
    far_in_bfloat16: "turned q and k",
    later_tokens: "",
    agrees_with_ours: "",
}


def with_rotation(turn):
    def scores(q, k, q_positions, k_positions):
        queries, keys = q.shape[2], k.shape[2]
        sizes = [keys - queries, queries] if keys > queries else [keys]
        turned = []
        # Keys of a cache were turned before the new tokens came.
        for old, where in zip(k.split(sizes, dim=2), k_positions.split(sizes, dim=1), strict=True):
            turned.append(turn(old, old, where)[1].double())
        q = turn(q, q, q_positions)[0][:, :, :READ].double()
        return q @ torch.cat(turned, dim=2).mT / q.shape[3] ** 0.5

    return scores


def with_bias(bias):
    def scores(q, k, *positions):
        return q @ k.mT / q.shape[3] ** 0.5 + bias(q.shape[1], q.shape[2], k.shape[2])

    return scores


def with_scores(scores):
    return lambda q, k, *positions: scores(q, k)


KINDS = {
    "q, k, positions": (with_rotation, {"", "turned q and k", "mask", "positions", SHIFT}),
    "heads, queries, keys": (with_bias, {"", "bias", SHIFT}),
    "q, k": (with_scores, {"", "bias", SHIFT}),
}


def probe_of(subject: Any, length: int | None, **shape: Any) -> Probe:
    """What a callable is by the names of its parameters; or a model."""
    names = ", ".join(inspect.signature(getattr(subject, "forward", subject)).parameters)
    if hasattr(subject, "config"):
        abilities = {"", "mask"}
        if "position_ids" in names:
            abilities.add("positions")
            if not any(name in str(subject) for name in LEARNED):
                abilities.add(SHIFT)
        longest = length or getattr(subject.config, "max_position_embeddings", VERY_FAR)
        return Probe(copy.deepcopy(subject).float().eval(), abilities, longest)
    for parameters, (as_scores, abilities) in KINDS.items():
        if names.startswith(parameters):
            return Probe(as_scores(subject), abilities, length or VERY_FAR, **shape)
    choices = " or ".join(f"({parameters})" for parameters in KINDS)
    raise UserError(f"parameters ({names}) do not say what it is; take {choices}")


@torch.no_grad()
def examine_anything(
    subject: Any, like: Subject | None = None, length: int | None = None, **shape: Any
) -> list[Finding]:
    """The findings of all checks, in order; UserError for what cannot be called.

    like, shape: for a function, what it should equal, and its heads and head_dim
    """
    if like and hasattr(subject, "config"):
        raise UserError("--as: a model has more than its encoding; give the function alone")
    try:
        probe = probe_of(subject, length, **shape, like=like and like.position())
        probe.read()
    except UserError:
        raise
    except Exception as fault:
        raise UserError(f"it stops with {type(fault).__name__}: {fault}") from fault
    findings = []
    for trial, need in CHECKS.items():
        if need in probe.abilities:
            findings += examine(probe, [trial])
        else:
            findings.append(Finding(NOT_APPLICABLE, f"it has no {need}", title(trial)))
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
    like = Subject(encoding, options, heads, head_dim) if encoding else None
    findings = examine_anything(subject, like, length, heads=heads, head_dim=head_dim)
    if any(finding.verdict == FAILS for finding in findings):
        raise AssertionError("\n" + table(findings))
    return findings
