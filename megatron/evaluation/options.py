"""The options of evaluate.py and the values that they may have."""

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, Self

import torch

from megatron import strict_json
from megatron.cli_errors import CommandParser
from megatron.errors import UserError
from megatron.evaluation.methods import FACTORS, METHODS, fault_of_name, shown
from megatron.evaluation.protocols import PROTOCOLS, KeyRule, Request
from megatron.files import expanded, read_small
from megatron.positions import fingerprint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOST = 10**12
LONGEST_FACTORS = 10**6  # bytes of a file of factors
MOST_KEPT = 2**20  # losses in a row
TOKENS = (1, 2**24)  # beyond, positions are not exact in float32
VARIED = ("window", "logn_scale", "paper_precision", "sinks", "clip_distance", "method")
"""Settings of attention of which an evaluation may try several values on the same weights."""
READ_BY = {
    "windows": ("paper", "task"),
    "start": ("paper",),
    "tail": ("tail",),
    "stride": ("sliding",),
    **dict.fromkeys(("judge", "alpha", "beta", "trunc_len", "sliding_window"), ("longppl",)),
}
"""The protocols that read an option."""


@dataclass(frozen=True)
class Asked:
    """What is measured beside the configuration: the options of `add_checkpoint`.

    checkpoint: folder of a run or of one checkpoint; None for load or save of the configuration
    step: which checkpoint of the run; None for the latest
    lengths: tokens of a window; empty for eval_lengths of the configuration
    output: file of JSON lines; None for a name in the run's folder that says what is measured
    """

    checkpoint: str | None = None
    step: int | None = None
    lengths: Sequence[int] = ()
    output: Path | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Self:
        """The words of a command line."""
        return cls(**{one.name: getattr(arguments, one.name) for one in fields(cls)})


