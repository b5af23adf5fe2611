"""Time, memory and throughput of a training step and of evaluation, for encodings of one GPT.

python tools/bench/step.py --threads 1 --encodings rotary kerple_log --layers 4 --output step.json
python tools/bench/step.py --threads 1 --encodings all --into docs/performance.md

A step is forward, backward, clipping and torch's fused AdamW on weights in float32, on CUDA in
bfloat16. DeepSpeed's engine, its float32 masters and the loader are not in it. Evaluation is the
losses of one window. Every round runs each encoding once in rotated order; ratios are to the first
encoding in the same round. MFU follows PaLM (megatron/model/size.py), against the measured speed of
matrix products. With `all`, each encoding has the options of its file in configs/pos_emb. --trace
profiles one step of the first encoding. --into writes the table between its two marks in a file.
"""

import re
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import (
    ON_GPU,
    Call,
    Candidate,
    Row,
    arguments,
    conditions,
    figures,
    measure,
    milliseconds,
    positive,
    save,
    start,
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
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


@cache
def trunk(
    model: Architecture, vocab: int, device: str, compiled: bool
) -> tuple[GPT, torch.optim.Optimizer]:
    """The model without an encoding, and its optimizer.

    All encodings share its weights, and are put into it in turn.
    """
    torch.manual_seed(0)
    gpt = GPT(model, AttentionSettings(), positions=[], vocab=vocab, end_of_document=0)
    gpt = gpt.to(device, DTYPES[device])
    if compiled:
        from megatron.training.trainer import compile_layers  # needs DeepSpeed and pydantic

        compile_layers(gpt, torch.device(device))
    return gpt, torch.optim.AdamW(gpt.parameters(), lr=1e-4, weight_decay=0.0, fused=True)


def prepared(
    pos_emb: str, more: dict[str, Any], training: bool, batch: int, sizes: tuple, length: int
) -> Call:
    """A step or an evaluation on random tokens; the call returns the name of attention's backend.

    more: pos_emb_args; sizes: the arguments of `trunk`
    """
    gpt, optimizer = trunk(*sizes)
    model, vocab, device, _ = sizes
    heads, hidden = model.num_attention_heads, model.hidden_size
    shape = Shape(heads, hidden // heads, hidden, model.seq_length)
    torch.manual_seed(0)
    copies = model.num_layers if encoding_called(pos_emb).per_layer else 1
    positions = nn.ModuleList(build(pos_emb, shape, **more) for _ in range(copies))
    positions.to(device).train(training)
    if training:
        optimizer.add_param_group({"params": list(positions.parameters())})
    ids = torch.randint(1, vocab, (batch, length + 1)).to(device)
    inputs, labels = ids[:, :-1], ids[:, 1:]

    def call() -> str:
        gpt.positions = positions
        gpt.use_attention(AttentionSettings())
        if training:
            gpt(inputs, labels=labels, mean=True).backward()
            nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            with torch.inference_mode():
                gpt(inputs, labels=labels)
        return gpt.resolved_backend

    return call


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--encodings", nargs="+", default=ENCODINGS, metavar="NAME", help="or all")
    add("--compile", action="store_true", help="compile the layers, as torch_compile does")
    windows = "of a step; default: 32, without a GPU 1"
    add("--batch", type=positive, default=32 if ON_GPU else 1, metavar="WINDOWS", help=windows)
    add("--length", type=positive, default=4096, metavar="L", help="tokens to evaluate")
    add("--trace", type=Path, metavar="FILE.json.gz", help="for chrome://tracing and Perfetto")
    add("--into", type=Path, metavar="FILE.md", help="write the table between its marks there")
    for name, size in SIZES.items():
        add(f"--{name}", type=positive, default=size, help=f"default: {size}")
    options = parser.parse_args(argv)
    device, vocab = options.device, options.vocab
    if options.hidden % options.heads:
        raise UserError(f"--hidden: {options.hidden} cannot be split over --heads {options.heads}")
    if options.into:
        between_marks(options.into, "")  # before the hour that it takes
    if options.trace:
        check_output(options.trace)
    start(options)
    encodings = {name: {} for name in options.encodings}
    if options.encodings == ["all"]:
        longest = max(options.length, options.train_length)
        names = ["rotary", *sorted(REGISTRY)]  # the reference first
        encodings = {name: options_in_file(name, longest) for name in names}
    size = 4096 if device == "cuda" else 1024
    a, b = torch.randn(2, size, size, device=device).to(DTYPES[device])
    fastest = min(milliseconds(lambda: a @ b, 3, device) for _ in range(6))
    products_per_second = 2 * size**3 / fastest * 1000

    candidates: list[Candidate] = []
    rows: list[Row] = []
    for training, batch, length in (
        (True, options.batch, options.train_length),
        (False, 1, options.length),
    ):
        works = []
        for name, more in encodings.items():
            model = Architecture(
                hidden_size=options.hidden,
                num_layers=options.layers,
                num_attention_heads=options.heads,
                seq_length=options.train_length,
                heads_per_query=encoding_called(name).heads_per_query,
            )
            sizes = (model, vocab, device, options.compile)
            make = partial(prepared, name, more, training, batch, sizes)
            flops = batch * length * forward_flops(model, vocab, length)
            flops *= BACKWARD if training else 1
            facts = {"training": training, "batch": batch, "flops": flops, "attention": "-"}
            works.append(Candidate(name, make, length, facts))
        for candidate, row in zip(works, measure(works, options), strict=True):
            if training and row["ms"]:
                row["attention"] = candidate.make(length)()
            if row["ms"]:
                seconds = median(row["ms"]) / 1000
                row["tokens_per_second"] = batch * length / seconds
                row["mfu"] = row["flops"] / seconds / products_per_second
            rows.append(row)
        candidates += works
        save(rows, options)

    page = f"{conditions(device)}\n{markdown(rows[: len(encodings)], rows[len(encodings) :])}"
    print(page)
    if options.into:
        write_text(options.into, between_marks(options.into, page))
    if options.trace:
        step = candidates[0].make(options.train_length)
        for _ in range(2):  # the first is spent on starting the device's own profiler
            with profile() as profiler:
                step()
        profiler.export_chrome_trace(str(options.trace))
        order = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=order, row_limit=12))
    return int(any(row["reason"] for row in rows))


