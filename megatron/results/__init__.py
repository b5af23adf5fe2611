"""Results: the row, its files, statistics, comparisons and tables. Needs no torch."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def read_results(*paths: str | Path) -> "pd.DataFrame":
    """A frame with a line for each row of results files, and a column for each key that one has.

    megatron/results/row.py says what the keys mean. A later row replaces an earlier one of the same
    measurement. Losses of windows, blocks and positions are lists in a cell. Raises UserError, with
    the file and the line, for what is no row.
    """
    import pandas as pd  # training and evaluation begin faster without it

    from megatron.results.files import read_rows

    return pd.DataFrame(read_rows(paths)).convert_dtypes()
