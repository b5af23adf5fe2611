"""Time, memory and throughput of a training step and of evaluation, for encodings of one GPT.

python tools/bench/step.py --threads 1 --encodings rotary kerple_log --layers 4 --output step.json
python tools/bench/step.py --threads 1 --encodings all --into docs/performance.md

A step is forward, backward, clipping and torch's fused AdamW on the weights in their own dtype.
DeepSpeed's engine, its float32 masters and the loader are not in it. Evaluation is the losses of
one window. Every round runs each encoding once in rotated order; ratios are to rotary in the same
round. The eager backend is what the forks do, in float32. MFU follows PaLM
(megatron/model/size.py), against the measured speed of matrix products. With `all`, each encoding
has the options of its file in configs/pos_emb. --trace profiles one step of the first encoding.
--into writes the table between its two marks in a file.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from measure import (
    DTYPES,
    Bench,
    arguments,
    clocked,
    figures,
    positive,
    report_progress,
    shown,
    table,
)
from torch import nn
from torch.profiler import profile

from megatron.cli_errors import guarded
from megatron.errors import UserError
from megatron.files import ROOT, check_output, write_text
from megatron.model import GPT
from megatron.model.settings import Architecture, AttentionSettings
from megatron.model.size import BACKWARD, forward_flops
from megatron.positions import REGISTRY, Shape, build, options_of
from megatron.positions.registry import encoding_called

BEGIN, END = "<!-- table of encodings -->", "<!-- end of the table -->"
SIZES = {"hidden": 768, "layers": 12, "heads": 12, "vocab": 50304, "train_length": 512}
ENCODINGS = ["rotary", "none", "alibi", "kerple_log", "mep_free", "mep_param_t5", "t5"]


@dataclass(frozen=True)
class Size:
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
    size: Size
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return self.size.device

    @property
    def name(self) -> str:
        return f"{self.pos_emb}, {self.backend}"

    @property
    def architecture(self) -> Architecture:
        per_query = encoding_called(self.pos_emb).heads_per_query
        return replace(self.size.architecture, heads_per_query=per_query)

    @property
    def chosen_backend(self) -> str:
        """The name of the attention backend."""
        model, _ = trunk(self.size, self.architecture)
        model.positions = self.positions()
        model.use_attention(AttentionSettings(attention_backend=self.backend))
        return model.resolved_backend

    @property
    def needs(self) -> float:
        """Memory of all scores where attention is eager: about that of DAPE, the largest."""
        if self.device != "cpu" or self.chosen_backend != "eager":
            return 0
        heads = self.size.heads
        copies = 14 * heads + 3 * self.options.get("width", 0)
        layers = self.size.layers if self.training else 1
        return layers * copies * self.batch * self.length**2 * 4

    @property
    def flops(self) -> float:
        """Of a step or window as PaLM counts, with every pair of tokens."""
        token = forward_flops(self.architecture, self.size.vocab, self.length)
        forward = self.batch * self.length * token
        return BACKWARD * forward if self.training else forward

    def positions(self) -> nn.ModuleList:
        """The encoding, one for all layers or one for each."""
        size = self.size
        shape = Shape(size.heads, size.hidden // size.heads, size.hidden, size.train_length)
        torch.manual_seed(0)
        built = [build(self.pos_emb, shape, **self.options) for _ in range(size.layers)]
        if not built[0].per_layer:
            built = built[:1]
        return nn.ModuleList(built).to(self.device).train(self.training)

    def prepare(self) -> Callable[[], Any]:
        """The call to be timed.

        Candidates share the weights and put their encoding into the model in turn.
        """
        model, optimizer = trunk(self.size, self.architecture)
        positions = self.positions()
        shape = (self.batch, self.length + 1)
        ids = torch.randint(1, self.size.vocab, shape).to(self.device)
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
            loss = model(inputs, labels=labels, mean=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return call


@cache
def trunk(size: Size, architecture: Architecture) -> tuple[GPT, torch.optim.Optimizer]:
    """The model without an encoding, and its optimizer with a second group for the encoding's."""
    torch.manual_seed(0)
    settings = AttentionSettings()
    model = GPT(architecture, settings, positions=[], vocab=size.vocab, end_of_document=0)
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


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__ or "")
    add = parser.add_argument
    add("--encodings", nargs="+", default=ENCODINGS, metavar="NAME", help="or all")
    eager = "encodings to run with backend eager as well"
    add("--eager", nargs="*", default=[], metavar="NAME", help=eager)
    add("--compile", action="store_true", help="compile the layers, as torch_compile does")
    add("--dtype", choices=DTYPES, help="default: bfloat16, on CPU float32")
    add("--batch", type=positive, help="windows of a step; default: 32, on CPU 1")
    add("--length", type=positive, default=4096, metavar="L", help="tokens to evaluate")
    add("--trace", type=Path, metavar="FILE.json.gz", help="for chrome://tracing and Perfetto")
    add("--into", type=Path, metavar="FILE.md", help="write the table between its marks there")
    for name, size in SIZES.items():
        add(f"--{name}", type=positive, default=size, help=f"default: {size}")
    options = parser.parse_args(argv)
    if options.hidden % options.heads:
        raise UserError(f"--hidden: {options.hidden} cannot be split over --heads {options.heads}")
    if options.into:
        between_marks(options.into, "")  # before the hour that it takes
    if options.trace:
        check_output(options.trace)
    kinds = [(name, "auto", {}) for name in options.encodings]
    if options.encodings == ["all"]:
        longest = max(options.length, options.train_length)
        names = dict.fromkeys(["rotary", *sorted(REGISTRY)])  # the reference is called first
        kinds = [(name, "auto", options_in_file(name, longest)) for name in names]
    kinds += [(name, "eager", {}) for name in options.eager]

    bench = Bench(options)
    on_gpu = options.device == "cuda"
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    sizes = {name: getattr(options, name) for name in SIZES}
    size = Size(**sizes, dtype=dtype, device=options.device, compiled=options.compile)
    works = [(True, options.train_length, options.batch or (32 if on_gpu else 1))]
    works.append((False, options.length, 1))
    for work in works:
        report_progress("training step" if work[0] else "evaluation")
        candidates = [
            GPTCandidate(name, backend, *work, size, more) for name, backend, more in kinds
        ]
        for one, row in zip(candidates, bench.group(candidates, ["rotary, auto"]), strict=True):
            row |= {"attention": None, "tokens_per_second": None, "mfu": None}
            if row["median_ms"] is not None:
                seconds = row["median_ms"] / 1000
                row["attention"] = one.chosen_backend
                row["tokens_per_second"] = one.batch * one.length / seconds
                row["mfu"] = one.flops / seconds / best_speed(one.device, one.size.dtype)
        bench.save(markdown(bench))
    print(markdown(bench))
    if options.into:
        write_text(options.into, between_marks(options.into, markdown(bench)))
    if options.trace:
        name, backend, more = kinds[0]
        print(traced(GPTCandidate(name, backend, *works[0], size, more), options.trace))
    return 0


