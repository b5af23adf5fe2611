"""Time, memory and throughput of a training step and of evaluation, for encodings of one GPT.

python tools/bench/step.py --quick
python tools/bench/step.py --threads 1 --encodings rotary kerple_log --layers 4 --output step.json
python tools/bench/step.py --threads 1 --encodings rotary kerple_log --documents 500

A step is forward, backward, clipping and torch's fused AdamW on the weights in their own dtype.
DeepSpeed's engine, its float32 masters and the loader are not in it. Evaluation is the losses of
one window. Every round runs each encoding once in rotated order; ratios are to rotary in the same
round. The eager backend is what the forks do, in float32. Floors are the operations of every matrix
product and of the visible pairs of attention, three times for a step, or the bytes of weights,
gradients and optimizer state. MFU follows PaLM (megatron/model/flops.py), against the measured
speed of matrix products.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from bench_tables import FIGURES, figures, heading, shown, table
from measure import DTYPES, Bench, arguments, parsed, positive, report_progress
from torch import Tensor, nn

from megatron.cli_errors import guarded
from megatron.errors import UserError
from megatron.model import GPT
from megatron.model.settings import Architecture, AttentionSettings
from megatron.model.size import BACKWARD, causal_keys, forward_flops, matrix_weights
from megatron.positions import Shape, build
from megatron.training.compiled import compile_layers

ENCODINGS = ["rotary", "none", "alibi", "kerple_log", "mep_free", "mep_param_t5", "t5"]
END = 0  # the token that ends a document
REFERENCES = ("rotary, auto", "none, auto")
QUICK = {
    "encodings": ["rotary", "kerple_log"],
    "lengths": [512, 16384],
    "rounds": 3,
    "seconds": 5.0,
}


@dataclass(frozen=True)
class Candidate:
    """A GPT with an encoding and an attention backend, on random tokens.

    training: whether it takes a step or only computes losses
    document: mean length of the documents in the text, 0 for one document
    apart: whether attention keeps them apart, as reset_attention_mask does
    """

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
    compiled: bool = False
    document: int = 0
    apart: bool = False

    @property
    def name(self) -> str:
        words = [self.pos_emb, self.backend]
        if self.apart:
            words.append(f"documents of {self.document} apart")
        return ", ".join(words)

    def prepare(self) -> Callable[[], Any]:
        """The call to be timed.

        Candidates share the weights and put their encoding into the model in turn.
        """
        sizes = (self.hidden, self.layers, self.heads, self.vocab, self.train_length)
        model, optimizer = trunk(*sizes, self.dtype, self.device, self.compiled)
        positions = self._positions()
        ids = random_text(self.batch, self.length + 1, self.vocab, self.document).to(self.device)
        inputs, labels = ids[:, :-1], ids[:, 1:]
        settings = AttentionSettings(
            attention_backend=self.backend, reset_attention_mask=self.apart
        )

        def call() -> None:
            model.positions = positions
            model.use_attention(settings)
            if not self.training:
                with torch.inference_mode():
                    model(inputs, labels=labels)
                return
            optimizer.param_groups[1]["params"] = list(positions.parameters())
            model(inputs, labels=labels, mean=True).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return call

    def _positions(self) -> nn.ModuleList:
        """The encoding, one for all layers or one for each."""
        shape = Shape(self.heads, self.hidden // self.heads, self.hidden, self.train_length)
        torch.manual_seed(0)
        positions = [build(self.pos_emb, shape)]
        if positions[0].per_layer:
            positions += [build(self.pos_emb, shape) for _ in range(self.layers - 1)]
        return nn.ModuleList(positions).to(self.device)

    @property
    def weights(self) -> int:
        return matrix_weights(self._architecture, self.vocab)

    @property
    def _architecture(self) -> Architecture:
        return architecture(self.hidden, self.layers, self.heads, self.train_length)

    @property
    def flops(self) -> float:
        """Of a step or window, with the visible pairs of attention."""
        return self._flops(causal_keys(self.length))

    @property
    def palm_flops(self) -> float:
        """Of a step or window as PaLM counts, with every pair of tokens."""
        return self._flops(self.length)

    def _flops(self, keys: float) -> float:
        token = forward_flops(self._architecture, self.vocab, keys)
        forward = self.batch * self.length * token
        return BACKWARD * forward if self.training else forward

    @property
    def bytes(self) -> float:
        """Moved at least.

        Evaluation reads the weights once, a step twice. AdamW reads weights, gradients and two
        moments, and writes weights, gradients (zeros) and moments.
        """
        times = 10 if self.training else 1
        return times * self.weights * getattr(torch, self.dtype).itemsize

    @property
    def needs(self) -> float:
        """Memory of eager's matrices on the CPU, where too much ends the process; else 0."""
        if self.device != "cpu" or self.backend != "eager":
            return 0
        copies = 4 * self.layers + 8 if self.training else 4
        return copies * self.batch * self.heads * self.length**2 * 4


def architecture(hidden: int, layers: int, heads: int, train_length: int) -> Architecture:
    """A GPT of the papers of this size."""
    return Architecture(
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        seq_length=train_length,
    )


