"""Time, memory and throughput of a training step and of evaluation, for encodings of one GPT.

python tools/bench/step.py --quick
python tools/bench/step.py --threads 1 --encodings rotary kerple_log --layers 4 --output step.json

A step is forward, backward, clipping and torch's fused AdamW on the weights in their own dtype.
DeepSpeed's engine, its float32 masters and the loader are not in it. Evaluation is the losses of
one window. Every round runs each encoding once in rotated order; ratios are to rotary in the same
round. The eager backend is what the forks do, in float32. MFU follows PaLM
(megatron/model/size.py), against the measured speed of matrix products. --trace profiles one step
of the first encoding.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from measure import (
    DTYPES,
    FIGURES,
    Bench,
    arguments,
    clocked,
    figures,
    parsed,
    positive,
    report_progress,
    shown,
    table,
)
from torch import nn
from torch.profiler import ProfilerActivity, profile

from megatron.cli_errors import guarded
from megatron.errors import UserError
from megatron.model import GPT
from megatron.model.settings import Architecture, AttentionSettings
from megatron.model.size import BACKWARD, forward_flops
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
class Model:
    """A GPT of the papers of this size; compiled: whether torch compiles its layers."""

    hidden: int
    layers: int
    heads: int
    vocab: int
    train_length: int
    dtype: str
    device: str
    compiled: bool = False

    @property
    def architecture(self) -> Architecture:
        return Architecture(
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_attention_heads=self.heads,
            seq_length=self.train_length,
        )


@dataclass(frozen=True)
class GPTCandidate:
    """A GPT with an encoding and an attention backend, on random tokens.

    training: whether it takes a step or only computes losses
    options: pos_emb_args
    """

    pos_emb: str
    backend: str
    training: bool
    length: int
    batch: int
    model: Model
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return self.model.device

    @property
    def name(self) -> str:
        return f"{self.pos_emb}, {self.backend}"

    def prepare(self) -> Callable[[], Any]:
        """The call to be timed.

        Candidates share the weights and put their encoding into the model in turn.
        """
        model, optimizer = trunk(self.model)
        positions = self.positions()
        ids = torch.randint(1, self.model.vocab, (self.batch, self.length + 1)).to(self.device)
        inputs, labels = ids[:, :-1], ids[:, 1:]
        settings = AttentionSettings(attention_backend=self.backend)

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

    def positions(self) -> nn.ModuleList:
        """The encoding, one for all layers or one for each."""
        size = self.model
        shape = Shape(size.heads, size.hidden // size.heads, size.hidden, size.train_length)
        torch.manual_seed(0)
        positions = [build(self.pos_emb, shape, **self.options)]
        if positions[0].per_layer:
            others = range(size.layers - 1)
            positions += [build(self.pos_emb, shape, **self.options) for _ in others]
        return nn.ModuleList(positions).to(self.device).train(self.training)

    @property
    def flops(self) -> float:
        """Of a step or window as PaLM counts, with every pair of tokens."""
        token = forward_flops(self.model.architecture, self.model.vocab, self.length)
        forward = self.batch * self.length * token
        return BACKWARD * forward if self.training else forward

    @property
    def needs(self) -> float:
        """Memory of eager's matrices on the CPU, where too much ends the process; else 0."""
        if self.device != "cpu" or self.backend != "eager":
            return 0
        copies = 4 * self.model.layers + 8 if self.training else 4
        return copies * self.batch * self.model.heads * self.length**2 * 4


@cache
def trunk(size: Model) -> tuple[GPT, torch.optim.Optimizer]:
    """The model without an encoding, and its optimizer with a second group for the encoding's."""
    torch.manual_seed(0)
    settings = AttentionSettings()
    model = GPT(size.architecture, settings, positions=[], vocab=size.vocab, end_of_document=0)
    model = model.to(size.device, getattr(torch, size.dtype))
    if size.compiled:
        from megatron.training.trainer import compile_layers  # needs DeepSpeed and pydantic

        compile_layers(model, torch.device(size.device))
    placeholder = torch.zeros(1, device=size.device)
    groups = [{"params": list(model.parameters())}, {"params": [placeholder]}]
    return model, torch.optim.AdamW(groups, lr=1e-4, weight_decay=0.0, fused=True)


@cache
def best_speed(device: str, dtype: str) -> float:
    """Operations per second in matrix products, measured here; on the CPU of its own time."""
    size = 4096 if device == "cuda" else 1024
    a, b = torch.randn(2, size, size, device=device).to(getattr(torch, dtype))
    times = [clocked(lambda: a @ b, 3, device) for _ in range(6)]
    return 2 * size**3 / min(times) * 1000


