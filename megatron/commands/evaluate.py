"""Perplexity of a checkpoint at several lengths, in one process, on the same text; several GPUs share the windows.

python deepy.py evaluate.py configs/mep.yml [--lengths 512 1024] [--output results.jsonl]
python evaluate.py --checkpoint runs/mep [--step 2000]
python evaluate.py --checkpoint runs/mep eval_tokens=65536 eval_part=test
python evaluate.py --checkpoint runs/mep --protocol equal_tokens tail position --window none train_length
python evaluate.py --checkpoint runs/mine pos_emb_file=my_encoding.py

Killed and started again it continues: what was measured by the same code is not measured again.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron.config import Config
from megatron.entry import run
from megatron.evaluation.protocols import PROTOCOLS
from megatron.evaluation.run import DTYPES, evaluate
from megatron.parallel.grid import here
from megatron.report.figures.curves import plot_by_position, plot_perplexity
from megatron.results.row import Row
from megatron.results.table import by_length, table


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="folder of a run or of one checkpoint; default: load, else save",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="which checkpoint of the run; default: the latest"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", metavar="L", help="context lengths; default: eval_lengths"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="JSON lines; the plot goes beside it as .png"
    )
    parser.add_argument(
        "--protocol",
        nargs="+",
        choices=tuple(PROTOCOLS),
        default=["equal_tokens"],
        help="default: equal_tokens; docs/evaluation.md says what each answers",
    )
    parser.add_argument(
        "--windows", type=int, default=320, metavar="N", help="paper: windows per length (320)"
    )
    parser.add_argument("--start", type=int, default=0, metavar="N", help="paper: first window (0)")
    parser.add_argument(
        "--tail", type=int, default=256, metavar="N", help="tail: scored tokens of a window (256)"
    )
    parser.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="sliding: tokens that windows move by (half of each)",
    )
    parser.add_argument(
        "--window",
        nargs="+",
        metavar="W",
        help="key window, each value on the same weights: N, train_length or none",
    )
    parser.add_argument(
        "--logn-scale", nargs="+", choices=("off", "on"), help="key logn_scale, likewise"
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="fp32", help="of the model; tables stay float32"
    )


def main(config: Config | None, options: argparse.Namespace) -> None:
    rows, lengths = evaluate(config, options)
    if here().first:
        show(rows, lengths)


def show(rows: dict[Path, list[Row]], lengths: Sequence[int]) -> None:
    """A table for each protocol on the terminal, and for each file and protocol a plot beside the file."""
    shown = {output: by_length(found, lengths) for output, found in rows.items()}
    together = [row for found in shown.values() for row in found]
    for protocol in dict.fromkeys(row["protocol"] for row in together):
        print(table([row for row in together if row["protocol"] == protocol]), end="\n\n")
    for output, found in shown.items():
        protocols = list(dict.fromkeys(row["protocol"] for row in found))
        for protocol in protocols:
            picture = output.with_suffix(".png" if len(protocols) == 1 else f".{protocol}.png")
            own = [row for row in found if row["protocol"] == protocol]
            name = own[0]["pos_emb"]
            passes = [
                row for row in own if row.get("position_losses") and row["length"] == max(lengths)
            ]
            if passes:
                plot_by_position(passes, picture, title=f"Perplexity of {name} by position")
            else:
                plot_perplexity(own, picture, title=f"Perplexity of {name} at other lengths")
            print(f"written to {output} and {picture}")


def command() -> NoReturn:
    run(main, purpose="evaluate", options=add_options, config_needed=False)