def random_text(batch: int, length: int, vocab: int, document: int) -> Tensor:
    """Random tokens; END at random places, one in `document` on average: [batch, length] int64."""
    ids = torch.randint(END + 1, vocab, (batch, length))
    if document:
        ids[torch.rand(batch, length) < 1 / document] = END
    return ids


@cache
def trunk(
    hidden: int,
    layers: int,
    heads: int,
    vocab: int,
    train_length: int,
    dtype: str,
    device: str,
    compiled: bool,
) -> tuple[GPT, torch.optim.Optimizer]:
    """The model without an encoding, and its optimizer.

    compiled: whether torch compiles the layers, as `torch_compile: true` does. The optimizer's
    second group is for what an encoding learns.
    """
    torch.manual_seed(0)
    sizes = architecture(hidden, layers, heads, train_length)
    model = GPT(sizes, AttentionSettings(), positions=[], vocab=vocab, end_of_document=END)
    model = model.to(device, getattr(torch, dtype))
    if compiled:
        compile_layers(model, torch.device(device))
    placeholder = torch.zeros(1, device=device)
    groups = [{"params": list(model.parameters())}, {"params": [placeholder]}]
    return model, torch.optim.AdamW(groups, lr=1e-4, weight_decay=0.0, fused=True)


@guarded
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
    add(
        "--documents",
        type=positive,
        metavar="N",
        help="beside each encoding, the same with documents of N tokens on average kept apart",
    )
    add("--compile", action="store_true", help="compile the layers, as torch_compile does")
    add("--dtype", choices=DTYPES, help="default: bfloat16, on CPU float32")
    add("--batch", type=positive, help="windows of a step; default: 32, on CPU 1")
    add("--train_length", type=positive, default=512, metavar="L")
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    add("--lengths", nargs="*", type=positive, default=lengths, metavar="L", help="to evaluate")
    for name, size in (("hidden", 768), ("layers", 12), ("heads", 12), ("vocab", 50304)):
        add(f"--{name}", type=positive, default=size, help="default: 125M's")
    bench = run(parsed(parser, QUICK, argv))
    print(markdown(bench))
    return 0


def run(options: Namespace) -> Bench:
    """A training step, then an evaluation of each length; what is known is saved after each."""
    if options.hidden % options.heads:
        raise UserError(f"--hidden: {options.hidden} cannot be split over --heads {options.heads}")
    bench = Bench(options, "Whole steps")
    on_gpu = options.device == "cuda"
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    batch = options.batch or (32 if on_gpu else 1)
    works = [(True, options.train_length, batch)]
    works += [(False, length, 1) for length in options.lengths]
    for training, length, windows in works:
        report_progress(f"{'training' if training else 'evaluation'}, {length}")
        chosen = candidates(options, dtype, training, length, windows)
        rows = bench.group(chosen, REFERENCES, dtype)
        for row, candidate in zip(rows, chosen, strict=True):
            row |= rates(candidate, row, bench.peaks[dtype]["flops_per_second"])
        bench.save(markdown(bench))
    return bench


def candidates(
    options: Namespace, dtype: str, training: bool, length: int, batch: int
) -> list[Candidate]:
    """Every encoding with the chosen backend, also with documents apart, and some with eager."""
    document = options.documents or 0
    kinds = [(name, options.backend, False) for name in options.encodings]
    if document:
        kinds += [(name, options.backend, True) for name in options.encodings]
    kinds += [(name, "eager", False) for name in options.eager]
    return [
        Candidate(
            pos_emb=name,
            backend=backend,
            document=document,
            apart=apart,
            training=training,
            length=length,
            batch=batch,
            dtype=dtype,
            hidden=options.hidden,
            layers=options.layers,
            heads=options.heads,
            vocab=options.vocab,
            train_length=options.train_length,
            device=options.device,
            compiled=options.compile,
        )
        for name, backend, apart in kinds
    ]


def rates(candidate: Candidate, row: dict[str, Any], best: float) -> dict[str, float | None]:
    """What the median time means in tokens and operations. best: operations per second"""
    operations = candidate.palm_flops
    if row["median_ms"] is None:
        return {"tokens_per_second": None, "palm_flops": operations, "mfu": None}
    seconds = row["median_ms"] / 1000
    return {
        "tokens_per_second": candidate.batch * candidate.length / seconds,
        "palm_flops": operations,
        "mfu": operations / seconds / best,
    }


def markdown(bench: Bench) -> str:
    """One table of training steps, one of evaluation."""
    header = ["", "batch x length", *FIGURES, "tokens/s", "MFU %", "reason"]
    parts = [heading(bench)]
    for title, training in (("Training step", True), ("Evaluation of one window", False)):
        lines = [line(row) for row in bench.rows if row["training"] == training]
        if lines:
            parts += [f"#### {title}\n", table(header, lines)]
    return "\n".join(parts)


def line(row: dict[str, Any]) -> list[str]:
    size = f"{row['batch']} x {row['length']}"
    return [row["candidate"], size, *figures(row), *speed(row), row["reason"] or ""]


def speed(row: dict[str, Any]) -> list[str]:
    if row["tokens_per_second"] is None:
        return ["-", "-"]
    return [shown(row["tokens_per_second"]), f"{100 * row['mfu']:.1f}"]


if __name__ == "__main__":
    sys.exit(main())
