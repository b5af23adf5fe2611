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

import torch
from matplotlib.figure import Figure

from megatron.checkpoints.read import load_for_evaluation
from megatron.cli_errors import guarded
from megatron.config import Config
from megatron.config.yaml_files import read_overrides
from megatron.data.parts import open_parts
from megatron.data.samples import split_documents
from megatron.data.tokenizers.build import build_tokenizer
from megatron.errors import UserError
from megatron.evaluation.attention_probes import attention_of
from megatron.model import GPT
from megatron.positions import REGISTRY, DistanceBias, Shape, build, load_file, options_of
from megatron.positions.layers import name_of_layers
from megatron.report.curves import write
from megatron.report.encoding_figures import (
    draw,
    draw_attention,
    draw_learned,
    draw_trajectory,
    panels,
)
from megatron.results.files import training_log

SHOWN = 80  # letters of the text beneath a map of attention


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
    add = parser.add_argument
    names = "encodings; default: all that are a bias by distance"
    add("names", nargs="*", metavar="NAME", help=names)
    own = "a Python file of yours that registers encodings"
    add("--from", dest="file", metavar="FILE", help=own)
    option = "an option of the encoding, as in pos_emb_args; may be repeated"
    add("--option", action="append", default=[], metavar="KEY=VALUE", help=option)
    add("--heads", type=int, default=12)
    add("--head_dim", type=int, default=64)
    train_length = "seq_length of the model"
    add("--train_length", type=int, default=512, metavar="L", help=train_length)
    add("--length", type=int, default=16384, metavar="L", help="distances to draw")
    add("--checkpoint", metavar="DIR", help="folder of a run or of one checkpoint")
    step = "which checkpoint of the run; default: the latest"
    add("--step", type=int, metavar="N", help=step)
    text = "text for the attention maps; default: held-out data"
    add("--text", type=Path, metavar="FILE", help=text)
    add("--tokens", type=int, default=64, metavar="N", help="its first tokens")
    folder = "default: plots, or plots in the run's folder"
    add("-o", "--output", type=Path, metavar="DIR", help=folder)
    given = parser.parse_args(argv)
    if min(given.heads, given.head_dim, given.train_length, given.tokens) < 1 or given.length < 2:
        parser.error(
            "--heads, --head_dim, --train_length and --tokens are at least 1, --length at least 2"
        )
    if given.checkpoint and given.names:
        parser.error("a checkpoint knows its encoding: give names or --checkpoint, not both")
    return given


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG and as SVG, and print the files."""
    paths = [path.with_name(f"{path.name}.{suffix}") for suffix in ("png", "svg")]
    for one in paths:
        write(figure, one)
    print(*paths)


def draw_encodings(given: argparse.Namespace) -> None:
    """Encodings with the first values of seed 0."""
    faults: list[str] = []
    options = read_overrides(given.option, faults.append)
    if faults:
        raise UserError(f"--option: {faults[0]}; write --option key=value")
    shape = Shape(given.heads, given.head_dim, given.heads * given.head_dim, given.train_length)
    names = given.names
    for name, encoding in sorted(REGISTRY.items()) if not names else ():
        complete = all(option.default is not option.empty for option in options_of(name).values())
        if complete and issubclass(encoding, DistanceBias):
            names = [*names, name]
    for name in names:
        torch.manual_seed(0)
        found = panels(build(name, shape, **options).eval(), given.length)
        if found:
            title = ", ".join([name, *(f"{key}: {value}" for key, value in options.items())])
            save(draw(found, title), (given.output or Path("plots")) / name)
        else:
            print(f"{name}: nothing to draw, none of its hooks does anything")


def draw_checkpoint(given: argparse.Namespace) -> None:
    """The trained encoding, its learned numbers, these over training, and attention on a text."""
    model, config, meta = load_for_evaluation(given.checkpoint, given.step)
    checkpoint = Path(meta["path"])
    folder = given.output or checkpoint.parent / "plots" / checkpoint.name
    title = f"{name_of_layers(config.position)}, step {meta['step']}"
    heads = config.model.num_attention_heads
    for one in model.placed:
        found = panels(one.position, given.length)
        several = len(model.placed) > 1
        name = f"encoding-layer{one.layers[0]}" if several else "encoding"
        if found:
            save(draw(found, f"{title}: {one.label}" if several else title), folder / name)
    learned = model.learned()
    if learned:
        save(draw_learned(learned, heads, f"{title}: learned numbers"), folder / "learned")
        log = Path(config.logging.log_dir or checkpoint.parent) / "metrics.jsonl"
        try:
            figure = draw_trajectory(training_log(log), learned, heads, f"{title}: over training")
        except (OSError, ValueError) as fault:
            print(f"no trajectory: {log}: cannot be read ({fault})", file=sys.stderr)
        else:
            if figure is None:
                print(f"no trajectory: {log}: holds none of {', '.join(learned)}", file=sys.stderr)
            else:
                save(figure, folder / "trajectory")
    else:
        print(f"{title}: learns nothing, so there are no learned numbers to draw")
    try:
        figure = attention_on_text(model, config, given.text, given.tokens, title)
    except UserError as fault:
        print(f"no attention: {fault}", file=sys.stderr)
    else:
        save(figure, folder / "attention")


def attention_on_text(
    model: GPT, config: Config, text: Path | None, tokens: int, title: str
) -> Figure:
    """Attention on the first tokens of a file, or of a held-out document that is long enough."""
    data = config.data
    tokenizer = None
    try:
        tokenizer = build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)
    except UserError:
        if text is not None:
            raise
    ids: list[int] = []
    if text is None:
        ids = held_out(config, tokens)
    elif tokenizer:
        try:
            ids = tokenizer.encode(text.read_text(encoding="utf-8"))[:tokens]
        except (OSError, UnicodeDecodeError) as fault:
            raise UserError(f"--text: {text} cannot be read as text ({fault})") from None
    if len(ids) < 2:
        raise UserError(f"--text: {text} has {len(ids)} tokens; give a longer text")
    words = f"{' '.join(tokenizer.decode(ids).split())[:SHOWN]} …" if tokenizer else ""
    probabilities = attention_of(model, torch.tensor(ids, dtype=torch.long))
    return draw_attention(probabilities, f"{title}: attention", words, model.names_of_layers)


def held_out(config: Config, count: int) -> list[int]:
    """The first tokens of the first document of the validation part that has so many."""
    part = open_parts(config.data, ["valid"])["valid"]
    for tokens in part.files:
        for document in split_documents(tokens, part.split, "valid"):
            if tokens.sizes[document] >= count:
                return tokens.read(document, 0, count).astype("int64").tolist()
    raise UserError(f"--tokens: no held-out document has {count} tokens; ask for fewer")


if __name__ == "__main__":
    sys.exit(main())
