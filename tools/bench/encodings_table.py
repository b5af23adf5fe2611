"""Speed and memory of every encoding on one small GPT: a training step and a long evaluation.

python tools/bench/encodings_table.py --quick --encodings rotary fox
python tools/bench/encodings_table.py --threads 1 --output encodings.json --into docs/performance.md

Each encoding has the options of its file in configs/pos_emb. A step is forward, backward, clipping
and torch's fused AdamW, as in tools/bench/step.py. Evaluation is the losses of one window. Every
round runs each encoding once in rotated order. Times are ratios to rotary in the same round, and
tokens per second are of the median round. --into writes the table between its two marks in a file.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_tables import heading, shown, spread, table
from measure import DTYPES, Bench, arguments, parsed, positive, report_progress
from step import Candidate, rates, trunk
from torch import nn

from megatron.cli_errors import guarded
from megatron.config.read import read_file
from megatron.errors import UserError
from megatron.files import write_text
from megatron.model.settings import AttentionSettings
from megatron.positions import REGISTRY, Shape, build, options_of

FILES = Path(__file__).resolve().parents[2] / "configs" / "pos_emb"
REFERENCE = "rotary"
QUICK = {"length": 256, "rounds": 2, "seconds": 5.0}
BEGIN, END = "<!-- table of encodings -->", "<!-- end of the table -->"
HEADER = [
    "encoding",
    "attention",
    "step: tokens/s",
    "time (quartiles)",
    "peak MiB",
    "evaluation: tokens/s",
    "time (quartiles)",
    "peak MiB",
]


@dataclass(frozen=True)
class OfFile(Candidate):
    """A GPT with an encoding as its file describes it.

    options: pos_emb_args
    """

    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.pos_emb

    @property
    def needs(self) -> float:
        """Memory of all scores where attention is eager: about that of DAPE, the largest."""
        if self.chosen_backend != "eager":
            return 0
        hidden = self.options.get("width", 0)
        copies = 3 * (2 * self.heads + hidden) + 8 * self.heads
        layers = self.layers if self.training else 1
        return layers * copies * self.batch * self.length**2 * 4

    @property
    def chosen_backend(self) -> str:
        """The name of the attention backend."""
        sizes = (self.hidden, self.layers, self.heads, self.vocab, self.train_length)
        model, _ = trunk(*sizes, self.dtype, self.device, self.compiled)
        model.positions = self._positions()
        model.use_attention(AttentionSettings(attention_backend=self.backend))
        return model.resolved_backend

    def _positions(self) -> nn.ModuleList:
        """The encoding, one for all layers or one for each."""
        shape = Shape(self.heads, self.hidden // self.heads, self.hidden, self.train_length)
        torch.manual_seed(0)
        positions = [build(self.pos_emb, shape, **self.options)]
        if positions[0].per_layer:
            others = range(self.layers - 1)
            positions += [build(self.pos_emb, shape, **self.options) for _ in others]
        return nn.ModuleList(positions).to(self.device).train(self.training)


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__ or "", QUICK)
    add = parser.add_argument
    add("--encodings", nargs="+", default=sorted(REGISTRY), metavar="NAME", help="default: all")
    add("--backend", default="auto", metavar="NAME", help="attention_backend")
    add("--dtype", choices=DTYPES, default="float32")
    add("--batch", type=positive, default=1, help="windows of a step")
    add("--train_length", type=positive, default=512, metavar="L", help="tokens of a window")
    add("--length", type=positive, default=4096, metavar="L", help="tokens to evaluate")
    for name, size in (("hidden", 256), ("layers", 2), ("heads", 4), ("vocab", 1024)):
        add(f"--{name}", type=positive, default=size, help=f"default: {size}")
    add("--into", type=Path, metavar="FILE.md", help="write the table between its marks there")
    options = parsed(parser, QUICK, argv)
    if options.into:
        between_marks(options.into, "")  # before the hour that it takes
    bench = run(options)
    text = markdown(bench)
    print(text)
    if options.into:
        write_text(options.into, between_marks(options.into, text))
    return 0


def run(options: Namespace) -> Bench:
    """A training step, then an evaluation, of every encoding."""
    if options.hidden % options.heads:
        raise UserError(f"--hidden: {options.hidden} cannot be split over --heads {options.heads}")
    unknown = sorted(set(options.encodings) - REGISTRY.keys())
    if unknown:
        raise UserError(f"--encodings: no encoding is called {unknown[0]}; see docs/positions.md")
    bench = Bench(options, "Every encoding")
    for training in (True, False):
        report_progress("training step" if training else "evaluation")
        chosen = candidates(options, training)
        rows = bench.group(chosen, [REFERENCE], options.dtype)
        for row, candidate in zip(rows, chosen, strict=True):
            row |= rates(candidate, row, bench.peaks[options.dtype]["flops_per_second"])
            row["backend"] = candidate.chosen_backend
        bench.save(markdown(bench))
    return bench


def candidates(options: Namespace, training: bool) -> list[OfFile]:
    """The encodings that are asked for, and the reference."""
    names = dict.fromkeys([REFERENCE, *options.encodings])
    longest = max(options.length, options.train_length)
    return [
        OfFile(
            pos_emb=name,
            backend=options.backend,
            training=training,
            length=options.train_length if training else options.length,
            batch=options.batch if training else 1,
            dtype=options.dtype,
            hidden=options.hidden,
            layers=options.layers,
            heads=options.heads,
            vocab=options.vocab,
            train_length=options.train_length,
            device=options.device,
            options=options_in_file(name, longest),
        )
        for name in names
    ]


def options_in_file(name: str, longest: int) -> dict[str, Any]:
    """pos_emb_args of the encoding's file, with a row for every position of a table of rows."""
    options = dict(read_file(FILES / f"{name}.yml").get("pos_emb_args") or {})
    if "max_positions" in options_of(name):
        options["max_positions"] = longest
    return options


def markdown(bench: Bench) -> str:
    """One line for each encoding, the fastest training step first."""
    steps = {row["pos_emb"]: row for row in bench.rows if row["training"]}
    evaluations = {row["pos_emb"]: row for row in bench.rows if not row["training"]}
    lines = []
    for name, step in sorted(steps.items(), key=lambda item: item[1]["ratio"] or float("inf")):
        evaluation = evaluations.get(name)
        columns = cells(evaluation) if evaluation else ["-"] * 3
        lines.append([name, step["backend"], *cells(step), *columns])
    return f"{heading(bench)}\n{table(HEADER, lines)}"


def cells(row: dict[str, Any]) -> list[str]:
    """Speed, ratio and memory of a row, or why there are none."""
    if row["median_ms"] is None:
        return [row["reason"] or "-", "-", "-"]
    peak = row["peak_bytes"]
    return [
        shown(row["tokens_per_second"]),
        shown(row["ratio"]) + spread(row["quartiles_ratio"]),
        "-" if peak is None else f"{peak / 2**20:,.0f}",
    ]


def between_marks(path: Path, text: str) -> str:
    """The file's text with `text` between its marks; UserError where it has none."""
    try:
        before = path.read_text(encoding="utf-8")
    except OSError as fault:
        raise UserError(f"--into: {path} cannot be read ({fault.strerror})") from None
    if before.count(BEGIN) != 1 or before.count(END) != 1:
        raise UserError(f"--into: {path} has not the lines '{BEGIN}' and '{END}'; write them there")
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{text}\n{END}{tail}"


if __name__ == "__main__":
    sys.exit(main())
