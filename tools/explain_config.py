"""What a configuration means: every key with its value, where that comes from and what it does.

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

import yaml

from megatron.cli_errors import guarded
from megatron.config import Config, load
from megatron.config.config import plain
from megatron.config.document import description
from megatron.config.keys import Key, all_keys
from megatron.config.origins import Origins
from megatron.config.schema import SECTIONS
from megatron.entry import add_conf_dir, settings_first, split_words
from megatron.errors import UserError, visible
from megatron.explain.effects import effect
from megatron.explain.sizes import EVALUATED_IN, Sizes, device_hours
from megatron.model import Architecture
from megatron.model.size import matrix_weights
from megatron.parallel.machine import in_bytes
from megatron.positions.layers import name_of_layers
from megatron.sweeps.cost import DEVICES, UTILISATION, Device, named_device

WIDTH = 100
INDENT = " " * 6


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    files, overrides = split_words(options.words, options.conf_dir)
    origins = Origins()
    config = load(files, overrides, trace=origins.after)
    kind = "cpu" if options.gpu == "cpu" else "cuda"
    sizes = Sizes.of(config, options.devices, kind)
    gpus = [options.gpu] if options.gpu else list(DEVICES)
    times = [_time(sizes, name, options.mfu) for name in gpus]
    if options.json:
        print(json.dumps(_record(sizes, origins, times), indent=2, ensure_ascii=False))
        return 0
    lines = [] if options.brief else list(_keys(sizes, origins, given=options.given))
    lines += _summary(sizes, times, options.mfu)
    print(visible("\n".join(lines)))
    return 0


# --- Keys ---


def _keys(sizes: Sizes, origins: Origins, *, given: bool) -> Iterator[str]:
    """Every key, in documented order; given: only those that a source sets."""
    for name, section in SECTIONS.items():
        keys = [key for key in all_keys() if key.section == name]
        shown = [key for key in keys if not given or key.name in origins.of]
        if not shown:
            continue
        about = " ".join((section.__doc__ or "").split())
        yield from textwrap.wrap(f"{name}: {about}", WIDTH, subsequent_indent="  ")
        for key in shown:
            yield from _lines_of(key, sizes, origins)
        yield ""
    if sizes.config.notes:
        yield "notes: what was converted, dropped, or has no effect"
        for note in sizes.config.notes:
            yield from textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent=INDENT)
        yield ""


def _lines_of(key: Key, sizes: Sizes, origins: Origins) -> Iterator[str]:
    value = plain(sizes.config[key.name])
    yield f"  {key.name}: {_as_yaml(value)}    [{origins.described(key)}]"
    here = effect(key.name, sizes)
    texts = [description(key), f"here: {here}" if here else ""]
    for text in filter(None, texts):
        yield from textwrap.wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)


def _as_yaml(value: Any) -> str:
    """A value as a file has it, on one line; `unset` for null."""
    if value is None:
        return "unset"
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.removesuffix("...\n").strip()


# --- Sizes ---


def _summary(sizes: Sizes, times: Sequence[dict[str, Any]], mfu: float) -> list[str]:
    config = sizes.config
    lines = [f"this run (hash {config.hash}, encoding {name_of_layers(config.position)})"]
    lines += _row("parameters", _parameters(sizes))
    lines += _row("tokens", _tokens(sizes))
    lines += _row("FLOP", _operations(sizes))
    if sizes.steps != 0:
        lines += _row("training", _training_memory(sizes))
    lines += _evaluation_memory(sizes)
    lines.append("")
    lines += _hours(sizes, times, mfu)
    return lines


def _row(subject: str, text: str) -> list[str]:
    first = f"  {subject:<12}"
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first))


def _parameters(sizes: Sizes) -> str:
    config, counted = sizes.config, sizes.parameters
    table = sizes.vocab * config.model.hidden_size
    tables, names = 1, "the embedding"
    if config.model.no_weight_tying:
        tables, names = 2, "the embedding and the output matrix"
    return (
        f"{counted.whole:,}; {counted.whole - tables * table:,} without {names} of"
        f" {sizes.vocab:,} rows ({sizes.vocab_basis}); {counted.positions:,} in the encoding"
    )


def _tokens(sizes: Sizes) -> str:
    if sizes.tokens is None:
        return "unknown: train_epochs needs the data"
    if not sizes.tokens:
        return "none: train_iters is 0"
    ratio = sizes.tokens / sizes.parameters.whole
    return (
        f"{sizes.tokens:,} = {sizes.steps:,} steps * {sizes.windows_per_step} windows *"
        f" {sizes.config.model.seq_length}; {ratio:.1f} for each parameter"
    )


def _operations(sizes: Sizes) -> str:
    model = Architecture.of(sizes.config.model)
    length = sizes.config.model.seq_length
    weights = matrix_weights(model, sizes.vocab)
    formula = (
        f"3 * (2 * {weights:,} weights in matrices + 4 * {model.num_layers} layers *"
        f" {model.attention_width} features * {length}/2 keys)"
    )
    per_token = f"{sizes.flops_per_token:.4g} for each token = {formula}"
    if not sizes.training_flops:
        return f"{per_token}, forward and backward"
    return (
        f"{sizes.training_flops:.3g} of training: {per_token}, forward and backward;"
        f" {sizes.evaluation_flops:.3g} of one evaluation of"
        f" {sizes.config.evaluation.eval_tokens:,} tokens at every length"
    )


def _training_memory(sizes: Sizes) -> str:
    need = sizes.needs
    stage = sizes.config.parallel.zero_stage
    activations = f"{in_bytes(need.activations)} of activations and logits"
    if sizes.scores:
        activations += f", without the scores that this encoding keeps, {in_bytes(sizes.scores)}"
        activations += " or several times that"
    return (
        f"about {in_bytes(need.memory)} of memory on each of {sizes.devices} device(s), ZeRO stage"
        f" {stage}: {in_bytes(need.state)} of weights, gradients and Adam, {activations};"
        f" {in_bytes(need.disk)} of disk for checkpoints, one more than are kept"
    )


def _evaluation_memory(sizes: Sizes) -> list[str]:
    """A row for each size; several lengths often need the same, that of eval_batch_tokens."""
    lengths: dict[str, list[str]] = {}
    for length, size in sizes.evaluation_memory.items():
        lengths.setdefault(in_bytes(size), []).append(str(length))
    lines = []
    for size, same in lengths.items():
        text = f"about {size} of memory, in float32, at {', '.join(same)}"
        lines += _row("evaluation", text)
    return lines


def _time(sizes: Sizes, name: str, mfu: float) -> dict[str, Any]:
    """Device hours of training and of an evaluation, with what they rest on."""
    device = named_device(name, sizes.config.precision.dtype, option="--gpu")
    measuring = device if name == "cpu" else named_device(name, EVALUATED_IN, option="--gpu")
    flops = sizes.training_flops
    training = None if flops is None else _hours_on(device, flops, mfu)
    return {
        "gpu": name,
        "tflops_per_second": device.flops_per_second / 1e12,
        "basis": device.basis,
        "training_gpu_hours": training,
        "evaluation_gpu_hours": _hours_on(measuring, sizes.evaluation_flops, mfu),
    }


def _hours_on(device: Device, flops: float, mfu: float) -> float:
    return device_hours(flops, device.flops_per_second, mfu)


def _hours(sizes: Sizes, times: Sequence[dict[str, Any]], mfu: float) -> list[str]:
    basis = "assumed (--mfu)" if mfu == UTILISATION else "given by --mfu"
    lines = [f"GPU hours at {mfu:.0%} of the speed below, which is {basis}"]
    for time in times:
        speed = f"{time['tflops_per_second']:.4g} TFLOP/s, {time['basis']}"
        text = f"an evaluation in float32 {_short(time['evaluation_gpu_hours'])}; {speed}"
        training = time["training_gpu_hours"]
        if training:
            together = f", {_short(training / sizes.devices)} on {sizes.devices}"
            others = together if sizes.devices > 1 else ""
            text = f"training {_short(training)}{others}; {text}"
        lines += _row(time["gpu"], text)
    return lines


def _short(hours: float) -> str:
    if hours < 0.1:
        return f"{hours * 60:.2g} minutes"
    return f"{hours:.3g} hours"


# --- JSON ---


def _record(sizes: Sizes, origins: Origins, times: Sequence[dict[str, Any]]) -> dict[str, Any]:
    config: Config = sizes.config
    keys = {}
    for key in all_keys():
        keys[key.name] = {
            "value": plain(config[key.name]),
            "from": origins.described(key),
            "meaning": description(key),
            "here": effect(key.name, sizes),
            "counts_for_hash": key.shapes_result,
        }
    return {
        "hash": config.hash,
        "keys": keys,
        "notes": list(config.notes),
        "devices": sizes.devices,
        "vocab": sizes.vocab,
        "parameters": sizes.parameters.whole,
        "parameters_of_encoding": sizes.parameters.positions,
        "tokens": sizes.tokens,
        "flops_per_token": sizes.flops_per_token,
        "training_flops": sizes.training_flops,
        "evaluation_flops": sizes.evaluation_flops,
        "training_memory": sizes.needs.memory,
        "disk": sizes.needs.disk,
        "evaluation_memory": sizes.evaluation_memory,
        "times": list(times),
    }


# --- Options ---


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
        raise UserError(f"--mfu: {options.mfu:g} is no share - give more than 0 and at most 1")
    if options.devices is not None and not 1 <= options.devices <= 10**6:
        raise UserError(f"--devices: {options.devices} is no number of devices - give 1 or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
