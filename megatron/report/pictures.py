"""Pictures of encodings: with their first values, and as a checkpoint has learned them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from megatron.checkpoints.read import load_for_evaluation
from megatron.config import Config
from megatron.config.load import DATA_PATHS
from megatron.data.parts import open_parts
from megatron.data.samples import split_documents
from megatron.data.tokenizers.build import build_tokenizer
from megatron.errors import UserError
from megatron.evaluation.probes.recorded import attention_of
from megatron.model import GPT
from megatron.positions import REGISTRY, DistanceBias, Shape, build, options_of
from megatron.positions.layers import name_of_layers
from megatron.report.evidence import positions_of
from megatron.report.figures.attention import draw_attention
from megatron.report.figures.learned import draw_learned, draw_trajectory, trajectory
from megatron.report.figures.positions import draw, falls, panels

SHOWN = 80  # letters of the text beneath a map of attention


@dataclass(frozen=True)
class Picture:
    """A figure under the name of its file, or why there is none.

    failed: whether something that it needs is missing, not just nothing to draw
    """

    name: str
    figure: Figure | None
    reason: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Trained:
    """A checkpoint to be drawn; folder: its global_stepN."""

    model: GPT
    config: Config
    folder: Path
    step: int

    @classmethod
    def load(cls, checkpoint: str | Path, step: int | None) -> "Trained":
        model, config, meta = load_for_evaluation(checkpoint, step)
        return cls(model, config, Path(meta["path"]), meta["step"])

    @property
    def run(self) -> Path:
        return self.folder.parent

    @property
    def title(self) -> str:
        return f"{name_of_layers(self.config.position)}, step {self.step}"


def drawable() -> list[str]:
    """The encodings that are a bias by distance and need no options."""
    found = []
    for name, encoding in sorted(REGISTRY.items()):
        options = options_of(name).values()
        complete = all(option.default is not option.empty for option in options)
        if complete and issubclass(encoding, DistanceBias):
            found.append(name)
    return found


def of_encoding(name: str, shape: Shape, options: Mapping[str, Any], length: int) -> Picture:
    """An encoding with the first values of seed 0, on distances below `length`."""
    torch.manual_seed(0)
    position = build(name, shape, **options).eval()
    found = [*panels(position, length), *falls(position, length)]
    if not found:
        return Picture(name, None, f"{name}: nothing to draw, none of its hooks does anything")
    title = ", ".join([name, *(f"{key}: {value}" for key, value in options.items())])
    return Picture(name, draw(found, title))


def of_checkpoint(
    trained: Trained, *, length: int, text: Path | None, tokens: int
) -> Iterator[Picture]:
    """The trained encoding, its learned numbers, these over training, and attention on a text.

    text: a file whose first `tokens` tokens are read; None: the first held-out document
    """
    yield from _encodings(trained, length)
    learned = trained.model.learned()
    if learned:
        heads = trained.config.model.num_attention_heads
        title = f"{trained.title}: learned numbers"
        yield Picture("learned", draw_learned(learned, heads, title))
        yield _attempt("trajectory", lambda: over_training(trained, learned))
    else:
        reason = f"{trained.title}: learns nothing, so there are no learned numbers to draw"
        yield Picture("learned", None, reason)
    yield _attempt("attention", lambda: on_text(trained, text, tokens))


def _encodings(trained: Trained, length: int) -> Iterator[Picture]:
    """One picture, or one for each encoding where layers do not share one."""
    placed = positions_of(trained.model)
    for one in placed:
        found = [*panels(one.position, length), *falls(one.position, length)]
        if not found:
            continue
        if len(placed) > 1:
            figure = draw(found, f"{trained.title}: {one.label}")
            yield Picture(f"encoding-layer{one.layers[0]}", figure)
        else:
            yield Picture("encoding", draw(found, trained.title))


def _attempt(name: str, make: Callable[[], Figure]) -> Picture:
    """The figure, or what it would need; other pictures do not depend on it."""
    try:
        return Picture(name, make())
    except UserError as fault:
        return Picture(name, None, f"no {name}: {fault}", failed=True)


def over_training(trained: Trained, learned: Mapping[str, Tensor]) -> Figure:
    """The learned numbers at each step that was logged; UserError where none was."""
    log_dir = trained.config.logging.log_dir
    folder = Path(log_dir) if log_dir else trained.run
    found = trajectory(folder, learned)
    if not found:
        raise UserError(
            f"{folder}/metrics.jsonl: holds none of {', '.join(learned)};"
            " numbers of many entries are left out"
        )
    heads = trained.config.model.num_attention_heads
    return draw_trajectory(found, heads, f"{trained.title}: over training")


def on_text(trained: Trained, text: Path | None, tokens: int) -> Figure:
    """Attention on the first tokens of a file, or of a held-out document that is long enough."""
    data = trained.config.data
    tokenizer = None
    try:
        with trained.config.naming_places("vocab_file", "merge_file"):
            tokenizer = build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)
    except UserError:
        if text is not None:
            raise
    if text is None:
        ids = _held_out(trained.config, tokens)
    else:
        ids = tokenizer.encode(_text_of(text))[:tokens] if tokenizer else []
    if len(ids) < 2:
        raise UserError(f"--text: {text} has {len(ids)} tokens; give a longer text")
    shown = ""
    if tokenizer:
        words = " ".join(tokenizer.decode(ids).split())
        shown = f"{words[:SHOWN]} …"
    probabilities = attention_of(trained.model, torch.tensor(ids, dtype=torch.long))
    names = trained.model.names_of_layers
    return draw_attention(probabilities, f"{trained.title}: attention", shown, names)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"--text: {path} cannot be read as text ({fault})") from None


def _held_out(config: Config, count: int) -> list[int]:
    """The first tokens of the first document of the validation part that has so many."""
    with config.naming_places(*DATA_PATHS):
        part = open_parts(config.data, ["valid"])["valid"]
    for tokens in part.files:
        for document in split_documents(tokens, part.split, "valid"):
            if tokens.sizes[document] >= count:
                return tokens.read(document, 0, count).astype("int64").tolist()
    prefixes = ", ".join(str(tokens.prefix) for tokens in part.files)
    raise UserError(
        f"--tokens: no held-out document of {prefixes} has {count} tokens; ask for fewer"
    )
