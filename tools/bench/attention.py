"""Time and memory of attention with a bias by distance or content, and of other ways beside it.

python tools/bench/attention.py --quick
python tools/bench/attention.py --threads 1 --lengths 512 2048 --dtypes float32 --output out.json

Beside it are attention without a bias, rotary, and the forks' way. Every round runs each candidate
once, in rotated order. Ratios are to plain scaled_dot_product_attention(is_causal=True) without a
bias in the same round. The tables are given: a model computes them once per step. Floors count
4 · head_dim operations for each visible pair of a query and a key, 3.5 times that with the
backward pass (four products of the gradient and the scores once more), and every input and output
moved once.
"""

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from bench_tables import FIGURES, figures, heading, table
from measure import DTYPES, Bench, arguments, parsed, positive, report_progress
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.attention import BACKENDS, attention
from megatron.cli_errors import guarded
from megatron.model.size import PER_PAIR, causal_pairs
from megatron.positions import Position, Shape, build

TABLES = {
    "frozen": "alibi",
    "learned": "kerple_log",
    "weight": "kerple_bias_wht",
    "window": "alibi",
}
CONTENT = {"keys": "fox", "rank_one": "cable"}
"""Biases by content, a number for each key and, in the second, one for each query."""
BIASES = TABLES | CONTENT
WINDOW = 512
KERNELS = {"plain flash": SDPBackend.FLASH_ATTENTION, "plain cudnn": SDPBackend.CUDNN_ATTENTION}
# The distances' dtype; None: the model's.
FORKS = {"forks": torch.float32, "forks, rounded distances": None}
REFERENCES = ("plain flash", "plain")
PASSES = {"forward": False, "forward+backward": True}
QUICK = {
    "lengths": [512, 4096],
    "dtypes": ["bfloat16"],
    "tables": ["frozen", "learned"],
    "rounds": 5,
    "seconds": 2.0,
}
# float32 matrices [batch, heads, length, length] that a dense way surely fits in, by backward.
DENSE_COPIES = {False: 4, True: 12}
WITH_BACKWARD = 3.5  # products of forward and backward, in those of forward
FLOAT32 = 4  # bytes
Computation = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v -> output


