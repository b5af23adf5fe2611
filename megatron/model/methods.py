"""Methods that let trained weights read longer texts: for evaluation and generation only.

Most of them choose between two versions of a score by distance. A near key counts at its own
position, a far one at a position that was trained. So each is four short answers: up to where keys
are near, which far keys are visible, and where far queries and keys stand.

| method, with w = window | far keys | distance of a far key j to query i |
|---|---|---|
| rerope (Su, kexue.fm/archives/9708) | all | w |
| leaky_rerope (the same) | all | w + (i - j - w) / factor |
| self_extend (arXiv 2401.01325) | all | floor(i / group) - floor(j / group) + w - w / group |
| lm_infinite (arXiv 2308.16137) | the first `sinks` of the text | limit |
| sinks with a window (StreamingLLM, arXiv 2309.17453) | the first `sinks` | of places in a cache |

`dynamic_ntk` changes the base of a rotary encoding for later queries.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.attention import attention
from megatron.attention.content import ScoreBias
from megatron.attention.near_far import Keys, Tables, near_far
from megatron.errors import UserError, did_you_mean
from megatron.model.settings import AttentionSettings
from megatron.positions import REGISTRY, Position

MOST = 2**24  # tokens: beyond, positions are not exact in float32


@dataclass(frozen=True)
class Method:
    """What all methods have. Fields are the options, in tokens where nothing else is said.

    needs: the attribute that the encoding of at least one layer must have; None: nothing
    """

    name: ClassVar[str]
    needs: ClassVar[str | None] = "rotates"

    @classmethod
    def defaults(cls, train_length: int, given: Mapping[str, float]) -> dict[str, float]:
        """Values of the options that need not be given."""
        return {}

    @property
    def text(self) -> str:
        """The method as `method_of` reads it, with all options: rerope,window=256."""
        words = [self.name]
        for one in fields(self):
            value = getattr(self, one.name)
            is_whole = isinstance(value, float) and value.is_integer()
            words.append(f"{one.name}={int(value) if is_whole else value}")
        return ",".join(words)

    def faults(self, train_length: int) -> Iterator[str]:
        """What is wrong with the options."""
        yield from ()

    def applies_to(self, position: Position) -> bool:
        """Whether it changes anything of a layer with this encoding."""
        return position.rotates

    def obstacle(self, position: Position) -> str | None:
        """Why a layer with this encoding cannot be computed; None: it can."""
        return obstacle_to_moving(position)

    def table_length(self, keys: int) -> int:
        """How many distances a table must have for so many keys."""
        return keys

    def visible(self, window: int | None) -> tuple[int, int | None]:
        """What a query sees in a layer with this window: how many first and how many last keys."""
        return 0, window


@dataclass(frozen=True)
class NearFar(Method):
    """Two versions of the score. Indices of tokens are counted from the start of the text.

    window: keys less than so many tokens back are near
    between: far distances may lie between whole numbers, where tables have no value
    """

    between: ClassVar[bool] = False
    window: int

    @classmethod
    def defaults(cls, train_length: int, given: Mapping[str, float]) -> dict[str, float]:
        return {"window": max(1, train_length // 2)}

    @property
    def first_keys(self) -> int | None:
        """How many keys of the text's start are the only far ones; None: all are visible."""
        return None

    def far_query(self, index: Tensor) -> Tensor:
        """Where a query stands for far keys: [queries] int64 -> [queries] int64 or float32."""
        raise NotImplementedError

    def far_key(self, index: Tensor) -> Tensor:
        """Where a far key stands: [keys] int64 -> [keys] int64 or float32."""
        return torch.zeros_like(index)

    def faults(self, train_length: int) -> Iterator[str]:
        if not 1 <= self.window <= train_length:
            yield (
                f"window={self.window} is not within 1 … {train_length}, the training length;"
                " beyond it near keys stand at distances that were not trained"
            )

    def visible(self, window: int | None) -> tuple[int, int | None]:
        return (0, window) if self.first_keys is None else (self.first_keys, self.window)

    def excluded(self, attention: AttentionSettings, windows: Sequence[int]) -> Iterator[str]:
        """Other settings that it excludes. windows: those of layers that have one"""
        if attention.blockwise:
            yield "has no meaning beside blockwise: true"
        if attention.clip_distance is not None:
            yield f"excludes --clip-distance {attention.clip_distance}, since it clips itself"
        for window in windows:
            if self.first_keys is not None:
                yield "has a window of its own; give --window none"
            elif window <= self.window:
                yield f"changes nothing within window {window}; give --window none or more"

    def applies_to(self, position: Position) -> bool:
        return position.rotates or has_table(position)

    def obstacle(self, position: Position) -> str | None:
        if self.between and has_table(position):
            return "its bias by distance has no value between whole distances"
        return obstacle_to_moving(position)


