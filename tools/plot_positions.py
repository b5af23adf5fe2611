"""Draw encodings, or the learned encoding of a checkpoint, as PNG and SVG.

python tools/plot_positions.py                          every encoding that is a bias by distance
python tools/plot_positions.py mep_free fire --heads 8
python tools/plot_positions.py bump --from my_encoding.py --option width=16
python tools/plot_positions.py --checkpoint runs/mep [--step 2000]
python tools/plot_positions.py alibi mep_free --figure effective_length

--figure derivative draws a kernel and its change from a distance to the next; effective_length,
in one figure for all, the number of heads whose bias has fallen below -2 (KERPLE, figure 6);
training, the encoding at six steps of a run, from the learned numbers in its metrics.jsonl.
"""

import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure

from megatron.checkpoints.manifest import imported_class
from megatron.checkpoints.read import load_for_evaluation
from megatron.cli_errors import command_parser, guarded
from megatron.config.yaml_files import read_overrides
from megatron.errors import UserError
from megatron.evaluation.options import number
from megatron.positions import REGISTRY, DistanceBias, Position, Shape, build, load_file, options_of
from megatron.report.curves import write
from megatron.report.encoding_figures import (
    NO_PICTURE,
    derivative_panels,
    draw,
    effective_panel,
    figures_of_model,
    panels,
    training_panels,
)
from megatron.results.files import PICTURES, training_log


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    names = "encodings; default: every bias by distance"
    add("names", nargs="*", metavar="NAME", help=names)
    own = "a Python file of yours that registers encodings"
    add("--from", dest="file", type="path", metavar="FILE", help=own)
    option = "an option of the encoding, as in pos_emb_args; may be repeated"
    add("--option", action="append", default=[], metavar="KEY=VALUE", help=option)
    size = number(1, 1024)
    add("--heads", type=size, default=12)
    add("--head_dim", type=size, default=64)
    train_length = "seq_length of the model"
    add("--train_length", type=number(1, 2**20), default=512, metavar="L", help=train_length)
    add("--length", type=number(2, 2**20), default=16384, metavar="L", help="distances to draw")
    checkpoints = "folders of runs or of single checkpoints"
    add("--checkpoint", type="path", nargs="+", default=[], metavar="DIR", help=checkpoints)
    figures = ["shape", "derivative", "effective_length", "training"]
    add("--figure", choices=figures, default="shape", help="default: shape")
    step = "which checkpoint of the run; default: the latest"
    add("--step", type=int, metavar="N", help=step)
    folder = "default: plots, or plots in the run's folder"
    add("-o", "--output", type=Path, metavar="DIR", help=folder)
    given = parser.parse_args(argv)
    if given.checkpoint and given.names:
        parser.error("a checkpoint knows its encoding: give names or --checkpoint, not both")
    if given.output and given.output.suffix in PICTURES:
        parser.error("--output: names the folder of the pictures - give it without a suffix")
    if given.output and len(given.checkpoint) > 1 and given.figure != "effective_length":
        raise UserError("--output: would hold several runs - give one --checkpoint, or no --output")
    if given.figure == "training" and not given.checkpoint:
        raise UserError("--figure training: is of a run - give its folder as --checkpoint")
    suffix = "" if given.figure == "shape" else f"-{given.figure}"
    panels_of = derivative_panels if given.figure == "derivative" else panels

    logging.basicConfig(level=logging.ERROR)
    if given.file:
        load_file(given.file)
    compared: dict[str, Position] = {}  # in the figure of effective lengths
    for run in given.checkpoint:  # what it has learned
        model, config, meta = load_for_evaluation(run, given.step)
        checkpoint = Path(meta["path"])
        folder = given.output or checkpoint.parent / "plots" / checkpoint.name
        seed = "" if imported_class(meta) else f", seed {config.training.seed}"
        title = f"{config.label}{seed}, step {meta['step']}"
        if given.figure == "effective_length":
            for one in model.placed:
                compared[f"{run} {one.label}".rstrip()] = one.position
            continue
        if given.figure == "training":
            log = Path(config.logging.log_dir or checkpoint.parent) / "metrics.jsonl"
            try:
                records = [record for record in training_log(log) if "position" in record]
            except (OSError, ValueError) as fault:
                raise UserError(
                    f"{log}: cannot be read: {fault} - give a run of train.py"
                ) from None
            if len(model.positions) > 1 or not records:
                raise UserError(
                    f"{log}: has no learned numbers of one encoding for all layers - give the run"
                    " of an encoding that learns, such as kerple_log"
                )
            panels_of = partial(training_panels, records)
        figures = figures_of_model(model, title, given.length, panels_of)
        for name, figure in figures.items():
            save(figure, folder / f"{name}{suffix}")
        if not figures:
            print(f"{title}: {NO_PICTURE}")

    # First values of seed 0.
    faults: list[str] = []
    options = read_overrides(given.option, faults.append)
    if faults:
        raise UserError(f"--option: {faults[0]}; write --option key=value")
    shape = Shape(given.heads, given.head_dim, given.heads * given.head_dim, given.train_length)
    names = given.names
    for name, encoding in sorted(REGISTRY.items()) if not names and not given.checkpoint else ():
        complete = all(option.default is not option.empty for option in options_of(name).values())
        if complete and issubclass(encoding, DistanceBias):
            names = [*names, name]
    for name in names:
        torch.manual_seed(0)
        position = build(name, shape, **options).eval()
        title = ", ".join([name, *(f"{key}: {value}" for key, value in options.items())])
        if given.figure == "effective_length":
            compared[title] = position
        elif found := panels_of(position, given.length):
            save(draw(found, title), (given.output or Path("plots")) / f"{name}{suffix}")
        else:
            print(f"{name}: {NO_PICTURE}")
    if compared:
        figure = draw([effective_panel(compared, given.length)], "")
        save(figure, (given.output or Path("plots")) / "effective_length")
    return 0


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG and as SVG, and print the files."""
    paths = [path.with_name(f"{path.name}.{suffix}") for suffix in ("png", "svg")]
    for one in paths:
        write(figure, one)
    print(*paths)


if __name__ == "__main__":
    sys.exit(main())
