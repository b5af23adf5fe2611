"""Time, memory and throughput of a training step and of evaluation, for encodings of one GPT.

python tools/bench/step.py --threads 1 --encodings rotary kerple_log --layers 4 --output step.json
python tools/bench/step.py --threads 1 --encodings all --hidden 256 --layers 2 --heads 4

A step is forward, backward, clipping and torch's fused AdamW on weights in float32, on CUDA in
bfloat16. DeepSpeed's engine, its float32 masters and the loader are not in it. Evaluation is the
losses of one window. Every round runs each encoding once in rotated order; ratios are to the first
encoding in the same round. MFU follows PaLM (megatron/model/size.py), against the measured speed of
matrix products. With `all`, each encoding has the options of its file in configs/pos_emb. --trace
profiles one step of the first encoding.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import DEVICE, DTYPE, ON_GPU, Call, Candidate, arguments, positive, run
from torch import nn
from torch.profiler import profile

from megatron.cli_errors import guarded
from megatron.errors import UserError
from megatron.files import ROOT, check_output
from megatron.model import GPT
from megatron.model.settings import Architecture, AttentionSettings
from megatron.model.size import BACKWARD, forward_flops
from megatron.positions import REGISTRY, Shape, build, options_of
from megatron.positions.registry import encoding_called

SIZES = {"hidden": 768, "layers": 12, "heads": 12, "vocab": 50304, "train_length": 512}
ENCODINGS = ["rotary", "kerple_log", "alibi", "mep_free"]


def prepared(
    name: str,
    more: dict[str, Any],
    training: bool,
    batch: int,
    length: int,
    model: Architecture,
    options: argparse.Namespace,
) -> Call:
    """A step or an evaluation on random tokens; more: pos_emb_args."""
    torch.manual_seed(0)
    heads, hidden = options.heads, options.hidden
    shape = Shape(heads, hidden // heads, hidden, options.train_length)
    copies = model.num_layers if encoding_called(name).per_layer else 1
    positions = [build(name, shape, **more) for _ in range(copies)]
    gpt = GPT(
        model, AttentionSettings(), positions=positions, vocab=options.vocab, end_of_document=0
    )
    gpt.to(DEVICE, DTYPE).train(training)
    gpt.positions.float()
    print(f"attention: {gpt.attention_choice}", file=sys.stderr)
    if options.compile:
        from megatron.training.trainer import compile_layers  # needs DeepSpeed and pydantic

        compile_layers(gpt, torch.device(DEVICE))
    ids = torch.randint(1, options.vocab, (batch, length + 1)).to(DEVICE)
    inputs, labels = ids[:, :-1], ids[:, 1:]
    if not training:
        return torch.inference_mode()(partial(gpt, inputs, labels=labels))
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def step() -> None:
        gpt(inputs, labels=labels, mean=True).backward()
        nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--encodings", nargs="+", default=ENCODINGS, metavar="NAME", help="or all")
    add("--compile", action="store_true", help="compile the layers, as torch_compile does")
    windows = "of a step; default: 32, without a GPU 1"
    add(
        "--batch",
        type=positive,
        default=32 if DEVICE == "cuda" else 1,
        metavar="WINDOWS",
        help=windows,
    )
    add("--length", type=positive, default=4096, metavar="L", help="tokens to evaluate")
    add("--trace", type=Path, metavar="FILE.json.gz", help="for chrome://tracing and Perfetto")
    for name, size in SIZES.items():
        add(f"--{name}", type=positive, default=size, help=f"default: {size}")
    options = parser.parse_args(argv)
    if options.hidden % options.heads:
        raise UserError(f"--hidden: {options.hidden} cannot be split over --heads {options.heads}")
    if options.trace:
        check_output(options.trace)
    encodings = {name: {} for name in options.encodings}
    if options.encodings == ["all"]:
        longest = max(options.length, options.train_length)
        names = ["rotary", *sorted(REGISTRY)]  # the reference first
        encodings = {name: options_in_file(name, longest) for name in names}
    groups: list[tuple[str, list[Candidate]]] = []
    for training, batch, length in (
        (True, options.batch, options.train_length),
        (False, 1, options.length),
    ):
        candidates = []
        for name, more in encodings.items():
            model = Architecture(
                hidden_size=options.hidden,
                num_layers=options.layers,
                num_attention_heads=options.heads,
                seq_length=options.train_length,
                heads_per_query=encoding_called(name).heads_per_query,
            )
            make = partial(prepared, name, more, training, batch, length, model, options)
            flops = batch * length * forward_flops(model, options.vocab, length)
            flops *= BACKWARD if training else 1
            candidates.append(Candidate(name, make, batch * length, flops))
        title = f"{'step' if training else 'evaluation'} of {batch} x {length} tokens"
        groups.append((title, candidates))
    status = run(groups, options)
    if options.trace:
        step = groups[0][1][0].make()
        for _ in range(2):  # the first is spent on starting the device's own profiler
            with profile() as profiler:
                step()
        profiler.export_chrome_trace(str(options.trace))
        order = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=order, row_limit=12))
    return status


def options_in_file(name: str, longest: int) -> dict[str, Any]:
    """pos_emb_args of the encoding's file, with a row for every position of a table of rows."""
    from megatron.config.yaml_files import read_file  # needs PyYAML

    file = ROOT / "configs/pos_emb" / f"{name}.yml"
    options = dict(read_file(file).get("pos_emb_args") or {})
    if "max_positions" in options_of(name):
        options["max_positions"] = longest
    return options


if __name__ == "__main__":
    sys.exit(main())
