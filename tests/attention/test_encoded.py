"""One call gives any attention any encoding: by formula, as the model's layers, in pieces."""

import math
from itertools import pairwise

import pytest
import torch

from megatron.attention import LayerCache, attention, encoded, prepare
from megatron.attention.encoded import attend_with_encoding
from megatron.errors import UserError
from megatron.model.gpt import LayerPlan, attention_inputs
from megatron.model.settings import AttentionSettings
from megatron.positions import REGISTRY, Shape, build, encodings
from tests.encodings import every_signature
from tests.support import NEEDED

HEADS, HEAD_DIM, LENGTH = 4, 8, 70
SHAPE = Shape(HEADS, HEAD_DIM, HEADS * HEAD_DIM, 32)
BEFORE = ("prepare", "on_embeddings", "on_embeddings_by_ids")


def encoding_called(name, **options):
    """In float64, with numbers far from their first values."""
    torch.manual_seed(0)
    encoding = build(name, SHAPE, **{**NEEDED.get(name, {}), **options}).double().eval()
    for parameter in encoding.parameters():
        torch.nn.init.uniform_(parameter, 0.1, 0.9)
    return encoding


def projected(encoding=None, key_heads=HEADS, length=LENGTH):
    """q, k, v and x of two texts, in float64."""
    torch.manual_seed(1)
    query_heads = HEADS if encoding is None else HEADS // encoding.heads_per_query
    sizes = [(query_heads, HEAD_DIM), (key_heads, HEAD_DIM), (key_heads, HEAD_DIM)]
    q, k, v = (torch.randn(2, heads, length, size).double() for heads, size in sizes)
    return q, k, v, torch.randn(2, length, SHAPE.hidden).double()


def turned(x, base=10000.0):
    """RoPE's formula: halves of the features are pairs."""
    frequency = base ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    angle = torch.arange(x.shape[2]).double()[:, None] * frequency
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def test_rotation_bias_groups_window_documents_and_sink_are_their_formulas():
    q, k, v, _ = projected(key_heads=2)
    sum_of_both = encoding_called("sum", parts=["rotary", "kerple_log"])
    kerple = sum_of_both.parts[1]
    segments = (torch.arange(LENGTH) > 40).long().expand(2, -1)
    sink = torch.linspace(-1, 1, HEADS).double()
    out = encoded(sum_of_both, q, k, v, window=20, segments=segments, sink=sink)

    wide_k, wide_v = (x.repeat_interleave(2, dim=1) for x in (turned(k), v))
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    p, a = (x.view(-1, 1, 1).double() for x in (kerple.p, kerple.a))
    scores = turned(q) @ wide_k.mT / math.sqrt(HEAD_DIM) - p * torch.log1p(
        a * distance.clamp(min=0)
    )
    hidden = (distance < 0) | (distance >= 20) | (segments[:, None, :, None] != segments[0])
    scores = scores.masked_fill(hidden, -math.inf)
    with_sink = torch.cat([scores, sink.view(-1, 1, 1).expand(2, -1, LENGTH, 1)], dim=-1)
    expected = with_sink.softmax(-1)[..., :-1] @ wide_v
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@every_signature
def test_a_layer_of_the_model_computes_the_same(name):
    encoding = encoding_called(name)
    q, k, v, x = projected(encoding)
    plan = LayerPlan(encoding, "", 40, None, "auto")
    new = slice(0, LENGTH)
    prepare([encoding], LENGTH)
    inputs = attention_inputs([plan], AttentionSettings(), new, LENGTH, None)[plan]
    wide_q = q.repeat_interleave(encoding.heads_per_query, dim=1)
    expected = attend_with_encoding(wide_q, k, v, x, inputs)
    result = encoded(encoding, q, k, v, x, window=40, applied=BEFORE)
    assert expected.std() > 0.01
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