@dataclass(frozen=True)
class Candidate:
    """One way to compute attention.

    way: plain, one of its kernels, rotary, a name in FORKS or a backend;
    tables: a name in BIASES, None for no bias
    """

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
        *inputs, gradient = torch.randn(shape, device=self.device).to(self._torch_dtype)
        compute, learned = self._computation()
        if not self.backward:
            return torch.no_grad()(lambda: compute(*inputs))
        leaves = [*inputs, *learned]
        for leaf in leaves:
            leaf.requires_grad_()
        return lambda: torch.autograd.grad(compute(*inputs), leaves, gradient)

    @property
    def _torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def _computation(self) -> tuple[Computation, list[Tensor]]:
        """A function of q, k, v, and what else is learned."""
        if self.way in FORKS:
            return self._forks(FORKS[self.way] or self._torch_dtype)
        if self.tables:
            return self._ours(self.tables)
        if self.way in KERNELS:
            return sdpa_kernel(KERNELS[self.way])(plain), []
        if self.way == "plain":
            return plain, []
        turn = self._position(self.way).on_queries_keys
        return lambda q, k, v: plain(*turn(q, k), v), []

    def _ours(self, kind: str) -> tuple[Computation, list[Tensor]]:
        """Attention by one of our backends, with an encoding's tables as leaves."""
        if kind in CONTENT:
            return self._by_content(self._position(CONTENT[kind]))
        position = self._position(TABLES[kind])
        bias = _leaf(position.distance_bias(self.length))
        weight = _leaf(position.distance_weight(self.length))
        learned = []
        if list(position.parameters()):
            learned = [table for table in (bias, weight) if table is not None]

        def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, bias, weight=weight, window=self.window, backend=self.way)

        return compute, learned

    def _by_content(self, position: Position) -> tuple[Computation, list[Tensor]]:
        """Attention with an encoding's numbers for queries and keys as leaves."""
        text = torch.randn(self.batch, self.length, self.heads * self.head_dim, device=self.device)
        with torch.no_grad():
            u, w = map(_leaf, position.score_bias(text, {}))
        assert w is not None
        learned = [numbers for numbers in (u, w) if numbers is not None]
        return (
            lambda q, k, v: attention(q, k, v, backend=self.way, score_bias=(u, w)),
            learned,
        )

    def _forks(self, distance_dtype: torch.dtype) -> tuple[Computation, list[Tensor]]:
        p, a = torch.rand(2, self.heads, 1, 1, device=self.device).to(distance_dtype)
        index = torch.arange(self.length, device=self.device)
        distance = (index[:, None] - index).tril().to(distance_dtype)
        later = index[:, None] < index
        return lambda q, k, v: forks(q, k, v, p, a, distance, later), [p, a]

    def _position(self, name: str) -> Position:
        hidden = self.heads * self.head_dim
        return build(name, Shape(self.heads, self.head_dim, hidden, WINDOW)).to(self.device)

    @property
    def window(self) -> int | None:
        return min(WINDOW, self.length) if self.tables == "window" else None

    @property
    def pairs(self) -> int:
        """Visible pairs of a query and a key, of one head."""
        if self.window is None:
            return causal_pairs(self.length)
        return causal_pairs(self.length) - causal_pairs(self.length - self.window)

    @property
    def flops(self) -> float:
        forward = PER_PAIR * self.batch * self.heads * self.pairs * self.head_dim
        return WITH_BACKWARD * forward if self.backward else forward

    @property
    def bytes(self) -> float:
        """Every input and output moved once.

        Forward moves q, k, v and the output. Backward reads them and the output's gradient, and
        writes three gradients. A table is float32; backward reads it again and writes its gradient.
        """
        tensors, tables = (12, 3) if self.backward else (4, 1)
        numbers = self.batch * self.heads * self.length * self.head_dim
        moved = tensors * numbers * self._torch_dtype.itemsize
        if self.tables:
            moved += tables * self.heads * self.length * FLOAT32
        return moved

    @property
    def needs(self) -> float:
        """Memory of the dense ways on the CPU, where too much ends the process; else 0."""
        dense = self.way in FORKS or self.way == "eager"
        if self.device != "cpu" or not dense:
            return 0
        matrix = self.batch * self.heads * self.length**2 * FLOAT32
        return DENSE_COPIES[self.backward] * matrix


def _leaf(table: Tensor | None) -> Tensor | None:
    """A copy that knows nothing of how it was computed."""
    return None if table is None else table.detach().clone()


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention without a bias."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def forks(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, a: Tensor, distance: Tensor, mask: Tensor
) -> Tensor:
    """Attention as the GPT-NeoX forks of KERPLE and MEP compute it in every layer.

    The dense bias, here KERPLE's logarithm, is made anew and added to scores of the model's dtype.
    The scores of later keys become -10000.
    q, k, v [batch, heads, length, head_dim]; p, a [heads, 1, 1];
    distance, mask (True for later keys) [length, length] -> as q
    """
    batch, heads, length, head_dim = q.shape
    queries = q.flatten(0, 1)  # [batch * heads, length, head_dim]
    keys = k.flatten(0, 1).transpose(1, 2)  # [batch * heads, head_dim, length]
    values = v.flatten(0, 1)
    unused = q.new_empty(batch * heads, length, length)
    scores = torch.baddbmm(unused, queries, keys, beta=0.0, alpha=1 / math.sqrt(head_dim))
    scores = scores.view(batch, heads, length, length)
    bias = p * torch.log(1 + a * distance)  # [heads, length, length]
    scores = scores - bias.to(q.dtype)
    scores = scores.masked_fill_(mask, -10000.0)
    probabilities = scores.softmax(dim=-1).flatten(0, 1)
    return torch.bmm(probabilities, values).view_as(q)


