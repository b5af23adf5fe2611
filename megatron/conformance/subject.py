"""A small encoding to be checked, what its hooks do, and the finding of a check."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any

import torch
from torch import Tensor

from megatron.attention.eager import all_scores
from megatron.attention.terms import Content, Terms
from megatron.config.schema import Model
from megatron.errors import UserError
from megatron.model.gpt import GPT
from megatron.model.settings import Architecture, AttentionSettings
from megatron.positions import Position, Shape, build

VOCAB = 61
FAR, VERY_FAR = 16384, 131072
CHUNK = 32  # tokens whose treatment is compared
HOLDS, FAILS, FACT, NOT_APPLICABLE = "ok", "FAIL", "no", "n/a"


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    verdict: HOLDS, FAILS, FACT (it does not hold, and need not) or NOT_APPLICABLE
    detail: the numbers, or the reason
    check: the sentence that was checked
    """

    verdict: str
    detail: str = ""
    check: str = ""


def at_most(allowed: float, worst: float, measured: str = "largest difference") -> Finding:
    """Holds if the worst number is within what is allowed."""
    if worst <= allowed:
        return Finding(HOLDS, f"{measured} {worst:.1e}")
    return Finding(FAILS, f"{measured} {worst:.1e}, allowed {allowed:g}")


def table(findings: Sequence[Finding], columns: int = 100) -> str:
    """A line for each finding, wrapped: verdict, what was checked, numbers."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        line = f"  {finding.verdict:4}  {finding.check:{width}}  {finding.detail}"
        lines.append(fill(line, columns, subsequent_indent=" " * (width + 10)))
    return "\n".join(lines)


def largest_difference(first: Tensor, second: Tensor) -> float:
    """The largest |first - second|, infinite for nan; ValueError if shapes differ."""
    if first.shape != second.shape:
        raise ValueError(f"{list(first.shape)} and {list(second.shape)} cannot be compared")
    difference = first.detach().double() - second.detach().double()
    if not difference.numel():
        return 0.0
    return float(difference.abs().nan_to_num(math.inf).max())


def largest_difference_in(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The same over tensors of the same names; ValueError if one side lacks a name."""
    if first.keys() != second.keys():
        raise ValueError(f"{list(first)} and {list(second)} cannot be compared")
    return max((largest_difference(first[name], second[name]) for name in first), default=0.0)


def random_ids(length: int, batch: int = 1) -> Tensor:
    """Token numbers of a random text: [batch, length] int64."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(VOCAB, (batch, length), generator=generator)


@dataclass(frozen=True)
class Subject:
    """An encoding with its options, and the small shape that it is checked in."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    heads: int = 4
    head_dim: int = 8
    train_length: int = 64
    vocab: int = VOCAB

    def position(self, seed: int = 0) -> Position:
        """The encoding with first values of this seed."""
        torch.manual_seed(seed)
        shape = Shape(self.heads, self.head_dim, self.heads * self.head_dim, self.train_length)
        return build(self.name, shape, **self.options).eval()

    def gpt(self, backend: str = "auto", layers: int = 2) -> GPT:
        """A small model with the encoding: one for all layers, or one for each if it needs that."""
        positions = [self.position(seed) for seed in range(layers)]
        section = Model(
            hidden_size=self.heads * self.head_dim,
            num_layers=layers,
            num_attention_heads=self.heads,
            heads_per_query=positions[0].heads_per_query,
            seq_length=self.train_length,
            max_position_embeddings=self.train_length,
            init_method_std=0.2,  # large, so that attention is far from uniform
            output_layer_init_method="normal",
        )
        torch.manual_seed(0)
        return GPT(
            Architecture.of(section),
            AttentionSettings(attention_backend=backend),
            positions=positions if positions[0].per_layer else positions[:1],
            vocab=self.vocab,
        ).eval()


def tables(position: Position, length: int) -> dict[str, Tensor]:
    """The tables that an encoding has, by name: each [heads, length]."""
    by_name = {"bias": position.distance_bias(length), "weight": position.distance_weight(length)}
    return {name: table for name, table in by_name.items() if table is not None}


def biases(position: Position, length: int) -> dict[str, Tensor]:
    """The tables, and the bias by index of the last query: each [heads, length]."""
    by_name = tables(position, length)
    if position.has("index_bias"):
        last = torch.tensor([length - 1])
        by_name["index bias"] = position.index_bias(last, torch.arange(length))[:, 0]
    return by_name


def scores(
    position: Position, q: Tensor, k: Tensor, x: Tensor | None = None, start: int = 0
) -> Tensor:
    """q·k/√head_dim with all that the encoding does to it: [batch, heads, length, length].

    Scores of later keys are 0. The first token is at `start`.
    q, k [batch, heads, length, head_dim]; x [batch, length, hidden]: the layer's input, for content
    """
    scale = position.score_scale(torch.arange(start + 1, start + q.shape[2] + 1))
    q, k = position.on_queries_keys(q, k, start)
    q = q if scale is None else q * scale[..., None]
    options: dict[str, Any] = {}
    if position.has("index_bias"):
        options["index_bias"] = lambda i, j: position.index_bias(start + i, start + j)
    if x is not None:
        q, k = position.on_queries_keys_by_content(q, k, x, {})
        if position.has("score_bias"):
            options["content"] = Content.of(position.score_bias(x, {}), q.shape[2])
        if position.has("on_scores"):
            options["on_scores"] = lambda scores: position.on_scores(scores, x, {})
        if position.has("block_scores"):
            options["scores"] = position.block_scores(q, k, x, {})
    terms = Terms(**tables(position, q.shape[2]), **options)
    return all_scores(q, k, terms).tril()


def effects_before(position: Position, end: int) -> dict[str, Tensor]:
    """What an encoding does to the 32 tokens before `end`, and its tables of that length."""
    shape = position.shape
    start = end - CHUNK
    torch.manual_seed(1)
    x = torch.randn(1, CHUNK, shape.hidden)
    q, k = torch.randn(2, 1, shape.heads, CHUNK, shape.head_dim)
    embeddings = position.on_embeddings(x, start=start)
    effects = {"embedding": position.on_embeddings_by_ids(embeddings, random_ids(CHUNK), {})}
    effects["score"] = scores(position, q, k, x, start)
    return effects | biases(position, end)


def infinite_effect(effects: dict[str, Tensor]) -> str:
    """Which effect is not finite, in words; empty if all are."""
    for name, effect in effects.items():
        if not effect.isfinite().all():
            return f"{name} is not finite"
    return ""


def longest_length(position: Position) -> int:
    """The first of 16384, 4096 and the training length that the encoding can compute."""
    one_token = torch.zeros(1, 1, position.shape.hidden)
    for length in (FAR, 4096):
        try:
            position.on_embeddings(one_token, start=length - 1)
        except UserError:
            continue
        return length
    return position.shape.train_length
