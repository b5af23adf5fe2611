"""Each check of anybody's encoding passes what is right and finds its planted mistake."""

import math
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcons_alibi
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as apply_llamas

from megatron.conformance import anybody, check
from megatron.conformance.anybody import examine_anything
from megatron.conformance.subject import FAILS, HOLDS, NOT_APPLICABLE, Subject
from megatron.errors import UserError
from megatron.positions import Shape, build

SHAPE = {"heads": 4, "head_dim": 32, "length": 4096}
SHORT = SHAPE | {"length": 1024}
"""Enough for mistakes that show at any length."""


def findings(function, name=None, shape=SHAPE, **options):
    """The findings by the function that made them."""
    sizes = {"heads": shape.get("heads", 4), "head_dim": shape.get("head_dim", 64)}
    like = Subject(name, options, **sizes) if name else None
    listed = examine_anything(function, like, **shape)
    return dict(zip(anybody.CHECKS, listed, strict=True))


def failing(function, *like, **options):
    by_check = findings(function, *like, **options)
    return {trial for trial, finding in by_check.items() if finding.verdict == FAILS}


def finding_of(trial, function, **options):
    """The finding of one check; the others take seconds."""
    with mock.patch.dict(anybody.CHECKS, {trial: anybody.CHECKS[trial]}, clear=True):
        return findings(function, **options)[trial]


