"""Measure retrieval, the receptive field, and attention by distance.

python tools/probe.py --checkpoint runs/mep [--step 2000] [--lengths 512 1024] [--probes copy]
python tools/probe.py --checkpoint runs/mep eval_part=test --output probes.jsonl
python tools/probe.py --checkpoint runs/mep --probes ruler --lengths 512 1024 2048 4096 8192 16384
python tools/probe.py --checkpoint runs/rotary --probes passkey --method none yarn,factor=4
"""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from megatron.config import Config
from megatron.entry import run
from megatron.evaluation.options import add_checkpoint, number
from megatron.evaluation.probe_checkpoint import ProbeOptions, probe
from megatron.results.probes import GROUPS, PROBES, RULER, ProbeRow
from megatron.results.row import ATTENTION_INPUTS, plain


def add_options(parser: argparse.ArgumentParser) -> None:
    """The words of probe.py beside files and settings; their defaults are those of ProbeOptions."""
    add_checkpoint(parser)
    parser.add_argument(
        "--probes",
        nargs="+",
        choices=(*PROBES, *GROUPS),
        default=ProbeOptions.probes,
        metavar="NAME",
        help=f"{', '.join(PROBES)}; ruler: {', '.join(RULER)}; default: all but these",
    )
    for name, words, bounds in (
        ("depths", "places in the context", (1, 1000)),
        ("trials", "contexts per length and depth, number of hops, …", (1, 10**6)),
        ("probe_seed", "of the questions", (0, 2**63 - 1)),
    ):
        default = getattr(ProbeOptions, name)
        text = f"{words}; default: {default}"
        kind = number(*bounds)
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=text)


def main(config: Config | None, arguments: argparse.Namespace) -> None:
    """Ask the probes, and print each answer."""
    files = probe(config, ProbeOptions.of(arguments), report=show)
    print("\naccuracies of 0 are expected of small models and short trainings")
    print(f"written to {', '.join(map(str, files))}")


def show(rows: Sequence[ProbeRow]) -> None:
    """Print one line about a probe at a length: accuracies by place, a number, or a reason."""
    first = rows[0]
    if "reach" in first:
        summary = f"reach {first['reach']}"
    elif "mean_entropy" in first:
        summary = f"mean_entropy {first['mean_entropy']}"
    elif first.get("reason"):
        summary = str(first.get("reason"))
    else:
        summary = " ".join(f"{row.get('accuracy'):.3f}" for row in rows)
        if first.get("guess") is not None:
            guesses = " ".join(f"{row.get('guess'):.3f}" for row in rows)
            summary = f"{summary} (guess rates {guesses})"
    settings = [f", {key} {plain(value)}" for key in ATTENTION_INPUTS if (value := first.get(key))]
    place = f"{first['probe']} at {first['length']}{''.join(settings)}"
    print(f"{place}: {summary}   ({first.get('seconds', 0.0):.1f} s)", flush=True)


def command() -> NoReturn:
    run(main, purpose="evaluate", options=add_options, config_needed=False)


if __name__ == "__main__":
    command()
