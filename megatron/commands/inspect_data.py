"""What is in a token file: its card, lengths, tokens, samples and repeated documents.

python tools/inspect_data.py data/stdlib/stdlib_text_document -o lengths.png
python tools/inspect_data.py PREFIX --config configs/125M.yml configs/data/stdlib.yml --samples 3
python tools/inspect_data.py PREFIX --vocab-file vocab.json --merge-file merges.txt --json out.json

Nothing is written but the files that -o and --json name. A large corpus is sampled (--most-tokens),
and the text says how much was read.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megatron.cli_errors import guarded
from megatron.commands.options.tokenizer import (
    add_tokenizer_options,
    given_tokenizer,
    tokenizer_of,
)
from megatron.config import Config, load
from megatron.data.inspect.inspection import Inspection, Options, inspected
from megatron.data.inspect.words import words
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.data.tokens import LONGEST, TokenFile
from megatron.errors import UserError
from megatron.files import write_text
from megatron.results.files import PICTURES
from megatron.splits import PARTS, canonical_split

HIGHEST_SEED = 2**32 - 1  # of numpy's generator, which shuffles documents and windows


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    _check_numbers(given)
    _check_outputs(given)
    config = load(given.config) if given.config else None
    tokens = TokenFile.open(given.prefix)
    tokenizer = tokenizer_of(tokens, [given_tokenizer(given) or _of_config(config)])
    found = inspected(tokens, tokenizer, _options(given, config))
    print(words(found, tokenizer))
    if given.output:
        _draw(found, given.output)
    if given.json:
        write_text(given.json, json.dumps(found.plain(), indent=1) + "\n")
    return 0


def _draw(found: Inspection, path: Path) -> None:
    from megatron.report.figures.lengths import plot_lengths  # here: matplotlib takes a second

    name = found.tokens.meta.get("corpus") or found.tokens.prefix.name
    documents, tokens = found.lengths.documents, found.lengths.tokens
    title = f"{name}: {documents:,} documents, {tokens:,} tokens"
    plot_lengths(found.lengths, path, title=title)
    print(f"\npicture: {path}")


def _check_numbers(given: argparse.Namespace) -> None:
    """Raise UserError for numbers that mean nothing."""
    lowest = {"seq_length": 1, "samples": 0, "most_tokens": 0, "seed": 0}
    highest = {"seq_length": LONGEST, "seed": HIGHEST_SEED}
    for name, least in lowest.items():
        value = getattr(given, name)
        if value is None:
            continue
        spelling = name.replace("_", "-")
        if value < least:
            raise UserError(f"--{spelling}: {value} is too small - use {least} or more")
        if value > highest.get(name, value):
            raise UserError(f"--{spelling}: {value} is too large - use {highest[name]} or less")
    wrong = [length for length in given.lengths if not 1 <= length <= LONGEST]
    if wrong:
        raise UserError(f"--lengths: {wrong[0]} is no length of a window - use 1 to {LONGEST}")
    if not 0 < given.similar <= 1:
        raise UserError(f"--similar: {given.similar} is no share - use a number such as 0.7")


def _check_outputs(given: argparse.Namespace) -> None:
    """Raise UserError for a file that could not be written, before anything is read."""
    if given.output and given.output.suffix.lower() not in PICTURES:
        raise UserError(
            f"-o: {given.output} is no picture - name it .png, .svg or .pdf (--json for numbers)"
        )
    for path in (given.output, given.json):
        if path and path.is_dir():
            raise UserError(f"{path}: is a folder - name a file in it")


def _of_config(config: Config | None) -> Tokenizer | None:
    """The tokenizer that a configuration names; None for none."""
    if config is None or not config.data.vocab_file:
        return None
    data = config.data
    with config.naming_places("vocab_file", "merge_file"):
        return build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)


def _options(given: argparse.Namespace, config: Config | None) -> Options:
    """What is looked at: the options, then the configuration, then the defaults."""
    options = Options()
    split, length, seed = options.split, options.seq_length, options.seed
    windows = 1
    if config is not None:
        split, seed = config.data.split, config.training.seed
        length, windows = _of_part(config, given.part)
    if given.split is not None:
        split = _split(given.split)
    return Options(
        lengths=given.lengths,
        most_tokens=given.most_tokens,
        split=split,
        part=given.part,
        seq_length=length if given.seq_length is None else given.seq_length,
        seed=seed if given.seed is None else given.seed,
        windows=windows,
        samples=given.samples,
        valid_data=given.valid_data,
        look_for=given.duplicates,
        similar=given.similar,
    )


def _of_part(config: Config, part: str) -> tuple[int, int]:
    """Tokens of a window and the windows of a run on one device."""
    training = config.training
    micro_batch = training.train_micro_batch_size_per_gpu
    if part != "train":
        return config.data.seq_length_val, training.eval_iters * micro_batch
    of_step = training.train_batch_size or micro_batch * training.gradient_accumulation_steps
    return config.model.seq_length, training.train_iters * of_step


def _split(text: str) -> str:
    try:
        return canonical_split(text)
    except ValueError as fault:
        raise UserError(f"--split: {fault}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    default = Options()
    add("prefix", metavar="PREFIX", help="token files, without .bin and .idx")
    add("-o", "--output", type=Path, metavar="PICTURE", help="lengths as .png, .svg or .pdf")
    add("--json", type=Path, metavar="FILE", help="everything as JSON")
    add(
        "--lengths",
        type=int,
        nargs="+",
        metavar="L",
        default=list(default.lengths),
        help="lengths of an evaluation (default: 512 to 16384)",
    )
    of_run = "split, length, seed, number of samples and tokenizer of a run"
    add("--config", nargs="+", metavar="YAML", help=of_run)
    add_tokenizer_options(parser)
    add("--split", metavar="S", help=f"shares of the parts (default: {default.split})")
    add("--part", choices=PARTS, default=default.part, help="whose samples (default: train)")
    add("--seq-length", type=int, metavar="L", help=f"of a sample (default: {default.seq_length})")
    add("--seed", type=int, metavar="N", help=f"of the run (default: {default.seed})")
    add(
        "--samples",
        type=int,
        metavar="N",
        default=default.samples,
        help=f"how many are shown (default: {default.samples})",
    )
    add(
        "--duplicates",
        choices=("near", "exact", "none"),
        default=default.look_for,
        help="validation documents that are in the training part too (default: near)",
    )
    add(
        "--similar",
        type=float,
        metavar="S",
        default=default.similar,
        help="near: from this share of common passages on (default: %(default)s)",
    )
    add(
        "--valid-data",
        metavar="PREFIX",
        help="look for the documents of this file instead of those of the valid part",
    )
    add(
        "--most-tokens",
        type=int,
        metavar="N",
        default=default.most_tokens,
        help="read at most so many for tokens and duplicates; 0: all (default: %(default)s)",
    )
    return parser
