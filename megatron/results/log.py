"""The log of a training, metrics.jsonl: read whole, without what a kill cut off."""

from pathlib import Path
from typing import Required, TypedDict, cast

from megatron.files import read_small
from megatron.results.check import fault_of
from megatron.strict_json import parse

LARGEST = 1 << 30  # bytes of a log: a record of every step of a million has 250 MB


class Record(TypedDict, total=False):
    """One line, of a training step or a validation. Other keys may follow."""

    step: Required[int]
    kind: str  # train or valid
    loss: float | None
    seconds_per_step: float | None
    tokens_per_second: float | None
    model_tflops_per_second: float | None
    mfu: float | None
    peak_memory_gib: float | None
    position: dict[str, list[float]]  # learned numbers of the encoding, by their names


def training_log(path: Path) -> list[Record]:
    """The records of a file.

    OSError where it cannot be read; ValueError, with the number of the line, where it is damaged.
    A last line without its end was cut off by a kill: it is left out.
    """
    *lines, _ = read_small(path, LARGEST).split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = parse(line)
        except ValueError as fault:
            raise ValueError(f"line {number}: {fault}") from None
        if not isinstance(record, dict) or "step" not in record:
            raise ValueError(f"line {number}: it is no record of a step")
        if fault := fault_of(record, Record):
            raise ValueError(f"line {number}: {fault}")
        records.append(cast("Record", record))
    return records
