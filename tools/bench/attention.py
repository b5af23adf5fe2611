"""Time and memory of attention with a bias by distance or content, and of other ways.

python tools/bench/attention.py --threads 1 --lengths 512 2048 --dtypes float32 --output out.json
python tools/bench/attention.py --tables learned --ways triton --rounds 5

Beside it are attention without a bias, rotary, and the forks' way. Every round runs each candidate
once, in rotated order. Ratios are to plain scaled_dot_product_attention(is_causal=True) without a
bias in the same round. The tables are given: a model computes them once per step.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from measure import DTYPES, FIGURES, Bench, arguments, figures, positive, report_progress, table
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
REFERENCES = ("flash", "plain")
WAYS = ("rotary", "path", "path_fox", *BACKENDS, "forks")
# float32 matrices [batch, heads, length, length] that a dense way surely fits in, by backward.
DENSE_COPIES = {False: 4, True: 12}
Computation = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v -> output


@dataclass(frozen=True)
class Candidate:
    """One way to compute attention.

    way: one of WAYS or of REFERENCES;
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

    @property
    def needs(self) -> float:
        """Memory of the dense ways on the CPU, where too much ends the process; else 0."""
        if self.device != "cpu" or self.way not in ("forks", "eager"):
            return 0
        return DENSE_COPIES[self.backward] * self.batch * self.heads * self.length**2 * 4

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
        if self.way == "plain":
            return plain, []
        if self.way == "flash":
            return sdpa_kernel(SDPBackend.FLASH_ATTENTION)(plain), []
        if self.way == "forks":
            p, a = torch.rand(2, self.heads, 1, 1, device=self.device)
            index = torch.arange(self.length, device=self.device)
            distance = (index[:, None] - index).tril().float()
            dense = {"p": p, "a": a, "distance": distance, "mask": index[:, None] < index}
            return partial(forks, **dense), [p, a]
        text = torch.randn(self.batch, self.length, self.heads * self.head_dim, device=self.device)
        if self.tables is None:  # an encoding that gives scores, or turns queries and keys
            position = self._position(self.way)
            if position.has("block_scores"):

                def by_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                    scores: dict[str, Any] = {"block_scores": position.block_scores(q, k, text, {})}
                    if position.has("score_bias"):
                        scores["score_bias"] = position.score_bias(text, {})
                    return attention(q, k, v, **scores)

                return by_blocks, list(position.parameters())
            turn = position.on_queries_keys
            return lambda q, k, v: plain(*turn(q, k), v), []

        position = self._position(BIASES[self.tables])
        tables = {
            "bias": position.distance_bias(self.length),
            "weight": position.distance_weight(self.length),
        }
        if position.has("score_bias"):
            tables["u"], tables["w"] = position.score_bias(text, {})
        # Copies that know nothing of how they were computed.
        leaves = {name: x.detach().clone() for name, x in tables.items() if x is not None}
        learned = list(leaves.values()) if list(position.parameters()) else []
        options: dict[str, Any] = dict(leaves)
        if "w" in leaves:
            options["score_bias"] = (options.pop("u", None), options.pop("w"))
        if self.tables == "window":
            options["window"] = min(WINDOW, self.length)
        return partial(attention, backend=self.way, **options), learned

    def _position(self, name: str) -> Position:
        hidden = self.heads * self.head_dim
        return build(name, Shape(self.heads, self.head_dim, hidden, WINDOW)).to(self.device)


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


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__ or "")
    add = parser.add_argument
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    add("--lengths", nargs="+", type=positive, default=lengths, metavar="L")
    tokens = "batch x length where a length allows; default 16384, on CPU 512"
    add("--tokens", type=positive, metavar="N", help=tokens)
    add("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    add("--tables", nargs="+", choices=BIASES, default=list(BIASES))
    ways = "end with 1 if one of these does not run; default: all that run"
    add("--ways", nargs="+", choices=WAYS, help=ways)
    add("--heads", type=positive, default=12)
    add("--head_dim", type=positive, default=64)
    options = parser.parse_args(argv)
    bench = Bench(options)
    on_gpu = options.device == "cuda"
    tokens = options.tokens or (16384 if on_gpu else 512)
    wanted = options.ways or WAYS
    parts = [bench.heading]
    for dtype in options.dtypes:
        for backward in (False, True):
            title = f"{dtype}, {'forward and backward' if backward else 'forward'}"
            rows = []
            for length in options.lengths:
                report_progress(f"{title}, {length}")
                batch = max(1, tokens // length)
                sizes = (backward, dtype, length, batch, options.heads, options.head_dim)
                kinds: list[tuple[str, str | None]] = [("plain", None)]
                kinds += [("flash", None)] if on_gpu else []
                for way in wanted:
                    if way not in BACKENDS:
                        kinds.append((way, None))
                        continue
                    # Without a gradient a learned table is a frozen one.
                    tables = [one for one in options.tables if backward or one != "learned"]
                    kinds += [(way, one) for one in tables]
                candidates = [Candidate(*kind, *sizes, options.device) for kind in kinds]
                rows += bench.group(candidates, REFERENCES)
                heads = f"{options.heads} heads of {options.head_dim}"
                section = f"#### {title}, {heads}\n\n{markdown(rows)}"
                bench.save("\n".join([*parts, section]))
            parts.append(section)
    print("\n".join(parts))
    lacking = [row for row in bench.rows if row["reason"] and row["way"] in (options.ways or ())]
    return int(bool(lacking))


def markdown(rows: list[dict[str, Any]]) -> str:
    """Ratios to plain attention with a column for each length, then every figure."""
    lengths = list(dict.fromkeys(str(row["length"]) for row in rows))
    ratios: dict[str, list[str]] = {}
    lines = []
    for row in rows:
        name = row["candidate"]
        cells = ratios.setdefault(name, [name])
        if row["median_ratio"] is None:
            cells.append("-")
        else:
            cells.append(f"{row['median_ratio']:.2f}")
        size = f"{row['batch']} x {row['length']}"
        lines.append([name, size, *figures(row), row["reason"] or ""])
    overview = table(["ratio", *lengths], list(ratios.values()))
    every_figure = table(["", "batch x length", *FIGURES, "reason"], lines)
    return f"{overview}\n{every_figure}"


if __name__ == "__main__":
    sys.exit(main())
