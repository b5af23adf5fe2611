"""The meaning of a configuration: every key with its value, where that comes from and what it does.

python tools/explain_config.py configs/125M.yml configs/pos_emb/kerple_log.yml seed=1235
python tools/explain_config.py configs/125M.yml --brief --gpu h100 --mfu 0.4

Then the size of the run: parameters, tokens, floating point operations, memory of the training and
of each evaluation length, and GPU hours. Hours rest on --mfu, the share of the data sheet's speed
that the run reaches: 0.35 is assumed, measure yours from `mfu` in the log. Nothing is trained.
"""

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import yaml

from megatron.cli_errors import guarded
from megatron.config import Config, load
from megatron.config.document import description
from megatron.config.schema import SECTIONS, all_keys, plain
from megatron.data.parts import open_parts
from megatron.entry import add_conf_dir, settings_first, split_words
from megatron.errors import UserError, visible
from megatron.evaluation.memory import evaluation_memory
from megatron.model import Architecture, position_of_entry
from megatron.model.size import BACKWARD, parameters
from megatron.parallel.machine import in_bytes
from megatron.positions.layers import entries_of, name_of_layers
from megatron.positions.outline import Outline
from megatron.report.catalogue import formula
from megatron.sweeps.cost import DEVICES, UTILISATION, evaluation_flops, forward_flops, named_device
from megatron.training.batches import VOCAB, likely_rows, windows_per_step, with_epochs
from megatron.training.fits import needs

WIDTH = 100
INDENT = " " * 6
HOUR = 3600  # seconds
EVALUATED_IN = "fp32"  # evaluate.py's default


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    files, overrides = split_words(options.words, options.conf_dir)
    config = load(files, overrides)
    devices = options.devices or devices_of(config)
    config.check_batch(devices)
    vocab_basis = f"GPT-2's {VOCAB}, as no data are at hand"
    if config.data.data_path or config.data.train_data_paths:
        try:
            part = open_parts(config.data, ["train"])["train"]
        except UserError as absent:
            vocab_basis += f" ({absent})"
        else:
            config = with_epochs(config, part, devices)
            vocab_basis = "by the data"

    sizes = sizes_of(config, devices, "cpu" if options.gpu == "cpu" else "cuda")
    gpus = [options.gpu] if options.gpu else list(DEVICES)
    times = [hours_on(gpu, config, sizes, options.mfu) for gpu in gpus]
    if options.json:
        record = {"hash": config.hash, "keys": keys_of(config), **sizes}
        record |= {"notes": list(config.notes), "times": times}
        print(json.dumps(record, indent=2, ensure_ascii=False))
        return 0
    lines = []
    if not options.brief:
        lines += key_lines(config, only_given=options.given)
    lines += size_lines(config, sizes, vocab_basis)
    lines += ["", *hour_lines(times, devices, options.mfu)]
    print(visible("\n".join(lines)))
    return 0


def devices_of(config: Config) -> int:
    """Devices that a configuration asks for: by train_batch_size, else by num_gpus, else one."""
    whole, of_one = config.training.train_batch_size, windows_per_step(config)
    if whole is not None and whole % of_one == 0:
        return whole // of_one
    return (config.launch.num_gpus or 1) * (config.launch.num_nodes or 1)


def sizes_of(config: Config, devices: int, kind: str) -> dict[str, Any]:
    """Parameters, tokens, operations and bytes of one run, by the project's own formulas.

    kind: cuda or cpu; blocks of logits are larger on CUDA
    Tokens and training_flops are None if train_epochs needs data that are not at hand.
    """
    vocab = likely_rows(config)
    counted = parameters(config, vocab)
    length = config.model.seq_length
    flops_per_token = BACKWARD * forward_flops(config, vocab, length)
    tokens = None
    if config.training.train_epochs is None or config.training.train_iters:
        tokens = config.training.train_iters * windows_per_step(config) * devices * length
    with torch.random.fork_rng(devices=[]), Outline():
        positions = [position_of_entry(config, entry) for entry in entries_of(config.position)]
    memory = {}
    for length in sorted(config.evaluation.eval_lengths):
        memory[length] = evaluation_memory(
            Architecture.of(config.model),
            vocab,
            counted.whole,
            length,
            batch_tokens=config.evaluation.eval_batch_tokens,
            device=torch.device(kind),
            dense=any(position.has("on_scores") for position in positions),
        )
    need = needs(config, vocab, devices, torch.device(kind))
    return {
        "devices": devices,
        "vocab": vocab,
        "parameters": counted.whole,
        "parameters_of_encoding": counted.positions,
        "tokens": tokens,
        "flops_per_token": flops_per_token,
        "training_flops": None if tokens is None else tokens * flops_per_token,
        "evaluation_flops": evaluation_flops({}, config, vocab),
        "training_memory": need.memory,
        "disk": need.disk,
        "evaluation_memory": memory,
    }


def hours_on(gpu: str, config: Config, sizes: dict[str, Any], mfu: float) -> dict[str, Any]:
    """Device hours of training and of an evaluation, with what they rest on."""
    device = named_device(gpu, config.precision.dtype, option="--gpu")
    measuring = device if gpu == "cpu" else named_device(gpu, EVALUATED_IN, option="--gpu")
    flops = sizes["training_flops"]
    speed = device.flops_per_second
    return {
        "gpu": gpu,
        "tflops_per_second": speed / 1e12,
        "basis": device.basis,
        "training_gpu_hours": None if flops is None else flops / (speed * mfu) / HOUR,
        "evaluation_gpu_hours": (
            sizes["evaluation_flops"] / (measuring.flops_per_second * mfu) / HOUR
        ),
    }


