"""attention_gate against numbers of the authors' code (arXiv 2505.06708), in float64."""

import pytest
import torch
from torch import Tensor

from megatron.attention.encoded import AttentionInputs
from megatron.attention.terms import Terms
from megatron.hybrids import GatedAttention
from megatron.positions import build
from tests.architectures import architecture
from tests.positions.golden import Golden, load
from tests.positions.test_authors import close, merged

VARIANTS = ("elementwise", "headwise", "elementwise_gqa", "headwise_gqa")


def rows(golden: Golden, kind: str, key_heads: int) -> Tensor:
    """Our fused projection, or its gradient, from theirs: both stand by key head."""
    parts = [golden.numbers[f"{kind}.{letter}_proj.weight"] for letter in "qkv"]
    by_key_head = [part.unflatten(0, (key_heads, -1)) for part in parts]
    return torch.cat(by_key_head, dim=1).flatten(0, 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gate_gives_the_numbers_of_its_authors(variant):
    golden = load("gated_attention", variant)
    shape, grouped = golden.shape(), variant.endswith("_gqa")
    key_heads = 1 if grouped else shape.heads
    model = architecture(
        layers="gated_attention",
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=key_heads,
        seq_length=shape.train_length,
        norm="rmsnorm",
        layernorm_epsilon=1e-6,
        qk_norm=grouped,
        attention_gate="head" if variant.startswith("headwise") else "element",
        use_bias_in_attn_linear=False,
    )
    layer = GatedAttention(model).double()
    weights = {
        "query_key_value.weight": rows(golden, "param", key_heads),
        "dense.weight": torch.eye(shape.hidden),
    }
    norms = {"query_norm.weight": "q_norm.weight", "key_norm.weight": "k_norm.weight"}
    if grouped:
        weights |= {ours: golden.numbers[f"param.{theirs}"] for ours, theirs in norms.items()}
    layer.load_state_dict(weights)
    inputs = AttentionInputs(build("rotary", shape).double(), Terms())

    for length in golden.lengths:
        x = golden.inputs[f"{length}.x"].double().requires_grad_()
        out = layer(x, inputs)
        close(out, merged(golden.numbers[f"{length}.out"]), 1e-6)
        if length != "L16":  # the others have no gradients
            continue
        (out * merged(golden.inputs["L16.dout"])).sum().backward()
        assert x.grad is not None
        close(x.grad, golden.numbers["L16.grad_x"], 1e-6)
        gradient = layer.query_key_value.weight.grad
        assert gradient is not None
        close(gradient, rows(golden, "L16.grad", key_heads), 1e-6)
        for ours, theirs in norms.items():
            if grouped:
                gradient = layer.get_parameter(ours).grad
                assert gradient is not None
                close(gradient, golden.numbers[f"L16.grad.{theirs}"], 1e-6)
