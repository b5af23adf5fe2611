"""Time, memory and throughput of a whole training step and of evaluation, for several encodings of one GPT.

python tools/bench/step.py --quick
python tools/bench/step.py --threads 1 --encodings rotary kerple_log --layers 4 --batch 1 --output step.json

A step is forward, backward, clipping and torch's fused AdamW on the weights in their own dtype: DeepSpeed's engine, its
float32 masters and the loader are not in it. Evaluation is the losses of one window. Every round runs each encoding
once in rotated order; ratios are to rotary in the same round. The eager backend is what the forks do, in float32.
Floors are the operations of every matrix product and of the pairs that attention sees, three times for a step, or the
bytes of weights, gradients and optimizer state. MFU follows PaLM (6 N + 12 layers · hidden · length for each token of a
step, with N the weights in products), against the product speed that was measured.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from measure import (
    DTYPES,
    FIGURES,
    Bench,
    arguments,
    figures,
    heading,
    parsed,
    positive,
    shown,
    table,
    told,
)
from torch import nn

from megatron.errors import UserError
from megatron.model import GPT, Architecture, AttentionSettings
from megatron.positions import Shape, build

ENCODINGS = ["rotary", "none", "alibi", "kerple_log", "mep_free", "mep_param_t5", "t5"]
REFERENCES = ("rotary, auto", "none, auto")
QUICK = {
    "encodings": ["rotary", "kerple_log"],
    "lengths": [512, 16384],
    "rounds": 3,
    "seconds": 5.0,
}


@dataclass(frozen=True)
class Candidate:
    """A GPT with an encoding and an attention backend, which trains on random tokens or only computes their losses."""

    pos_emb: str
    backend: str
    training: bool
    length: int
    batch: int
    dtype: str
    hidden: int
    layers: int
    heads: int
    vocab: int
    train_length: int
    device: str

    @property
    def name(self) -> str:
        return f"{self.pos_emb}, {self.backend}"

    def prepare(self) -> Callable[[], Any]:
        """The call to be timed; candidates share the weights and put their encoding into the model in turn."""
        model, optimizer = trunk(
            self.hidden,
            self.layers,
            self.heads,
            self.vocab,
            self.train_length,
            self.dtype,
            self.device,
        )
        shape = Shape(self.heads, self.hidden // self.heads, self.hidden, self.train_length)
        torch.manual_seed(0)
        first = build(self.pos_emb, shape)
        positions = [
            first,
            *(build(self.pos_emb, shape) for _ in range(self.layers - 1) if first.per_layer),
        ]
        positions = nn.ModuleList(positions).to(self.device)
        ids = torch.randint(self.vocab, (self.batch, self.length + 1), device=self.device)
        settings = AttentionSettings(attention_backend=self.backend)

        def call() -> None:
            model.positions = positions
            model.use_attention(settings)
            if not self.training:
                with torch.inference_mode():
                    model(ids[:, :-1], labels=ids[:, 1:])
                return
            optimizer.param_groups[1]["params"] = list(positions.parameters())
            model(ids[:, :-1], labels=ids[:, 1:], mean=True).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return call

    @property
    def weights(self) -> int:
        """Numbers in matrices that multiply every token: layers and output."""
        return 12 * self.layers * self.hidden**2 + self.vocab * self.hidden

    @property
    def flops(self) -> float:
        pairs = self.length * (self.length + 1) // 2
        forward = 2 * self.weights * self.length + 4 * self.layers * self.hidden * pairs
        return (3 if self.training else 1) * self.batch * forward

    @property
    def bytes(self) -> float:
        """Weights read once; in a step read twice, and AdamW reads weights, gradients and moments and writes three."""
        return (10 if self.training else 1) * self.weights * getattr(torch, self.dtype).itemsize

    @property
    def needs(self) -> float:
        """Memory of eager's matrices on CPU, where too much ends the process: what the other backends need is small."""
        copies = 4 * self.layers + 8 if self.training else 4
        dense = self.device == "cpu" and self.backend == "eager"
        return copies * self.batch * self.heads * self.length**2 * 4 if dense else 0

    @property
    def palm_flops(self) -> float:
        """Of a step or window by PaLM's appendix B, which counts every pair of tokens; a third without backward."""
        forward = 2 * self.weights + 4 * self.layers * self.hidden * self.length
        return (3 if self.training else 1) * self.batch * self.length * forward