def options_in_file(name: str, longest: int) -> dict[str, Any]:
    """pos_emb_args of the encoding's file, with a row for every position of a table of rows."""
    from megatron.config.yaml_files import read_file  # needs PyYAML

    file = ROOT / "configs/pos_emb" / f"{name}.yml"
    options = dict(read_file(file).get("pos_emb_args") or {})
    if "max_positions" in options_of(name):
        options["max_positions"] = longest
    return options


def markdown(steps: Sequence[Row], evaluations: Sequence[Row]) -> str:
    """One line for each encoding, the fastest training step first."""
    columns = ["tokens/s", "MFU %", "time (quartiles)", "peak MiB"]
    header = ["encoding", "attention", f"step: {columns[0]}", *columns[1:]]
    header += [f"evaluation: {columns[0]}", *columns[1:]]
    pairs = list(zip(steps, evaluations, strict=True))
    pairs.sort(key=lambda pair: median(pair[0]["ratios"] or [float("inf")]))
    lines = []
    for pair in pairs:
        line = [pair[0]["candidate"], pair[0]["attention"]]
        for row in pair:
            speed, *others = figures(row)
            mfu = "-"
            if row["ms"]:
                speed, mfu = f"{row['tokens_per_second']:,.0f}", f"{100 * row['mfu']:.1f}"
            line += [speed, mfu, *others]
        lines.append(line)
    return table(header, lines)


def between_marks(path: Path, text: str) -> str:
    """The file's text with `text` between its marks; raises UserError if it has none."""
    between = re.compile(f"(?<={BEGIN}\n).*(?={END}\n)", re.DOTALL)
    page, tables = between.subn(lambda _: f"\n{text}\n", path.read_text(encoding="utf-8"))
    if not tables:
        raise UserError(f"--into: {path} has not the lines '{BEGIN}' and '{END}'; write them there")
    return page


if __name__ == "__main__":
    sys.exit(main())
