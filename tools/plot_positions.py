"""Draw encodings, or what a checkpoint has learned of its encoding, as PNG and SVG.

python tools/plot_positions.py                          every encoding that is a bias by distance
python tools/plot_positions.py mep_free fire --heads 8
python tools/plot_positions.py bump --from my_encoding.py --option width=16
python tools/plot_positions.py --checkpoint runs/mep [--step 2000] [--text page.txt] [--tokens 64]
"""

import argparse
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.cli_errors import guarded
from megatron.config.yaml_files import read_overrides
from megatron.errors import UserError
from megatron.positions import Shape, load_file
from megatron.report.figures.positions import save
from megatron.report.pictures import Picture, Trained, drawable, of_checkpoint, of_encoding


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    given = parsed(argv)
    logging.basicConfig(level=logging.ERROR)
    if given.file:
        load_file(given.file)
    if given.checkpoint:
        draw_checkpoint(given)
    else:
        draw_encodings(given)
    return 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="encodings; default: all that are a bias by distance",
    )
    parser.add_argument(
        "--from",
        dest="file",
        metavar="FILE",
        help="a Python file of yours that registers encodings",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the encoding, as in pos_emb_args; may be repeated",
    )
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument(
        "--train_length", type=int, default=512, metavar="L", help="seq_length of the model"
    )
    parser.add_argument("--length", type=int, default=16384, metavar="L", help="distances to draw")
    parser.add_argument("--checkpoint", metavar="DIR", help="folder of a run or of one checkpoint")
    parser.add_argument(
        "--step", type=int, metavar="N", help="which checkpoint of the run; default: the latest"
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text for the attention maps; default: held-out data",
    )
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="its first tokens")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="default: plots, or plots in the run's folder",
    )
    given = parser.parse_args(argv)
    if min(given.heads, given.head_dim, given.train_length, given.tokens) < 1 or given.length < 2:
        parser.error(
            "--heads, --head_dim, --train_length and --tokens are at least 1, --length at least 2"
        )
    if given.checkpoint and given.names:
        parser.error("a checkpoint knows its encoding: give names or --checkpoint, not both")
    return given


def draw_encodings(given: argparse.Namespace) -> None:
    faults: list[str] = []
    options = read_overrides(given.option, faults.append)
    if faults:
        raise UserError(f"--option: {faults[0]}; write --option key=value")
    shape = Shape(given.heads, given.head_dim, given.heads * given.head_dim, given.train_length)
    names = given.names or drawable()
    pictures = (of_encoding(name, shape, options, given.length) for name in names)
    save_all(pictures, given.output or Path("plots"))


def draw_checkpoint(given: argparse.Namespace) -> None:
    trained = Trained.load(given.checkpoint, given.step)
    pictures = of_checkpoint(trained, length=given.length, text=given.text, tokens=given.tokens)
    save_all(pictures, given.output or trained.run / "plots" / trained.folder.name)


def save_all(pictures: Iterable[Picture], folder: Path) -> None:
    """Write each picture and print its files, or print why there is none."""
    for picture in pictures:
        if picture.figure is None:
            print(picture.reason, file=sys.stderr if picture.failed else sys.stdout)
        else:
            print(*save(picture.figure, folder / picture.name))


if __name__ == "__main__":
    sys.exit(main())
