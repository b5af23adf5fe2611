"""Time and memory of attention with a bias by distance or content, and of other ways.

python tools/bench/attention.py --quick
python tools/bench/attention.py --threads 1 --lengths 512 2048 --dtypes float32 --output out.json

Beside it are attention without a bias, rotary, and the forks' way. Every round runs each candidate
once, in rotated order. Ratios are to plain scaled_dot_product_attention(is_causal=True) without a
bias in the same round. The tables are given: a model computes them once per step.
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
    parsed,
    positive,
    report_progress,
    table,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.attention import BACKENDS, attention
from megatron.cli_errors import guarded
from megatron.positions import Position, Shape, build

BIASES = {
    "frozen": "alibi",
    "learned": "kerple_log",
    "weight": "kerple_bias_wht",
    "window": "alibi",
    "keys": "fox",
    "rank_one": "cable",
}
"""An encoding for each kind of bias; the last two are by content."""
WINDOW = 512
KERNELS = {"plain flash": SDPBackend.FLASH_ATTENTION, "plain cudnn": SDPBackend.CUDNN_ATTENTION}
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
TURNING = ("rotary",)  # encodings that turn queries and keys
Computation = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v -> output


@dataclass(frozen=True)
class Candidate:
    """One way to compute attention.

    way: plain, one of its kernels, rotary, forks or a backend;
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
        numbers = torch.randn(shape, device=self.device).to(getattr(torch, self.dtype))
        *inputs, gradient = numbers
        compute, learned = self._computation()
        if not self.backward:
            return torch.no_grad()(lambda: compute(*inputs))
        leaves = [*inputs, *learned]
        for leaf in leaves:
            leaf.requires_grad_()
        return lambda: torch.autograd.grad(compute(*inputs), leaves, gradient)

    def _computation(self) -> tuple[Computation, list[Tensor]]:
        """A function of q, k, v, and what else is learned."""
        if self.way in KERNELS:
            return sdpa_kernel(KERNELS[self.way])(plain), []
        if self.way == "plain":
            return plain, []
        if self.way in TURNING:
            turn = self._position(self.way).on_queries_keys
            return lambda q, k, v: plain(*turn(q, k), v), []
        if self.way == "forks":
            p, a = torch.rand(2, self.heads, 1, 1, device=self.device)
            index = torch.arange(self.length, device=self.device)
            distance = (index[:, None] - index).tril().float()
            later = index[:, None] < index
            return lambda q, k, v: forks(q, k, v, p, a, distance, later), [p, a]

        position = self._position(BIASES[self.tables or ""])
        options: dict[str, Any] = {"backend": self.way}
        if position.has("score_bias"):
            width = self.heads * self.head_dim
            text = torch.randn(self.batch, self.length, width, device=self.device)
            with torch.no_grad():
                u, w = map(_leaf, position.score_bias(text, {}))
            learned = [numbers for numbers in (u, w) if numbers is not None]
            options["score_bias"] = (u, w)
            return lambda q, k, v: attention(q, k, v, **options), learned
        options["bias"] = _leaf(position.distance_bias(self.length))
        options["weight"] = _leaf(position.distance_weight(self.length))
        if self.tables == "window":
            options["window"] = min(WINDOW, self.length)
        learned = []
        if list(position.parameters()):
            learned = [options[name] for name in ("bias", "weight") if options[name] is not None]
        return lambda q, k, v: attention(q, k, v, **options), learned

    def _position(self, name: str) -> Position:
        hidden = self.heads * self.head_dim
        return build(name, Shape(self.heads, self.head_dim, hidden, WINDOW)).to(self.device)

    @property
    def needs(self) -> float:
        """Memory of the dense ways on the CPU, where too much ends the process; else 0."""
        if self.device != "cpu" or self.way not in ("forks", "eager"):
            return 0
        return DENSE_COPIES[self.backward] * self.batch * self.heads * self.length**2 * 4


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
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    bias = p * torch.log(1 + a * distance)  # [heads, length, length]
    scores = scores - bias.to(q.dtype)
    return scores.masked_fill_(mask, -10000.0).softmax(dim=-1) @ v


def ways(kinds: Sequence[str], backward: bool, device: str) -> Iterator[tuple[str, str | None]]:
    """(way, kind of table) of every candidate.

    Without a gradient a learned table is a frozen one and left out.
    """
    kernels = KERNELS if device == "cuda" else ()
    for way in ("plain", *kernels, "rotary"):
        yield way, None
    for kind in kinds:
        if kind == "learned" and not backward:
            continue
        for backend in BACKENDS:
            yield backend, kind
    yield "forks", None


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__ or "", QUICK)
    add = parser.add_argument
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    add("--lengths", nargs="+", type=positive, default=lengths, metavar="L")
    tokens = "batch x length where a length allows; default 16384, on CPU 512"
    add("--tokens", type=positive, metavar="N", help=tokens)
    add("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    add("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    add("--tables", nargs="+", choices=BIASES, default=list(BIASES))
    add("--heads", type=positive, default=12)
    add("--head_dim", type=positive, default=64)
    required = "end with 1 where a candidate with one of these words in its name did not run"
    add("--required", nargs="*", default=[], metavar="WORD", help=required)
    options = parsed(parser, QUICK, argv)
    bench = Bench(options)
    parts = [bench.heading]
    tokens = options.tokens or (16384 if options.device == "cuda" else 512)
    for dtype in options.dtypes:
        for direction in options.passes:
            rows = []
            for length in options.lengths:
                report_progress(f"{dtype}, {direction}, {length}")
                backward = PASSES[direction]
                batch = max(1, tokens // length)
                sizes = (backward, dtype, length, batch, options.heads, options.head_dim)
                candidates = [
                    Candidate(way, kind, *sizes, options.device)
                    for way, kind in ways(options.tables, backward, options.device)
                ]
                rows += bench.group(candidates, REFERENCES)
                title = f"{dtype}, {direction}, {options.heads} heads of {options.head_dim}"
                section = f"#### {title}\n\n{markdown(rows)}"
                bench.save("\n".join([*parts, section]))
            parts.append(section)
    print("\n".join(parts))
    return 1 if lacks_required(bench) else 0


def lacks_required(bench: Bench) -> bool:
    """Whether a candidate that --required names did not run, or none has such a name."""
    for word in bench.options.required:
        reasons = [row["reason"] for row in bench.rows if word in row["candidate"]]
        if not reasons or any(reasons):
            return True
    return False


def markdown(rows: list[dict[str, Any]]) -> str:
    """Ratios to plain attention with a column for each length, then every figure."""
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    ratios: dict[str, list[str]] = {}
    for row in rows:
        ratio = row["median_ratio"]
        ratios.setdefault(row["candidate"], []).append("-" if ratio is None else f"{ratio:.2f}")
    overview = table(
        ["ratio", *map(str, lengths)], [[name, *cells] for name, cells in ratios.items()]
    )
    lines = []
    for row in rows:
        size = f"{row['batch']} x {row['length']}"
        lines.append([row["candidate"], size, *figures(row), row["reason"] or ""])
    return overview + "\n" + table(["", "batch x length", *FIGURES, "reason"], lines)


if __name__ == "__main__":
    sys.exit(main())
