"""Time and memory of attention with a bias by distance, beside attention without one, rotary and the forks' way.

python tools/bench/attention.py --quick
python tools/bench/attention.py --threads 1 --lengths 512 2048 --dtypes float32 --output attention.json

Every round runs each candidate once, in rotated order; ratios are to plain scaled_dot_product_attention(is_causal=True)
without a bias in the same round. The tables are given: a model computes them once per step. Floors count 4 · head_dim
operations for each pair of a query and a key that it sees, 3.5 times that with the backward pass (four products of the
gradient and the scores once more), and every input and output moved once.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from measure import (
    DTYPES,
    FIGURES,
    Bench,
    arguments,
    figures,
    heading,
    parsed,
    positive,
    table,
    told,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.attention import BACKENDS, attention
from megatron.errors import UserError
from megatron.positions import Shape, build

TABLES = {
    "frozen": "alibi",
    "learned": "kerple_log",
    "weight": "kerple_bias_wht",
    "window": "alibi",
}
WINDOW = 512
KERNELS = {"plain flash": SDPBackend.FLASH_ATTENTION, "plain cudnn": SDPBackend.CUDNN_ATTENTION}
FORKS = {
    "forks": torch.float32,
    "forks, rounded distances": None,
}  # the distances' dtype; None: the model's
REFERENCES = ("plain flash", "plain")
PASSES = {"forward": False, "forward+backward": True}
QUICK = {
    "lengths": [512, 4096],
    "dtypes": ["bfloat16"],
    "tables": ["frozen", "learned"],
    "rounds": 5,
    "seconds": 2.0,
}
DENSE_COPIES = {
    False: 4,
    True: 12,
}  # float32 matrices [batch, heads, length, length] that a dense way surely fits in


@dataclass(frozen=True)
class Candidate:
    """One way to compute attention: `way` is plain, one of its kernels, rotary, a name in FORKS or a backend."""

    way: str
    tables: str | None
    backward: bool
    dtype: str
    length: int
    batch: int
    heads: int
    head_dim: int
    device: str

    @property
    def name(self) -> str:
        return f"{self.way}, {self.tables}" if self.tables else self.way

    def prepare(self) -> Callable[[], Any]:
        """The call to be timed, on inputs of its own."""
        torch.manual_seed(0)
        shape = (4, self.batch, self.heads, self.length, self.head_dim)
        *leaves, gradient = torch.randn(shape, device=self.device).to(getattr(torch, self.dtype))
        compute, learned = self._computation()
        if not self.backward:
            return torch.no_grad()(lambda: compute(*leaves))
        leaves = [leaf.requires_grad_() for leaf in leaves]
        learned = [leaf.requires_grad_() for leaf in learned]
        return lambda: torch.autograd.grad(compute(*leaves), [*leaves, *learned], gradient)

    def _computation(self) -> tuple[Callable[..., Tensor], list[Tensor]]:
        """A function of q, k, v, and what else is learned."""
        if self.way in FORKS:
            return self._forks(FORKS[self.way] or getattr(torch, self.dtype))
        if self.tables:
            return self._ours(self.tables)
        if self.way in KERNELS:
            return sdpa_kernel(KERNELS[self.way])(plain), []
        if self.way == "plain":
            return plain, []
        turning = self._position(self.way).on_queries_keys
        return lambda q, k, v: plain(*turning(q, k), v), []

    def _ours(self, kind: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
        found = self._position(TABLES[kind])
        bias, weight = found.distance_bias(self.length), found.distance_weight(self.length)
        tables = [None if one is None else one.detach().clone() for one in (bias, weight)]
        learned = [one for one in tables if one is not None] if list(found.parameters()) else []
        settings = {"weight": tables[1], "window": self.window, "backend": self.way}
        return lambda q, k, v: attention(q, k, v, tables[0], **settings), learned

    def _forks(self, precise: torch.dtype) -> tuple[Callable[..., Tensor], list[Tensor]]:
        p, a = torch.rand(2, self.heads, 1, 1, device=self.device).to(precise)
        index = torch.arange(self.length, device=self.device)
        distance = (index[:, None] - index).tril().to(precise)
        mask = index[:, None] < index
        return lambda q, k, v: forks(q, k, v, p, a, distance, mask), [p, a]

    def _position(self, name: str) -> Any:
        hidden = self.heads * self.head_dim
        return build(name, Shape(self.heads, self.head_dim, hidden, WINDOW)).to(self.device)

    @property
    def window(self) -> int | None:
        return min(WINDOW, self.length) if self.tables == "window" else None

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        unseen = self.length - (self.window or self.length)
        return (self.length * (self.length + 1) - unseen * (unseen + 1)) // 2

    @property
    def flops(self) -> float:
        return (
            (3.5 if self.backward else 1) * 4 * self.batch * self.heads * self.pairs * self.head_dim
        )

    @property
    def bytes(self) -> float:
        """q, k, v and output once; backward reads them and the output's gradient, and writes three gradients."""
        tensors = 12 if self.backward else 4
        rows = (
            self.batch
            * self.heads
            * self.length
            * self.head_dim
            * getattr(torch, self.dtype).itemsize
        )
        return tensors * rows + (3 if self.backward else 1) * (
            self.heads * self.length * 4 if self.tables else 0
        )

    @property
    def needs(self) -> float:
        """Memory of the dense ways on CPU, where too much ends the process: what the others need is small."""
        dense = self.device == "cpu" and (self.way in FORKS or self.way == "eager")
        return (
            DENSE_COPIES[self.backward] * self.batch * self.heads * self.length**2 * 4
            if dense
            else 0
        )


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention without a bias."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def forks(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, a: Tensor, distance: Tensor, mask: Tensor
) -> Tensor:
    """Attention as the GPT-NeoX forks of KERPLE and MEP compute it in every layer, here with KERPLE's logarithm.

    The dense bias is made anew, is added to scores of the model's dtype, and -10000 hides later keys.
    q, k, v [batch, heads, length, head_dim]; p, a [heads, 1, 1]; distance, mask [length, length] -> as q
    """
    batch, heads, length, head_dim = q.shape
    empty = q.new_empty(batch * heads, length, length)
    keys = k.flatten(0, 1).transpose(1, 2)
    scores = torch.baddbmm(empty, q.flatten(0, 1), keys, beta=0.0, alpha=1 / math.sqrt(head_dim))
    bias = p * torch.log(1 + a * distance)  # [heads, length, length]
    scores = (scores.view(batch, heads, length, length) - bias.to(q.dtype)).masked_fill_(
        mask, -10000.0
    )
    return torch.bmm(scores.softmax(dim=-1).flatten(0, 1), v.flatten(0, 1)).view_as(q)


