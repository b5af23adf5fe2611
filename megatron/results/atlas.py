"""The atlas: what encodings reach at one small budget, and where a new one stands among them.

docs/atlas.md explains the score.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from megatron.files import ROOT
from megatron.protocols import TASK
from megatron.results.claims import Claim, judged, table_of
from megatron.results.effective_length import effective_lengths
from megatron.results.files import read_rows
from megatron.results.row import (
    ENCODING_AXIS,
    Row,
    cell_of,
    encoding_of,
    identity,
    with_facts,
)
from megatron.results.table import Table, with_spread

FOLDER = ROOT / "docs" / "results"
TEXT = "text"
TASKS = ["induction", "needle", "recall", "flip_flop"]
PARTS = [TEXT, *TASKS]
SCORE = "score"
EFFECTIVE = "effective length"
REFERENCE = "alibi"
FAR = 32  # the longest length is this many times the training length
PLACE = ("seed", "window", "length", "corpus", "protocol")  # rows that are equal in these are one
SURE = 0.01  # an entry is called better if p is below this
FEW = {1: "¹", 2: "²"}  # marks by the number of seeds
NOTES = (
    "score: mean of the five parts, for the seeds with all of them; ± standard deviation",
    "text: perplexity of alibi at 32 L in % of this one's; L: training length",
    "induction, needle, recall, flip_flop: % of answer tokens right, mean over 2 L to 32 L",
    "¹ one seed, ² two",
)
NOTES_OF_ENTRY = (
    "at 32 L, paired by seed; holds: better, fails: worse, if p of the line < 0.01",
    "no rows: not both on the same text",
    "*: fewer than three seeds, these weights only",
    "would decide: seeds for a power of 80 %, if the effect is as seen",
)


def atlas_rows(more: Iterable[Path] = ()) -> list[Row]:
    """The rows of the atlas in docs/results and of other files; their `cell` names the encoding.

    Later rows replace earlier ones of the same encoding and seed.
    """
    files = [FOLDER / f"tasks/{task}.jsonl" for task in TASKS]
    rows = {}
    for row in read_rows([*files, *sorted(FOLDER.glob("atlas/**/*.jsonl")), *more]):
        name = cell_of(row).get("pos_emb") or encoding_of(row)
        if row.get("protocol") in ("tail", TASK):
            row = with_facts(row, {"cell": {ENCODING_AXIS: name}, "sweep": "atlas"})
            rows[name, identity(row, PLACE)] = row
    return [*rows.values()]


class Standings(NamedTuple):
    """What rows say of every encoding.

    values: a line for each encoding and seed, a column for the score and each part; nan if a part
        was not measured
    cells: the texts of the table, a line for each encoding: the best score first
    curves: means over seeds, a line for each encoding, a column for each part and length
    """

    values: pd.DataFrame
    cells: pd.DataFrame
    curves: pd.DataFrame

    def table(self) -> Table:
        """A line for each encoding."""
        cells = self.cells.reset_index(names="encoding")
        return Table([*cells], cells.to_numpy().tolist(), NOTES)


def standings(rows: Sequence[Row]) -> Standings:
    """The standings of encodings; rows: as `atlas_rows` gives them.

    A length that a model cannot read counts as 0.
    """
    frame: Any = pd.DataFrame(rows).query("window != 'train_length'")  # without the control
    frame["name"] = frame["cell"].str[ENCODING_AXIS]
    is_text = frame["protocol"] != TASK
    frame["part"] = frame["corpus"].str.removeprefix("task:").mask(is_text, TEXT)
    right = 100 * frame["token_accuracy"].fillna(0)
    frame["number"] = frame["perplexity"].fillna(math.inf).where(is_text, right)

    # Of text, the ratio to the reference of the same seed and targets.
    frame["reference"] = frame.query("name == @REFERENCE")["number"]  # nan in other rows
    alike = frame.groupby(["seed", "text", "length"])
    ratio = 100 * alike["reference"].transform("first") / frame["number"]
    frame["value"] = ratio.where(is_text, right)

    effective = effective_lengths(rows)
    curves = frame.pivot_table(index="name", columns=["part", "length"], values="number")
    # Scores have the longest length of text, and of a task the mean over all beyond the training's.
    scored = frame.query("length == @FAR * train_length or part != @TEXT and length > train_length")
    values = scored.pivot_table(index=["name", "seed"], columns="part", values="value")
    values = values.reindex(columns=PARTS)
    values.insert(0, SCORE, values.mean(axis=1, skipna=False))

    by_name = values.groupby("name")
    order = by_name.mean().sort_values(SCORE, ascending=False)
    cells = by_name.agg(over_seeds).loc[order.index]
    lengths = {}
    for label, (text, _, differences) in effective.items():
        difference = differences[min(differences)]
        lengths[label.partition(",")[0]] = text + FEW.get(len(difference.by_seed), "")
    cells[EFFECTIVE] = pd.Series(lengths).reindex(cells.index, fill_value="")
    return Standings(values, cells, curves)


def over_seeds(numbers: Any) -> str:
    """Of a Series: the mean, ± the standard deviation; nothing for what was not measured."""
    count = numbers.count()
    std = numbers.std() if count > 1 else None
    return with_spread("{:.0f}".format, numbers.mean(), std) + FEW.get(count, "") if count else ""


def decided(name: str, rivals: Iterable[str], rows: Sequence[Row]) -> Table:
    """Whether an encoding is better than its rivals in each part, at the longest length."""
    # Windows of its own belong to an encoding: they don't keep it from being compared.
    unlimited = [
        with_facts(row, {"window": None}) for row in rows if row.get("window") != "train_length"
    ]
    body = []
    for rival, part in product(rivals, PARTS):
        sides = {"a": f"encoding {name}", "b": f"encoding {rival}", "at": f"{FAR} L"}
        better = {"both": part, "quantity": "token_accuracy", "higher_by": 0}
        if part == TEXT:
            better = {"protocol": "tail", "lower_by": 0}
        claim = Claim.model_validate(sides | better)
        for verdict in judged([claim], unlimited, SURE):
            _, _, *line, _, needed = table_of([verdict], "").body[0]
            body.append([f"{part}: {name}, {rival}", *line, needed])
    head = ["is the first better?", "verdict", "effect [95 %]", "p", "would decide"]
    return Table(head, body, NOTES_OF_ENTRY)