@dataclass(frozen=True)
class Options(Asked):
    """The wishes of one evaluation beside its configuration.

    protocol: names in PROTOCOLS; empty for equal_tokens
    window, logn_scale, …, method: values of settings of attention, each on the same weights; empty
        for that of the configuration
    keep_losses: scored targets, at most, whose own losses a row has too
    two_by_two: the variants that tell untrained distances from untrained numbers of keys, in place
        of values of these settings
    dtype: of the model's matrices, a name in DTYPES
    windows, start, tail, stride: of single protocols, see protocols.Request
    judge: folder of the checkpoint that says which tokens are key tokens; None: the model itself,
        as it was trained
    alpha, beta, trunc_len, sliding_window: see protocols.KeyRule; None for a part of the training
        length
    """

    protocol: Sequence[str] = ()
    window: Sequence[Any] = ()
    logn_scale: Sequence[bool] = ()
    paper_precision: Sequence[bool] = ()
    sinks: Sequence[int | None] = ()
    clip_distance: Sequence[int | None] = ()
    method: Sequence[str | None] = ()
    two_by_two: bool = False
    keep_losses: int = 0
    dtype: str = "fp32"
    windows: int = Request.windows
    start: int = Request.start
    tail: int = Request.tail
    stride: int | None = Request.stride
    judge: str | None = None
    alpha: float = 2.0
    beta: float = -2.0
    trunc_len: int | None = None
    sliding_window: int | None = None

    def check_read_by(self, protocols: Collection[str]) -> None:
        """Raises UserError for an option that is given and that none of these protocols reads."""
        for name, readers in READ_BY.items():
            if getattr(self, name) != getattr(Options, name) and not set(readers) & set(protocols):
                option = "--" + name.replace("_", "-")
                raise UserError(
                    f"{option}: is read by --protocol {' or '.join(readers)} alone, and measured"
                    f" is {', '.join(protocols)} - name that protocol too, or leave {option} out"
                )

    def key_rule(self, train_length: int) -> KeyRule:
        """The rule of protocol longppl; in the paper the short context has 4096 tokens or more."""
        trunc_len = self.trunc_len or max(1, train_length // 2)
        sliding_window = self.sliding_window or max(1, trunc_len // 4)
        return KeyRule(self.alpha, self.beta, trunc_len, sliding_window)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The words of evaluate.py beside files, settings and tasks."""
    add_checkpoint(parser)
    add = parser.add_argument
    protocol = (
        "default: equal_tokens, or with train_iters: 0 and no --lengths as KERPLE and MEP measure;"
        " docs/evaluation.md explains each"
    )
    add("--protocol", nargs="+", default=(), choices=tuple(PROTOCOLS), help=protocol)
    add_whole_number(
        parser, "--windows", Options.windows, "paper and task: windows per length", (1, 10**6)
    )
    add_whole_number(parser, "--start", Options.start, "paper: first window", (0, MOST))
    add_whole_number(parser, "--tail", Options.tail, "tail: scored tokens of a window", TOKENS)
    stride = "sliding: tokens that windows move by; default: half of each"
    add("--stride", type=number(*TOKENS), metavar="N", help=stride)
    judge = (
        "longppl: checkpoint that says which tokens are key; default: the model itself, as it was"
        " trained"
    )
    add("--judge", type="path", metavar="DIR", help=judge)
    alpha = "longppl: nats that far context gains a key token; default: 2"
    add("--alpha", type=real, default=Options.alpha, metavar="A", help=alpha)
    beta = "longppl: a key token has a loss below -B; default: -2"
    add("--beta", type=real, default=Options.beta, metavar="B", help=beta)
    trunc_len = "longppl: tokens of a short context; default: half of seq_length"
    add("--trunc-len", type=number(*TOKENS), metavar="N", help=trunc_len)
    sliding = "longppl: tokens that short contexts move by; default: a quarter of --trunc-len"
    add("--sliding-window", type=number(*TOKENS), metavar="N", help=sliding)
    add_attention(parser, nargs="+", action="extend", default=[])
    keep = "losses of the first N targets in each row: which gain by context; default: none"
    add("--keep-losses", type=number(0, MOST_KEPT), default=0, metavar="N", help=keep)
    two_by_two = (
        "with distances clipped or not, and numbers of keys scaled or not: which of the two breaks"
        " long texts (docs/longer_texts.md)"
    )
    add("--two-by-two", action="store_true", help=two_by_two)
    dtype = "of the model; tables stay float32"
    add("--dtype", choices=tuple(DTYPES), default=Options.dtype, help=dtype)


def add_attention(parser: argparse.ArgumentParser, **how: Any) -> None:
    """The settings of attention in VARIED. how: nargs, action and default of each option"""
    window = "the key window: N, train_length or none"
    sinks = "first tokens that stay visible beside --window (StreamingLLM): N or none"
    clip = "tables by distance keep their value from D on: D or none"
    method = f"for longer texts: none or {', '.join(METHODS)} (docs/longer_texts.md)"
    tokens = number(*TOKENS, or_one_of=("none",))
    options = (
        ("--window", number(*TOKENS, or_one_of=("none", "train_length")), "W", window),
        ("--logn-scale", switch, "on|off", "the key logn_scale"),
        ("--paper-precision", switch, "on|off", "the key paper_precision"),
        ("--sinks", tokens, "N", sinks),
        ("--clip-distance", tokens, "D", clip),
        ("--method", method_or_none, "M", method),
    )
    for name, kind, metavar, words in options:
        parser.add_argument(name, type=kind, metavar=metavar, help=words, **how)


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Which checkpoint, at which lengths, and where the rows go."""
    add = parser.add_argument
    folder = "folder of a run or of one checkpoint; default: load, else save"
    add("--checkpoint", type="path", metavar="DIR", help=folder)
    step = "which checkpoint of the run; default: the latest"
    add("--step", type=number(0, MOST), metavar="N", help=step)
    lengths = "context lengths; default: eval_lengths"
    kind = number(*TOKENS)
    add("--lengths", type=kind, nargs="+", default=(), metavar="L", help=lengths)
    add("-o", "--output", type=Path, metavar="FILE", help="file for the rows, JSON lines")


def add_whole_number(
    parser: argparse.ArgumentParser,
    name: str,
    default: int,
    words: str,
    bounds: tuple[int, int],
) -> None:
    """An option for a whole number; its help names the default."""
    text = f"{words}; default: {default}"
    parser.add_argument(name, type=number(*bounds), default=default, metavar="N", help=text)


class _Words(CommandParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


def options_of_words(words: Sequence[str]) -> Options:
    """The options of a command line; raises UserError for those that evaluate.py would refuse."""
    parser = _Words(add_help=False)
    add_options(parser)
    return Options.of(parser.parse_args(words))


# --- Kinds of values, for argparse ---


def number(least: int, most: int, or_one_of: Sequence[str] = ()) -> Callable[[str], Any]:
    """A whole number within bounds, or one of some words; `none` becomes None."""

    def parsed(text: str) -> Any:
        if text in or_one_of:
            return None if text == "none" else text
        with contextlib.suppress(ValueError):
            value = int(text)
            if least <= value <= most:
                return value
        shown = ascii(text)[1:-1][:40]
        words = "".join(f", or {word}" for word in or_one_of)
        raise argparse.ArgumentTypeError(
            f"{shown} is not a whole number from {least} to {most:,}{words}"
        )

    return parsed


def real(text: str) -> float:
    """A finite number."""
    with contextlib.suppress(ValueError):
        value = float(text)
        if math.isfinite(value):
            return value
    raise argparse.ArgumentTypeError(f"{ascii(text)[1:-1][:40]} is not a number")


def switch(text: str) -> bool:
    """On or off."""
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{ascii(text)[1:-1][:40]}: give on or off")
    return text == "on"


def method_or_none(text: str) -> str | None:
    """A method for longer texts, or none. A file of factors is read, and its contents named."""
    if text == "none":
        return None
    fault = fault_of_name(text)
    if fault is not None:
        raise argparse.ArgumentTypeError(fault.removeprefix("--method "))
    if "factors" not in METHODS[text.partition(",")[0]].options:
        return text
    options, _, file = text.partition(",factors=")
    try:
        found = strict_json.parse(read_small(Path(expanded(file)), LONGEST_FACTORS))
        for key in ("rope_scaling", "rope_parameters"):  # where a config.json has them
            found = found.get(key) or found
        factors = {key: found[key] for key in ("long_factor", "short_factor")}
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        raise argparse.ArgumentTypeError(
            f"{shown(text)}: give longrope,factor=N,factors=FILE; FILE is JSON with the lists"
            " long_factor and short_factor, one number for each feature pair, such as config.json"
            " of a model with them"
        ) from None
    name = fingerprint(json.dumps(factors))[:12]
    FACTORS[name] = factors
    return f"{options},factors={name}"
