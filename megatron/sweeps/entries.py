"""Whether the rows of an entry are those of its sweep: its cells, its lengths, its texts."""

from collections import Counter
from collections.abc import Sequence

from megatron.results.row import Row, identity
from megatron.sweeps.cells import Sweep

PLACE = ("corpus", "part", "split", "protocol", "length", "windows")


def faults_of_entry(sweep: Sweep, rows: Sequence[Row], atlas: Sequence[Row]) -> list[str]:
    """A line for each cell with other lengths than its sweep's, and for each row of another text.

    rows: of the entry; atlas: of the encodings that it is compared with
    """
    faults = []
    for cell in sweep.cells:
        lengths = cell.config.evaluation.eval_lengths
        expected: Counter[int] = Counter()
        for call in cell.evaluations:
            expected.update(call.options.get("lengths", lengths))
        ours = [row for row in rows if row["config_hash"] == cell.config.hash]
        if Counter(row["length"] for row in ours) != expected:
            faults.append(
                f"{cell.name}: {len(ours)} rows of configuration {cell.config.hash}, not"
                f" {expected.total()} - run the sweep with this entry"
            )
    texts = {identity(row, PLACE): row.get("text") for row in atlas}
    for row in rows:
        place = identity(row, PLACE)
        if row.get("text") != texts.get(place, row.get("text")):
            words = ", ".join(map(str, place))
            faults.append(f"{words}: another text - prepare the data by `make results PART=atlas`")
    return faults
