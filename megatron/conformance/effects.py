"""What the hooks of an encoding do: to tables, to scores, and to tokens far from the start."""

import math

import torch
from torch import Tensor

from megatron.attention.content import ScoreBias
from megatron.errors import UserError
from megatron.positions import Position

FAR, VERY_FAR = 16384, 131072
CHUNK = 32  # tokens whose treatment is compared


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


def adds_to_embeddings(position: Position) -> bool:
    """Whether the encoding changes what enters the first layer."""
    return bool(position.on_embeddings(torch.zeros(1, 8, position.shape.hidden)).any())


def scores(
    position: Position, q: Tensor, k: Tensor, x: Tensor | None = None, start: int = 0
) -> Tensor:
    """q·k/√head_dim with all that the encoding does to it: [heads, length, length].

    Scores of later keys are 0. The first token is at `start`.
    q, k [1, heads, length, head_dim]; x [1, length, hidden]: the layer's input, for on_scores
    """
    length = q.shape[2]
    q, k = position.on_queries_keys(q, k, start)
    if x is not None:
        q, k = position.on_queries_keys_by_content(q, k, x, {})
    index = torch.arange(length)
    distance = (index[:, None] - index).clamp(min=0)
    result = (q @ k.transpose(-1, -2))[0] / math.sqrt(q.shape[-1])
    by_name = tables(position, length)
    if "weight" in by_name:
        result = result * by_name["weight"][:, distance]
    if "bias" in by_name:
        result = result + by_name["bias"][:, distance]
    if position.has("index_bias"):
        result = result + position.index_bias(start + index, start + index)
    if position.has("score_bias") and x is not None:
        result = result + content_bias(position, x)
    if position.has("on_scores") and x is not None:
        result = position.on_scores(result[None], x, {})[0]
    return result.tril()


def content_bias(position: Position, x: Tensor) -> Tensor:
    """What score_bias adds to a text without earlier tokens: [heads, length, length].

    The key of the query itself gets 0.
    """
    score_bias = ScoreBias.of(position.score_bias(x, {}))
    assert score_bias is not None
    own_key = torch.arange(x.shape[1])
    return score_bias.bias(own_key)[0].to(position.origin.dtype)


def effects_before(position: Position, end: int) -> dict[str, Tensor]:
    """What each hook does to the 32 tokens before `end`, by a name for the hook."""
    shape = position.shape
    start = end - CHUNK
    torch.manual_seed(1)
    x = torch.randn(1, CHUNK, shape.hidden)
    q, k = torch.randn(2, 1, shape.heads, CHUNK, shape.head_dim)
    effects = {"embedding": position.on_embeddings(x, start=start)}
    effects["query"], effects["key"] = position.on_queries_keys(q, k, start=start)
    if position.has("on_queries_keys_by_content"):
        turned = position.on_queries_keys_by_content(q, k, x, {})
        effects["query by content"], effects["key by content"] = turned
    effects |= tables(position, end)
    if position.has("index_bias"):
        last = torch.arange(end - 4, end)
        effects["index bias"] = position.index_bias(last, torch.arange(end))
    if position.has("score_bias"):
        effects["content bias"] = content_bias(position, x).tril()
    if position.has("on_scores"):
        no_scores = torch.zeros(1, shape.heads, CHUNK, CHUNK)
        effects["content score"] = position.on_scores(no_scores, x, {}).tril()
    return effects


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
