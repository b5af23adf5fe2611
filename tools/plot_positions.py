"""Draw encodings, or the learned encoding of a checkpoint, as PNG and SVG.

python tools/plot_positions.py                          every encoding that is a bias by distance
python tools/plot_positions.py mep_free fire --heads 8
python tools/plot_positions.py bump --from my_encoding.py --option width=16
python tools/plot_positions.py --checkpoint runs/mep [--step 2000]
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.checkpoints.manifest import imported_class
from megatron.checkpoints.read import load_for_evaluation
from megatron.cli_errors import command_parser, guarded
from megatron.config.yaml_files import read_overrides
from megatron.errors import UserError
from megatron.evaluation.options import number
from megatron.positions import REGISTRY, DistanceBias, Shape, build, load_file
from megatron.report.catalogue import example
from megatron.report.curves import write
from megatron.report.encoding_figures import (
    NO_PICTURE,
    draw,
    figures_of_model,
    panels,
)
from megatron.results.files import PICTURES


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    names = "encodings; default: every bias by distance"
    add("names", nargs="*", metavar="NAME", help=names)
    file = "a Python file of yours that registers encodings"
    add("--from", dest="file", type="path", metavar="FILE", help=file)
    option = "an option of the encoding, as in pos_emb_args; may be repeated"
    add("--option", action="append", default=[], metavar="KEY=VALUE", help=option)
    size = number(1, 1024)
    add("--heads", type=size, default=12)
    add("--head-dim", type=size, default=64)
    train_length = "seq_length of the model"
    add("--train-length", type=number(1, 2**20), default=512, metavar="L", help=train_length)
    add("--length", type=number(2, 2**20), default=16384, metavar="L", help="distances to draw")
    checkpoints = "folders of runs or of single checkpoints"
    add("--checkpoint", type="path", nargs="+", default=[], metavar="DIR", help=checkpoints)
    step = "which checkpoint of the run; default: the latest"
    add("--step", type=int, metavar="N", help=step)
    folder = "default: plots, or plots in the run's folder"
    add("-o", "--output", type=Path, metavar="DIR", help=folder)
    options = parser.parse_args(argv)
    if options.checkpoint and options.names:
        parser.error("a checkpoint knows its encoding: give names or --checkpoint, not both")
    if options.output and options.output.suffix in PICTURES:
        parser.error("--output: names the folder of the pictures - give it without a suffix")
    if options.output and len(options.checkpoint) > 1:
        raise UserError("--output: would hold several runs - give one --checkpoint, or no --output")

    logging.basicConfig(level=logging.ERROR)
    if options.file:
        load_file(options.file)
    folder = options.output or Path("plots")
    figures = {}
    for run in options.checkpoint:  # what it has learned
        model, config, meta = load_for_evaluation(run, options.step)
        checkpoint = Path(meta["path"])
        seed = "" if imported_class(meta) else f", seed {config.training.seed}"
        title = f"{config.label}{seed}, step {meta['step']}"
        drawn = figures_of_model(model, title, options.length)
        if not drawn:
            print(f"{title}: {NO_PICTURE}")
        folder_of_run = options.output or checkpoint.parent / "plots" / checkpoint.name
        figures |= {folder_of_run / name: figure for name, figure in drawn.items()}

    # First values of seed 0.
    faults: list[str] = []
    settings = read_overrides(options.option, faults.append)
    if faults:
        raise UserError(f"--option: {faults[0]}; write --option key=value")
    hidden = options.heads * options.head_dim
    shape = Shape(options.heads, options.head_dim, hidden, options.train_length)
    names = options.names
    if not names and not options.checkpoint:
        biases = [name for name in REGISTRY if issubclass(REGISTRY[name], DistanceBias)]
        names = sorted(name for name in biases if example(name) is not None)
    for name in names:
        torch.manual_seed(0)
        position = build(name, shape, **settings).eval()
        title = ", ".join([name, *(f"{key}: {value}" for key, value in settings.items())])
        if drawn := panels(position, options.length):
            figures[folder / name] = draw(drawn, title)
        else:
            print(f"{name}: {NO_PICTURE}")
    for path, figure in figures.items():
        paths = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
        for picture in paths:
            write(figure, picture)
        print(*paths)
    return 0


if __name__ == "__main__":
    sys.exit(main())
