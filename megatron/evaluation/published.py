"""What KERPLE and MEP measure with `train-iters: 0`: their own windows of both held-out parts."""

import logging
from collections.abc import Iterator
from dataclasses import replace

from megatron.checkpoints.saved import find, step_of
from megatron.config import Config
from megatron.errors import UserError
from megatron.evaluation.opened import checkpoint_folder
from megatron.evaluation.run import Evaluation, Options, evaluate

PARTS = ("valid", "test")
NEAREST_DTYPE = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp32"}

logger = logging.getLogger(__name__)


def evaluate_as_published(config: Config) -> Iterator[Evaluation]:
    """Measure validation and test text by protocol `paper`, with the numbers of a training file.

    The length is seq_length_val. A part has eval_iters batches. Those of the validation begin where
    the training's next validation would, as the forks have it; those of the test with the first.
    UserError where there is no checkpoint, or nothing to measure.
    """
    training = config.training
    if not training.eval_iters:
        raise UserError("eval_iters: 0 batches are nothing to measure - give at least 1")
    batch = training.train_micro_batch_size_per_gpu * training.gradient_accumulation_steps
    windows = training.eval_iters * batch
    length = config.data.seq_length_val
    checkpoint = find(checkpoint_folder(config, None))
    dtype = NEAREST_DTYPE[config.precision.dtype]
    logger.info(
        "train_iters: 0 - %s is measured as KERPLE and MEP do it: protocol paper, %d windows of %d"
        " tokens of each part, model in %s",
        *(checkpoint, windows, length, dtype),
    )
    starts = {"valid": _validations(config, step_of(checkpoint)) * windows, "test": 0}
    for part in PARTS:
        section = config.evaluation.model_copy(update={"eval_part": part})
        options = Options(
            checkpoint=str(checkpoint),
            lengths=[length],
            protocols=["paper"],
            dtype=dtype,
            windows=windows,
            start=starts[part],
        )
        yield evaluate(replace(config, evaluation=section), options)


def _validations(config: Config, step: int | None) -> int:
    """How many validations the forks count up to a step."""
    training = config.training
    if not training.eval_interval or step is None:
        return 0
    return step * training.gradient_accumulation_steps // training.eval_interval
