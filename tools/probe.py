"""What a perplexity does not show: retrieval, the receptive field, and attention by distance.

python tools/probe.py --checkpoint runs/mep [--step 2000] [--lengths 512 1024] [--probes copy]
python tools/probe.py --checkpoint runs/mep eval_part=test --output probes.jsonl
python tools/probe.py --checkpoint runs/mep --probes ruler --lengths 512 1024 2048 4096 8192 16384
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.config import Config
from megatron.entry import add_number, run
from megatron.evaluation.probes.run import Answer, Options, probe
from megatron.report.curves import write
from megatron.report.probe_figure import draw_probes
from megatron.results.probes import GROUPS, PROBES, RULER


def add_options(parser: argparse.ArgumentParser) -> None:
    """The words of probe.py beside files and settings; their defaults are those of Options."""
    add = parser.add_argument
    add("--checkpoint", metavar="DIR", help="folder of a run or of one checkpoint")
    add("--step", type=int, metavar="N", help="which checkpoint of the run; default: the latest")
    lengths = "context lengths; default: eval_lengths"
    add("--lengths", type=int, nargs="+", metavar="L", help=lengths)
    add(
        "--probes",
        nargs="+",
        choices=(*PROBES, *GROUPS),
        default=Options.probes,
        metavar="NAME",
        help=f"{', '.join(PROBES)}; ruler: {', '.join(RULER)}; default: all but these",
    )
    add_number(parser, "--depths", Options.depths, "places in the context")
    add_number(
        parser, "--trials", Options.trials, "contexts per length and depth, number of hops, …"
    )
    add_number(parser, "--probe_seed", Options.seed, "of the questions")
    output = "JSON lines; the picture goes beside it as .png"
    add("-o", "--output", type=Path, metavar="FILE", help=output)


def main(config: Config | None, arguments: argparse.Namespace) -> None:
    """Ask the probes, print each answer, and draw all of them."""
    options = Options(
        checkpoint=arguments.checkpoint,
        step=arguments.step,
        lengths=arguments.lengths or (),
        output=arguments.output,
        probes=arguments.probes,
        depths=arguments.depths,
        trials=arguments.trials,
        seed=arguments.probe_seed,
    )
    probed = probe(config, options, report=show)
    last = probed.rows[-1]
    title = f"{last['pos_emb']}, trained at {last.get('train_length')}"
    picture = probed.output.with_suffix(".png")
    write(draw_probes(probed.rows, title), picture)
    print(f"\nwritten to {probed.output} and {picture}")


def show(answer: Answer) -> None:
    """Print one line about an answer."""
    print(
        f"{answer.probe} at {answer.length}: {summary(answer.rows)}   ({answer.seconds:.1f} s)",
        flush=True,
    )


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Accuracies by place, the single numbers of another probe, or the reason for none."""
    reason = rows[0].get("reason")
    if reason:
        return reason
    if "accuracy" not in rows[0]:
        (row,) = rows
        return str({key: value for key, value in row.items() if isinstance(value, int | float)})
    accuracies = " ".join(_shown(row["accuracy"]) for row in rows)
    if all(row["guess"] is None for row in rows):
        return accuracies
    guesses = " ".join(_shown(row["guess"]) for row in rows)
    return f"{accuracies} (guess rates {guesses})"


def _shown(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def command() -> NoReturn:
    run(main, purpose="evaluate", options=add_options, config_needed=False)


if __name__ == "__main__":
    command()