def ways(
    kinds: Sequence[str], dtype: str, backward: bool, device: str
) -> Iterator[tuple[str, str | None]]:
    """(way, kind of table) of every candidate.

    Without a gradient a learned table is a frozen one and left out.
    """
    yield "plain", None
    if device == "cuda":
        for kernel in KERNELS:
            yield kernel, None
    yield "rotary", None
    for kind in kinds:
        if kind == "learned" and not backward:
            continue
        for backend in BACKENDS:
            yield backend, kind
    for name, distance_dtype in FORKS.items():
        if distance_dtype is not None or dtype != "float32":
            yield name, None


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__ or "", QUICK)
    add = parser.add_argument
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    add("--lengths", nargs="+", type=positive, default=lengths, metavar="L")
    add(
        "--tokens",
        type=positive,
        metavar="N",
        help="batch x length where a length allows; default 16384, on CPU 512",
    )
    add("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    add("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    add("--tables", nargs="+", choices=BIASES, default=list(BIASES))
    add("--heads", type=positive, default=12)
    add("--head_dim", type=positive, default=64)
    add(
        "--required",
        nargs="*",
        default=[],
        metavar="WORD",
        help="end with 1 where a candidate with one of these words in its name did not run",
    )
    options = parsed(parser, QUICK, argv)
    bench = Bench(options, "Attention")
    for dtype in options.dtypes:
        for direction in options.passes:
            for length in options.lengths:
                report_progress(f"{dtype}, {direction}, {length}")
                bench.group(candidates(options, dtype, direction, length), REFERENCES, dtype)
                bench.save(markdown(bench))
    print(markdown(bench))
    return 1 if lacks_required(bench) else 0


def lacks_required(bench: Bench) -> bool:
    """Whether a candidate that --required names did not run, or none has such a name."""
    for word in bench.options.required:
        reasons = [row["reason"] for row in bench.rows if word in row["candidate"]]
        if not reasons or any(reasons):
            return True
    return False


def candidates(options: Namespace, dtype: str, direction: str, length: int) -> list[Candidate]:
    """All ways of one dtype, direction and length."""
    backward = PASSES[direction]
    tokens = options.tokens or (16384 if options.device == "cuda" else 512)
    return [
        Candidate(
            way=way,
            tables=kind,
            backward=backward,
            dtype=dtype,
            length=length,
            batch=max(1, tokens // length),
            heads=options.heads,
            head_dim=options.head_dim,
            device=options.device,
        )
        for way, kind in ways(options.tables, dtype, backward, options.device)
    ]


def markdown(bench: Bench) -> str:
    """For each dtype and pass the ratios at all lengths, then every figure."""
    options = bench.options
    parts = [heading(bench)]
    for dtype in options.dtypes:
        for direction, backward in PASSES.items():
            chosen = (dtype, backward)
            rows = [row for row in bench.rows if (row["dtype"], row["backward"]) == chosen]
            if not rows:
                continue
            title = f"{dtype}, {direction}, {options.heads} heads of {options.head_dim}"
            parts += [f"#### {title}\n", overview(rows), details(rows)]
    return "\n".join(parts)


def overview(rows: list[dict[str, Any]]) -> str:
    """Ratios to plain attention: one line for each candidate, one column for each length."""
    lengths: list[int] = []
    ratios: dict[str, dict[int, float | None]] = {}
    for row in rows:
        length = row["length"]
        if length not in lengths:
            lengths.append(length)
        ratios.setdefault(row["candidate"], {})[length] = row["ratio"]
    lines = []
    for name, by_length in ratios.items():
        cells = [_two_decimals(by_length[length]) for length in lengths]
        lines.append([name, *cells])
    header = ["ratio", *map(str, lengths)]
    return table(header, lines)


def _two_decimals(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def details(rows: list[dict[str, Any]]) -> str:
    """Every figure, and why a candidate did not run."""
    lines = []
    for row in rows:
        size = f"{row['batch']} x {row['length']}"
        lines.append([row["candidate"], size, *figures(row), row["reason"] or ""])
    return table(["", "batch x length", *FIGURES, "reason"], lines)


if __name__ == "__main__":
    sys.exit(main())
