"""Show what a configuration means, and the memory and time that its run takes.

python tools/explain_config.py configs/125M.yml configs/pos_emb/kerple_log.yml seed=1235
python tools/explain_config.py configs/125M.yml --brief --gpu h100 --mfu 0.4
python tools/explain_config.py train.yml exp_configs/ali_tanh_gau_all003_arxiv_1235.yml -o mine.yml

It lists every key with its value, source and meaning, then the size of the run: parameters, tokens,
floating point operations, memory and GPU hours. The hours depend on --mfu, the fraction of the data
sheet's speed that the run reaches; the default is 0.35. A run's log shows `mfu`, which is higher
because it counts masked attention too. Nothing is trained.

-o converts published files (KERPLE, MEP, GPT-NeoX) to one file in today's spelling. If the pos-emb
of one of MEP's files hides its mixture, we suggest kernels from the file's name.
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from megatron.cli_errors import command_parser, guarded
from megatron.config import Config, load
from megatron.config.document import description, shown
from megatron.config.legacy import SPELLINGS
from megatron.config.schema import all_keys
from megatron.config.yaml_files import find_file, read_file
from megatron.entry import add_conf_dir, settings_first, split_words
from megatron.errors import UserError, visible
from megatron.files import in_bytes, write_output
from megatron.model.size import parameters
from megatron.positions import ALIASES, REGISTRY
from megatron.strict_yaml import on_one_line
from megatron.sweeps.cost import (
    DEVICES,
    UTILISATION,
    evaluation_flops,
    hours,
    training_cost,
)
from megatron.training.batches import likely_rows, windows_per_step
from megatron.training.fits import memory_to_train

WIDTH = 100
INDENT = " " * 6
EXPERIMENT = re.compile(r"(.+)_(openwebtext2|github|arxiv|pg19)_\d+")
PREFIX = re.compile(r"(len1024_)?(medium_)?(snope_)?")
COUNT = re.compile(r"all00(\d)")  # this many kernels with equal weights
HIDES_MIXTURE = "snope"  # the beginning of such spellings of the MEP fork


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add(
        "words",
        nargs="+",
        metavar="FILE | key=value",
        help="YAML files in order, then key=value settings",
    )
    add_conf_dir(parser)
    add("--given", action="store_true", help="show only keys that are set")
    add("--brief", action="store_true", help="show only the size of the run")
    add("--gpu", choices=[*DEVICES], help="default: all")
    add("--mfu", type=float, default=UTILISATION, metavar="SHARE", help="default: %(default)s")
    add(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the keys that are set to a new file, in today's spelling",
    )
    words = sys.argv[1:] if argv is None else list(argv)
    options = parser.parse_intermixed_args(settings_first(words))
    if not 0 < options.mfu <= 1:
        raise UserError(
            f"--mfu: {options.mfu:g} is not a fraction - give a number above 0 and at most 1"
        )
    files, overrides = split_words(options.words, options.conf_dir)
    config = load(files, overrides)
    if options.output:
        text = in_todays_spelling(config, files)
        write_output(options.output, text.encode())
        print(visible(f"{options.output}:\n{text}"))
        return 0
    lines = [] if options.brief else [*key_lines(config, only_given=options.given)]
    print(visible("\n".join([*lines, *size_lines(config, options.gpu, options.mfu)])))
    return 0


def key_lines(config: Config, *, only_given: bool) -> Iterator[str]:
    """Every key, in documented order; only_given: only keys that are set."""
    for key in all_keys():
        name = key.name
        if only_given and name not in config.origins:
            continue
        meaning = description(key)
        if name == "pos_emb" and not config.position.pos_emb_layers:
            formula, *_ = inspect.cleandoc(REGISTRY[config[name]].__doc__ or "").split("\n")
            meaning = f"{meaning} Here: {formula}"
        default = f"default, follows {key.follows}" if key.follows else "default"
        yield f"  {name}: {shown(config[name])}    [{config.origins.get(name, default)}]"
        yield from textwrap.wrap(meaning, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    if config.notes:
        yield "notes: keys that were converted or dropped, or that have no effect"
    for note in config.notes:
        yield from textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent=INDENT)
    yield ""


def size_lines(config: Config, gpu: str | None, mfu: float) -> Iterator[str]:
    """The size of the run, and its hours on a GPU, or on each GPU that we know."""
    shared = config.parallel.context_parallel_size
    groups = (config.launch.num_gpus or 1) * (config.launch.num_nodes or 1) // shared or 1
    if config.training.train_batch_size:
        groups = config.training.train_batch_size // windows_per_step(config)
    devices = groups * shared
    vocab = likely_rows(config)
    counted = parameters(config, vocab)
    memory = memory_to_train(config, counted.whole, devices)
    evaluated = evaluation_flops({}, config, vocab)
    tokens, flops = training_cost(config, vocab, config.training.train_iters * groups)
    yield f"this run (hash {config.hash}, encoding {config.label})"
    yield f"  parameters          {counted.whole:,}"
    yield f"    in the encoding   {counted.positions:,}"
    yield f"  vocabulary          {vocab:,} rows, from the data (GPT-2's if there is no data)"
    yield f"  tokens              {tokens:,}"
    yield f"  FLOP of training    {flops:.3g}"
    yield f"  FLOP to evaluate    {evaluated:.3g}, for eval_tokens at every length"
    yield f"  memory to train     at least {in_bytes(memory)} on each of {devices} device(s)"
    trained = config.precision.products(config.precision.dtype)
    measured = config.precision.products("fp32")
    yield f"\nGPU hours to train in {trained} and to evaluate in {measured},"
    yield f"at {mfu:.0%} (--mfu) of the data sheet's speed"
    for name in [gpu] if gpu else DEVICES:
        alone = hours({trained: flops}, name, mfu)
        to_train = f"{_short(alone)} ({_short(alone / devices)} on {devices}) to train"
        to_evaluate = _short(hours({measured: evaluated}, name, mfu))
        yield f"  {name:<9} {to_train}, {to_evaluate} to evaluate"


def _short(time: float) -> str:
    return f"{time * 60:.2g} minutes" if time < 0.1 else f"{time:.3g} hours"


# --- Today's spelling of published files ---


def in_todays_spelling(config: Config, files: Sequence[str | Path]) -> str:
    """The keys that are set, with comments about what was changed."""
    notes = list(config.notes)
    keys = {name.partition(".")[0] for name in config.origins}
    settings = {key: value for key, value in config.flat().items() if key in keys}
    for path in map(find_file, files):
        published = str(read_file(path).get("pos_emb"))
        if not published.startswith(HIDES_MIXTURE) or published not in ALIASES:
            continue
        mixture = mixture_named(path.stem, published)
        if isinstance(mixture, str):
            notes.append(
                f"pos_emb: the file's name does not say which kernels were used: {mixture}"
            )
        else:
            notes.append("pos_emb: these kernels were derived from the file's name; check them")
            settings |= {"pos_emb": "mep", "pos_emb_args": mixture}
    lines = [f"# {note}" for note in notes]
    lines += [f"{key}: {on_one_line(value)}" for key, value in settings.items()]
    return "\n".join(lines) + "\n"


def mixture_named(stem: str, pos_emb: str) -> dict[str, Any] | str:
    """The options of `mep` that follow from a file's name (without .yml), or why there are none.

    400 of MEP's files share one pos-emb and 176 another: the authors selected kernels by commenting
    source lines in and out, and noted them in the file's name. docs/published_files.md lists the
    words.
    """
    match = EXPERIMENT.fullmatch(stem)
    name = match[1] if match else stem
    if name.startswith(pos_emb):
        return "it repeats pos-emb and names no kernels"
    name = PREFIX.sub("", name, count=1).replace("gaussian_def05", "gaussian05")
    words = SPELLINGS["mixtures"]
    with_weights = words["with_weights"].get(name.removesuffix("_fp32"))
    if with_weights:
        return dict(with_weights)
    kernels = []
    expected = 0
    for word in filter(None, name.split("_")):
        if count := COUNT.fullmatch(word):
            expected = int(count[1])
        elif word in words["kernels"]:
            kernels.append(deepcopy(words["kernels"][word]))
        elif word not in words["silent"]:
            reasons = [why for start, why in words["unknown"].items() if word.startswith(start)]
            return [*reasons, f"its word {word!r} is unknown"][0]
    if not kernels:
        return "it names no kernels"
    if expected not in (0, len(kernels)):
        return f"it names {len(kernels)} kernels but says that there are {expected}"
    return {"kernels": kernels}


if __name__ == "__main__":
    sys.exit(main())