@dataclass(frozen=True)
class ReRoPE(NearFar):
    """window: from here on every distance counts as this one; default seq_length / 2."""

    name = "rerope"

    def far_query(self, index: Tensor) -> Tensor:
        return torch.full_like(index, self.window)


@dataclass(frozen=True)
class LeakyReRoPE(NearFar):
    """window: as in rerope; factor: beyond, distances grow by 1 / factor for each token."""

    name = "leaky_rerope"
    between = True
    factor: float

    def far_query(self, index: Tensor) -> Tensor:
        return (index + self.window * (self.factor - 1)) / self.factor

    def far_key(self, index: Tensor) -> Tensor:
        return index / self.factor

    def faults(self, train_length: int) -> Iterator[str]:
        yield from super().faults(train_length)
        if not 1 < self.factor <= MOST:
            yield f"factor={self.factor} is not more than 1 and at most {MOST}"


@dataclass(frozen=True)
class SelfExtend(NearFar):
    """window: as in rerope; group: tokens that share a far position."""

    name = "self_extend"
    between = True
    group: int

    def far_query(self, index: Tensor) -> Tensor:
        # A true division: the shift is no whole number where group does not divide window.
        return self.far_key(index) + self.window - self.window / self.group

    def far_key(self, index: Tensor) -> Tensor:
        return index // self.group

    def faults(self, train_length: int) -> Iterator[str]:
        yield from super().faults(train_length)
        if not 2 <= self.group <= MOST:
            yield f"group={self.group} is not within 2 … {MOST}"


@dataclass(frozen=True)
class LMInfinite(NearFar):
    """window: last keys that are visible, default seq_length; sinks: of the first tokens, visible
    to all queries; limit: the distance of sinks beyond the window, default window.
    """

    name = "lm_infinite"
    needs = None
    sinks: int
    limit: int

    @classmethod
    def defaults(cls, train_length: int, given: Mapping[str, float]) -> dict[str, float]:
        return {"window": train_length, "limit": given.get("window", train_length)}

    @property
    def first_keys(self) -> int | None:
        return self.sinks

    def far_query(self, index: Tensor) -> Tensor:
        return torch.full_like(index, self.limit)

    def faults(self, train_length: int) -> Iterator[str]:
        yield from super().faults(train_length)
        if not 1 <= self.sinks <= MOST:
            yield f"sinks={self.sinks} is not within 1 … {MOST}"
        if not self.window <= self.limit <= MOST:
            yield f"limit={self.limit} is not within window … {MOST}"

    def applies_to(self, position: Position) -> bool:
        return True

    def table_length(self, keys: int) -> int:
        return max(keys, self.limit + 1)


@dataclass(frozen=True)
class Sinks(NearFar):
    """StreamingLLM: the first `sinks` keys and the last `window` ones, at their places in a cache
    that holds no others. It stands for the setting `sinks` beside `window`.
    """

    name = "sinks"
    needs = None
    sinks: int

    @property
    def first_keys(self) -> int | None:
        return self.sinks

    def far_query(self, index: Tensor) -> Tensor:
        last_place = self.sinks + self.window - 1
        return index.clamp(max=last_place)

    def far_key(self, index: Tensor) -> Tensor:
        return index

    def applies_to(self, position: Position) -> bool:
        return True


