"""Time and memory of attention with a bias by distance or content, and of other ways.

python tools/bench/attention.py --threads 1 --lengths 512 2048 --dtypes float32 --output out.json
python tools/bench/attention.py --tables learned --ways triton flex --rounds 5

Beside it are rotary, the forks' way, and torch's flex_attention (compiled, the table captured).
Every round runs each candidate once, in rotated order. Ratios are to plain
scaled_dot_product_attention(is_causal=True) without a bias in the same round. The tables are given:
a model computes them once per step.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from measure import DEVICE, ON_GPU, Call, Candidate, arguments, positive, run
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megatron.attention import BACKENDS, attention
from megatron.cli_errors import guarded
from megatron.positions import Shape, build

ENCODINGS = {
    "frozen": "alibi",
    "learned": "kerple_log",
    "weight": "kerple_bias_wht",
    "window": "alibi",
    "keys": "fox",
    "rank_one": "cable",
    "rotary": "rotary",
    "path": "path",
    "path_fox": "path_fox",
    "wall": "wall",
}
"""An encoding for each kind of term: tables by distance, terms by content, scores of its own."""
TABLES = ("frozen", "learned", "weight", "window", "keys", "rank_one", "rotary")
WINDOW = 512
WAYS = (*BACKENDS, "forks", "flex")
KINDS = {"plain": [""], "forks": ["learned"], "flex": ["learned"]}  # others: all
DENSE = ("eager", "forks")
LONGEST_DENSE = 4096  # beyond, all scores need tens of gigabytes, and too much ends the process
# Flash wherever it can, never cuDNN's kernel.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# With fullgraph, one length too many is an error, and never the slow program without a compiler.
compiled_flex = torch.compile(flex_attention, fullgraph=True, dynamic=False)


def prepared(
    way: str, kind: str, backward: bool, dtype: str, length: int, options: argparse.Namespace
) -> Call:
    """One way to compute attention, on inputs of its own; kind: a name in ENCODINGS, or empty."""
    torch.manual_seed(0)
    learned = []
    heads, head_dim = options.heads, options.head_dim
    batch = max(1, options.tokens // length)
    with torch.device(DEVICE):
        numbers = torch.randn(4, batch, heads, length, head_dim).to(getattr(torch, dtype))
        text = torch.randn(batch, length, heads * head_dim)
        p, a = torch.rand(2, heads, 1, 1)
        index = torch.arange(length)
    *inputs, gradient = numbers
    if way == "plain":
        compute = plain
    elif way == "forks":
        distance = (index[:, None] - index).tril().float()
        mask = index[:, None] < index
        learned = [p, a]
        compute = partial(forks, p=p, a=a, distance=distance, mask=mask)
    else:
        shape = Shape(heads, head_dim, heads * head_dim, WINDOW)
        position = build(ENCODINGS[kind], shape).to(DEVICE)
        u, w = position.score_bias(text, {}) if position.has("score_bias") else (None, None)
        tables = [position.distance_bias(length), position.distance_weight(length), u, w]
        # Copies that know nothing of how they were computed.
        table, weight, u, w = (None if x is None else x.detach().clone() for x in tables)
        learned = list(position.parameters())
        if learned:
            learned += [x for x in (table, weight, u, w) if x is not None]

        def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = position.on_queries_keys(q, k)
            scores = position.block_scores(q, k, text, {}) if position.has("block_scores") else None
            return attention(
                q,
                k,
                v,
                bias=table,
                weight=weight,
                score_bias=None if w is None else (u, w),
                block_scores=scores,
                window=min(WINDOW, length) if kind == "window" else None,
                backend=way,
            )

        if way == "flex":
            assert table is not None
            causal = causal_mask(length)
            compute = partial(flex, table=table, causal=causal)
    if not backward:
        return torch.no_grad()(partial(compute, *inputs))
    leaves = [*inputs, *learned]
    for leaf in leaves:
        leaf.requires_grad_()
    # What tables were computed from has no part in it.
    return lambda: torch.autograd.grad(compute(*inputs), leaves, gradient, allow_unused=True)


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


def causal_mask(length: int) -> BlockMask:
    shape = (None, None, length, length, DEVICE)
    return create_block_mask(lambda batch, head, query, key: query >= key, *shape)


def flex(q: Tensor, k: Tensor, v: Tensor, table: Tensor, causal: BlockMask) -> Tensor:
    """torch's flex_attention; table [heads, length] is captured by its score function."""

    def biased(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + table[head, (query - key).abs()]

    return compiled_flex(q, k, v, score_mod=biased, block_mask=causal)


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    add = parser.add_argument
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    add("--lengths", nargs="+", type=positive, default=lengths, metavar="L")
    tokens = "batch x length where a length allows; default 16384, without a GPU 512"
    add(
        "--tokens",
        type=positive,
        default=16384 if DEVICE == "cuda" else 512,
        metavar="N",
        help=tokens,
    )
    dtypes = ["float32", "bfloat16"]
    add("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    add("--tables", nargs="+", choices=ENCODINGS, default=TABLES)
    add("--ways", nargs="+", choices=WAYS, help="default: all that run here")
    add("--heads", type=positive, default=12)
    add("--head-dim", type=positive, default=64)
    options = parser.parse_args(argv)
    ways = options.ways or [way for way in WAYS if ON_GPU or way not in ("triton", "flex")]
    groups = []
    for dtype, backward, length in product(options.dtypes, (False, True), options.lengths):
        batch = max(1, options.tokens // length)
        candidates = []
        for way, kind in [("plain", ""), *product(ways, options.tables)]:
            if (way in DENSE and length > LONGEST_DENSE) or kind not in KINDS.get(way, ENCODINGS):
                continue
            # torch has no backward pass of flex_attention on the CPU.
            if way == "flex" and backward and DEVICE == "cpu":
                continue
            name = f"{way}, {kind}" if kind else way
            make = partial(prepared, way, kind, backward, dtype, length, options)
            candidates.append(Candidate(name, make, batch * length))
        direction = "forward and backward" if backward else "forward"
        groups.append((f"{dtype}, {direction}, {batch} x {length}", candidates))
    return run(groups, options)


if __name__ == "__main__":
    sys.exit(main())
