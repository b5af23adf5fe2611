"""Explain a configuration: every key with its value, its source and its meaning.

python tools/explain_config.py configs/125M.yml configs/pos_emb/kerple_log.yml seed=1235
python tools/explain_config.py configs/125M.yml --brief --gpu h100 --mfu 0.4

Then the size of the run: parameters, tokens, floating point operations, memory and GPU hours. Hours
depend on --mfu, the fraction of the data sheet's speed that the run reaches: 0.35 is assumed, the
log shows yours as `mfu`. Nothing is trained.
"""

import sys
import textwrap
from collections.abc import Iterator, Sequence

from megatron.cli_errors import command_parser, guarded
from megatron.config import Config, load
from megatron.config.document import description
from megatron.config.schema import SECTIONS, all_keys, plain
from megatron.entry import add_conf_dir, settings_first, split_words
from megatron.errors import UserError, visible
from megatron.model.size import parameters
from megatron.parallel.machine import in_bytes
from megatron.report.catalogue import formula
from megatron.strict_yaml import on_one_line
from megatron.sweeps.cost import DEVICES, UTILISATION, evaluation_flops, named_device, training_cost
from megatron.training.batches import likely_rows, windows_per_step
from megatron.training.fits import memory_to_train

WIDTH = 100
INDENT = " " * 6
HOUR = 3600  # seconds


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("words", nargs="+", metavar="FILE | key=value", help="YAML files in order, then settings")
    add_conf_dir(parser)
    add("--given", action="store_true", help="show only keys that a source sets")
    add("--brief", action="store_true", help="show no key, only the size of the run")
    add("--gpu", metavar="NAME", help=f"one of {', '.join(DEVICES)}; default: all")
    add("--mfu", type=float, default=UTILISATION, metavar="SHARE", help="default: %(default)s")
    words = sys.argv[1:] if argv is None else list(argv)
    options = parser.parse_intermixed_args(settings_first(words))
    if not 0 < options.mfu <= 1:
        raise UserError(f"--mfu: {options.mfu:g} is not a share - give more than 0 and at most 1")
    files, overrides = split_words(options.words, options.conf_dir)
    config = load(files, overrides)
    shared = config.parallel.context_parallel_size
    groups = (config.launch.num_gpus or 1) * (config.launch.num_nodes or 1) // shared or 1
    if config.training.train_batch_size:
        groups = config.training.train_batch_size // windows_per_step(config)
    devices = groups * shared

    lines = [] if options.brief else [*key_lines(config, only_given=options.given)]
    vocab = likely_rows(config)
    counted = parameters(config, vocab)
    memory = memory_to_train(config, counted.whole, devices)
    evaluated = evaluation_flops({}, config, vocab)
    steps = config.training.train_iters * groups
    tokens, flops = training_cost(config, vocab, steps)
    lines += [
        f"this run (hash {config.hash}, encoding {config.label})",
        f"  parameters          {counted.whole:,}",
        f"    in the encoding   {counted.positions:,}",
        f"  vocabulary          {vocab:,} rows, by the data, or GPT-2's if there are none",
        f"  tokens              {tokens:,}",
        f"  FLOP of training    {flops:.3g}",
        f"  FLOP to evaluate    {evaluated:.3g}, eval_tokens at every length",
        f"  memory to train     at least {in_bytes(memory)} on each of {devices} device(s)",
        "",
        f"GPU hours to train at {options.mfu:.0%} (--mfu) of the speed below",
    ]
    for gpu in [options.gpu] if options.gpu else DEVICES:
        device = named_device(gpu, config.precision.dtype, option="--gpu")
        speed = device.flops_per_second
        hours = flops / (speed * options.mfu) / HOUR
        each = _short(hours / devices)
        basis = f"{speed / 1e12:.4g} TFLOP/s, {device.basis}"
        lines.append(f"  {gpu:<9} {_short(hours)} ({each} on {devices}); {basis}")
    print(visible("\n".join(lines)))
    return 0


def key_lines(config: Config, *, only_given: bool) -> Iterator[str]:
    """Every key, in documented order; only_given: only those that a source sets."""
    section = ""
    for key in all_keys():
        name = key.name
        if only_given and name not in config.origins:
            continue
        if key.section != section:
            section = key.section
            about = " ".join((SECTIONS[section].__doc__ or "").split())
            yield from textwrap.wrap(f"{section}: {about}", WIDTH, subsequent_indent="  ")
        meaning = description(key)
        if name == "pos_emb" and not config.position.pos_emb_layers:
            meaning += f" Here: {formula(config.position.pos_emb)}"
        value = plain(config[name])
        text = "unset" if value is None else on_one_line(value)
        default = f"default, follows {key.follows}" if key.follows else "default"
        yield f"  {name}: {text}    [{config.origins.get(name, default)}]"
        yield from textwrap.wrap(meaning, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    if config.notes:
        yield "notes: what was converted, dropped, or has no effect"
    for note in config.notes:
        yield from textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent=INDENT)
    yield ""


def _short(hours: float) -> str:
    return f"{hours * 60:.2g} minutes" if hours < 0.1 else f"{hours:.3g} hours"


if __name__ == "__main__":
    sys.exit(main())
