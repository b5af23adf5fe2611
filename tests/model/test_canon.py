"""Canon layers (arXiv 2512.17351) against torch's conv1d in float64, at each place of a layer."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.terms import Terms
from megatron.config import load
from megatron.model import GPT, Architecture, Cache, from_config
from megatron.model.block import AttentionInputs, Block
from megatron.model.documents import Documents
from megatron.positions import Shape, build
from tests.model import test_documents
from tests.model.test_cache import in_pieces
from tests.positions.test_authors import close

HEADS, KEY_HEADS, HEAD_DIM, WIDTH, EPSILON = 4, 2, 6, 20, 1e-5
HIDDEN = HEADS * HEAD_DIM
TAPS = 4
SIZES = ["num_layers=3", "hidden_size=32", "num_attention_heads=4", "seq_length=48"]


def block(canon: str) -> Block:
    """In float64, with norms that are not 1."""
    torch.manual_seed(0)
    model = Architecture(
        hidden_size=HIDDEN,
        num_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        intermediate_size=WIDTH,
        seq_length=64,
        norm="rmsnorm",
        activation="swiglu",
        qk_norm=True,
        attention_gate="head",
        use_bias_in_attn_linear=False,
        use_bias_in_mlp=False,
        canon=canon,
    )
    layer = Block(model).double()
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 2)
    return layer


def inputs(documents: Documents | None = None) -> AttentionInputs:
    position = build("none", Shape(HEADS, HEAD_DIM, HIDDEN, 64))
    return AttentionInputs(position, Terms(), documents=documents)


def by_formula(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """A layer of Llama with a gate for each head, and x + conv1d(x) where there are weights."""

    def norm(x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
        return x * scale * weights[f"{name}.weight"]

    def canon(x: Tensor, name: str) -> Tensor:
        weight = weights.get(f"{name}.weight")
        if weight is None:
            return x
        padded = F.pad(x.mT, (TAPS - 1, 0))
        return x + F.conv1d(padded, weight, groups=len(weight)).mT

    read = canon(norm(x, "input_layernorm"), "attention_convolution")
    fused = (read @ weights["attention.query_key_value.weight"].mT).unflatten(2, (KEY_HEADS, -1))
    group = HEADS // KEY_HEADS
    q, gate, k, v = fused.split([group * HEAD_DIM, group, HEAD_DIM, HEAD_DIM], dim=3)
    q = norm(q.unflatten(3, (group, HEAD_DIM)), "attention.query_norm").flatten(3)
    qkv = torch.cat([q, norm(k, "attention.key_norm"), v], dim=3)
    qkv = canon(qkv.flatten(2), "attention.convolution").unflatten(2, (KEY_HEADS, -1, HEAD_DIM))
    q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in qkv.split([group, 1, 1], dim=3))
    k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    out = out * gate.flatten(2)[..., None].sigmoid()
    x = x + out.flatten(2) @ weights["attention.dense.weight"].mT

    read = canon(norm(x, "post_attention_layernorm"), "mlp_convolution")
    widened = canon(read @ weights["mlp.dense_h_to_4h.weight"].mT, "mlp.convolution")
    activation, up = widened.chunk(2, dim=2)
    return x + (F.silu(activation) * up) @ weights["mlp.dense_4h_to_h.weight"].mT


@pytest.mark.parametrize(("places", "layers"), [("ABCD", 4), ("A", 1), ("B", 1), ("CD", 2)])
def test_a_layer_is_its_formula_and_has_its_gradients(places, layers):
    layer, x = block(places), torch.randn(2, 13, HIDDEN, dtype=torch.float64, requires_grad=True)
    weights = dict(layer.named_parameters())
    assert sum("convolution" in name for name in weights) == layers
    result, expected = layer(x, inputs()), by_formula(weights, x)
    close(result, expected, 1e-12)
    weight = torch.randn_like(expected)
    mine = torch.autograd.grad((result * weight).sum(), [x, *weights.values()])
    theirs = torch.autograd.grad((expected * weight).sum(), [x, *weights.values()])
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def test_a_document_reads_what_it_reads_alone_and_has_its_gradients():
    layer, ids = block("ABCD"), test_documents.window()
    documents = Documents.of(ids, test_documents.END)
    x = torch.randn(*ids.shape, HIDDEN, dtype=torch.float64, requires_grad=True)
    weights = dict(layer.named_parameters())
    rows = []
    for row, numbers in zip(x, documents.numbers, strict=True):
        lengths = numbers.unique_consecutive(return_counts=True)[1].tolist()
        rows.append(torch.cat([by_formula(weights, part[None]) for part in row.split(lengths)], 1))
    expected, result = torch.cat(rows), layer(x, inputs(documents))
    close(result, expected, 1e-12)
    assert (layer(x, inputs()) - expected).abs().max() > 1e-2
    weight = torch.randn_like(expected)
    mine = torch.autograd.grad((result * weight).sum(), [x, *weights.values()])
    theirs = torch.autograd.grad((expected * weight).sum(), [x, *weights.values()])
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def model(*settings: str) -> GPT:
    gpt = from_config(load([], [*SIZES, "init_method_std=0.15", *settings]), vocab=50).eval()
    gpt.end_of_document = test_documents.END
    return gpt


@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [
        ("canon=ABCD", "layers=[gated_delta, attention, kda]", "pos_emb=fox"),
        ("canon=ACD", "layers=[mla, attention]", "qk_rope_head_dim=8", "pos_emb=rotary"),
        ("canon=ABCD", "parallel_residual=true", "shared_norm=true", "norm_placement=both"),
        ("canon=BC", "pos_emb=rope_pp", "heads_per_query=2", "clip_qkv=1"),
    ],
    ids=" ".join,
)
def test_decoding_in_pieces_is_the_whole_pass_also_of_documents_and_chosen_texts(settings):
    ids = test_documents.window()
    plain, gpt = model(*settings), model(*settings, "reset_attention_mask=true")
    expected = test_documents.one_by_one(plain, ids)
    torch.testing.assert_close(gpt(ids), expected, rtol=0, atol=2e-5)
    pieces = [1, 1, 8, 1, 1, 28, 2, 38, 10]
    torch.testing.assert_close(in_pieces(gpt, ids, pieces), expected, rtol=0, atol=1e-4)
    whole, cache, chosen = plain(ids), Cache(), torch.tensor([1, 1, 0])
    assert (whole - expected).abs().max() > 0.1
    plain(ids[:, :70], cache=cache)
    cache.select(chosen)
    rest = plain(ids[chosen, 70:], cache=cache)
    torch.testing.assert_close(rest, whole[chosen, 70:], rtol=0, atol=1e-4)


def test_first_weights_are_those_of_torch_and_the_key_alone_brings_them():
    gpt = from_config(load([], [*SIZES, "hidden_size=256", "canon=ABCD"]), vocab=50)
    plain = from_config(load([], [*SIZES, "hidden_size=256"]), vocab=50).state_dict()
    convolutions = gpt.state_dict().keys() - plain.keys()
    assert len(convolutions) == 3 * 4
    for name in convolutions:
        weight = gpt.state_dict()[name]
        assert weight.abs().max() <= 0.5
        assert weight.std().item() == pytest.approx(0.5 / math.sqrt(3), rel=0.05)
    hashes = {load([], [*SIZES, f"canon={places}"]).hash for places in ("null", "A", "B", "ABCD")}
    assert len(hashes) == 4
    assert load([], SIZES).hash in hashes