def turned(x, angle):
    """Pairs of halves, each turned by its angle: the formula of RoFormer."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def angles(positions, head_dim, dtype=torch.float32):
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return (positions[..., None].to(dtype) * frequencies.to(dtype))[:, None].float()


def halves(q, k, positions, dtype=torch.float32):
    angle = angles(positions, q.shape[-1], dtype)
    return turned(q, angle), turned(k, angle)


def neighbours(q, k, positions):
    def in_halves(x):
        return torch.cat([x[..., ::2], x[..., 1::2]], -1)

    q, k = halves(in_halves(q), in_halves(k), positions)
    return tuple(torch.stack(x.chunk(2, dim=-1), -1).flatten(-2) for x in (q, k))


def llama(q, k, positions):
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=128, num_attention_heads=4))
    return apply_llamas(q, k, *rotary(q, positions))


def ours(q, k, positions):
    encoding = build("rotary", Shape(4, 32, 128, 64))
    return encoding.on_queries_keys_at(q, k, positions[:, None], positions[:, None])


@pytest.mark.parametrize("rotation", [halves, llama, ours])
def test_right_rotations_pass_and_their_pairs_are_named(rotation):
    by_check = findings(rotation, "rotary", shape=SHORT)
    assert {finding.verdict for finding in by_check.values()} == {HOLDS, NOT_APPLICABLE}
    assert by_check[anybody.turns_pairs].detail == "16 pairs, halves: 0 turns with 16"


def test_the_other_pairing_differs_from_a_named_encoding_and_in_nothing_else():
    by_check = findings(neighbours, "rotary", interleaved=True)
    assert FAILS not in {finding.verdict for finding in by_check.values()}
    assert by_check[anybody.turns_pairs].detail == "16 pairs, neighbours: 0 turns with 1"
    assert failing(neighbours, "rotary", shape=SHORT) == {anybody.agrees_with_ours}


def bfloat16_positions(q, k, positions):
    return halves(q, k, positions.bfloat16())


def rounded_in_bfloat16(q, k, positions):
    return halves(q, k, positions, q.dtype)


def one_late_in_a_cache(q, k, positions):
    return halves(q, k, positions + (positions[:, :1] > 0))


def counts_padding(q, k, positions):
    return halves(q, k, positions + positions.eq(0).sum(dim=1, keepdim=True) * (positions > 4))


def never_restarts(q, k, positions):
    restarts = positions.diff(dim=1, prepend=positions[:, :1]).lt(0).cumsum(dim=1)
    return halves(q, k, positions * (1 - restarts))


def by_the_length(q, k, positions):
    return halves(q, k, positions / max(1.0, float(positions.max()) / 2048))


def by_the_square(q, k, positions):
    return halves(q, k, positions**2 / 100)


@pytest.mark.parametrize(
    ("mistake", "fails"),
    [
        (bfloat16_positions, {anybody.far_in_float32}),
        (rounded_in_bfloat16, {anybody.far_in_bfloat16}),
        (one_late_in_a_cache, {anybody.pieces}),
        (counts_padding, {anybody.padding_before, anybody.padding_behind}),
        (never_restarts, {anybody.packed}),
        (by_the_length, {anybody.later_tokens}),
        (by_the_square, {anybody.shifts}),
    ],
)
def test_a_mistake_fails_where_it_shows(mistake, fails):
    if mistake is rounded_in_bfloat16:
        assert failing(mistake) == fails
    for trial in fails:
        assert finding_of(trial, mistake).verdict == FAILS, trial


def test_turning_backwards_is_named():
    def backwards(q, k, positions):
        return halves(q, k, -positions)

    probe = anybody.probe_of(backwards, 256, head_dim=32)
    assert anybody.turns_pairs(probe).detail.endswith("0 turns with 16, backwards")


def test_what_turns_nothing_or_no_pairs_says_so():
    def mixes(q, k, positions):
        return q.roll(1, -1) + q.roll(2, -1), k.roll(1, -1) + k.roll(2, -1)

    for function, words in (
        (lambda q, k, positions: (q, k), "mixes 0 pairs"),
        (mixes, "mixes 32 pairs"),
    ):
        finding = finding_of(anybody.turns_pairs, function)
        assert finding.verdict == FAILS
        assert words in finding.detail


# The list of ALiBi's authors for 12 heads: that of 8, then every second one of 16.
TWELVE = [2.0**-i for i in range(1, 9)] + [2.0 ** -(i - 0.5) for i in range(1, 5)]
SLOPES = {count: [2.0 ** (-8 * i / count) for i in range(1, count + 1)] for count in (4, 8)}
SLOPES[12] = TWELVE


def distance(queries, keys):
    return torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]


def alibi(heads, queries, keys):
    return torch.tensor(SLOPES[heads])[:, None, None] * distance(queries, keys)


def geometric(heads, queries, keys):
    slopes = 2 ** (-8 * torch.arange(1, heads + 1) / heads)
    return slopes[:, None, None] * distance(queries, keys)


def bloom(heads, queries, keys):
    return build_alibi_tensor(torch.ones(1, keys), heads, torch.float32)


def in_scores(q, k):
    return q @ k.mT / math.sqrt(q.shape[-1]) + alibi(q.shape[1], q.shape[2], k.shape[2])


@pytest.mark.parametrize("bias", [alibi, bloom, in_scores])
def test_right_biases_and_scores_pass_and_their_slopes_are_named(bias):
    by_check = findings(bias, "alibi", shape=SHORT)
    assert {finding.verdict for finding in by_check.values()} == {HOLDS, NOT_APPLICABLE}
    assert by_check[anybody.authors_slopes].detail == "at 8, 4 and 12 heads"
    assert "at distance 129 -32.2 to -0.504" in by_check[anybody.never_grows].detail


def test_slopes_that_are_geometric_at_12_heads_are_found_at_any_number_of_heads():
    by_check = findings(geometric, "alibi")
    finding = by_check.pop(anybody.authors_slopes)
    assert finding.verdict == FAILS
    assert "geometric, not the authors' at 12 heads: the first is 0.63 for 0.5" in finding.detail
    assert FAILS not in {finding.verdict for finding in by_check.values()}
    at_12_heads = failing(geometric, "alibi", shape=SHORT | {"heads": 12})
    assert at_12_heads == {anybody.authors_slopes, anybody.agrees_with_ours}


def growing(heads, queries, keys):
    return -alibi(heads, queries, keys)


def one_late_with_a_cache(heads, queries, keys):
    late = distance(queries, keys) + (queries < keys)
    return -torch.tensor(SLOPES[heads])[:, None, None] * late.abs()


def falcon(heads, queries, keys):
    return falcons_alibi(torch.ones(1, keys, dtype=torch.long), heads, torch.float32)


def rounded(heads, queries, keys):
    return bloom(heads, queries, keys).bfloat16()


def leaking(q, k):
    return in_scores(q, k) * (1 + k.mean())


@pytest.mark.parametrize(
    ("mistake", "fails"),
    [
        (growing, anybody.never_grows),
        (one_late_with_a_cache, anybody.pieces),
        (rounded, anybody.far_in_float32),
        (falcon, anybody.far_in_float32),  # it multiplies slopes and places in bfloat16
        (leaking, anybody.later_tokens),
    ],
)
def test_a_mistake_of_a_bias_or_of_scores_fails_where_it_shows(mistake, fails):
    assert finding_of(fails, mistake).verdict == FAILS


def model(kind, **keys):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=64, initializer_range=0.2, **keys)
    return AutoModelForCausalLM.from_config(config)


MODEL = {"length": None}  # as long as the model says
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}

GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}


def test_models_of_transformers_pass():
    for subject in (model("gpt_neox", **LLAMA), model("gpt2", **GPT2)):
        listed = findings(subject, shape=MODEL)
        assert FAILS not in {finding.verdict for finding in listed.values()}, listed


def test_texts_of_a_row_see_each_other_where_masks_get_no_positions():
    keys = {"ffn_dim": 64, "hidden_size": 64, "word_embed_proj_dim": 64, "init_std": 0.2}
    subject = model("opt", num_hidden_layers=2, num_attention_heads=4, **keys)
    assert failing(subject, shape=MODEL) == {anybody.packed}


def test_mistakes_of_a_model_are_found(monkeypatch):
    subject = model("llama", **LLAMA)
    forward = subject.model.rotary_emb.forward

    def skips(x, position_ids):
        return forward(x, position_ids + (position_ids > 70))

    monkeypatch.setattr(subject.model.rotary_emb, "forward", skips)
    assert finding_of(anybody.shifts, subject, shape=MODEL).verdict == FAILS

    def forgets(x, position_ids):  # where new tokens are
        return forward(x, torch.arange(x.shape[1])[None])

    monkeypatch.setattr(subject.model.rotary_emb, "forward", forgets)
    assert finding_of(anybody.pieces, subject, shape=MODEL).verdict == FAILS


def test_check_raises_with_the_table():
    check(halves, "rotary", head_dim=32, base=10000.0)
    with pytest.raises(AssertionError, match=r"FAIL  Slopes of ALiBi(.|\n)*0\.63 for 0\.5"):
        check(geometric, length=1024)
    with pytest.raises(AssertionError, match="relative difference"):
        check(halves, "rotary", base=500.0, length=1024)


def test_what_cannot_be_called_is_one_message():
    for function, words in (
        (3, "is not a callable object"),
        (lambda a, b: a, r"parameters \(a, b\) do not say"),
        (lambda q, k: q, "it stops with"),
        (lambda q, k, positions: (q.mT, k.mT), "it stops with"),
        (lambda q, k, positions: missing, "NameError"),  # noqa: F821
        (lambda heads, queries, keys: torch.zeros(heads, keys), "it stops with"),
    ):
        with pytest.raises(UserError, match=words):
            check(function)
    with pytest.raises(UserError, match="no encoding is called 'rotery'"):
        check(halves, "rotery")


def test_texts_longer_than_a_table_are_not_tried_beyond_length():
    def table(q, k, positions):
        return turned(q, stored[positions][:, None]), turned(k, stored[positions][:, None])

    stored = angles(torch.arange(512)[None], 32)[0, 0]
    assert FAILS in {finding.verdict for finding in findings(table).values()}
    assert not failing(table, shape=SHAPE | {"length": 512})
