"""Hold an opened model against the program that it comes from, where that can run here."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.interop import huggingface
from megatron.model import GPT
from megatron.parallel.machine import in_bytes, total_memory

LENGTH = 256  # tokens of a text, at most
TEXTS = 2
TOLERANCE = 1e-4  # of the largest logit, at least 1: two programs sum in other orders
BYTES = 16  # of a weight while both models are in memory

Compared = dict[str, Any]
"""`largest_difference` of the logits and what it is beside, or the `reason` why there is none."""


def compared(kind: str, folder: Path, model: GPT) -> Compared:
    """What the other side says to random tokens, beside what `model` says.

    UserError where they differ by more than TOLERANCE.
    """
    return OTHER_SIDES[kind](folder, model)


def _with_transformers(folder: Path, model: GPT) -> Compared:
    count = sum(parameter.numel() for parameter in model.parameters())
    needed = BYTES * count
    if needed > total_memory():
        memory = in_bytes(total_memory())
        return {"reason": f"both models need {in_bytes(needed)}, and there are {memory} of memory"}
    ids = random_ids(model)
    expected, program = _logits_of_transformers(folder, ids)
    with torch.no_grad():
        logits = model(ids)
    difference = (logits - expected).abs().max().item()
    largest = expected.abs().max().item()
    # `not <=`: nan is no agreement
    if not difference <= TOLERANCE * max(1.0, largest):
        raise UserError(
            f"{folder}: our logits differ from those of {program} by {difference:.3g}, where the"
            f" largest is {largest:.3g} - nothing was written; please report this model"
        )
    return {
        "with": program,
        "tokens": ids.numel(),
        "largest_difference": difference,
        "largest_logit": largest,
    }


def _logits_of_transformers(folder: Path, ids: Tensor) -> tuple[Tensor, str]:
    """[batch, length, vocab] of transformers' own class, and its name; no code of the folder.

    UserError where that class does not take the folder.
    """
    import transformers  # only here: importing it takes seconds

    family = huggingface.read_settings(folder)[0]
    loader = getattr(transformers, family.architecture)
    transformers.logging.set_verbosity_error()
    program = f"transformers {transformers.__version__} {family.architecture}"
    try:
        # It draws bars on stderr, and writes them even where they are switched off.
        with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
            theirs = loader.from_pretrained(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                attn_implementation="eager",  # config.json may ask for one that is not installed
            )
    except Exception as fault:  # it raises many kinds, for keys that change nothing here too
        reason = " ".join(str(fault).split())
        raise UserError(
            f"{folder}: {program} cannot open it ({type(fault).__name__}: {reason:.200}) - correct"
            " its config.json, or copy the folder again"
        ) from None
    with torch.no_grad():
        logits = theirs.eval()(ids).logits
    return logits, program


def random_ids(model: GPT) -> Tensor:
    """Texts that differ and are the same each time: [TEXTS, at most LENGTH] int64."""
    draw = torch.Generator().manual_seed(0)
    length = min(LENGTH, model.train_length)
    return torch.randint(model.vocab, (TEXTS, length), generator=draw)


def _same_program(folder: Path, model: GPT) -> Compared:
    return {"reason": "it is a checkpoint of this program, whose weights are copied"}


def _compared_before(folder: Path, model: GPT) -> Compared:
    return {"reason": "it was compared when it was exported, and code in a folder is not run"}


def _no_program(folder: Path, model: GPT) -> Compared:
    return {"reason": "GPT-NeoX and its forks do not run here"}


OTHER_SIDES: dict[str, Callable[[Path, GPT], Compared]] = {
    "huggingface": _with_transformers,
    "ours": _same_program,
    "exported": _compared_before,
    "gpt-neox": _no_program,
}
"""How each kind of checkpoint is compared, by its name in `open.KINDS`."""