@cache
def trunk(
    hidden: int, layers: int, heads: int, vocab: int, train_length: int, dtype: str, device: str
) -> tuple[GPT, torch.optim.Optimizer]:
    """The model without an encoding, and its optimizer with a second group for what an encoding learns."""
    shape = Architecture(
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        seq_length=train_length,
    )
    torch.manual_seed(0)
    model = GPT(shape, AttentionSettings(), positions=[], vocab=vocab).to(
        device, getattr(torch, dtype)
    )
    groups = [{"params": list(model.parameters())}, {"params": [torch.zeros(1, device=device)]}]
    return model, torch.optim.AdamW(groups, lr=1e-4, weight_decay=0.0, fused=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__ or "", QUICK)
    add = parser.add_argument
    add("--encodings", nargs="+", default=ENCODINGS, metavar="NAME")
    add("--backend", default="auto", metavar="NAME", help="attention_backend of the encodings")
    add(
        "--eager",
        nargs="*",
        default=["kerple_log"],
        metavar="NAME",
        help="encodings to run with backend eager as well",
    )
    add("--dtype", choices=DTYPES, help="default: bfloat16, on CPU float32")
    add("--batch", type=positive, help="windows of a step; default: 32, on CPU 1")
    add("--train_length", type=positive, default=512, metavar="L")
    add(
        "--lengths",
        nargs="*",
        type=positive,
        default=[512, 1024, 2048, 4096, 8192, 16384],
        metavar="L",
        help="to evaluate",
    )
    for name, size in (("hidden", 768), ("layers", 12), ("heads", 12), ("vocab", 50304)):
        add(f"--{name}", type=positive, default=size, help="default: 125M's")
    try:
        given = parsed(parser, QUICK, argv)
        if given.hidden % given.heads:
            raise UserError(f"--hidden: {given.hidden} cannot be split over --heads {given.heads}")
        bench = Bench(given, "Whole steps")
        cuda = given.device == "cuda"
        dtype = given.dtype or ("bfloat16" if cuda else "float32")
        training = (True, given.train_length, given.batch or (32 if cuda else 1))
        chosen = [
            *((name, given.backend) for name in given.encodings),
            *((name, "eager") for name in given.eager),
        ]
        shape = (
            dtype,
            given.hidden,
            given.layers,
            given.heads,
            given.vocab,
            given.train_length,
            given.device,
        )
        for work in (training, *((False, length, 1) for length in given.lengths)):
            told(f"{'training' if work[0] else 'evaluation'}, {work[1]}")
            candidates = [Candidate(*one, *work, *shape) for one in chosen]
            for row, one in zip(
                bench.group(candidates, REFERENCES, dtype), candidates, strict=True
            ):
                row |= rates(one, row, bench.peaks[dtype]["flops_per_second"])
            bench.save(markdown(bench))
    except UserError as fault:
        print(fault, file=sys.stderr)
        return 1
    print(markdown(bench))
    return 0


def rates(candidate: Candidate, row: dict[str, Any], best: float) -> dict[str, float | None]:
    """What the median time means in tokens and operations."""
    seconds = None if row["median_ms"] is None else row["median_ms"] / 1000
    return {
        "tokens_per_second": seconds and candidate.batch * candidate.length / seconds,
        "palm_flops": candidate.palm_flops,
        "mfu": seconds and candidate.palm_flops / seconds / best,
    }


def markdown(bench: Bench) -> str:
    """One table of training steps, one of evaluation."""
    parts = [heading(bench)]
    for title, training in (("Training step", True), ("Evaluation of one window", False)):
        rows = [row for row in bench.rows if row["training"] == training]
        lines = [
            [
                row["candidate"],
                f"{row['batch']} x {row['length']}",
                *figures(row),
                *speed(row),
                row["reason"] or "",
            ]
            for row in rows
        ]
        header = ["", "batch x length", *FIGURES, "tokens/s", "MFU %", "reason"]
        parts += [f"#### {title}\n", table(header, lines)] if lines else []
    return "\n".join(parts)


def speed(row: dict[str, Any]) -> list[str]:
    if row["tokens_per_second"] is None:
        return ["-", "-"]
    return [shown(row["tokens_per_second"]), f"{100 * row['mfu']:.1f}"]


if __name__ == "__main__":
    sys.exit(main())
