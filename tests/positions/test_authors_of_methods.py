"""Methods for longer texts against numbers of their authors' code: output and gradients.

As in test_authors.py, GOLDEN_ENCODINGS names another folder with other sizes.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.attention.encoded import Text
from megatron.attention.terms import Terms
from megatron.evaluation.methods import Method, method_of
from megatron.positions import build
from tests.positions.golden import Golden, load
from tests.positions.test_authors import close

TRAIN_LENGTH = 512  # no near window of any file is longer


def rerope(golden: Golden, length: int) -> Method:
    numbers = load("rerope", "rerope").numbers
    window = int(numbers["param.window"].item())
    if golden.variant.startswith("rerope"):
        return method_of(f"rerope,window={window}", TRAIN_LENGTH)
    factor = load("rerope", "leaky").param("scaling_factor")
    return method_of(f"leaky_rerope,window={window},factor={factor}", TRAIN_LENGTH)


def self_extend(golden: Golden, length: int) -> Method:
    group, window = int(golden.param("group_size_1")), int(golden.param("group_size_2"))
    return method_of(f"self_extend,window={window},group={group}", TRAIN_LENGTH)


def lm_infinite(golden: Golden, length: int) -> Method:
    window, sinks = int(golden.param("local_branch")), int(golden.param("global_branch"))
    if golden.variant == "ceiling_only":  # every key is visible: what ReRoPE is
        return method_of(f"rerope,window={window}", TRAIN_LENGTH)
    limit = window
    if golden.variant == "lambda_limit":
        # Theirs depends on the length of the text, so that longer texts change what came before.
        limit = max(window, min(int(golden.param("limit_distance")), length - 1))
    return Method("lm_infinite", {"window": window, "sinks": sinks, "limit": limit})


def dual_chunk(golden: Golden, length: int) -> Method:
    chunk, limit = int(golden.param("chunk_len")), int(golden.param("chunk_size"))
    options = f"chunk={chunk},limit={limit},attention_factor={golden.param('mscale')}"
    return method_of(f"dual_chunk,{options}", TRAIN_LENGTH)


def string(golden: Golden, length: int) -> Method:
    window, local = int(golden.param("shifted_offset")), int(golden.param("small_local_value"))
    options = f"window={window},local={local},attention_factor={golden.param('attention_factor')}"
    return method_of(f"string,{options}", TRAIN_LENGTH)


def streaming_llm(golden: Golden, length: int) -> Method:
    recent, sinks = int(golden.param("recent_size")), int(golden.param("start_size"))
    query_key = (
        1 if golden.variant == "trim_after" else 0
    )  # the query's key is not counted in theirs
    return Method("sinks", {"window": recent + query_key, "sinks": sinks})


def training_length(golden: Golden) -> float | None:
    """Where their log-n scale begins; None: it is off."""
    if golden.variant in ("rerope_logn", "leaky_logn"):
        return load("rerope", "rerope").param("training_length")
    if golden.variant == "logn":
        return golden.param("scale_base")
    return None


CASES: dict[str, tuple[Callable[[Golden, int], Method], tuple[str, ...]]] = {
    "rerope": (rerope, ("rerope", "rerope_logn", "leaky", "leaky_logn")),
    "self_extend": (self_extend, ("even", "uneven", "logn")),
    "dual_chunk": (dual_chunk, ("plain", "local", "mscale")),
    "string": (string, ("plain", "code")),
    "lm_infinite": (lm_infinite, ("lambda", "lambda_limit", "ceiling_only")),
    "streaming_llm": (streaming_llm, ("trim_after", "evict_before")),
}
ALL = [(name, variant) for name, (_, variants) in CASES.items() for variant in variants]


def text_of(golden: Golden, length: str) -> Text:
    q, k, v = (golden.inputs[f"{length}.{key}"].double() for key in ("q", "k", "v"))
    shape = golden.shape(TRAIN_LENGTH)
    position = build("rotary", shape).double()
    scale = None
    trained = training_length(golden)
    if trained is not None:
        visible = torch.arange(1, q.shape[2] + 1, dtype=torch.float64)
        scale = (visible.log() / math.log(trained)).clamp(min=1)
    return Text(position, q.requires_grad_(), k.requires_grad_(), v, Terms(), scale)


def scores_of(method: Method, text: Text) -> Tensor:
    """What enters the softmax, before the mask: [batch, heads, length, length]."""
    index = torch.arange(text.q.shape[2])
    rows = slice(0, len(index))
    near_q, near_k = text.turned(rows, index, index)
    far_q, far_k = text.turned(rows, *method.far(index, index))
    is_near = index[:, None] - index < method.options["window"]
    scores = torch.where(is_near, near_q @ near_k.mT, far_q @ far_k.mT)
    return scores / text.q.shape[-1] ** 0.5


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_a_method_gives_the_numbers_of_its_authors(name, variant):
    golden, (build_method, _) = load(name, variant), CASES[name]
    assert golden.lengths
    for length in golden.lengths:
        expected = golden.of_length(length)
        text = text_of(golden, length)
        method = build_method(golden, int(length[1:]))
        out = method.attend(text)
        close(out, expected["out"], 1e-6)
        if "grad_q" in expected:
            (out * golden.inputs[f"{length}.dout"]).sum().backward()
            close(text.q.grad, expected["grad_q"], 1e-6)
            close(text.k.grad, expected["grad_k"], 1e-6)
