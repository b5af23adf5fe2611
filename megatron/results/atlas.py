"""The atlas: what encodings reach at one small budget, and where a new one stands among them.

docs/atlas.md explains the score.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from megatron.files import ROOT
from megatron.protocols import TASK
from megatron.results.claims import Claim, judged, table_of
from megatron.results.effective_length import EffectiveLength, effective_lengths
from megatron.results.files import read_rows
from megatron.results.row import ENCODING_AXIS, Row, cell_of, encoding_of, with_facts
from megatron.results.table import Table, mean_and_std, with_spread

FOLDER = ROOT / "docs" / "results"
TEXT = "text"
TASKS = ["induction", "needle", "recall", "flip_flop"]
PARTS = [TEXT, *TASKS]
SCORE = "score"
REFERENCE = "alibi"
FAR = 32  # the longest length is this many times the training length
SURE = 0.01  # an entry is called better if p is below this
ONE_SEED = "¹"


def atlas_rows(more: Iterable[Path] = ()) -> list[Row]:
    """The rows of the atlas in docs/results and of other files; their `cell` names the encoding."""
    files = [*FOLDER.glob("context/*.jsonl"), *FOLDER.glob("atlas/**/*.jsonl")]
    files += [FOLDER / "tasks" / f"{task}.jsonl" for task in TASKS]
    rows = []
    for row in read_rows([*sorted(files), *more]):
        name = cell_of(row).get("pos_emb") or encoding_of(row)
        if row.get("protocol") in ("tail", TASK):
            rows.append(with_facts(row, {"cell": {ENCODING_AXIS: name}, "sweep": "atlas"}))
    return rows


class Standings(NamedTuple):
    """What rows say of every encoding.

    values: a line for each encoding and seed, a column for each part and the score; nan if a part
        was not measured
    curves: means over seeds, a line for each encoding, a column for each part and length
    effective: effective lengths by encoding
    """

    values: pd.DataFrame
    curves: pd.DataFrame
    effective: Mapping[str, EffectiveLength]

    @property
    def names(self) -> list[str]:
        """The encodings, the best score first, and then those with most parts."""
        means: Any = self.values.groupby("name").mean()
        means["parts"] = means[PARTS].count(axis=1)
        means["mean"] = means[PARTS].mean(axis=1)
        order = means.sort_values([SCORE, "parts", "mean"], ascending=False)
        return order.index.tolist()

    def cell(self, name: str, part: str = SCORE) -> str:
        """The mean of a part or the score over seeds, ± their standard deviation; or nothing."""
        numbers = self.values.loc[name, part].dropna().tolist()
        if not numbers:
            return ""
        text = with_spread("{:.0f}".format, *mean_and_std(numbers))
        return text if len(numbers) > 1 else text + ONE_SEED

    def effective_cell(self, name: str) -> str:
        """The effective length; or nothing, where it wasn't measured or has no control."""
        effective = self.effective.get(name)
        if effective is None:
            return ""
        seeds = max(len(difference.by_seed) for difference in effective.differences.values())
        return f"{effective}{ONE_SEED if seeds == 1 else ''}"

    def table(self) -> Table:
        """A line for each encoding."""
        body = []
        for name in self.names:
            numbers = [self.cell(name, part) for part in (SCORE, *PARTS)]
            body.append([name, *numbers, self.effective_cell(name)])
        notes = [
            "score: mean of the five parts, for the seeds with all of them; ± standard deviation",
            f"{TEXT}: perplexity of {REFERENCE} at {FAR} L in % of this one's; L: training length",
            f"{', '.join(TASKS)}: % of answer tokens right, mean over 2 L to {FAR} L",
            f"{ONE_SEED} one seed",
        ]
        return Table(["encoding", SCORE, *PARTS, "effective length"], body, notes)


def standings(rows: Sequence[Row]) -> Standings:
    """The standings of encodings; rows: as `atlas_rows` gives them.

    A length that a model cannot read counts as 0. If a seed was measured on two versions of the
    text, the one with more seeds counts.
    """
    frame: Any = pd.DataFrame(rows)
    frame["name"] = [encoding_of(row) for row in rows]
    is_text = frame["protocol"] != TASK
    frame["part"] = frame["corpus"].str.removeprefix("task:").mask(is_text, TEXT)
    right = 100 * frame["token_accuracy"].fillna(0)
    frame["number"] = frame["perplexity"].fillna(math.inf).where(is_text, right)

    # The ratio to the reference of the same seed and targets, at the longest length.
    times = frame["length"] / frame["train_length"]
    is_limited = frame["window"] == "train_length"
    place = pd.MultiIndex.from_frame(frame[["seed", "text"]])
    is_reference = (frame["name"] == REFERENCE) & (times == FAR) & ~is_limited
    reference = frame["number"].set_axis(place)[is_reference.to_numpy()]
    ratio = 100 * reference.reindex(place).to_numpy() / frame["number"]
    frame["value"] = ratio.where(times == FAR).where(is_text, right.where(times > 1))

    # Of a seed that was measured on two versions of the text, drop that with fewer seeds.
    frame["seeds"] = frame.groupby(["name", "part", "split"])["seed"].transform("nunique")
    same = ["name", "part", "seed", "length", "window"]
    counted = frame.sort_values("seeds", kind="stable").drop_duplicates(same, keep="last")
    effective = effective_lengths([rows[index] for index in sorted(counted.index)])
    counted = counted[counted["window"] != "train_length"]
    # Of a task, the mean over its lengths.
    values = counted.pivot_table(index=["name", "seed"], columns="part", values="value")
    values = values.reindex(columns=PARTS)
    values[SCORE] = values.mean(axis=1, skipna=False)
    curves = counted.pivot_table(index="name", columns=["part", "length"], values="number")
    by_name = {label.split(",")[0]: length for label, length in effective.items()}
    return Standings(values, curves, by_name)


def decided(name: str, rivals: Iterable[str], rows: Sequence[Row]) -> Table:
    """Whether an encoding is better than its rivals in each part, at the longest length."""
    body = []
    for rival in rivals:
        for part in PARTS:
            claim = {"a": f"encoding {name}", "b": f"encoding {rival}", "at": f"{FAR} L"}
            if part == TEXT:
                claim |= {"lower_by": 0, "protocol": "tail"}
            else:
                claim |= {"higher_by": 0, "quantity": "token_accuracy", "both": part}
            for verdict in judged([Claim.model_validate(claim)], rows, SURE):
                _, _, *line, _, needed = table_of([verdict], "").body[0]
                body.append([f"{part}: {name}, {rival}", *line, needed])
    notes = [
        f"at {FAR} L, paired by seed; holds: better, fails: worse, if p of the line < {SURE:g}",
        "no rows: not both on the same text; *: fewer than three seeds, these weights only",
        "would decide: seeds for a power of 80 %, if the effect is as seen",
    ]
    head = ["is the first better?", "verdict", "effect [95 %]", "p", "would decide"]
    return Table(head, body, notes)