def ways(
    kinds: Sequence[str], dtype: str, backward: bool, device: str
) -> Iterator[tuple[str, str | None]]:
    """(way, kind of table) of every candidate; without a gradient a learned table is a frozen one."""
    yield "plain", None
    if device == "cuda":
        yield from ((name, None) for name in KERNELS)
    yield "rotary", None
    for kind in kinds:
        if backward or kind != "learned":
            yield from ((backend, kind) for backend in BACKENDS)
    for name, precise in FORKS.items():
        if precise is not None or dtype != "float32":
            yield name, None


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__ or "", QUICK)
    add = parser.add_argument
    add(
        "--lengths",
        nargs="+",
        type=positive,
        default=[512, 1024, 2048, 4096, 8192, 16384],
        metavar="L",
    )
    add(
        "--tokens",
        type=positive,
        metavar="N",
        help="batch x length where a length allows; default 16384, on CPU 512",
    )
    add("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    add("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    add("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    add("--heads", type=positive, default=12)
    add("--head_dim", type=positive, default=64)
    try:
        given = parsed(parser, QUICK, argv)
        bench = Bench(given, "Attention")
        for dtype in given.dtypes:
            for name in given.passes:
                for length in given.lengths:
                    told(f"{dtype}, {name}, {length}")
                    batch = max(
                        1, (given.tokens or (16384 if given.device == "cuda" else 512)) // length
                    )
                    shape = (
                        PASSES[name],
                        dtype,
                        length,
                        batch,
                        given.heads,
                        given.head_dim,
                        given.device,
                    )
                    found = ways(given.tables, dtype, PASSES[name], given.device)
                    bench.group([Candidate(*way, *shape) for way in found], REFERENCES, dtype)
                    bench.save(markdown(bench))
    except UserError as fault:
        print(fault, file=sys.stderr)
        return 1
    print(markdown(bench))
    return 0


def markdown(bench: Bench) -> str:
    """For each dtype and pass the ratios at all lengths, then every figure."""
    parts = [heading(bench)]
    for dtype in bench.given.dtypes:
        for name, backward in PASSES.items():
            rows = [
                row for row in bench.rows if (row["dtype"], row["backward"]) == (dtype, backward)
            ]
            if rows:
                given = bench.given
                parts += [
                    f"#### {dtype}, {name}, {given.heads} heads of {given.head_dim}\n",
                    overview(rows),
                    details(rows),
                ]
    return "\n".join(parts)


def overview(rows: list[dict[str, Any]]) -> str:
    """Ratios to plain attention: one line for each candidate, one column for each length."""
    columns, names = (
        list(dict.fromkeys(row[key] for row in rows)) for key in ("length", "candidate")
    )
    ratios = {(row["candidate"], row["length"]): row["ratio"] for row in rows}
    cells = {key: "-" if ratio is None else f"{ratio:.2f}" for key, ratio in ratios.items()}
    return table(
        ["ratio", *map(str, columns)],
        [[name, *(cells[name, length] for length in columns)] for name in names],
    )


def details(rows: list[dict[str, Any]]) -> str:
    """Every figure, and why a candidate did not run."""
    lines = [
        [row["candidate"], f"{row['batch']} x {row['length']}", *figures(row), row["reason"] or ""]
        for row in rows
    ]
    return table(["", "batch x length", *FIGURES, "reason"], lines)


if __name__ == "__main__":
    sys.exit(main())
