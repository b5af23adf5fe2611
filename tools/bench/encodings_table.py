"""Speed and memory of every encoding on one small GPT: a training step and a long evaluation.

python tools/bench/encodings_table.py --quick --encodings rotary fox
python tools/bench/encodings_table.py --threads 1 --output encodings.json --into docs/performance.md

Each encoding has the options of its file in configs/pos_emb. Steps, rounds and ratios are those of
tools/bench/step.py. --into writes the table between its two marks in a file.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import (
    DTYPES,
    Bench,
    arguments,
    parsed,
    positive,
    report_progress,
    shown,
    table,
    with_spread,
)
from step import GPTCandidate, add_sizes, measure, size_of, trunk

from megatron.cli_errors import guarded
from megatron.config.yaml_files import read_file
from megatron.errors import UserError
from megatron.files import write_text
from megatron.model.settings import AttentionSettings
from megatron.positions import REGISTRY, options_of

FILES = Path(__file__).resolve().parents[2] / "configs" / "pos_emb"
REFERENCE = "rotary"
QUICK = {"length": 256, "rounds": 2, "seconds": 5.0}
BEGIN, END = "<!-- table of encodings -->", "<!-- end of the table -->"
HEADER = [
    "encoding",
    "attention",
    "step: tokens/s",
    "time (quartiles)",
    "peak MiB",
    "evaluation: tokens/s",
    "time (quartiles)",
    "peak MiB",
]


@dataclass(frozen=True)
class OfFile(GPTCandidate):
    """A GPT with an encoding as its file describes it."""

    @property
    def name(self) -> str:
        return self.pos_emb

    @property
    def needs(self) -> float:
        """Memory of all scores where attention is eager: about that of DAPE, the largest."""
        if self.chosen_backend != "eager":
            return 0
        heads = self.model.heads
        copies = 3 * (2 * heads + self.options.get("width", 0)) + 8 * heads
        layers = self.model.layers if self.training else 1
        return layers * copies * self.batch * self.length**2 * 4

    @property
    def chosen_backend(self) -> str:
        """The name of the attention backend."""
        model, _ = trunk(self.model)
        model.positions = self.positions()
        model.use_attention(AttentionSettings(attention_backend=self.backend))
        return model.resolved_backend


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__ or "", QUICK)
    add = parser.add_argument
    add("--encodings", nargs="+", default=sorted(REGISTRY), metavar="NAME", help="default: all")
    add("--backend", default="auto", metavar="NAME", help="attention_backend")
    add("--dtype", choices=DTYPES, default="float32")
    add("--batch", type=positive, default=1, help="windows of a step")
    add("--length", type=positive, default=4096, metavar="L", help="tokens to evaluate")
    add("--into", type=Path, metavar="FILE.md", help="write the table between its marks there")
    add_sizes(parser, hidden=256, layers=2, heads=4, vocab=1024, train_length=512)
    options = parsed(parser, QUICK, argv)
    if options.into:
        between_marks(options.into, "")  # before the hour that it takes
    size = size_of(options, options.dtype)
    unknown = sorted(set(options.encodings) - REGISTRY.keys())
    if unknown:
        raise UserError(f"--encodings: no encoding is called {unknown[0]}; see docs/positions.md")

    bench = Bench(options)
    names = dict.fromkeys([REFERENCE, *options.encodings])
    longest = max(options.length, options.train_length)
    for training in (True, False):
        report_progress("training step" if training else "evaluation")
        length, batch = (options.train_length, options.batch) if training else (options.length, 1)
        candidates = [
            OfFile(
                *(name, options.backend, training, length, batch, size),
                options=options_in_file(name, longest),
            )
            for name in names
        ]
        backends = {one.pos_emb: one.chosen_backend for one in candidates}
        measure(bench, candidates, [REFERENCE])
        for row in bench.rows:
            row["backend"] = backends[row["pos_emb"]]
        bench.save(markdown(bench))
    text = markdown(bench)
    print(text)
    if options.into:
        write_text(options.into, between_marks(options.into, text))
    return 0


def options_in_file(name: str, longest: int) -> dict[str, Any]:
    """pos_emb_args of the encoding's file, with a row for every position of a table of rows."""
    options = dict(read_file(FILES / f"{name}.yml").get("pos_emb_args") or {})
    if "max_positions" in options_of(name):
        options["max_positions"] = longest
    return options


def markdown(bench: Bench) -> str:
    """One line for each encoding, the fastest training step first."""
    steps = {row["pos_emb"]: row for row in bench.rows if row["training"]}
    evaluations = {row["pos_emb"]: row for row in bench.rows if not row["training"]}
    lines = []
    for name, row in sorted(steps.items(), key=lambda item: item[1]["median_ratio"] or 1e9):
        columns = [name, row["backend"]]
        for one in (row, evaluations.get(name)):
            columns += ["-"] * 3 if one is None else cells(one)
        lines.append(columns)
    return f"{bench.heading}\n{table(HEADER, lines)}"


def cells(row: dict[str, Any]) -> list[str]:
    """Speed, ratio and memory of a row, or why there are none."""
    if row["median_ms"] is None:
        return [row["reason"] or "-", "-", "-"]
    peak = row["peak_bytes"]
    memory = "-" if peak is None else f"{peak / 2**20:,.0f}"
    return [shown(row["tokens_per_second"]), with_spread(row, "ratio"), memory]


def between_marks(path: Path, text: str) -> str:
    """The file's text with `text` between its marks; raises UserError if it has none."""
    try:
        before = path.read_text(encoding="utf-8")
    except OSError as fault:
        raise UserError(f"--into: {path} cannot be read ({fault.strerror})") from None
    if before.count(BEGIN) != 1 or before.count(END) != 1:
        raise UserError(f"--into: {path} has not the lines '{BEGIN}' and '{END}'; write them there")
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{text}\n{END}{tail}"


if __name__ == "__main__":
    sys.exit(main())
