"""Results: the row, its files, statistics, comparisons and tables. Needs no torch."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def read_results(*paths: str | Path) -> "pd.DataFrame":
    """A data frame with a line per row of results files, and a column per key.

    megatron/results/row.py explains the keys; `label` is the name of the row's kind among these
    rows, as in tables. A later row replaces an earlier one of the same measurement. Losses of
    windows, blocks and positions are lists in a cell; mappings are JSON texts; `window` is a text
    if any row has a word such as train_length. Raises UserError, with file and line, if a line is
    not a row.
    """
    import pandas as pd  # training and evaluation start faster without it

    from megatron.results.files import read_rows
    from megatron.results.labels import kinds

    rows = read_rows(paths)
    labels = {id(row): label for label, members in kinds(rows).items() for row in members}
    frame = pd.DataFrame(rows).assign(label=[labels[id(row)] for row in rows])
    for name, values in frame.items():
        types = set(values.dropna().map(type))
        if dict in types or types > {str}:
            frame[name] = values.map(_text, na_action="ignore")
    return frame.convert_dtypes()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