@dataclass(frozen=True)
class DynamicNTK(Method):
    """The base of a query with n keys is that of dynamic NTK for n rounded up to whole steps.

    It is base · (factor · n / seq_length - factor + 1)^(dim / (dim - 2)) beyond seq_length; all
    keys are turned by it too. transformers gives every query the base of the whole text, so that
    a longer text changes what came before. Here the last query of a step has what they give it.

    factor: how fast the base grows, default 1; step: default seq_length
    """

    name = "dynamic_ntk"
    needs = "stretches"
    factor: float
    step: int

    @classmethod
    def defaults(cls, train_length: int, given: Mapping[str, float]) -> dict[str, float]:
        return {"factor": 1.0, "step": train_length}

    def faults(self, train_length: int) -> Iterator[str]:
        if not 1 <= self.factor <= MOST:
            yield f"factor={self.factor} is not within 1 … {MOST}"
        if not 1 <= self.step <= MOST:
            yield f"step={self.step} is not within 1 … {MOST}"

    def obstacle(self, position: Position) -> str | None:
        if not position.stretches:
            return "its base cannot change, or is that of longer texts already"
        return obstacle_to_moving(position)

    def parts(self, start: int, end: int, train_length: int) -> Iterator[tuple[int, int, float]]:
        """(first query, end, growth of the base) of the queries start … end - 1, by their base."""
        while start < end:
            length = train_length
            if start >= train_length:
                steps = math.ceil((start + 1) / self.step)
                length = max(train_length, steps * self.step)
            stop = min(end, length)
            yield start, stop, self.factor * length / train_length - self.factor + 1
            start = stop


METHODS: dict[str, type[Method]] = {
    one.name: one for one in (ReRoPE, LeakyReRoPE, SelfExtend, LMInfinite, DynamicNTK)
}
"""What `--method` may name."""


def method_of(text: str, train_length: int) -> Method:
    """The method that a text such as `self_extend,window=256,group=8` describes.

    Options that are not given have the defaults of their method. Raises UserError with all faults.
    """
    fault = fault_of_name(text)
    if fault is not None:
        raise UserError(fault)
    shown = ascii(text)[1:-1][:100]
    name, *words = text.split(",")
    kind = METHODS[name]
    types = {one.name: one.type for one in fields(kind)}
    given: dict[str, float] = {}
    faults = []
    for word in words:
        key, _, value = word.partition("=")
        if key not in types or key in given:
            faults.append(f"{ascii(word)[1:-1]}: give each of {', '.join(types)} once")
            continue
        try:
            number = float(value[:20])
        except ValueError:
            number = math.nan
        if types[key] is int and number.is_integer():
            given[key] = int(number)
        elif types[key] is float and math.isfinite(number):
            given[key] = number
        else:
            wanted = "a whole number" if types[key] is int else "a number"
            faults.append(f"{ascii(word)[1:-1]} is wrong; write {key}= and {wanted}")
    options = kind.defaults(train_length, given) | given
    absent = types.keys() - options.keys()
    if absent and not faults:
        faults.append(f"give {', '.join(sorted(absent))}= too; it has no default")
    if not faults:
        method = kind(**options)
        faults = list(method.faults(train_length))
        if not faults:
            return method
    raise UserError("\n".join(f"--method {shown}: {fault}" for fault in faults))


def fault_of_name(text: str) -> str | None:
    """What is wrong with the name of the method in a text, or None."""
    name = text.split(",")[0]
    if name in METHODS:
        return None
    hint = did_you_mean(name, METHODS) or f"choose from {', '.join(METHODS)}"
    return f"--method {ascii(text)[1:-1][:100]}: no such method; {hint}"


def method_of_layer(
    attention: AttentionSettings, position: Position, window: int | None, train_length: int
) -> Method | None:
    """What changes the attention of a layer with this encoding and window, or None.

    The settings have no faults.
    """
    method: Method | None = None
    if attention.method is not None:
        method = method_of(attention.method, train_length)
    elif attention.sinks is not None and window is not None:
        method = Sinks(window, attention.sinks)
    if method is None or not method.applies_to(position):
        return None
    return method


