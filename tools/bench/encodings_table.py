"""Speed and memory of every encoding on one small GPT: a training step and a long evaluation.

python tools/bench/encodings_table.py --threads 1 --encodings rotary fox --output encodings.json
python tools/bench/encodings_table.py --threads 1 --into docs/performance.md

Each encoding has the options of its file in configs/pos_emb. Steps, rounds and ratios are those of
tools/bench/step.py. --into writes the table between its two marks in a file.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import Bench, arguments, figures, positive, report_progress, shown, table
from step import GPTCandidate, add_sizes, measure, size_of

from megatron.cli_errors import guarded
from megatron.config.yaml_files import read_file
from megatron.errors import UserError
from megatron.files import ROOT, write_text
from megatron.positions import REGISTRY, options_of

BEGIN, END = "<!-- table of encodings -->", "<!-- end of the table -->"
FIGURES = ["tokens/s", "time (quartiles)", "peak MiB"]
HEADER = ["encoding", "attention", f"step: {FIGURES[0]}", *FIGURES[1:]]
HEADER += [f"evaluation: {FIGURES[0]}", *FIGURES[1:]]


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__ or "")
    add = parser.add_argument
    add("--encodings", nargs="+", default=sorted(REGISTRY), metavar="NAME", help="default: all")
    add("--length", type=positive, default=4096, metavar="L", help="tokens to evaluate")
    add("--into", type=Path, metavar="FILE.md", help="write the table between its marks there")
    add_sizes(parser, hidden=256, layers=2, heads=4, vocab=1024, train_length=512)
    options = parser.parse_args(argv)
    if options.into:
        between_marks(options.into, "")  # before the hour that it takes
    unknown = sorted(set(options.encodings) - REGISTRY.keys())
    if unknown:
        raise UserError(f"--encodings: no encoding is called {unknown[0]}; see docs/positions.md")
    bench = Bench(options)
    size = size_of(options, "float32")
    longest = max(options.length, options.train_length)
    for training, length in ((True, options.train_length), (False, options.length)):
        report_progress("training step" if training else "evaluation")
        candidates = [
            GPTCandidate(name, "auto", training, length, 1, size, options_in_file(name, longest))
            for name in dict.fromkeys(["rotary", *options.encodings])
        ]
        backends = [one.chosen_backend for one in candidates]
        measure(bench, candidates)
        for row, backend in zip(bench.rows[-len(candidates) :], backends, strict=True):
            row["backend"] = backend
        bench.save(markdown(bench))
    text = markdown(bench)
    print(text)
    if options.into:
        write_text(options.into, between_marks(options.into, text))
    return 0


def options_in_file(name: str, longest: int) -> dict[str, Any]:
    """pos_emb_args of the encoding's file, with a row for every position of a table of rows."""
    file = ROOT / "configs/pos_emb" / f"{name}.yml"
    options = dict(read_file(file).get("pos_emb_args") or {})
    if "max_positions" in options_of(name):
        options["max_positions"] = longest
    return options


def markdown(bench: Bench) -> str:
    """One line for each encoding, the fastest training step first."""
    of_evaluation = {row["pos_emb"]: row for row in bench.rows if not row["training"]}
    steps = [row for row in bench.rows if row["training"]]
    steps.sort(key=lambda row: row["median_ratio"] or float("inf"))
    lines = []
    for step in steps:
        cells = [step["pos_emb"], step["backend"]]
        for row in (step, of_evaluation.get(step["pos_emb"])):
            if row is None or row["median_ms"] is None:
                cells += [(row or {}).get("reason") or "-", "-", "-"]
            else:
                cells += [shown(row["tokens_per_second"]), *figures(row)[1:]]
        lines.append(cells)
    return f"{bench.heading}\n{table(HEADER, lines)}"


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
