"""Results of an evaluation at Weights & Biases, in the run of the training."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoints.read import read_meta
from megatron.config.schema import Logging
from megatron.errors import in_words
from megatron.results.row import Row
from megatron.training.records import InBackground, Spared
from megatron.training.weights_and_biases import NAME, PATIENCE, Attachment, Wandb, new_id

logger = logging.getLogger(__name__)


def send_results(results: Mapping[Path, Sequence[Row]], settings: Logging | None) -> None:
    """Send rows, their files and the plots beside them, where use_wandb and wandb_artifacts say so.

    results: rows by their file, of one checkpoint; settings: the section `logging`;
    None for that of the training
    The rows become a table without their pieces. What fails is a warning.
    """
    if settings is not None and not _wanted(settings):
        return
    try:
        first = next(rows[0] for rows in results.values() if rows)
        path = Path(first.get("checkpoint", ""))
        trained, record = read_meta(path)
    except Exception as fault:  # the checkpoint was moved or removed meanwhile
        if settings is not None:
            logger.warning(f"{NAME}: nothing is sent ({in_words(fault)})")
        return
    settings = settings or trained.logging
    if not _wanted(settings):
        return
    run_id = record.get("wandb")
    pictures = {}
    for file in results:
        for picture in sorted(file.parent.glob(f"{file.stem}*.png")):
            pictures[picture.stem] = picture
    rows = [_numbers(row) for own in results.values() for row in own]
    attachment = Attachment(
        f"evaluation-{run_id or path.parent.name}-step{record['step']}",
        "evaluation",
        record["step"],
        [*results, *pictures.values()],
        {"evaluation": rows},
        pictures,
    )
    make = partial(
        Wandb,
        settings,
        {},
        path.parent,
        run_id or new_id(),
        is_continued=run_id is not None,
        attached=lambda: attachment,
    )
    Spared(InBackground(NAME, make, PATIENCE), NAME).close()


def _wanted(settings: Logging) -> bool:
    return settings.use_wandb and settings.wandb_artifacts


def _numbers(row: Row) -> dict[str, Any]:
    """A row without lists and mappings, which no table shows."""
    return {key: value for key, value in row.items() if not isinstance(value, list | dict)}
