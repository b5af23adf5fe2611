"""RoPE++: heads of its authors' code, and whole layers with equal heads and with equal cache."""

import math

import pytest
from torch import nn

from megatron.attention.encoded import AttentionInputs
from megatron.attention.terms import Terms
from megatron.config import load as load_config
from megatron.errors import UserError
from megatron.interop.families import fused, parted
from megatron.model.block import SelfAttention
from megatron.positions import Shape, build
from tests.architectures import architecture
from tests.positions.golden import load
from tests.positions.test_authors import (
    Case,
    check_gradients,
    check_values,
    close,
    lower_triangle,
    output_of,
)

YARN = {"high_freq_factor": 32.0, "low_freq_factor": 1.0, "original_length": 4096}
CASE = Case("rope_pp")
SHAPE = ["num_layers=1", "hidden_size=24", "num_attention_heads=6", "seq_length=16"]


@pytest.mark.parametrize("variant", ["core", "core_yarn"])
def test_real_and_imaginary_heads_have_the_scores_of_the_authors(variant):
    golden = load("rope_pp", variant)
    options = {}
    if variant == "core_yarn":  # whose ramp is that of Llama 3.1
        factor = golden.param("factor")
        options = {**YARN, "scaling": "llama3", "factor": factor}
        options["attention_factor"] = 0.1 * math.log(factor) + 1
    position = build("rope_pp", Shape(6, 8, 24, 512), **options).double()
    for length in golden.lengths:
        expected = golden.of_length(length)
        q, k, v = (golden.inputs[f"{length}.{key}"].double().requires_grad_() for key in "qkv")
        both_q, turned_k = position.on_queries_keys(q.repeat_interleave(2, 1), k)
        both_k, both_v = (x.repeat_interleave(2, 1) for x in (turned_k, v))
        scores = both_q @ both_k.mT / 8**0.5
        out = output_of(scores, both_v)
        check_values(lower_triangle(scores), scores, out, expected, CASE)
        if "grad_q" in expected:
            (out * expected["dout"]).sum().backward()
            check_gradients(position, {"grad_q": q, "grad_k": k, "grad_v": v}, expected, CASE)


@pytest.mark.parametrize("variant", ["ec", "ec_gqa", "eh", "eh_gqa"])
def test_a_layer_is_that_of_the_authors(variant):
    """Equal heads have half of the queries and keys, equal cache has twice as many heads."""
    golden = load("rope_pp", variant)
    projections = ("q_proj", "k_proj", "v_proj")
    q, k, v = (golden.numbers[f"param.{name}.weight"].double() for name in projections)
    out = golden.numbers["param.o_proj.weight"].double()
    hidden, width = out.shape
    heads = width // 8
    model = architecture(
        pos_emb="rope_pp",
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=len(k) // 8,
        heads_per_query=2,
        head_dim=8,
        seq_length=16,
        use_bias_in_attn_linear=False,
    )
    layer = SelfAttention(model).double()
    layer.query_key_value.weight = nn.Parameter(fused([q, k, v], model))
    layer.dense.weight = nn.Parameter(out)
    position = build("rope_pp", Shape(heads, 8, hidden, 16)).double()
    for length in golden.lengths:
        expected = golden.of_length(length)
        x = golden.inputs[f"{length}.x"].double().requires_grad_()
        out_of_layer = layer(x, AttentionInputs(position, Terms(), "eager"))
        close(out_of_layer, expected["layer_out"], 2e-5)
        if "grad_x" not in expected:
            continue
        layer.zero_grad()
        dout = load("rope_pp", "layer").numbers[f"{length}.dout"]
        (out_of_layer * dout).sum().backward()
        close(x.grad, expected["grad_x"], 1e-4)
        gradients = parted(layer.query_key_value.weight.grad, model)
        named = zip((*projections, "o_proj"), (*gradients, layer.dense.weight.grad), strict=True)
        for name, gradient in named:
            close(gradient, expected[f"grad.{name}.weight"], 1e-4)


def test_an_encoding_and_a_model_agree_on_the_heads_of_a_query():
    for words, message in (
        (["pos_emb=rope_pp"], "heads_per_query: 1 does not fit RopePP; set it to 2"),
        (["pos_emb=rotary", "heads_per_query=2"], "2 does not fit Rotary; set it to 1"),
        (["pos_emb_layers=[rope_pp, none]", "heads_per_query=2"], "2 does not fit NoPosition"),
        (["pos_emb=rope_pp", "heads_per_query=4"], "4 does not divide num_attention_heads = 6"),
        (
            ["pos_emb=rope_pp", "heads_per_query=2", "num_key_value_heads=2"],
            "num_key_value_heads: 2 do not divide num_attention_heads / heads_per_query = 3",
        ),
    ):
        with pytest.raises(UserError, match=message):
            load_config([], [*SHAPE, *words])
    parts = "pos_emb_args={parts: [rope_pp, kerple_log]}"
    load_config([], [*SHAPE, "pos_emb=sum", parts, "heads_per_query=2"])