def options_in_file(name: str, longest: int) -> dict[str, Any]:
    """pos_emb_args of the encoding's file, with a row for every position of a table of rows."""
    from megatron.config.yaml_files import read_file  # needs PyYAML

    file = ROOT / "configs/pos_emb" / f"{name}.yml"
    options = dict(read_file(file).get("pos_emb_args") or {})
    if "max_positions" in options_of(name):
        options["max_positions"] = longest
    return options


def markdown(bench: Bench) -> str:
    """One line for each encoding, the fastest training step first."""
    columns = ["tokens/s", "MFU %", "time (quartiles)", "peak MiB"]
    header = ["encoding", "attention", f"step: {columns[0]}", *columns[1:]]
    header += [f"evaluation: {columns[0]}", *columns[1:]]
    steps, evaluations = [], {}
    for row in bench.rows:
        if row["training"]:
            steps.append(row)
        else:
            evaluations[row["candidate"]] = row
    steps.sort(key=lambda row: row["median_ratio"] or float("inf"))
    lines = []
    for step in steps:
        evaluation = evaluations.get(step["candidate"], {})
        line = [step["pos_emb"], step["attention"] or "-"]
        for row in (step, evaluation):
            speed = row.get("tokens_per_second")
            if speed is None:
                reason = row.get("reason") or "-"
                line += [reason, "-", "-", "-"]
                continue
            mfu = f"{100 * row['mfu']:.1f}"
            line += [shown(speed), mfu, *figures(row)[1:]]
        lines.append(line)
    return f"{bench.heading}\n{table(header, lines)}"


def between_marks(path: Path, text: str) -> str:
    """The file's text with `text` between its marks; raises UserError if it has none."""
    try:
        before = path.read_text(encoding="utf-8")
    except OSError as fault:
        raise UserError(f"--into: {path} cannot be read ({fault.strerror})") from None
    if before.count(BEGIN) != 1 or before.count(END) != 1:
        raise UserError(f"--into: {path} has not the lines '{BEGIN}' and '{END}'; write them there")
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{text}\n{END}{tail}"


def traced(candidate: GPTCandidate, path: Path) -> str:
    """Write a trace of one step; the table of its longest operations."""
    step = candidate.prepare()
    for _ in range(3):
        step()
    for _ in range(2):  # the first is spent on starting the device's own profiler
        with profile() as profiler:
            step()
    profiler.export_chrome_trace(str(path))
    order = "self_device_time_total" if candidate.device == "cuda" else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=12)


if __name__ == "__main__":
    sys.exit(main())