def faults_of(
    attention: AttentionSettings, positions: Sequence[Position], train_length: int
) -> list[str]:
    """What is wrong with sinks, clip_distance and method for layers with these encodings."""
    pattern = attention.window_layers or (attention.window,)
    windows = list(dict.fromkeys(attention.windows(len(pattern), train_length)))
    lengths = [window for window in windows if window is not None]
    names = " or ".join(dict.fromkeys(name_of(one) for one in positions))
    sinks, clip = attention.sinks, attention.clip_distance
    faults = []
    for option, value in (("--sinks", sinks), ("--clip-distance", clip)):
        if value is not None and not 1 <= value <= MOST:
            faults.append(f"{option} {value}: give a number of tokens of 1 to {MOST}, or none")
    if sinks is not None:
        where = f"--sinks {sinks}"
        if not lengths:
            faults.append(f"{where}: without a window all keys are visible; give --window too")
        if attention.blockwise:
            faults.append(f"{where}: has no meaning beside blockwise: true")
        if attention.method is not None:
            faults.append(f"{where}: excludes --method {attention.method}")
    if clip is not None and not any(has_table(one) for one in positions):
        faults.append(
            f"--clip-distance {clip}: {names} has no table by distance; for rotations"
            " --method rerope is the same"
        )
    chosen: list[Method] = []
    if attention.method is not None:
        try:
            chosen.append(method_of(attention.method, train_length))
        except UserError as fault:
            faults.append(str(fault))
    if sinks is not None and sinks >= 1 and lengths:
        chosen.append(Sinks(lengths[0], sinks))
    for method in chosen:
        where = f"--method {method.text}"
        if isinstance(method, Sinks):
            where = f"--sinks {sinks}"
        elif isinstance(method, NearFar):
            faults += [f"{where}: {fault}" for fault in method.excluded(attention, lengths)]
        if method.needs is not None and not any(getattr(one, method.needs) for one in positions):
            faults.append(f"{where}: {names} {lacks(method.needs)}")
        else:
            for one in positions:
                obstacle = method.obstacle(one) if method.applies_to(one) else None
                if obstacle is not None:
                    faults.append(f"{where}: {name_of(one)} cannot be read so: {obstacle}")
        if attention.reset_attention_mask:
            faults.append(f"{where}: reads a text as one document; set reset_attention_mask=false")
    return list(dict.fromkeys(faults))


def lacks(attribute: str) -> str:
    """What an encoding lacks without an attribute that a method needs."""
    if attribute == "stretches":
        return "has no base that can grow; it is for rotary without scaling, alone or in sum"
    rotating = ", ".join(name for name, kind in REGISTRY.items() if kind.rotates)
    return (
        f"does not turn queries and keys by position; it is for {rotating}, and for sum with one of"
        " them"
    )


def name_of(position: Position) -> str:
    """The name of an encoding in the registry."""
    names = [name for name, kind in REGISTRY.items() if kind is type(position)]
    return names[0] if names else type(position).__name__


def has_table(position: Position) -> bool:
    """Whether the encoding adds or multiplies by a table of distances."""
    return position.has("distance_bias") or position.has("distance_weight")


def obstacle_to_moving(position: Position) -> str | None:
    """Why tokens of this encoding cannot stand at other positions, or None."""
    if position.has("on_scores"):
        return "it changes all scores of a query by their content"
    if position.has("on_embeddings"):
        return "it adds positions to the embeddings, where they stay"
    if position.has("index_bias"):
        return "its bias depends on the places of both tokens, not on their distance alone"
    if not position.movable:
        return "its queries and keys are known at their own positions alone"
    if position.has("on_queries_keys") and position.has("on_queries_keys_by_content"):
        return "it turns queries and keys by their content too"
    return None


