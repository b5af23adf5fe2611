"""The hooks of a positional encoding: what every encoding can do, and what the model calls."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.positions.precision import Float32Module, without_autocast

EXACT = 2**24
"""Positions from here on are no longer exact in float32."""
Pair = tuple[Tensor, Tensor]
"""Queries and keys, or cosines and sines."""
BlockScores = tuple[
    Callable[[Sequence[Tensor], int, int], tuple[Tensor, Tensor, Tensor]], Sequence[Tensor]
]
"""See `Position.block_scores`."""
Memory = dict[str, Tensor]
"""The tensors that a layer keeps of a cached text, by name; the first dimension is the batch."""
KERNEL = ("zero_at_0", "never_rises", "conditionally_positive_definite")
"""What KERPLE's kernels claim."""
NO_ATTENTION = -1e9
"""A bias with which a key gets no attention, and which no backend turns into NaN, as -inf may."""


@dataclass(frozen=True)
class Shape:
    """The sizes that an encoding may depend on."""

    heads: int
    head_dim: int
    hidden: int
    train_length: int


class Fork(NamedTuple):
    """An encoding in KERPLE's or MEP's code.

    names: those of its tensors there, by ours; unused: tensors that the forks store and do not use
    """

    names: Mapping[str, str] = {}
    unused: tuple[str, ...] = ()


class WrongEncoding(UserError):
    """A method of an encoding does not do what it must; the message has its file and line."""

    def __init__(self, method: Callable, fault: str) -> None:
        code = inspect.unwrap(method).__code__
        place = f"{code.co_filename}:{code.co_firstlineno}"
        super().__init__(f"pos_emb: {place}: {method.__qualname__} {fault}")


