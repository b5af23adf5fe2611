"""Methods that let trained weights read longer texts: for evaluation and generation only.

Most of them choose between two versions of a score by distance. A near key counts at its own
position, a far one at a position that was trained. So each is four short answers: up to where keys
are near, which far keys are visible, and where far queries and keys stand.

| method, with w = window | far keys | distance of a far key j to query i |
|---|---|---|
| rerope (Su, kexue.fm/archives/9708) | all | w |
| leaky_rerope (the same) | all | w + (i - j - w) / factor |
| self_extend (arXiv 2401.01325) | all | floor(i / group) - floor(j / group) + w - w / group |
| string (arXiv 2410.18745) | all | i - j - w + local |
| lm_infinite (arXiv 2308.16137) | the first `sinks` of the text | limit |
| sinks with a window (StreamingLLM, arXiv 2309.17453) | the first `sinks` | of places in a cache |

`dual_chunk` has three versions of a score, by the chunks of both tokens: see `by_chunks`.

`dynamic_ntk` changes the base of a rotary encoding for later queries: it is that of dynamic NTK for
their number of keys n, rounded up to whole steps. The base is base · (factor · n / seq_length -
factor + 1)^(dim / (dim - 2)) beyond seq_length; all keys are turned by it too. transformers gives
every query the base of the whole text, so that a longer text changes what came before. Here the
last query of a step has what they give it.

`pi`, `ntk`, `yarn`, `longrope` and `clipped_rope` are relatives of `rotary` (positions/rotary.py),
on a model that was trained without: tokens stay where they are, and frequencies change.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.attention import attend
from megatron.attention.eager import all_scores, attended
from megatron.attention.scope import BLOCK
from megatron.attention.sdpa import MOST_SCORES, cpu_kernel, sdpa
from megatron.attention.terms import Terms, merge, with_sink
from megatron.errors import UserError, did_you_mean
from megatron.model.block import Text, for_each_query_head
from megatron.model.settings import AttentionSettings
from megatron.positions import REGISTRY, Position

MOST = 2**24  # tokens: beyond, positions are not exact in float32
LEAST = {"group": 2, "attention_factor": 0.01}
"""The least value of an option, where it is not 1."""


class MethodKind(NamedTuple):
    """Options of a method and their types, tokens unless something else is said.

    defaults: of options that need not be given, by the training's length and what is given
    needs: the attribute that the encoding of at least one layer must have; None: nothing
    between: far distances may lie between whole numbers, where tables have no value
    scaling: of `rotary`, which the encoding gets with these options; None: tokens move instead
    """

    options: dict[str, type]
    defaults: Callable[[int, Mapping[str, float]], dict[str, float]] = (
        lambda length, chosen_options: {}
    )
    needs: str | None = "rotates"
    between: bool = False
    scaling: str | None = None


def half(train_length: int, _: Mapping[str, float]) -> dict[str, float]:
    """Keys of the last half of the training's length are near."""
    return {"window": max(1, train_length // 2)}


METHODS = {
    "rerope": MethodKind({"window": int}, half),
    "leaky_rerope": MethodKind({"window": int, "factor": float}, half, between=True),
    "self_extend": MethodKind({"window": int, "group": int}, half, between=True),
    "dual_chunk": MethodKind(
        {"chunk": int, "limit": int, "attention_factor": float},
        # Those of the authors' code.
        lambda length, chosen_options: {
            "chunk": length * 3 // 4 - length // 8,
            "limit": length * 3 // 4,
            "attention_factor": 1.0,
        },
    ),
    "string": MethodKind(
        {"window": int, "local": int, "attention_factor": float},
        lambda length, chosen_options: {
            "window": length // 3,
            "local": min(128, chosen_options.get("window", length // 3)),
            "attention_factor": 1.0,
        },
    ),
    "lm_infinite": MethodKind(
        {"window": int, "sinks": int, "limit": int},
        lambda length, chosen_options: {
            "window": length,
            "limit": chosen_options.get("window", length),
        },
        needs=None,
    ),
    "dynamic_ntk": MethodKind(
        {"factor": float, "step": int},
        lambda length, chosen_options: {"factor": 1.0, "step": length},
        needs="stretches",
    ),
    "pi": MethodKind({"factor": float}, needs="stretches", scaling="linear"),
    "ntk": MethodKind({"factor": float}, needs="stretches", scaling="ntk"),
    "yarn": MethodKind({"factor": float}, needs="stretches", scaling="yarn"),
    "longrope": MethodKind(
        {"factor": float, "factors": str}, needs="stretches", scaling="longrope"
    ),
    "clipped_rope": MethodKind({"clipped": int}, needs="stretches", scaling="none"),
}
"""All that `--method` may name."""
SINKS = MethodKind({"window": int, "sinks": int}, needs=None)
"""The setting `sinks` beside `window`."""
FACTORS: dict[str, dict[str, list[float]]] = {}
"""LongRoPE's factors that were read: long_factor and short_factor, by a name of their contents."""
LACKS = {
    "rotates": "does not turn queries and keys by position; it is for encodings such as rotary",
    "stretches": "has no frequencies that can be stretched; it is for rotary",
}
"""Reasons why an encoding does not fit a method."""


@dataclass(frozen=True)
class Method:
    """A method with all its options. Indices of tokens are counted from the start of the text."""

    name: str
    options: dict[str, Any]

    @property
    def kind(self) -> MethodKind:
        return METHODS.get(self.name, SINKS)

    @property
    def near_keys(self) -> int | None:
        """How many keys may stand as they were trained; None: near and far keys are alike."""
        return self.options.get("window", self.options.get("chunk"))

    @property
    def text(self) -> str:
        """The method as `method_of` reads it, with all options: rerope,window=256."""
        words = [f"{name}={self.options[name]}" for name in self.kind.options]
        return ",".join([self.name, *(word.removesuffix(".0") for word in words)])

    @property
    def scaling(self) -> dict[str, Any]:
        """What it changes of the encoding's `Scaling`; {}: nothing, tokens move."""
        if self.kind.scaling is None:
            return {}
        options = dict(self.options)
        factors = FACTORS.get(options.pop("factors", ""), {})
        return {"name": self.kind.scaling, **options, **factors}

    def far(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of queries for far keys, and of these for them: [queries], [keys] -> same."""
        window, factor = self.options["window"], self.options.get("factor")
        group = self.options.get("group")
        if factor is not None:
            return (query + window * (factor - 1)) / factor, key / factor
        if group is not None:
            # A true division: the shift is no whole number where group does not divide window.
            return query // group + window - window / group, key // group
        if "local" in self.options:
            return query - window + self.options["local"], key
        if self.name == "sinks":
            return query.clamp(max=self.options["sinks"] + window - 1), key
        limit = self.options.get("limit", window)
        return torch.full_like(query, limit), torch.zeros_like(key)

    @property
    def backend(self) -> str | None:
        """What computes attention in place of the model's backend, or None."""
        return None if self.near_keys is None else "near_far"

    def visible(self, window: int | None) -> tuple[int | None, int | None]:
        """The window of a layer's queries, and the first keys that they see beside it."""
        if "sinks" in self.options:
            return self.options["window"], self.options["sinks"]
        return window, None

    def attend(self, text: Text) -> Tensor:
        """The output of attention over a text: [batch, heads, queries, head_dim]."""
        return attention_by_method(self, text)

    def table_length(self, keys: int) -> int:
        """The number of distances that a table must have for so many keys."""
        return max(keys, self.options.get("limit", 0) + 1)

    def applies_to(self, position: Position) -> bool:
        """Whether it changes anything of a layer with this encoding."""
        if self.kind.needs is None or position.rotates:
            return True
        return self.near_keys is not None and has_table(position)

    def obstacle(self, position: Position) -> str | None:
        """The reason why tokens of this encoding cannot stand at other positions, or None."""
        has = position.has
        if self.kind.between and has_table(position):
            return "its bias by distance has no value between whole distances"
        if self.kind.needs == "stretches" and not position.stretches:
            return stretched_already(position) or "its base cannot change"
        if self.scaling:
            try:
                deepcopy(position).use_scaling(self.scaling)
            except UserError as fault:
                return str(fault)
            return None
        if has("on_scores"):
            return "it changes all scores of a query by their content"
        if has("block_scores"):
            return "its scores depend on the tokens between query and key"
        if position.changes_embeddings:
            return "it adds positions to the embeddings, where they stay"
        if has("index_bias"):
            return "its bias depends on the places of both tokens, not on their distance"
        if not position.movable:
            return "its queries and keys are known at their own positions alone"
        if has("on_queries_keys") and has("on_queries_keys_by_content"):
            return "it turns queries and keys by their content too"
        return None

    def parts(self, start: int, end: int, train_length: int) -> Iterator[tuple[int, int, float]]:
        """(first query, end, growth of the base) of the queries start … end - 1, by their base."""
        factor, step = self.options["factor"], self.options["step"]
        while start < end:
            length = train_length
            if start >= train_length:
                length = max(train_length, math.ceil((start + 1) / step) * step)
            stop = min(end, length)
            yield start, stop, factor * length / train_length - factor + 1
            start = stop


def method_of(text: str, train_length: int) -> Method:
    """The method that a text such as `self_extend,window=256,group=8` describes.

    Options that are not given have the defaults of their method. Raises UserError for others.
    """
    fault = fault_of_name(text)
    if fault is not None:
        raise UserError(fault)
    name, *words = text.split(",")
    kind = METHODS[name]
    options: dict[str, Any] = {}
    option_types = ", ".join(f"{option}={type.__name__}" for option, type in kind.options.items())
    for word in words:
        key, _, value = word.partition("=")
        try:
            options[key] = kind.options[key](value[:20])
        except (KeyError, ValueError):
            raise UserError(
                f"--method {name}: {shown(word)} is wrong; give {option_types}"
            ) from None
    options = kind.defaults(train_length, options) | options
    for key in kind.options:
        if key not in options:
            raise UserError(f"--method {name}: give {key}= too; it has no default")
        if key == "factors":  # a name of numbers
            continue
        least, most = LEAST.get(key, 1), MOST
        if key == "limit":
            least = options.get("window", options.get("chunk"))
        if key in ("window", "chunk"):
            most = train_length
        if key == "local":
            most = options["window"]
        if not least <= options[key] <= most:
            value = options[key]
            raise UserError(f"--method {name}: {key}={value} is not within {least} … {most}")
    return Method(name, options)


def shown(text: str) -> str:
    """A text of the user's for a message: printable, and not long."""
    return ascii(text)[1:-1][:100]


def fault_of_name(text: str) -> str | None:
    """The message about the name of the method in a text, or None."""
    name = text.split(",")[0]
    if name in METHODS:
        return None
    hint = did_you_mean(name, METHODS) or f"choose from {', '.join(METHODS)}"
    return f"--method {shown(text)}: no such method; {hint}"


@dataclass(frozen=True)
class MeasuredAttention(AttentionSettings):
    """Settings of attention, with those that are chosen when trained weights are used.

    sinks: first keys of the text that stay visible beside the window (StreamingLLM)
    clip_distance: tables by distance have the value there at every larger distance
    method: see `method_of`
    """

    sinks: int | None = None
    clip_distance: int | None = None
    method: str | None = None

    def check(self, positions: Sequence[Position], train_length: int) -> None:
        faults = dict.fromkeys(faults_of(self, positions, train_length))
        if faults:
            raise UserError("\n".join(faults))

    def scaling(self, train_length: int) -> dict[str, Any]:
        method = self.chosen(None, train_length)
        return {} if method is None else method.scaling

    def method_of_layer(
        self, position: Position, window: int | None, train_length: int
    ) -> Method | None:
        method = self.chosen(window, train_length)
        if method is None or method.scaling or not method.applies_to(position):
            return None
        return method

    def table(self, table: Tensor | None) -> Tensor | None:
        return clipped(table, self.clip_distance)

    def chosen(self, window: int | None, train_length: int) -> Method | None:
        """The method of layers with this window, or None. Raises UserError for its options."""
        if self.method is not None:
            return method_of(self.method, train_length)
        if self.sinks is None or window is None:
            return None
        return Method("sinks", {"window": window, "sinks": self.sinks})


def faults_of(
    attention: MeasuredAttention, positions: Sequence[Position], train_length: int
) -> Iterator[str]:
    """Messages about sinks, clip_distance and method for layers with these encodings."""
    sinks, clip = attention.sinks, attention.clip_distance
    windows = attention.windows(len(attention.window_layers) or 1, train_length)
    lengths = [window for window in windows if window is not None]
    names = " or ".join(dict.fromkeys(name_of(position) for position in positions))
    if sinks is not None and not lengths:
        yield f"--sinks {sinks}: without a window all keys are visible; give --window too"
    if clip is not None and not any(has_table(position) for position in positions):
        rotating = "for rotations --method rerope is the same"
        yield f"--clip-distance {clip}: {names} has no table by distance; {rotating}"
    if sinks is not None and attention.method is not None:
        yield f"--sinks {sinks}: excludes --method {attention.method}"
    try:
        method = attention.chosen(lengths[0] if lengths else None, train_length)
    except UserError as fault:
        yield str(fault)
        return
    if method is None:
        return

    is_named = attention.method is not None
    where = f"--method {method.text}" if is_named else f"--sinks {sinks}"
    near_keys = method.near_keys
    if near_keys is not None and attention.blockwise:
        yield f"{where}: has no meaning beside blockwise: true"
    if near_keys is not None and is_named and clip is not None:
        yield f"{where}: excludes --clip-distance {clip}, since it clips itself"
    if near_keys is not None and is_named and lengths:
        window = min(lengths)
        if method.name in ("lm_infinite", "dual_chunk") or window <= near_keys:
            yield f"{where}: window {window} hides what it is for; give --window none"
    needs = method.kind.needs
    if needs is not None and not any(getattr(position, needs) for position in positions):
        stretched = [stretched_already(position) for position in positions if position.stretched_by]
        lacks = stretched[0] if stretched else f"{names} {LACKS[needs]}, alone or in sum"
        yield f"{where}: {lacks}"
        return
    for position in positions:
        obstacle = method.obstacle(position)
        if obstacle is not None and method.applies_to(position):
            yield f"{where}: {name_of(position)} cannot be read so: {obstacle}"
    if attention.reset_attention_mask and not method.scaling:
        yield f"{where}: reads a text as one document; set reset_attention_mask=false"


def stretched_already(position: Position) -> str | None:
    """The reason why frequencies of a model cannot be stretched again, and what to take; or None"""
    if position.stretched_by is None:
        return None
    moving_methods = [name for name, kind in METHODS.items() if kind.needs != "stretches"]
    return (
        f"the frequencies of {name_of(position)} are stretched already (scaling:"
        f" {position.stretched_by}); take one of {', '.join(moving_methods)}"
    )


def name_of(position: Position) -> str:
    """The name of an encoding in the registry."""
    names = [name for name, kind in REGISTRY.items() if kind is type(position)]
    return names[0] if names else type(position).__name__


def has_table(position: Position) -> bool:
    """Whether the encoding adds or multiplies by a table of distances."""
    return position.has("distance_bias") or position.has("distance_weight")


def clipped(table: Tensor | None, distance: int | None) -> Tensor | None:
    """A table whose value beyond a distance is the one there: [heads, distances] -> same."""
    if table is None or distance is None or distance + 1 >= table.shape[1]:
        return table
    last = table[:, distance : distance + 1]
    beyond = table.shape[1] - distance - 1
    return torch.cat([table[:, : distance + 1], last.expand(-1, beyond)], dim=1)


def attention_by_method(method: Method, text: Text) -> Tensor:
    """The output of attention over a text: [batch, heads, queries, head_dim]."""
    start, end = text.start, text.k.shape[2]
    key = torch.arange(end, device=text.k.device)
    values = for_each_query_head(text.v, text.q.shape[1] // text.v.shape[1])
    factor = method.options.get("attention_factor", 1.0)
    if factor != 1:
        scale = text.position.origin.new_full((1, end - start), factor**2)
        if text.query_scale is not None:
            scale = scale * text.query_scale
        text = replace(text, query_scale=scale)
    if "chunk" in method.options:
        return by_chunks(method, text, values)
    if method.near_keys is not None:
        query, rows = key[start:], slice(0, end - start)
        far = method.far(query, key)
        sinks = method.options.get("sinks")
        return near_far(
            text.turned(rows, query, key),
            text.turned(rows, *far),
            values,
            text.terms if sinks is None else replace(text.terms, window=None),
            places=(far[0].long(), far[1].long()),
            distance=method.options["window"],
            sinks=sinks,
        )
    # One part of the queries after the other, each with the base of its length.
    outputs = []
    for first, stop, stretch in method.parts(start, end, text.position.shape.train_length):
        rows, keys = slice(first - start, stop - start), slice(0, stop)
        q, k = text.turned(rows, key[first:stop], key[keys], stretch)
        outputs.append(attend(q, k, values[:, :, keys], text.terms.part(rows, keys)))
    return torch.cat(outputs, dim=2)


def by_chunks(method: Method, text: Text, v: Tensor) -> Tensor:
    """Dual chunk attention (arXiv 2402.17463): [batch, heads, queries, features].

    Key j stands at j mod chunk. Query i stands at i mod chunk for keys of its own chunk, at
    min(i mod chunk + chunk, limit) for keys of the chunk before, and at min(2 chunk - 1, limit) for
    all earlier ones. v [batch, heads, keys, features]; scores are float32 or wider.
    """
    chunk, limit, terms = method.options["chunk"], method.options["limit"], text.terms
    start, end = text.start, v.shape[2]
    wide_v = v.to(torch.promote_types(v.dtype, torch.float32))
    place = torch.arange(end, device=v.device) % chunk
    wide_k = text.turned(slice(0, 0), place[:0], place)[1].to(wide_v.dtype)
    outputs = []
    for own_chunk in range(start - start % chunk, end, chunk):
        first, stop = max(start, own_chunk), min(own_chunk + chunk, end)
        rows, before = slice(first - start, stop - start), max(0, own_chunk - chunk)
        own_place = place[first:stop]
        for query_place, keys in (
            (own_place, slice(own_chunk, stop)),
            ((own_place + chunk).clamp(max=limit), slice(before, own_chunk)),
            (torch.full_like(own_place, min(2 * chunk - 1, limit)), slice(0, before)),
        ):
            if keys.start == keys.stop:
                continue
            q = text.turned(rows, query_place, place[:0])[0].to(wide_k.dtype)
            qkv = q, wide_k[:, :, keys], wide_v[:, :, keys]
            part = terms.part(rows, keys)
            if keys.stop == stop:  # the own chunk, under the causal mask
                out, lse = with_lse(*qkv, part)
            else:
                out, lse = merge(out, lse, *far_keys(*qkv, part, (query_place, place[keys])))
        outputs.append(with_sink(out, lse, terms.sink))
    return torch.cat(outputs, dim=2).to(v.dtype)


def with_lse(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """Causal attention, and the lse of each query."""
    out, lse = sdpa(q, k, v, replace(terms, needs_lse=True))
    assert lse is not None
    return out, lse


def far_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    places: tuple[Tensor, Tensor],
    last: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of queries to far keys, in blocks of queries: output and lse.

    places [queries], [keys] int64: tables are asked for their difference;
    last [queries]: the index of the last key that each query sees, which may be beyond the keys;
    None: all queries see all keys
    """
    (batch, heads, queries), keys = q.shape[:3], k.shape[2]
    tables = terms.bias is not None or terms.weight is not None
    plain = terms.is_causal_alone and terms.content is None
    if plain and last is None and q.device.type == "cpu" and not torch.is_grad_enabled():
        return cpu_kernel(q, k, v, None)
    if last is None:
        last = torch.full_like(places[0], keys)
    size = max(1, min(BLOCK, MOST_SCORES // (batch * heads * keys)))
    outs, lses = [], []
    for start in range(0, queries, size):
        rows = slice(start, min(start + size, queries))
        first_key = 0 if terms.window is None else max(0, int(last[start]) - terms.window + 1)
        columns = slice(first_key, min(int(last[rows.stop - 1]) + 1, keys))
        distance = None
        if tables:
            distance = (places[0][rows, None] - places[1][columns]).clamp(min=0)
        scores = all_scores(
            q[:, :, rows],
            k[:, :, columns],
            terms.part(rows, columns),
            query=last[rows] - first_key,
            distance=distance,
        )
        out, lse = attended(scores, v[:, :, columns], True)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def near_far(
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    v: Tensor,
    terms: Terms,
    *,
    places: tuple[Tensor, Tensor],
    distance: int,
    sinks: int | None = None,
) -> Tensor:
    """Causal attention with two versions of the score, for evaluation.

    near, far: q [batch, heads, queries, features] of the last keys, and k [batch, heads, keys,
    features]: `near` for keys less than `distance` tokens back, `far` for all others;
    v [batch, heads, keys, features]; terms: tables, window and content;
    places [queries], [keys] int64: tables are asked for their difference where a key is far;
    sinks: of the far keys, only the first `sinks` of the text are visible; excludes a window.

    Returns [batch, heads, queries, features] in v's dtype; scores are float32 or wider.
    """
    window = terms.window
    assert window is None or sinks is None
    dtype = torch.promote_types(v.dtype, torch.float32)
    (near_q, near_k), (far_q, far_k) = ([x.to(dtype) for x in pair] for pair in (near, far))
    wide_v = v.to(dtype)
    queries, keys = near_q.shape[2], v.shape[2]
    before = keys - queries
    nearest = min(distance, window or distance)  # keys that are near and visible
    out, lse = with_lse(near_q, near_k, wide_v, replace(terms, window=nearest))
    first = max(0, distance - before)  # the first query with far keys
    if first >= queries or (window is not None and window <= distance):
        return with_sink(out, lse, terms.sink).to(v.dtype)

    # The keys that are far enough are those of a causal mask, `distance` tokens earlier.
    rows = slice(first, queries)
    columns = slice(0, keys - distance if sinks is None else min(sinks, keys - distance))
    qkv = far_q[:, :, rows], far_k[:, :, columns], wide_v[:, :, columns]
    terms = replace(terms, window=None if window is None else window - distance)
    if terms.bias is None and terms.weight is None and terms.content is None and sinks is None:
        far_out, far_lse = with_lse(*qkv, terms)
    else:
        last = torch.arange(before + first, keys, device=v.device) - distance
        part = terms.part(rows, columns)
        far_out, far_lse = far_keys(*qkv, part, (places[0][rows], places[1][columns]), last)
    both = merge(out[:, :, rows], lse[:, :, rows], far_out, far_lse)
    if out.requires_grad:
        out = torch.cat([out[:, :, :first], both[0]], dim=2)
        lse = torch.cat([lse[:, :, :first], both[1]], dim=2)
    else:  # no second copy
        out[:, :, rows], lse[:, :, rows] = both
    return with_sink(out, lse, terms.sink).to(v.dtype)
