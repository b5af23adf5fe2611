"""Errors of an attention backend against the definition in float64, at real lengths.

python tools/bench/errors.py --lengths 2048 16384 --output errors.json

The last queries of each length attend to all of its keys, so the longest sums are measured. An
error is the norm of the difference divided by the norm of the exact values; it is given for the
output and for every gradient.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench_tables import table
from measure import DTYPES, conditions, positive
from torch import Tensor

from megatron.attention import BACKENDS, attention
from megatron.cli_errors import guarded
from megatron.files import write_text

NAMES = ("out", "q", "k", "v", "bias")


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    cuda = torch.cuda.is_available()
    add("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"))
    add("--backend", default="triton" if cuda else "sdpa", choices=BACKENDS)
    add("--lengths", nargs="+", type=positive, default=[2048, 16384], metavar="L")
    add("--queries", type=positive, default=512, help="how many of the last queries")
    add("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    add("--heads", type=positive, default=4)
    add("--head_dim", type=positive, default=64)
    add("--output", type=Path, metavar="FILE.json")
    options = parser.parse_args(argv)
    rows = []
    for dtype in options.dtypes:
        for length in options.lengths:
            rows.append(row(options, dtype, length))
            if options.output:
                record = {"conditions": conditions(options), "rows": rows}
                write_text(options.output, json.dumps(record) + "\n")
    print(markdown(rows))
    return 0


def row(options: argparse.Namespace, dtype: str, length: int) -> dict[str, Any]:
    """The relative error of the output and of each gradient, by name."""
    draw = torch.Generator().manual_seed(0)
    shape = (1, options.heads, length, options.head_dim)
    tensors = [torch.randn(shape, generator=draw).to(getattr(torch, dtype)) for _ in range(3)]
    tensors[0] = tensors[0][:, :, -options.queries :]
    slopes = 2.0 ** -torch.arange(1, options.heads + 1)
    noise = torch.randn(options.heads, length, generator=draw)
    bias = noise - slopes[:, None] * torch.arange(length).log1p()
    given = [x.to(options.device) for x in (*tensors, bias)]
    ours = values_and_gradients(given, options.backend)
    exact = values_and_gradients([x.double() for x in given], "eager")
    found: dict[str, Any] = {"dtype": dtype, "length": length, "backend": options.backend}
    for name, mine, true in zip(NAMES, ours, exact, strict=True):
        found[name] = float((mine.double() - true).norm() / true.norm())
    return found


def values_and_gradients(given: Sequence[Tensor], backend: str) -> list[Tensor]:
    """The output [1, heads, queries, head_dim], and the gradients of q, k, v and the table."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    out = attention(*leaves, backend=backend)
    onto = torch.linspace(-1, 1, out.numel(), device=out.device).sin()
    return [out.detach(), *torch.autograd.grad(out, leaves, onto.view_as(out).to(out.dtype))]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each dtype and length."""
    lines = []
    for one in rows:
        errors = [f"{one[name]:.1e}" for name in NAMES]
        lines.append([f"{one['backend']}, {one['dtype']}", str(one["length"]), *errors])
    return table(["relative error", "length", "out", "dq", "dk", "dv", "dbias"], lines)


if __name__ == "__main__":
    sys.exit(main())