@every_signature
def test_text_in_pieces_with_a_cache_is_the_text_in_one_call(name):
    encoding = encoding_called(name)
    q, k, v, x = projected(encoding)
    expected = encoded(encoding, q, k, v, x, window=30, applied=BEFORE[1:])
    cache, pieces = LayerCache(), []
    for start, end in pairwise([0, 1, 30, 37, LENGTH]):
        parts = [part[:, :, start:end] for part in (q, k, v)]
        options = {"window": 30, "cache": cache, "applied": BEFORE[1:]}
        pieces.append(encoded(encoding, *parts, x[:, start:end], **options))
        assert cache.length == end
    torch.testing.assert_close(torch.cat(pieces, dim=2), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["xpos", "rotary", "fox", "ssmax", "kerple_log"])
def test_documents_that_begin_again_are_the_documents_alone(name):
    encoding = encoding_called(name)
    q, k, v, x = projected()
    segments = (torch.arange(LENGTH) >= 25).long().expand(2, -1)
    together = encoded(encoding, q, k, v, x, segments=segments, restart=True)
    for document in (slice(0, 25), slice(25, LENGTH)):
        parts = [part[:, :, document] for part in (q, k, v)]
        alone = encoded(encoding, *parts, x[:, document])
        torch.testing.assert_close(together[:, :, document], alone, rtol=1e-5, atol=1e-5)


def test_autocast_rounds_neither_scores_nor_gates():
    encoding = build("fox", SHAPE)
    inputs = [part.float() for part in projected()]
    expected = encoded(encoding, *inputs)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(encoded(encoding, *inputs), expected, rtol=0, atol=0)


def test_gradients_reach_the_encoding_and_the_projections():
    encoding = build("kerple_log", SHAPE)
    q, k, v, _ = (part.float().requires_grad_() for part in projected())
    leaves = [q, k, v, *encoding.parameters()]
    direction = torch.randn(q.shape)
    result = torch.autograd.grad(encoded(encoding, q, k, v), leaves, direction)
    by_table = attention(q, k, v, encoding.distance_bias(LENGTH))
    for gradient, expected in zip(
        result, torch.autograd.grad(by_table, leaves, direction), strict=True
    ):
        assert expected.abs().max() > 0
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("fox", {"x": None}, "Fox: reads content; give x"),
        ("learned", {}, r"on_embeddings\(x\) once, .*applied=\['on_embeddings'\]"),
        ("rope_pp", {}, r"q is \[2, 4, 70, 8\], and must be \[2, 2, 70, 8\]"),
        ("alibi", {"keys": 9}, r"k is \[2, 4, 9, 8\], and must be \[2, 4, 70, 8\]"),
        ("alibi", {"values": 9}, r"v is \[2, 4, 9, 8\], and must be \[2, 4, 70, 8\]"),
        ("path", {"key_heads": 2}, "num_key_value_heads: 2"),
        ("alibi", {"segments": torch.zeros(2, 9)}, r"segments is \[2, 9\], and must be \[2, 70\]"),
        ("path", {"segments": torch.zeros(2, LENGTH)}, "cannot keep documents apart"),
        ("alibi", {"window": 0}, "window: 0 must be at least 1"),
    ],
)
def test_what_does_not_fit_is_one_message(name, changes, message):
    options = dict(changes)
    q, k, v, x = projected(key_heads=options.pop("key_heads", HEADS))
    k, v = k[:, :, : options.pop("keys", LENGTH)], v[:, :, : options.pop("values", LENGTH)]
    options = {"x": x} | options
    with pytest.raises(UserError, match=message):
        encoded(encoding_called(name), q, k, v, **options)


def test_positions_that_are_drawn_in_training_need_one_draw_for_all_layers():
    encoding = build("randomized", SHAPE).train()
    q, k, v, _ = projected()
    with pytest.raises(UserError, match=r"encoding.prepare\(length\) once per pass"):
        encoded(encoding, q, k, v)
    prepare([encoding, encoding], LENGTH)
    first, second = (encoded(encoding, q, k, v, applied=["prepare"]) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    plain = encoded(build("rotary", SHAPE), q, k, v)
    assert (first - plain).abs().max() > 1e-3
    torch.testing.assert_close(encoded(encoding.eval(), q, k, v), plain)


@pytest.mark.parametrize("name", ["kerple_log", "cope"])
def test_layers_share_an_encoding_unless_each_needs_its_own(name):
    layers = encodings(name, SHAPE, 3)
    assert len(layers) == 3
    assert len({*layers}) == (3 if REGISTRY[name].per_layer else 1)