def add_sizes(parser: ArgumentParser, **sizes: int) -> None:
    """An option for each size of the model, with its default."""
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=positive, default=size, help=f"default: {size}")


def size_of(options: Namespace, dtype: str, *, compiled: bool = False) -> Model:
    """The model that the options describe; raises UserError if heads do not fit."""
    if options.hidden % options.heads:
        raise UserError(f"--hidden: {options.hidden} cannot be split over --heads {options.heads}")
    sizes = (options.hidden, options.layers, options.heads, options.vocab, options.train_length)
    return Model(*sizes, dtype, options.device, compiled)


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__ or "", QUICK)
    add = parser.add_argument
    add("--encodings", nargs="+", default=ENCODINGS, metavar="NAME")
    add("--backend", default="auto", metavar="NAME", help="attention_backend of the encodings")
    eager = "encodings to run with backend eager as well"
    add("--eager", nargs="*", default=["kerple_log"], metavar="NAME", help=eager)
    add("--compile", action="store_true", help="compile the layers, as torch_compile does")
    add("--dtype", choices=DTYPES, help="default: bfloat16, on CPU float32")
    add("--batch", type=positive, help="windows of a step; default: 32, on CPU 1")
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    add("--lengths", nargs="*", type=positive, default=lengths, metavar="L", help="to evaluate")
    add("--trace", type=Path, metavar="FILE.json.gz", help="for chrome://tracing and Perfetto")
    add_sizes(parser, hidden=768, layers=12, heads=12, vocab=50304, train_length=512)
    options = parsed(parser, QUICK, argv)

    on_gpu = options.device == "cuda"
    size = size_of(
        options, options.dtype or ("bfloat16" if on_gpu else "float32"), compiled=options.compile
    )
    kinds = [(name, options.backend) for name in options.encodings]
    kinds += [(name, "eager") for name in options.eager]
    works = [(True, options.train_length, options.batch or (32 if on_gpu else 1))]
    works += [(False, length, 1) for length in options.lengths]
    bench = Bench(options)
    for training, length, windows in works:
        report_progress(f"{'training' if training else 'evaluation'}, {length}")
        candidates = [
            GPTCandidate(name, backend, training, length, windows, size) for name, backend in kinds
        ]
        measure(bench, candidates, REFERENCES)
        bench.save(markdown(bench))
    print(markdown(bench))
    if options.trace:
        first = GPTCandidate(options.encodings[0], options.backend, *works[0], size)
        print(traced(first, options.trace))
    return 0


def measure(bench: Bench, candidates: Sequence[GPTCandidate], references: Sequence[str]) -> None:
    """Measure candidates; their rows get tokens per second and MFU."""
    by_name = {one.name: one for one in candidates}
    for row in bench.group(candidates, references):
        one = by_name[row["candidate"]]
        row |= {"tokens_per_second": None, "mfu": None, "flops": one.flops}
        if row["median_ms"] is not None:
            seconds = row["median_ms"] / 1000
            row["tokens_per_second"] = one.batch * one.length / seconds
            row["mfu"] = one.flops / seconds / best_speed(one.device, one.model.dtype)


def markdown(bench: Bench) -> str:
    """One table of training steps, one of evaluation."""
    header = ["", "batch x length", *FIGURES, "tokens/s", "MFU %", "reason"]
    parts = [bench.heading]
    for title, training in (("Training step", True), ("Evaluation of one window", False)):
        lines = []
        for row in bench.rows:
            if row["training"] != training:
                continue
            size = f"{row['batch']} x {row['length']}"
            speed = ["-", "-"]
            if row["tokens_per_second"] is not None:
                speed = [shown(row["tokens_per_second"]), f"{100 * row['mfu']:.1f}"]
            lines.append([row["candidate"], size, *figures(row), *speed, row["reason"] or ""])
        if lines:
            parts += [f"#### {title}\n", table(header, lines)]
    return "\n".join(parts)


def traced(candidate: GPTCandidate, path: Path) -> str:
    """Write a trace of one step; the table of its longest operations."""
    on_gpu = candidate.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    step = candidate.prepare()
    for _ in range(3):
        step()
    for _ in range(2):  # the first is spent on starting the device's own profiler
        with profile(activities=activities) as profiler:
            step()
            if on_gpu:
                torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=12)


if __name__ == "__main__":
    sys.exit(main())