def keys_of(config: Config) -> dict[str, dict[str, Any]]:
    """Every key with its value, its source and its meaning."""
    keys = {}
    for key in all_keys():
        default = f"default, follows {key.follows}" if key.follows else "default"
        keys[key.name] = {
            "value": plain(config[key.name]),
            "from": config.origins.get(key.name, default),
            "meaning": description(key),
            "counts_for_hash": key.shapes_result,
        }
    return keys


def key_lines(config: Config, *, only_given: bool) -> Iterator[str]:
    """Every key, in documented order; only_given: only those that a source sets."""
    keys = keys_of(config)
    for name, section in SECTIONS.items():
        shown = [key.name for key in all_keys() if key.section == name]
        if only_given:
            shown = [key for key in shown if key in config.origins]
        if not shown:
            continue
        about = " ".join((section.__doc__ or "").split())
        yield from textwrap.wrap(f"{name}: {about}", WIDTH, subsequent_indent="  ")
        for key in shown:
            value, meaning = keys[key]["value"], keys[key]["meaning"]
            if key == "pos_emb" and not config.position.pos_emb_layers:
                meaning += f" Here: {formula(config.position.pos_emb)}"
            text = "unset"
            if value is not None:
                text = yaml.safe_dump(
                    value, default_flow_style=True, width=math.inf, allow_unicode=True
                )
            text = text.removesuffix("...\n").strip()
            yield f"  {key}: {text}    [{keys[key]['from']}]"
            yield from textwrap.wrap(
                meaning, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT
            )
        yield ""
    if config.notes:
        yield "notes: what was converted, dropped, or has no effect"
        for note in config.notes:
            yield from textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent=INDENT)
        yield ""


def size_lines(config: Config, sizes: dict[str, Any], vocab_basis: str) -> list[str]:
    """The size of the run, a figure in each line."""
    tables = 2 if config.model.no_weight_tying else 1
    in_tables = tables * sizes["vocab"] * config.model.hidden_size
    windows = windows_per_step(config) * sizes["devices"]
    steps, length = config.training.train_iters, config.model.seq_length
    evaluated = f"of {config.evaluation.eval_tokens:,} tokens at every length"
    lines = [
        f"this run (hash {config.hash}, encoding {name_of_layers(config.position)})",
        f"  parameters          {sizes['parameters']:,}",
        f"    in the encoding   {sizes['parameters_of_encoding']:,}",
        f"    in the layers     {sizes['parameters'] - in_tables:,}",
        f"  vocabulary          {sizes['vocab']:,} rows, {vocab_basis}",
    ]
    if sizes["tokens"] is None:
        lines.append("  tokens              unknown: train_epochs needs the data")
    else:
        of_steps = f"{steps:,} steps of {windows} windows of {length}"
        lines.append(f"  tokens              {sizes['tokens']:,}, {of_steps}")
        lines.append(f"  FLOP of training    {sizes['training_flops']:.3g}")
    lines += [
        f"    of each token     {sizes['flops_per_token']:.4g}, forward and backward",
        f"  FLOP to evaluate    {sizes['evaluation_flops']:.3g}, {evaluated}",
        f"  memory to train     {in_bytes(sizes['training_memory'])} on each of"
        f" {sizes['devices']} device(s), ZeRO stage {config.parallel.zero_stage}",
        f"  disk                {in_bytes(sizes['disk'])}, one checkpoint more than are kept",
    ]
    for length, size in sizes["evaluation_memory"].items():
        lines.append(f"  memory at {length:<9} {in_bytes(size)} to evaluate in float32")
    return lines


def hour_lines(times: Sequence[dict[str, Any]], devices: int, mfu: float) -> list[str]:
    """Hours of each GPU in words."""
    basis = "assumed (--mfu)" if mfu == UTILISATION else "given by --mfu"
    lines = [f"GPU hours at {mfu:.0%} of the speed below, which is {basis}"]
    for time in times:
        text = f"{_short(time['evaluation_gpu_hours'])} to evaluate"
        training = time["training_gpu_hours"]
        if training:
            text = (
                f"{_short(training)} to train ({_short(training / devices)} on {devices}), {text}"
            )
        speed = f"{time['tflops_per_second']:.4g} TFLOP/s, {time['basis']}"
        lines.append(f"  {time['gpu']:<9} {text}; {speed}")
    return lines


def _short(hours: float) -> str:
    return f"{hours * 60:.2g} minutes" if hours < 0.1 else f"{hours:.3g} hours"


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("words", nargs="+", metavar="FILE | key=value", help="YAML files in order, then settings")
    add_conf_dir(parser)
    show = parser.add_mutually_exclusive_group()
    show.add_argument("--given", action="store_true", help="show only keys that a source sets")
    show.add_argument("--brief", action="store_true", help="show no key, only the size of the run")
    add("--devices", type=int, metavar="N", help="devices that train together; default: as asked")
    add("--gpu", metavar="NAME", help=f"one of cpu, {', '.join(DEVICES)}; default: all but cpu")
    add("--mfu", type=float, default=UTILISATION, metavar="SHARE", help="default: %(default)s")
    add("--json", action="store_true", help="print all of it as JSON")
    words = sys.argv[1:] if argv is None else list(argv)
    options = parser.parse_intermixed_args(settings_first(words))
    if not 0 < options.mfu <= 1:
        raise UserError(f"--mfu: {options.mfu:g} is not a share - give more than 0 and at most 1")
    if options.devices is not None and not 1 <= options.devices <= 10**6:
        raise UserError(f"--devices: {options.devices} is not a number of devices - give 1 or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
