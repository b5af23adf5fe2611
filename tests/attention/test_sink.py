"""A sink, one more score in the denominator, against its definition and transformers' gpt-oss."""

import importlib.util
import math

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, eager_attention_forward

from megatron.attention import attend
from megatron.attention.eager import all_scores
from megatron.attention.terms import Terms
from megatron.evaluation.methods import MeasuredAttention
from tests.attention.random_cases import Case, inputs_of
from tests.model.test_cache import in_pieces, model

HAS_TRITON = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()
BACKENDS = ["eager", "sdpa", *(["triton"] if HAS_TRITON else [])]
CASES = (
    {"bias": None, "queries": 1},
    {"window": 11, "queries": 33, "weight": True},
    {"documents": 3, "content": 1},
)


def by_definition(q, k, v, terms):
    scores = all_scores(q, k, terms)
    column = terms.sink[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1] @ v, None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_backend_divides_by_the_sum_with_the_sink(backend):
    for options in CASES:
        sizes = {"batch": 1, "heads": 2, "queries": 70, "keys": 70}  # several tiles each way
        inputs = inputs_of(Case(**(sizes | options), lse=False))
        results = []
        for double in (False, True):
            tensors = {**inputs.tensors, "sink": torch.tensor([0.7, 2.3])}
            leaves = {key: x.double() if double else x.clone() for key, x in tensors.items()}
            sink = leaves.pop("sink").requires_grad_()
            inputs.options["sink"] = sink

            def ours(q, k, v, terms):
                return attend(q, k, v, terms, backend, self_check=False), None

            leaves = {key: x.requires_grad_() for key, x in leaves.items()}
            (out,) = inputs.attend(by_definition if double else ours, leaves)
            gradients = torch.autograd.grad(out, [sink, *leaves.values()], inputs.dout.to(out))
            results.append((out, *gradients))
        for value, expected in zip(*results, strict=True):
            torch.testing.assert_close(value.double(), expected.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [None, 8])
def test_values_and_gradients_are_those_of_gpt_oss(window):
    config = GptOssConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=window,
    )  # fmt: skip
    layer = GptOssAttention(config, 0)
    layer.sinks.data = torch.tensor([-1.0, 0.0, 0.5, 2.0])
    q, k, v = (torch.randn(2, heads, 30, 8).requires_grad_() for heads in (4, 2, 2))
    index = torch.arange(30)
    back = index[:, None] - index
    hidden = (back < 0) | (back >= (window or 30))
    mask = torch.zeros(30, 30).masked_fill(hidden, -math.inf)[None, None]
    theirs, _ = eager_attention_forward(layer, q, k, v, mask, scaling=8**-0.5)
    sink = layer.sinks.detach().clone().requires_grad_()
    whole_k, whole_v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    ours = attend(q, whole_k, whole_v, Terms(window=window, sink=sink), "sdpa")
    dout = torch.randn_like(ours)
    expected = torch.autograd.grad(theirs.transpose(1, 2), [q, k, v, layer.sinks], dout)
    gradients = torch.autograd.grad(ours, [q, k, v, sink], dout)
    torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=0, atol=2e-6)
    for gradient, theirs_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, theirs_gradient, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_model_with_sinks_decodes_in_pieces_and_under_methods():
    learnable, windows = "softmax_type=learnable", "window_layers=[7, null]"
    gpt, ids = model("alibi", learnable, windows), torch.randint(50, (2, 40))
    plain = gpt(ids)  # the learned score is 0 at first
    torch.testing.assert_close(plain, model("alibi", "softmax_type=off-by-one", windows)(ids))
    for layer in gpt.layers:
        layer.attention.softmax_offset.copy_(torch.tensor([3.0, -1.0, 0.0, 1.0]))
    whole = gpt(ids)
    assert (whole - plain).abs().max() > 1e-3
    torch.testing.assert_close(in_pieces(gpt, ids, [13, 1, 26]), whole, rtol=0, atol=1e-4)
    gpt = model("rotary", learnable)
    whole = gpt(ids)
    gpt.use_attention(MeasuredAttention(method="rerope,window=40"))  # no key is far
    torch.testing.assert_close(gpt(ids), whole, rtol=0, atol=1e-5)
