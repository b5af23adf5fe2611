"""How a task of lm-evaluation-harness wants its texts to be continued: its `generation_kwargs`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from megatron.errors import UserError
from megatron.generation.sampling import Sampling
from megatron.model.methods import MOST

USUAL_NEW_TOKENS = 256  # where a task names no number, as the harness has it
NUMBERS = {"temperature": float, "top_k": int, "top_p": float, "repetition_penalty": float}
HANDLED = {"do_sample", "until", "max_gen_toks", *NUMBERS}
WHERE = "--tasks: generation_kwargs of a task"


@dataclass(frozen=True)
class Wanted:
    """sampling; most: new tokens at most; stops: strings before which a text ends."""

    sampling: Sampling
    most: int
    stops: list[str]


def wanted_by(settings: Mapping[str, Any]) -> Wanted:
    """What generation_kwargs say; UserError for what they ask for in vain."""
    try:
        known: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), USUAL_NEW_TOKENS))
        numbers = {
            name: kind(known[name]) for name, kind in NUMBERS.items() if known.get(name) is not None
        }
    except (TypeError, ValueError, OverflowError) as fault:
        raise UserError(f"{WHERE} hold what is no number ({fault}) - correct its file") from None
    unknown = sorted(set(known) - HANDLED)
    if unknown:
        raise UserError(
            f"{WHERE} name {', '.join(unknown)}, which is not offered - leave it out;"
            f" known are {', '.join(sorted(HANDLED))}"
        )
    sample, most = known["do_sample"], known["max_gen_toks"]
    if not isinstance(sample, bool):
        raise UserError(f"{WHERE}: do_sample {sample!r} - give true or false")
    if not 1 <= most <= MOST:
        raise UserError(f"{WHERE}: max_gen_toks {most} - give a whole number of 1 to {MOST}")
    stops = [stop for stop in known["until"] if stop not in ("", None)]
    if not all(isinstance(stop, str) for stop in stops):
        raise UserError(f"{WHERE}: until {stops} - give strings, in quotes")
    return Wanted(_sampling(numbers, sample=sample), most, stops)


def _sampling(numbers: Mapping[str, Any], *, sample: bool) -> Sampling:
    """How tokens are chosen; UserError for a number beyond its bounds."""
    penalty = numbers.get("repetition_penalty", 1.0)
    if sample:
        temperature = numbers.get("temperature", 1.0)
        sampling = Sampling(temperature, numbers.get("top_k"), numbers.get("top_p"), penalty)
    else:
        sampling = Sampling(temperature=0.0, repetition_penalty=penalty)
    try:
        sampling.check()
    except UserError as fault:
        raise UserError(f"{WHERE}: {fault}") from None
    return sampling
