"""Methods with which trained weights read longer texts, for evaluation and generation only.

Most of them choose between two versions of a score by distance. A near key keeps its own position,
a far key gets a position that occurred in training. So each method answers four questions: which
keys are near, which far keys are visible, and which positions far queries and far keys get.

| method, with w = window | far keys | distance of a far key j to query i |
|---|---|---|
| rerope (Su, kexue.fm/archives/9708) | all | w |
| leaky_rerope (the same) | all | w + (i - j - w) / factor |
| self_extend (arXiv 2401.01325) | all | floor(i / group) - floor(j / group) + w - w / group |
| string (arXiv 2410.18745) | all | i - j - w + local |
| lm_infinite (arXiv 2308.16137) | the first `sinks` of the text | limit |
| sinks with a window (StreamingLLM, arXiv 2309.17453) | the first `sinks` | of places in a cache |

`dual_chunk` has three versions of a score, by the chunks of both tokens: see `Method.seen_keys`.

`dynamic_ntk` changes the base of a rotary encoding for later queries: they use dynamic NTK's base
for their number of keys n, rounded up to whole steps. That base is base · (factor · n / seq_length
- factor + 1)^(dim / (dim - 2)) beyond seq_length; all keys are rotated with it too. transformers
    uses the base of the whole text for every query, so a longer text changes earlier outputs. Here
    only the last query of a step gets the same base as there.

`pi`, `ntk`, `yarn` and `clipped_rope` are relatives of `rotary` (positions/rotary.py),
on a model that was trained without them: positions stay, and frequencies change.
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
from megatron.attention.encoded import Text
from megatron.attention.scope import BLOCK
from megatron.attention.sdpa import MOST_SCORES, cpu_kernel
from megatron.attention.terms import Terms, for_each_query_head, mask, merge, with_sink
from megatron.errors import UserError, did_you_mean
from megatron.model.settings import AttentionSettings
from megatron.positions import Position

MOST = 2**24  # tokens; beyond this, positions are not exact in float32
FACTOR = "attention_factor"  # an option


class MethodKind(NamedTuple):
    """The options of a method and their types; numbers are tokens unless noted otherwise.

    defaults: for optional options, from the training length and the other options
    needs: what the encoding of at least one layer must do; None: nothing
    between: far distances may be fractions, for which tables have no value
    scaling: the `rotary` scaling that the encoding gets with these options; None: positions change
        instead
    """

    options: dict[str, type]
    defaults: Callable[[int, Mapping[str, float]], dict[str, float]] = (
        lambda length, chosen_options: {}
    )
    needs: str | None = "rotates"
    between: bool = False
    scaling: str | None = None


def half(train_length: int, _: Mapping[str, float]) -> dict[str, float]:
    """Keys within half of the training length are near."""
    return {"window": max(1, train_length // 2)}


METHODS = {
    "rerope": MethodKind({"window": int}, half),
    "leaky_rerope": MethodKind({"window": int, "factor": float}, half, between=True),
    "self_extend": MethodKind({"window": int, "group": int}, half, between=True),
    "dual_chunk": MethodKind(
        {"chunk": int, "limit": int, "attention_factor": float},
        # As in the authors' code.
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
    "clipped_rope": MethodKind({"clipped": int}, needs="stretches", scaling="clipped_rope"),
}
"""All names that `--method` accepts."""
SINKS = MethodKind({"window": int, "sinks": int}, needs=None)
"""The setting `sinks` with `window`."""


class SeenKeys(NamedTuple):
    """The keys first … end - 1 as some queries see them.

    query_place [queries], key_place [keys of the text]: their positions, possibly fractions
    last [queries]: the last key that each query sees, possibly beyond `end`
    window: the number of visible keys up to that one; None: all
    """

    query_place: Tensor
    key_place: Tensor
    first: int
    end: int
    last: Tensor
    window: int | None = None


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
        """The number of near keys; None: near and far keys are treated alike."""
        return self.options.get("window", self.options.get("chunk"))

    @property
    def text(self) -> str:
        """The method in the form that `method_of` reads, with all options: rerope,window=256."""
        words = [f"{name}={self.options[name]}" for name in self.kind.options]
        return ",".join([self.name, *(word.removesuffix(".0") for word in words)])

    @property
    def scaling(self) -> dict[str, Any]:
        """What the method changes in the encoding's `Scaling`; {}: nothing, positions change
        instead."""
        if self.kind.scaling is None:
            return {}
        return {"name": self.kind.scaling, **self.options}

    def far(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of queries and keys for scores of far keys: [queries], [keys] -> same."""
        window, factor = self.options["window"], self.options.get("factor")
        group = self.options.get("group")
        if factor is not None:
            return (query + window * (factor - 1)) / factor, key / factor
        if group is not None:
            # A true division: the shift is a fraction if group doesn't divide window.
            return query // group + window - window / group, key // group
        if "local" in self.options:
            return query - window + self.options["local"], key
        if self.name == "sinks":
            return query.clamp(max=self.options["sinks"] + window - 1), key
        limit = self.options.get("limit", window)
        return torch.full_like(query, limit), torch.zeros_like(key)

    @property
    def backend(self) -> str | None:
        """The function that computes attention instead of the model's backend, or None."""
        return None if self.near_keys is None else "near_far"

    def visible(self, window: int | None) -> tuple[int | None, int | None]:
        """The window of a layer's queries, and the number of first keys that they see in
        addition."""
        if "sinks" in self.options:
            return self.options["window"], self.options["sinks"]
        return window, None

    def table_length(self, keys: int) -> int:
        """The number of distances that a table must have for this many keys."""
        return max(keys, self.options.get("limit", 0) + 1)

    def applies_to(self, position: Position) -> bool:
        """Whether the method changes a layer with this encoding."""
        if self.kind.needs is None or position.rotates:
            return True
        return self.near_keys is not None and has_table(position)

    def obstacle(self, position: Position) -> str | None:
        """Why this encoding's tokens cannot get other positions, or None."""
        if self.kind.needs == "stretches" and position.stretch_fault is not None:
            return position.stretch_fault
        if self.scaling:
            try:
                deepcopy(position).use_scaling(self.scaling)
            except UserError as fault:
                return str(fault)
            return None
        if self.kind.between and has_table(position):
            return "its bias has no values for fractional distances"
        hooks = ("on_scores", "block_scores", "index_bias")
        turns_by_content = position.has("on_queries_keys_by_content")
        if (
            any(position.has(hook) for hook in hooks)
            or position.changes_embeddings
            or not position.movable
            or (position.has("on_queries_keys") and turns_by_content)
        ):
            return "its scores depend on more than the distance between query and key"
        return None

    def attend(self, text: Text) -> Tensor:
        """The output of attention over a text: [batch, heads, queries, head_dim]."""
        start, end = text.start, text.k.shape[2]
        key = torch.arange(end, device=text.k.device)
        group = text.q.shape[1] // text.v.shape[1]
        text = replace(text, v=for_each_query_head(text.v, group))
        near_keys = self.near_keys
        if near_keys is None:
            # The queries in parts, each with the base for its length.
            outputs = []
            for first, stop, stretch in self.parts(start, end, text.position.shape.train_length):
                rows, keys = slice(first - start, stop - start), slice(0, stop)
                q, k = text.turned(rows, key[first:stop], key[keys], stretch)
                outputs.append(attend(q, k, text.v[:, :, keys], text.terms.part(rows, keys)))
            return torch.cat(outputs, dim=2)

        scale = text.position.origin.new_full((1, end - start), self.options.get(FACTOR, 1.0) ** 2)
        if text.query_scale is not None:
            scale = scale * text.query_scale
        wide = torch.promote_types(text.v.dtype, torch.float32)
        text = replace(text, q=text.q.to(wide), query_scale=scale)
        turned = self.turned(text, key)
        size = max(1, min(BLOCK, MOST_SCORES // (math.prod(text.q.shape[:2]) * end)))
        chunk = self.options.get("chunk", end)
        outputs = []
        while start < end:
            stop = min(start + size, (start // chunk + 1) * chunk, end)
            if start < near_keys:  # either all queries of a block have far keys, or none
                stop = min(stop, near_keys)
            outputs.append(self.block(text, turned, key, start, stop))
            start = stop
        return torch.cat(outputs, dim=2).to(text.v.dtype)

    def turned(self, text: Text, key: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """For each of `seen_keys`: the first key, all queries, and the keys that some see."""
        query, turned = key[text.start :], []
        for seen in self.seen_keys(query, key, text.terms.window):
            first = max(0, seen.first)
            if first < seen.end:  # the sets without keys are the last ones
                places = seen.query_place, seen.key_place[first : seen.end]
                q, k = text.turned(slice(0, len(query)), *places, first=first)
                turned.append((first, q, k))
        return turned

    def block(
        self,
        text: Text,
        turned: Sequence[tuple[int, Tensor, Tensor]],
        key: Tensor,
        start: int,
        stop: int,
    ) -> Tensor:
        """The output of the queries start … stop - 1: [batch, heads, queries, features].

        key [keys]: 0, 1, 2, …
        """
        rows, parts = slice(start - text.start, stop - text.start), []
        all_seen = self.seen_keys(key[start:stop], key, text.terms.window)
        for seen, (begin, q, k) in zip(all_seen, turned, strict=False):
            columns = slice(max(0, seen.first), seen.end)
            if columns.start < columns.stop:
                parts += [
                    attended_keys(
                        q[:, :, rows],
                        k[:, :, columns.start - begin : columns.stop - begin],
                        text.v[:, :, columns].to(q.dtype),
                        replace(text.terms.part(rows, columns), window=seen.window),
                        seen.last - columns.start,
                        seen.query_place,
                        seen.key_place[columns],
                    )
                ]
        out, lse = parts[0]
        for part in parts[1:]:
            out, lse = merge(out, lse, *part)
        return with_sink(out, lse, text.terms.sink)

    def seen_keys(self, query: Tensor, key: Tensor, window: int | None) -> Iterator[SeenKeys]:
        """The keys that any of some neighbouring queries sees: near ones, then far ones."""
        first, end = int(query[0]), int(query[-1]) + 1
        if "chunk" in self.options:
            # Key j has position j mod chunk. Query i has position i mod chunk for keys of its own
            # chunk, at min(i mod chunk + chunk, limit) for keys of the chunk before, and at min(2
            # chunk - 1, limit) for all earlier ones (arXiv 2402.17463).
            chunk, limit = self.options["chunk"], self.options["limit"]
            begin, last_begin = first - first % chunk, end - 1 - (end - 1) % chunk
            place = key % chunk
            own_place = place[first:end]
            next_place = (own_place + chunk).clamp(max=limit)
            far_place = torch.full_like(own_place, min(2 * chunk - 1, limit))
            yield SeenKeys(own_place, place, begin, end, query)
            yield SeenKeys(next_place, place, begin - chunk, last_begin, query)
            yield SeenKeys(far_place, place, 0, last_begin - chunk, query)
            return
        near, sinks = self.options["window"], self.options.get("sinks")
        if sinks is not None:
            window = None
        nearest = min(near, window or near)
        yield SeenKeys(query, key, first - nearest + 1, end, query, nearest)
        if window is not None and window <= near:
            return
        far_query, far_key = self.far(query, key)
        first_far = 0 if window is None else first - window + 1
        end_of_far = end - near if sinks is None else min(sinks, end - near)
        # Far keys follow a causal mask that is shifted by `near` tokens.
        far_window = None if window is None else window - near
        yield SeenKeys(far_query, far_key, first_far, end_of_far, query - near, far_window)

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
    """The method for a text such as `self_extend,window=256,group=8`.

    Missing options get the defaults of the method. Raises UserError for unknown ones.
    """
    name, *words = text.split(",")
    if name not in METHODS:
        hint = did_you_mean(name, METHODS) or f"choose from {', '.join(METHODS)}"
        raise UserError(f"--method {text:.80}: no such method; {hint}")
    kind = METHODS[name]
    options: dict[str, Any] = {}
    option_types = ", ".join(f"{option}={type.__name__}" for option, type in kind.options.items())
    for word in words:
        key, _, value = word.partition("=")
        try:
            options[key] = kind.options[key](value[:20])
        except (KeyError, ValueError):
            raise UserError(
                f"--method {name}: {word:.80} is not valid; write {option_types}"
            ) from None
    options = kind.defaults(train_length, options) | options
    near = options.get("window", options.get("chunk", 1))
    bounds = {
        "group": (2, MOST),
        "attention_factor": (0.01, MOST),
        "limit": (near, MOST),
        "window": (1, train_length),
        "chunk": (1, train_length),
        "local": (1, near),
    }
    for key in kind.options:
        if key not in options:
            raise UserError(f"--method {name}: {key}= is missing and has no default; add it")
        least, most = bounds.get(key, (1, MOST))
        if not least <= options[key] <= most:
            value = options[key]
            raise UserError(f"--method {name}: {key}={value} must be between {least} and {most}")
    return Method(name, options)


@dataclass(frozen=True)
class MeasuredAttention(AttentionSettings):
    """Attention settings, including those that can be chosen for trained weights.

    sinks: first keys of the text that stay visible in addition to the window (StreamingLLM)
    clip_distance: tables by distance are constant from this distance on
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
    names = " or ".join(dict.fromkeys(position.registered_name for position in positions))
    if sinks is not None and not lengths:
        yield f"--sinks {sinks}: without a window all keys are visible; give --window too"
    if clip is not None and not any(has_table(position) for position in positions):
        rotating = "for rotations use --method rerope, which does the same"
        yield f"--clip-distance {clip}: {names} has no table by distance; {rotating}"
    if sinks is not None and attention.method is not None:
        yield f"--sinks {sinks}: excludes --method {attention.method}; remove one of them"
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
    if near_keys is not None:
        hides = method.name in ("lm_infinite", "dual_chunk")
        too_short = bool(lengths) and (hides or min(lengths) <= near_keys)
        if attention.blockwise or (is_named and (clip is not None or too_short)):
            beside = "blockwise, --clip-distance or this --window"
            yield f"{where}: has no meaning with {beside}; remove that"
    if method.kind.needs is not None and not any(position.rotates for position in positions):
        yield f"{where}: {names} do not rotate queries and keys by position; use rotary"
        return
    for position in positions:
        obstacle = method.obstacle(position)
        if obstacle is not None and method.applies_to(position):
            yield f"{where}: {position.registered_name} does not support it: {obstacle}"
    if attention.reset_attention_mask and not method.scaling:
        yield f"{where}: treats a text as one document; set reset_attention_mask=false"


def has_table(position: Position) -> bool:
    """Whether the encoding adds or multiplies by a table of distances."""
    return position.has("distance_bias") or position.has("distance_weight")


def clipped(table: Tensor | None, distance: int | None) -> Tensor | None:
    """A table that is constant from a distance on: [heads, distances] -> same."""
    if table is None or distance is None or distance + 1 >= table.shape[1]:
        return table
    last = table[:, distance : distance + 1]
    beyond = table.shape[1] - distance - 1
    return torch.cat([table[:, : distance + 1], last.expand(-1, beyond)], dim=1)


def attended_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    last: Tensor,
    query_place: Tensor,
    key_place: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attention of some queries to some keys: the output and lse.

    last [queries]: the last key that each query sees; query_place [queries], key_place [keys]:
    positions, for tables by distance
    """
    plain = terms.weight is None and terms.content is None
    distance = None
    if terms.bias is not None or terms.weight is not None:
        distance = (query_place.long()[:, None] - key_place.long()).clamp(min=0)
    if not plain or q.device.type != "cpu" or torch.is_grad_enabled():
        scores = all_scores(q, k, terms, query=last, distance=distance)
        out, lse = attended(scores, v, True)
        assert lse is not None
        return out, lse
    masked = mask(last, torch.arange(k.shape[2]), terms.window, None, None)
    added = q.new_zeros(1, *masked.shape) if terms.bias is None else terms.bias[:, distance]
    return cpu_kernel(q, k, v, added.to(q.dtype).masked_fill(masked, -math.inf)[None])