class Position(Float32Module):
    """A positional encoding: override any of its hooks. Its numbers stay in float32.

    The hooks are the methods from `prepare` to `on_scores`; docs/add_an_encoding.md lists them.

    per_layer: every layer needs parameters of its own, whatever `pos_emb_shared` says
    by_distance: whether positions count by their differences alone, apart from what is added to
        the embedding; False where the scores of equal vectors change along the text
    crosses_documents: what carries the text of one document into the next although attention
        masks its keys, such as "its convolution over keys"; None: nothing
    grouped_queries: whether the model may have fewer key heads than heads
    heads_per_query: how many neighbouring heads get the same query from the model
    score_width: how many times as wide as values on_queries_keys makes queries and keys
    only_rotates: on_queries_keys_at turns q and k by fixed angles for each position, apart from one
        factor of all, also at positions [batch, 1, length], and nothing else acts, learns or is
        drawn: layers with a state can have it
    score_rank: rank of score_bias, the last dimension of u and w
    in_parts: hooks that can be computed for a part of a text alone: "score_bias", whose w is a sum
        over the tokens up to each key (`running_sum`), "on_queries_keys_by_content", which reads of
        x each token's own vector, "prepare", which draws nothing
    claims: some of "zero_at_0", "never_rises" and "conditionally_positive_definite", as KERPLE's
        kernels are; tools/check_encoding.py holds the bias to them
    bounds: intervals of learned parameters; `bounded` and `learned` give the values within them
    fork: what KERPLE's or MEP's code has of it, so that `paper_precision` is known; None: nothing
    """

    per_layer: bool = False
    by_distance: bool = True
    crosses_documents: str | None = None
    grouped_queries: bool = True
    heads_per_query: int = 1
    score_width: int = 1
    only_rotates: bool = False
    score_rank: int = 1
    in_parts: tuple[str, ...] = ()
    claims: ClassVar[tuple[str, ...]] = ()
    fork: ClassVar[Fork | None] = None
    # What `build` was asked for, and gave the constructor.
    registered_name: str = ""
    options: Mapping[str, Any] = {}
    # [length] int64: positions to use in place of 0, 1, 2, …, as `randomized` draws them.
    drawn: Tensor | None = None

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.made: dict[tuple[Any, ...], Any] = {}  # by `once`

    @classmethod
    def joined(cls, options: Mapping[str, Any]) -> tuple[type["Position"], dict[str, Any]]:
        """The class that some options make of this one, and the options that it takes."""
        return cls, dict(options)

    @classmethod
    def changeable(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Those of some options that may change within a run: `use_scaling` understands them."""
        return {}

    def prepare(self, length: int) -> None:
        """Called once per forward pass, before every other hook: the place to draw at random.

        `length` counts cached tokens too. Recomputed activations do not call it again.
        """

    def on_embeddings(self, x: Tensor, start: int = 0) -> Tensor:
        """Change the embeddings, once before the first layer: [batch, length, hidden] -> same.

        `start` is the position of the first token.
        """
        return x

    def on_embeddings_by_ids(self, x: Tensor, ids: Tensor, memory: Memory) -> Tensor:
        """Change the embeddings by the tokens themselves, after on_embeddings: same shape.

        x [batch, length, hidden], ids [batch, length] int64. memory is that of the embeddings, and
        otherwise as for on_scores. A token that ends documents is the only sign of them here.
        """
        return x

    def on_queries_keys(self, q: Tensor, k: Tensor, start: int = 0) -> Pair:
        """Change queries and keys, in every layer: [batch, heads, length, head_dim] each -> same.

        `start` is the position of the first token. With grouped queries k has fewer heads than q.
        """
        return q, k

    def on_queries_keys_at(
        self,
        q: Tensor,
        k: Tensor,
        query: Tensor,
        key: Tensor,
        *,
        start: int = 0,
        stretch: float = 1.0,
    ) -> Pair:
        """on_queries_keys as if tokens stood at other places, for `megatron.evaluation.methods`.

        q [batch, heads, queries, head_dim] at the positions query [queries], k [batch, heads, keys,
        head_dim] at key [keys]: numbers in float32, also between whole ones. start: index of the
        first query in the text, for what counts tokens. stretch: how many times longer the texts
        become for which dynamic NTK chooses the base; 1 is as trained.
        """
        raise NotImplementedError

    def on_queries_keys_by_content(self, q: Tensor, k: Tensor, x: Tensor, memory: Memory) -> Pair:
        """Change queries and keys by the content of the text, after on_queries_keys: same shapes.

        x [batch, length, hidden] is the input of this layer's attention, memory as for on_scores.
        Earlier keys are kept as they were changed.
        """
        return q, k

    def distance_bias(self, length: int) -> Tensor | None:
        """Table that is added to q·k/√head_dim: [heads, length] float32, or None.

        Column d belongs to the key d tokens before the query.
        """
        return None

    def distance_weight(self, length: int) -> Tensor | None:
        """Table that multiplies q·k/√head_dim before the bias: [heads, length] float32, or None."""
        return None

    def score_scale(self, visible_keys: Tensor) -> Tensor | None:
        """Factor of the scores of queries that attend to so many keys: [queries] int64, or with a
        batch before it -> […, heads, queries] float32, or None.

        It multiplies q after the other hooks that change it, and acts in every layer.
        """
        return None

    def index_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Bias that needs the positions of query and key, and not only their distance.

        [queries] int64, [keys] int64 -> [heads, queries, keys] float32, added to q·k/√head_dim.
        Attention asks for one block of queries at a time. It masks keys after a query itself.
        """
        raise NotImplementedError

    def score_bias(self, x: Tensor, memory: Memory) -> tuple[Tensor | None, Tensor]:
        """A bias by content that is a product, (u, w): u·w is added to q·k/√head_dim.

        x [batch, queries, hidden] is the input of this layer's attention, memory as for on_scores.
        u [batch, heads, queries], or None where it is 1; w [batch, heads, keys] for all keys, those
        in memory first. With a last dimension of both, the sum over it is added. What is the same
        for all keys of a query drops out of the softmax, so a sum over the tokens between key and
        query is u = None with w = minus the running sum at the key. Give such a sum in float64.
        """
        raise NotImplementedError

    def block_scores(self, q: Tensor, k: Tensor, x: Tensor, memory: Memory) -> BlockScores:
        """The scores in place of q·k/√head_dim, by blocks of queries: (function, tensors).

        q, k [batch, heads, length, head_dim] of the new tokens, x [batch, length, hidden] the input
        of this layer's attention, memory as for on_scores: keep earlier keys there.

        function(tensors, start, end) is asked for the queries start … end - 1. It returns far_q
        [batch, heads, rows, features] and far_k [batch, heads, keys, features], whose products are
        the scores of all keys before the query `start`, cached ones too; and the scores of the
        block's own keys [batch, heads, rows, rows], any finite number for keys after a query. All
        are divided by √head_dim and at least float32. Gradients compute the blocks again, so
        function must depend on nothing that learns but its tensors, of which it may be given
        copies. start is a multiple of 256. One that reads few tensors of a long text for each block
        is faster, because gradients of a slice are as long as the whole.
        """
        raise NotImplementedError

    def on_scores(self, scores: Tensor, x: Tensor, memory: Memory) -> Tensor:
        """Change the scores by the content of the text; attention is then `eager`.

        scores [batch, heads, queries, keys] -> same. They are q·k/√head_dim with every bias; for
        keys after a query they hold any finite number, and attention masks these afterwards.
        x [batch, queries, hidden] is the input of this layer's attention.
        memory belongs to this layer and lives as long as a cached text: keep in it what later
        tokens need of earlier ones. It is empty at the beginning of a text.

        An encoding that needs q too can keep it in on_queries_keys, which is called just before;
        it needs `per_layer = True`.
        """
        raise NotImplementedError

    def check_documents(self, *, restart: bool) -> None:
        """Raises UserError if this encoding cannot keep the documents of a text apart.

        restart: whether positions are to begin again at each document
        """
        name = type(self).__name__
        if self.crosses_documents is not None:
            raise UserError(
                f"reset_attention_mask: {name} cannot keep documents apart,"
                f" {self.crosses_documents} reads the text before; set it to false"
            )
        by_index = self.has("on_scores") and not self.by_distance
        if restart and (by_index or self.has("index_bias")):
            raise UserError(
                f"reset_position_ids: {name} cannot begin again at each document, because its bias"
                " depends on the index of the query, which is one for all windows of a batch; set"
                " it to false (reset_attention_mask keeps documents apart without it)"
            )

    def check_cached(self, before: int, length: int) -> None:
        """Raises UserError if cached keys of `before` tokens do not serve a text of `length`."""
        for part in self.inside:
            part.check_cached(before, length)

    def check_heads(self, key_heads: int, heads_per_query: int) -> None:
        """Raises UserError if the encoding needs more key heads, or other queries."""
        heads, name = self.shape.heads, type(self).__name__
        if self.heads_per_query != heads_per_query:
            raise UserError(
                f"heads_per_query: {heads_per_query} does not fit {name};"
                f" set it to {self.heads_per_query}"
            )
        if not self.grouped_queries and key_heads < heads:
            raise UserError(
                f"num_key_value_heads: {key_heads} is less than num_attention_heads = {heads}, but"
                f" {name} changes the keys of each head in its own way; leave"
                " num_key_value_heads out"
            )

    def check_tokens(self, vocab: int, end_of_document: int | None) -> None:
        """Raises UserError if ids of tokens in the options do not fit `vocab` rows of embeddings.

        end_of_document: the token that ends documents, where it is known
        """
        for part in self.inside:
            part.check_tokens(vocab, end_of_document)

    def check_parts(self) -> None:
        """Raises UserError if processes that have one part of a text each cannot compute this."""
        reasons = {
            "on_scores": "needs all scores at once",
            "on_queries_keys_by_content": "reads the tokens before",
            "on_embeddings_by_ids": "reads the tokens before",
            "block_scores": "reads the tokens between query and key",
            "score_bias": "does not say that its w is a sum (in_parts)",
            "prepare": "would draw in each process for itself (in_parts)",
        }
        name = type(self).__name__
        faults = [
            f"{hook} {reason}"
            for hook, reason in reasons.items()
            if self.has(hook) and hook not in self.in_parts
        ]
        if self.crosses_documents is not None:
            faults.append(f"{self.crosses_documents} reads the text before")
        if faults:
            raise UserError(
                f"context_parallel_size: {name} cannot be computed in parts of a text, because"
                f" {faults[0]}; set it to 1"
            )

    def use_paper_precision(self, on: bool) -> None:
        """Compute positions, distances and biases in bfloat16, as the forks' code does, or not.

        Raises UserError if the forks have no such encoding.
        """
        if on and not self.is_published:
            raise UserError(
                f"paper_precision: KERPLE's and MEP's code has no {type(self).__name__}, so it is"
                " not known how they would round it - set paper_precision: false"
            )
        for position in (self, *self.inside):
            position.paper_precision = on

    def use_scaling(self, options: Mapping[str, Any]) -> None:
        """Turn by the frequencies that these options give in place of its own; {}: as built.

        Raises UserError for options that do not fit. Encodings that turn nothing stay as they are.
        """
        for part in self.inside:
            part.use_scaling(options)

    def has(self, hook: str) -> bool:
        """Whether this encoding overrides a hook: index_bias, on_scores, distance_bias …"""
        return getattr(type(self), hook) is not getattr(Position, hook)

    @property
    def inside(self) -> list["Position"]:
        """The encodings inside this one."""
        return [part for part in self.modules() if isinstance(part, Position) and part is not self]

    @property
    def is_published(self) -> bool:
        """Whether the forks have it."""
        return self.fork is not None

    @property
    def rotates(self) -> bool:
        """Whether q·k depends on the distance, and can be asked for other positions."""
        return self.has("on_queries_keys_at")

    @property
    def stretch_fault(self) -> str | None:
        """Why `stretch` and `use_scaling` cannot change its frequencies; None: they can."""
        return "it has no frequencies that can be stretched; take rotary"

    @property
    def movable(self) -> bool:
        """Whether queries and keys can be had at other positions than their own."""
        return self.has("on_queries_keys_at") or not self.has("on_queries_keys")

    @property
    def changes_embeddings(self) -> bool:
        """Whether it acts before the first layer, once for all layers."""
        return self.has("on_embeddings") or self.has("on_embeddings_by_ids")

    @property
    def looks_at_content(self) -> bool:
        """Whether scores depend on the text besides q and k."""
        hooks = ["on_embeddings_by_ids", "on_queries_keys_by_content", "score_bias"]
        hooks += ["block_scores", "on_scores"]
        return any(self.has(hook) for hook in hooks)

    def distances(self, length: int) -> Tensor:
        """0, 1, …, length - 1: [length] float32, exact up to 2^24."""
        return torch.arange(length, device=self.origin.device).to(self.origin.dtype)

    def indices(self, start: int, length: int) -> Tensor:
        """Positions of `length` tokens from `start` on: [length] float32."""
        if self.drawn is None:
            return start + self.distances(length)
        return self.drawn[start : start + length].to(self.origin.dtype)

    def once(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """`function(*inputs)`, made once in a pass: layers share positions and cosines.

        function: a method of this encoding that reads nothing learned. Inputs that are tensors must
        be the same objects.
        """
        if torch.compiler.is_compiling():
            return function(*inputs)
        # Autograd refuses what was made in inference mode. `origin` changes with device and dtype.
        mode = torch.is_inference_mode_enabled()
        key = (function.__name__, mode, self.drawn, self.origin, self.paper_precision, *inputs)
        if key not in self.made:
            if len(self.made) > 1:  # positions and cosines of another place
                self.made.clear()
            self.made[key] = function(*inputs)
        return self.made[key]

    def table(self, kernel: Callable[[Tensor], Tensor], length: int) -> Tensor:
        """`kernel` of the distances 0 … length - 1, outside autocast: [heads, length] float32.

        Raises WrongEncoding for another shape or dtype.
        """
        distance = self.distances(length)
        with without_autocast(distance):
            table = self.in_float32(kernel, distance)
            if self.paper_precision:
                # The forks' -inf: no key gets less than no attention.
                table = table.to(distance.dtype).clamp(min=NO_ATTENTION)
        returned = (
            f"{list(table.shape)} {table.dtype}" if isinstance(table, Tensor) else repr(table)
        )
        expected = f"{[self.shape.heads, length]} {distance.dtype}"
        if returned != expected:
            raise WrongEncoding(kernel, f"must return {expected}, not {returned}")
        return table

    def bias_between(self, queries: Tensor, keys: Tensor, length: int) -> Tensor:
        """The whole bias of tokens at positions below `length`, later keys as at distance 0.

        [queries] int64, [keys] int64 -> [heads, queries, keys] float32
        """
        total = self.origin.expand(self.shape.heads, len(queries), len(keys))
        table = self.distance_bias(length)
        if table is not None:
            total = total + table[:, (queries[:, None] - keys).clamp(min=0)]
        if self.has("index_bias"):
            total = total + self.index_bias(queries, keys)
        return total

    def log_n_scale(self, visible_keys: Tensor) -> Tensor:
        """max(1, log n / log train_length) for queries with n visible keys: same shape, float32.

        Log-n attention scaling in the form without training: Su 2021, kexue.fm/archives/8823.
        """
        log_n = visible_keys.to(self.origin.dtype).log()
        return (log_n / math.log(self.shape.train_length)).clamp(min=1.0)

    def reference(self) -> Iterator[tuple[str, Tensor]]:
        """(name in the forks' checkpoints, our tensor): load parameters, compare buffers."""
        for position in (self, *self.inside):
            if position.fork is not None:
                for ours, theirs in position.fork.names.items():
                    yield theirs, getattr(position, ours)


class Turning(Position):
    """An encoding that turns queries and keys: a family writes `on_queries_keys_at` only."""

    def on_queries_keys(self, q: Tensor, k: Tensor, start: int = 0) -> Pair:
        position = self.once(self.indices, start, q.shape[-2])
        return self.on_queries_keys_at(q, k, position, position, start=start)


class Around(Position):
    """An encoding around another one, `inner`, which acts on embeddings, queries and keys."""

    inner: Position

    def on_embeddings(self, x: Tensor, start: int = 0) -> Tensor:
        return self.inner.on_embeddings(x, start)

    def on_queries_keys(self, q: Tensor, k: Tensor, start: int = 0) -> Pair:
        return self.inner.on_queries_keys(q, k, start)

    def score_scale(self, visible_keys: Tensor) -> Tensor | None:
        return self.inner.score_scale(visible_keys)


class DistanceBias(Position):
    """An encoding that is one function of the distance: a family writes `log_kernel` only."""

    def log_kernel(self, distance: Tensor) -> Tensor:
        """The bias of q·k/√head_dim: [length] float32 -> [heads, length] float32."""
        raise WrongEncoding(self.log_kernel, f"must be defined in {type(self).__name__}")

    def paper_kernel(self, distance: Tensor) -> Tensor:
        """The same in bfloat16, as the forks do: [length] float32 -> [heads, length] bfloat16."""
        return self.log_kernel(distance.bfloat16())

    def paper_probability(self, distance: Tensor) -> Tensor:
        """The kernel itself and not its logarithm, likewise: what the forks' mixtures add up."""
        return torch.exp(self.paper_kernel(distance))

    def distance_bias(self, length: int) -> Tensor:
        kernel = self.paper_kernel if self.paper_precision else self.log_kernel
        return self.table(kernel, length)


def after_earlier(new: Tensor, count: int, memory: Memory, name: str) -> Tensor:
    """The last `count` earlier tokens and these, for a causal convolution; 0 before the text.

    new [batch, features, length] -> [batch, features, count + length]. memory[name] holds the
    earlier tokens, and then the last of all.
    """
    earlier = memory.get(name, new.new_zeros(*new.shape[:2], count))
    longer = torch.cat([earlier, new], dim=2)
    memory[name] = longer[:, :, longer.shape[2] - count :].detach().clone()  # not all of them
    return longer


def with_earlier(new: Tensor, memory: Memory, name: str) -> Tensor:
    """Numbers of all tokens: [batch, heads, tokens, …]; memory[name] holds those of earlier ones,
    and then of all."""
    if name in memory:
        new = torch.cat([memory[name], new], dim=2)
    memory[name] = new
    return new


def running_sum(new: Tensor, memory: Memory) -> Tensor:
    """Sums of the tokens up to each key: [batch, heads, queries] -> [batch, heads, keys] float64.

    memory["total"] holds those of earlier tokens, and then all of them. In float64, because a sum
    over 16384 tokens in float32 loses the difference between neighbours.
    """
    total = new.double().cumsum(dim=2)
    if "total" in memory:
        total = memory["total"][..., -1:] + total
    return with_earlier(total, memory, "total")


def running_angle(new: Tensor, memory: Memory) -> Tensor:
    """Sums of the tokens up to each query: [batch, heads, queries, …] -> same, float64.

    memory["sum"] holds that of all earlier tokens, and then of all.
    """
    total = new.double().cumsum(dim=2) + memory.get("sum", 0)
    memory["sum"] = total[:, :, -1:].detach()
    return total
