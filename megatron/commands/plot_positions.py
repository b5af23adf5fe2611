"""Draw encodings, or what a checkpoint has learned of its encoding, as PNG and SVG.

python tools/plot_positions.py                          every encoding that is a bias by distance
python tools/plot_positions.py mep_free fire --heads 8
python tools/plot_positions.py bump --from my_encoding.py --option width=16
python tools/plot_positions.py --checkpoint runs/mep [--step 2000] [--text page.txt] [--tokens 64]
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from megatron.commands.check_encoding import add_encoding_options, options_in
from megatron.config import Config
from megatron.data.samples import split_documents
from megatron.data.tokenizer import build_tokenizer
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.evaluation.probes.recorded import attention_of
from megatron.model import GPT
from megatron.positions import REGISTRY, DistanceBias, Shape, build, load_file, options_of
from megatron.report.figures.attention import draw_attention
from megatron.report.figures.learned import draw_learned, draw_trajectory, trajectory
from megatron.report.figures.positions import draw, panels, save
from megatron.training.checkpoint import load_for_evaluation


def main(argv: Sequence[str] | None = None) -> int:
    given = parsed(argv)
    logging.basicConfig(level=logging.ERROR)
    try:
        if given.file:
            load_file(given.file)
        if given.checkpoint:
            of_checkpoint(given)
        else:
            of_encodings(given)
    except UserError as fault:
        print(fault, file=sys.stderr)
        return 1
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
    add_encoding_options(parser)
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
        "--output", type=Path, metavar="DIR", help="default: plots, or plots in the run's folder"
    )
    given = parser.parse_args(argv)
    if min(given.heads, given.head_dim, given.train_length, given.tokens) < 1 or given.length < 2:
        parser.error(
            "--heads, --head_dim, --train_length and --tokens are at least 1, --length at least 2"
        )
    if given.checkpoint and given.names:
        parser.error("a checkpoint knows its encoding: give names or --checkpoint, not both")
    return given


def of_encodings(given: argparse.Namespace) -> None:
    """One picture for each encoding, with its first values."""
    options, output = options_in(given.option), given.output or Path("plots")
    shape = Shape(given.heads, given.head_dim, given.heads * given.head_dim, given.train_length)
    for name in given.names or drawable():
        torch.manual_seed(0)
        found = panels(build(name, shape, **options).eval(), given.length)
        if not found:
            print(f"{name}: nothing to draw, none of its hooks does anything")
            continue
        title = ", ".join([name, *(f"{key}: {value}" for key, value in options.items())])
        told(save(draw(found, title), output / name))


def drawable() -> list[str]:
    """The encodings that are a bias by distance and need no options."""
    biases = [
        name for name, encoding in sorted(REGISTRY.items()) if issubclass(encoding, DistanceBias)
    ]
    return [
        name
        for name in biases
        if all(one.default is not one.empty for one in options_of(name).values())
    ]


def of_checkpoint(given: argparse.Namespace) -> None:
    """The trained encoding, its learned numbers, how they got there, and attention on a text."""
    model, config, about = load_for_evaluation(given.checkpoint, given.step)
    run = Path(about["path"]).parent
    output = given.output or run / "plots" / Path(about["path"]).name
    name, heads = (
        f"{config.position.pos_emb}, step {about['step']}",
        config.model.num_attention_heads,
    )
    for layer, position in enumerate(model.positions):
        found = panels(position, given.length)
        several = len(model.positions) > 1
        if found:
            title = f"{name}, layer {layer}" if several else name
            told(
                save(
                    draw(found, title),
                    output / (f"encoding-layer{layer}" if several else "encoding"),
                )
            )
    learned = model.learned()
    if learned:
        told(save(draw_learned(learned, heads, f"{name}: learned numbers"), output / "learned"))
        told_unless_missing(
            lambda: over_training(config, run, learned, name), output / "trajectory"
        )
    else:
        print(f"{name}: learns nothing, so there are no learned numbers to draw")
    told_unless_missing(lambda: on_text(model, config, given, name), output / "attention")


def over_training(config: Config, run: Path, learned: dict[str, Any], name: str) -> Figure:
    folder = Path(config.logging.log_dir) if config.logging.log_dir else run
    found = trajectory(folder, learned)
    if not found:
        raise UserError(
            f"{folder}/metrics.jsonl: holds none of {', '.join(learned)}; numbers of many entries are left out"
        )
    return draw_trajectory(found, config.model.num_attention_heads, f"{name}: over training")


def on_text(model: GPT, config: Config, given: argparse.Namespace, name: str) -> Figure:
    data = config.data
    tokenizer = None
    try:
        tokenizer = build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)
    except UserError:
        if given.text:
            raise
    if given.text:
        try:
            text = given.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as fault:
            raise UserError(f"--text: {given.text} cannot be read as text ({fault})") from None
        ids = torch.tensor(
            tokenizer.encode(text)[: given.tokens] if tokenizer else [], dtype=torch.long
        )
    else:
        tokens = TokenFile.open(data.data_path or "")
        document = next(
            (
                one
                for one in split_documents(tokens, data.split, "valid")
                if tokens.sizes[one] >= given.tokens
            ),
            None,
        )
        if document is None:
            raise UserError(
                f"--tokens: no held-out document of {data.data_path} has {given.tokens} tokens; ask for fewer"
            )
        ids = torch.from_numpy(tokens.read(document, 0, given.tokens).astype("int64"))
    if len(ids) < 2:
        raise UserError(f"--text: {given.text} has {len(ids)} tokens; give a longer text")
    said = " ".join(tokenizer.decode(ids.tolist()).split()) if tokenizer else ""
    return draw_attention(
        attention_of(model, ids), f"{name}: attention", f"{said[:80]} …" if said else ""
    )


def told_unless_missing(make: Any, path: Path) -> None:
    """Draw and save, or say what it would have needed; the other pictures do not depend on it."""
    try:
        figure = make()
    except UserError as fault:
        print(f"no {path.name}: {fault}", file=sys.stderr)
        return
    told(save(figure, path))


def told(paths: Sequence[Path]) -> None:
    print(" ".join(str(path) for path in paths))
