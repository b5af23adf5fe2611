"""Time and memory of attention with a bias by distance or content, and of other ways.

python tools/bench/attention.py --threads 1 --lengths 512 2048 --dtypes float32 --output out.json
python tools/bench/attention.py --tables learned --ways triton --rounds 5

Beside it are attention without a bias, rotary, and the forks' way. Every round runs each candidate
once, in rotated order. Ratios are to plain scaled_dot_product_attention(is_causal=True) without a
bias in the same round. The tables are given: a model computes them once per step.
"""

import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from measure import (
    ON_GPU,
    Call,
    Candidate,
    arguments,
    conditions,
    figures,
    measure,
    positive,
    save,
    start,
    table,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.attention import BACKENDS, attention
from megatron.cli_errors import guarded
from megatron.positions import Shape, build

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
ENCODINGS = ("rotary", "path", "path_fox")
WAYS = (*ENCODINGS, *BACKENDS, "forks")
DENSE = ("eager", "forks")
LONGEST_DENSE = 4096  # beyond, all scores need tens of gigabytes, and too much ends the process
# Flash wherever it can, never cuDNN's kernel.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def prepared(
    way: str,
    bias: str,
    backward: bool,
    dtype: str,
    batch: int,
    heads: int,
    head_dim: int,
    device: str,
    length: int,
) -> Call:
    """One way to compute attention, on inputs of its own; bias: a name in BIASES for a backend."""
    torch.manual_seed(0)
    learned = []
    with torch.device(device):
        numbers = torch.randn(4, batch, heads, length, head_dim).to(getattr(torch, dtype))
        text = torch.randn(batch, length, heads * head_dim)
        p, a = torch.rand(2, heads, 1, 1)
        index = torch.arange(length)
    *inputs, gradient = numbers
    shape = Shape(heads, head_dim, heads * head_dim, WINDOW)

    if way == "plain":
        compute = plain
    elif way == "forks":
        distance = (index[:, None] - index).tril().float()
        mask = index[:, None] < index
        learned = [p, a]
        compute = partial(forks, p=p, a=a, distance=distance, mask=mask)
    elif way in ENCODINGS:
        position = build(way, shape).to(device)
        learned = list(position.parameters())

        def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not position.has("block_scores"):
                return plain(*position.on_queries_keys(q, k), v)
            scores: dict[str, Any] = {"block_scores": position.block_scores(q, k, text, {})}
            if position.has("score_bias"):
                scores["score_bias"] = position.score_bias(text, {})
            return attention(q, k, v, **scores)
    else:
        position = build(BIASES[bias], shape).to(device)
        u, w = position.score_bias(text, {}) if position.has("score_bias") else (None, None)
        tables = [position.distance_bias(length), position.distance_weight(length), u, w]
        # Copies that know nothing of how they were computed.
        added, weight, u, w = (None if x is None else x.detach().clone() for x in tables)
        if list(position.parameters()):
            learned = [x for x in (added, weight, u, w) if x is not None]
        compute = partial(
            attention,
            bias=added,
            weight=weight,
            score_bias=None if w is None else (u, w),
            window=min(WINDOW, length) if bias == "window" else None,
            backend=way,
        )

    if not backward:
        return torch.no_grad()(partial(compute, *inputs))
    leaves = [*inputs, *learned]
    for leaf in leaves:
        leaf.requires_grad_()
    return lambda: torch.autograd.grad(compute(*inputs), leaves, gradient)


@sdpa_kernel(KERNELS)
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
    parser = arguments(__doc__)
    add = parser.add_argument
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    add("--lengths", nargs="+", type=positive, default=lengths, metavar="L")
    tokens = "batch x length where a length allows; default 16384, without a GPU 512"
    add("--tokens", type=positive, default=16384 if ON_GPU else 512, metavar="N", help=tokens)
    dtypes = ["float32", "bfloat16"]
    add("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    add("--tables", nargs="+", choices=BIASES, default=list(BIASES))
    add("--ways", nargs="+", choices=WAYS, help="default: all; without a GPU not triton")
    add("--heads", type=positive, default=12)
    add("--head_dim", type=positive, default=64)
    options = parser.parse_args(argv)
    start(options)
    ways = options.ways or [way for way in WAYS if ON_GPU or way != "triton"]
    print(conditions(options.device))
    rows = []
    for dtype in options.dtypes:
        for backward in (False, True):
            title = f"{dtype}, {'forward and backward' if backward else 'forward'}"
            lines = []
            for length in options.lengths:
                batch = max(1, options.tokens // length)
                facts = {"dtype": dtype, "backward": backward, "batch": batch}
                sizes = (backward, dtype, batch, options.heads, options.head_dim, options.device)
                candidates = []
                for way in ("plain", *ways):
                    if way in DENSE and length > LONGEST_DENSE:
                        continue
                    for bias in options.tables if way in BACKENDS else [""]:
                        name = f"{way}, {bias}" if bias else way
                        make = partial(prepared, way, bias, *sizes)
                        candidates.append(Candidate(name, make, length, facts))
                for row in measure(candidates, options):
                    rows.append(row)
                    lines.append([row["candidate"], f"{batch} x {length}", *figures(row)])
                save(rows, options)
            header = ["", "batch x length", "ms", "ratio (quartiles)", "peak MiB"]
            print(f"#### {title}\n\n{table(header, lines)}", flush=True)
    return int(any(row["reason"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
