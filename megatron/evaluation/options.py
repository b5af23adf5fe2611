"""The options of evaluate.py and their allowed values."""

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

import torch

from megatron.cli_errors import CommandParser
from megatron.errors import UserError
from megatron.evaluation.methods import METHODS
from megatron.protocols import MOST, MOST_TOKENS, OPTIONS, PROTOCOLS, Protocol, protocol_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOST_KEPT = 2**20  # largest number of single losses in a row
VARIED = ("window", "logn_scale", "paper_precision", "sinks", "clip_distance", "method")
"""Attention settings for which an evaluation may try several values on the same weights."""


@dataclass(frozen=True)
class Options:
    """The options of an evaluation, in addition to its configuration.

    checkpoint: folder of a run or of a checkpoint; None for load or save of the configuration
    step: which checkpoint of the run; None for the latest
    lengths: window lengths in tokens; empty for eval_lengths of the configuration
    output: file for JSON lines; None for a file in the run's folder, named after what is measured
    attention_values: values of the settings in VARIED, each tried on the same weights; the
        configuration's value for others
    dtype: of the model's matrices, a name in DTYPES
    protocol: names in PROTOCOLS; empty for equal_tokens
    protocol_options: options of single protocols, by their names in megatron.protocols.OPTIONS
    keep_losses: for at most this many scored targets, rows also have the single losses
    """

    checkpoint: str | None = None
    step: int | None = None
    lengths: Sequence[int] = ()
    output: Path | None = None
    attention_values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    dtype: str = "fp32"
    protocol: Sequence[str] = ()
    protocol_options: Mapping[str, Any] = field(default_factory=dict)
    keep_losses: int = 0

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Self:
        """The words of a command line that has these options."""
        words = vars(arguments)
        words = {
            **words,
            "attention_values": {name: words[name] for name in VARIED if words[name]},
            "protocol_options": {name: words[name] for name in OPTIONS if words[name] is not None},
        }
        return cls(**{option.name: words[option.name] for option in fields(cls)})

    def protocols(self, usual: str) -> dict[str, Protocol]:
        """The protocols by name; usual: the one to use if none is named.

        Raises UserError for an option that none of them has.
        """
        names = dict.fromkeys(self.protocol or [usual])
        for name in self.protocol_options:
            readers = OPTIONS[name].readers
            if not {*readers} & {*names}:
                option = "--" + name.replace("_", "-")
                raise UserError(
                    f"{option}: only works with --protocol {' or '.join(readers)}, but you measure"
                    f" {', '.join(names)} - add that protocol, or remove {option}"
                )
        return {name: protocol_of(name, self.protocol_options) for name in names}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of evaluate.py, except files, settings and tasks."""
    add = parser.add_argument
    add(
        "--checkpoint",
        type="path",
        metavar="DIR",
        help="folder of a run or of one checkpoint; default: load, else save",
    )
    add(
        "--step",
        type=number(0, MOST),
        metavar="N",
        help="step of the checkpoint; default: the latest",
    )
    kind = number(1, MOST_TOKENS)
    add(
        "--lengths",
        type=kind,
        nargs="+",
        default=(),
        metavar="L",
        help="context lengths in tokens; default: eval_lengths",
    )
    add("-o", "--output", type=Path, metavar="FILE", help="file for the rows (JSON lines)")
    add_attention(parser, nargs="+", action="extend", default=[])
    add(
        "--dtype",
        choices=tuple(DTYPES),
        default=Options.dtype,
        help="number format of the model; tables stay float32",
    )
    add(
        "--protocol",
        nargs="+",
        default=(),
        choices=tuple(PROTOCOLS),
        help="default: equal_tokens, or as KERPLE and MEP measure, for train_iters: 0 without"
        " --lengths; see docs/evaluation.md",
    )
    for name, option in OPTIONS.items():
        kind = number(option.least, option.most)
        add(f"--{name}", type=kind, metavar="N", help=option.help)
    add(
        "--keep-losses",
        type=number(0, MOST_KEPT),
        default=0,
        metavar="N",
        help="losses of the first N targets in each row: which gain from context; default: none",
    )


def add_attention(parser: argparse.ArgumentParser, **how: Any) -> None:
    """Add the attention settings in VARIED. how: nargs, action and default of each option"""
    tokens = number(1, MOST_TOKENS, or_one_of=("none",))
    add = partial(parser.add_argument, **how)
    window_or_word = number(1, MOST_TOKENS, or_one_of=("none", "train_length"))
    add(
        "--window",
        type=window_or_word,
        metavar="W",
        help="the key window: N tokens, train_length or none",
    )
    add("--logn-scale", type=switch, metavar="on|off", help="the key logn_scale")
    add("--paper-precision", type=switch, metavar="on|off", help="the key paper_precision")
    add(
        "--sinks",
        type=tokens,
        metavar="N",
        help="first tokens that stay visible with --window (StreamingLLM): N or none",
    )
    add(
        "--clip-distance",
        type=tokens,
        metavar="D",
        help="tables by distance are constant from distance D on: D or none",
    )
    add(
        "--method",
        type=method_or_none,
        metavar="M",
        help=f"method for longer texts: none or {', '.join(METHODS)} (docs/longer_texts.md)",
    )


class _Words(CommandParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(self.hinted(message).removeprefix("argument "))


def words_of(options: Mapping[str, Any]) -> list[str]:
    """The command line for options in YAML: {protocol: [tail, gap], window: 512}."""
    words = []
    for key, value in options.items():
        values = value if isinstance(value, list) else [value]
        words += ["--" + key.replace("_", "-"), *map(str, values)]
    return words


def options_of_words(words: Sequence[str]) -> Options:
    """The options of a command line; raises UserError for those that evaluate.py would reject."""
    parser = _Words(add_help=False)
    add_options(parser)
    return Options.of(parser.parse_args(words))


# --- Kinds of values, for argparse ---


def number(least: int, most: int, or_one_of: Sequence[str] = ()) -> Callable[[str], Any]:
    """A whole number within bounds, or one of the allowed words; `none` becomes None."""

    def parsed(text: str) -> Any:
        if text in or_one_of:
            return None if text == "none" else text
        with contextlib.suppress(ValueError):
            value = int(text)
            if least <= value <= most:
                return value
        words = "".join(f", or {word}" for word in or_one_of)
        raise argparse.ArgumentTypeError(
            f"{text:.40} is not a whole number from {least} to {most:,}{words}"
        )

    return parsed


def switch(text: str) -> bool:
    """On or off."""
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text:.40}: must be on or off")
    return text == "on"


def method_or_none(text: str) -> str | None:
    """A method for longer texts, or none."""
    return None if text == "none" else text