def clipped(table: Tensor | None, distance: int | None) -> Tensor | None:
    """A table whose value beyond a distance is the one there: [heads, distances] -> same."""
    if table is None or distance is None or distance + 1 >= table.shape[1]:
        return table
    last = table[:, distance : distance + 1]
    beyond = table.shape[1] - distance - 1
    return torch.cat([table[:, : distance + 1], last.expand(-1, beyond)], dim=1)


@dataclass(frozen=True)
class Text:
    """What a layer attends with, before its encoding has acted on queries and keys.

    q [batch, heads, queries, head_dim] of the last keys; k, v [batch, key heads, keys, head_dim];
    index [keys] int64: where keys stand in the text, some of which may be forgotten;
    bias [heads, distances] or None; query_scale [queries] or [heads, queries]: multiplies the
    queries; options: of megatron.attention.attention
    """

    position: Position
    q: Tensor
    k: Tensor
    v: Tensor
    index: Tensor
    bias: Tensor | None
    query_scale: Tensor | None
    options: dict[str, Any]

    @property
    def end(self) -> int:
        """The index behind the last query."""
        return int(self.index[-1]) + 1

    def turned(
        self, rows: slice, query: Tensor, key: Tensor, stretch: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Some queries, and the first keys, where they stand for a method.

        query [rows], key [keys]: int64 or float -> [batch, heads, rows, features] and
        [batch, heads, keys, features], without groups
        """
        q, k = self.q[:, :, rows], self.k[:, :, : len(key)]
        if self.position.has("on_queries_keys_at"):
            first = self.end - self.q.shape[2] + rows.start
            dtype = self.position.origin.dtype
            q, k = self.position.on_queries_keys_at(
                q, k, query.to(dtype), key.to(dtype), start=first, stretch=stretch
            )
        if self.query_scale is not None:
            q = (q * self.query_scale[..., rows, None]).to(q.dtype)
        return q, for_each_query_head(k, q.shape[1] // k.shape[1])

    def values(self, keys: int) -> Tensor:
        """Those of the first keys, without groups: [batch, heads, keys, head_dim]."""
        v = self.v[:, :, :keys]
        return for_each_query_head(v, self.q.shape[1] // v.shape[1])


def attention_by_method(method: Method, text: Text) -> Tensor:
    """What queries get from the keys of a text: [batch, heads, queries, head_dim]."""
    key, start = text.index, text.end - text.q.shape[2]
    if isinstance(method, NearFar):
        query = key[-text.q.shape[2] :]
        rows = slice(0, len(query))
        far_query, far_key = method.far_query(query), method.far_key(key)
        sinks = method.first_keys
        return near_far(
            Keys(*text.turned(rows, query, key), query, key),
            Keys(*text.turned(rows, far_query, far_key), far_query.long(), far_key.long()),
            text.values(len(key)),
            distance=method.window,
            window=text.options["window"] if sinks is None else None,
            sinks=sinks,
            tables=Tables(
                text.bias, text.options["weight"], ScoreBias.of(text.options["score_bias"])
            ),
        )
    assert isinstance(method, DynamicNTK)
    # One part of the queries after the other, each with the base of its length.
    forgotten = text.end - len(key)
    score_bias = text.options["score_bias"]
    outputs = []
    for first, stop, stretch in method.parts(start, text.end, text.position.shape.train_length):
        rows = slice(first - start, stop - start)
        keys = stop - forgotten
        q, k = text.turned(rows, key[first - forgotten : keys], key[:keys], stretch)
        options = dict(text.options)
        if score_bias is not None:
            u, w = score_bias
            options["score_bias"] = (None if u is None else u[:, :, rows], w[:, :, :keys])
        outputs.append(attention(q, k, text.values(keys), text.bias, **options))
    return torch.cat(outputs, dim=2)


def for_each_query_head(x: Tensor, group: int) -> Tensor:
    """Repeat each head for its group: [batch, key heads, keys, head_dim] -> [batch, heads, …]."""
    return x if group == 1 else x.repeat_interleave(group, dim=1)
