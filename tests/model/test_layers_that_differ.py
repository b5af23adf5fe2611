"""Layers with encodings and windows of their own."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import transformers

from megatron.config import load
from megatron.errors import UserError
from megatron.interop.families import FAMILIES, read_weights
from megatron.model import GPT, Architecture, Cache, from_config
from megatron.model.size import parameters
from megatron.positions import REGISTRY, Position
from tests.encodings import SAMPLE
from tests.support import NEEDED

SHAPE = ["num_layers=6", "hidden_size=32", "num_attention_heads=4", "seq_length=48"]
LARGE = ["max_position_embeddings=256", "init_method_std=0.15"]
SWA = ["pos_emb_layers=[rotary, none, kerple_log]", "window_layers=[20, null]"]
MANY = [
    "pos_emb_layers=[fox, {rotary: {base: 500}}, t5, rotary, cope]",
    "window_layers=[train_length, null, 9]",
]
both = pytest.mark.parametrize("settings", [SWA, MANY], ids=["swa", "many"])


def model(*settings: str) -> GPT:
    return from_config(load([], [*SHAPE, *LARGE, *settings]), vocab=50).eval()


def config_hash(*settings: str) -> str:
    return load([], [*SHAPE, *settings]).hash


@both
@torch.no_grad()
def test_decoding_in_pieces_beyond_the_training_length_is_the_whole_pass(settings):
    gpt, ids = model(*settings), torch.randint(50, (2, 141))
    expected, cache = gpt(ids), Cache()
    parts = [gpt(part, cache=cache) for part in ids.split([1, 5, 64, 7, 64], dim=1)]
    assert expected.std() > 0.1
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=2e-4)


@both
@torch.no_grad()
def test_later_tokens_change_nothing_before_them(settings):
    gpt, ids = model(*settings), torch.randint(50, (1, 120))
    torch.testing.assert_close(gpt(ids[:, :70]), gpt(ids)[:, :70], rtol=0, atol=2e-4)


@both
def test_every_number_has_a_gradient_and_is_saved_and_cast_as_one_encodings(settings):
    gpt, ids = model(*settings), torch.randint(50, (2, 60))
    gpt(ids, labels=ids, mean=True).backward()
    for name, parameter in gpt.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    again = model(*settings, "seed=7")
    again.load_state_dict(gpt.state_dict())
    torch.testing.assert_close(again(ids), gpt(ids), rtol=0, atol=0)
    gpt.bfloat16()
    assert {one.dtype for one in gpt.positions.parameters()} == {torch.float32}
    assert gpt(ids).isfinite().all()


def test_a_layer_computes_what_a_model_of_its_encoding_and_window_does():
    """Two layers whose blocks are swapped with their encodings are the same function."""
    gpt = model("num_layers=1", "pos_emb_layers=[alibi]", "window_layers=[7]")
    plain = model("num_layers=1", "pos_emb=alibi", "window=7")
    ids = torch.randint(50, (2, 60))
    assert torch.equal(gpt(ids), plain(ids))


def test_equal_entries_share_their_numbers_unless_layers_are_to_have_their_own():
    pattern = "pos_emb_layers=[kerple_log, none, kerple_log]"
    shared, own = model(pattern), model(pattern, "pos_emb_shared=false")
    assert len(shared.positions) == 2
    assert len(own.positions) == 6
    assert shared.learned().keys() == {"layer0.kerple_log.p", "layer0.kerple_log.a"}
    expected = {"layer0", "layer2", "layer3", "layer5"}
    assert {name.split(".")[0] for name in own.learned()} == expected
    for gpt, words in ((shared, []), (own, ["pos_emb_shared=false"])):
        counted = parameters(load([], [*SHAPE, *LARGE, pattern, *words]), 50)
        assert counted.whole == sum(one.numel() for one in gpt.parameters())
        assert counted.positions == sum(one.numel() for one in gpt.positions.parameters())


ANYWHERE = [name for name in SAMPLE if REGISTRY[name].on_embeddings is Position.on_embeddings]


def beside_none(name: str, *settings: str) -> GPT:
    options = json.dumps(NEEDED.get(name, {}))
    pattern = f"pos_emb_layers=[{{{name}: {options}}}, none]"
    return model("num_layers=2", pattern, "window_layers=[null, 20]", *settings)


@pytest.mark.parametrize("name", ANYWHERE)
def test_every_encoding_may_be_that_of_some_layers(name):
    """Its layer alone is changed, and texts of any length go on as everywhere else."""
    gpt, ids = beside_none(name), torch.randint(50, (2, 141))
    with torch.no_grad():
        first, long, again = gpt(ids[:, :48]), gpt(ids), gpt(ids[:, :48])
        assert torch.equal(first, again)
        torch.testing.assert_close(long[:, :48], first, rtol=0, atol=2e-4)
        cache = Cache()
        parts = [gpt(part, cache=cache) for part in ids.split([1, 5, 64, 71], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), long, rtol=0, atol=2e-4)
    gpt(ids, labels=ids, mean=True).backward()
    assert all(one.grad is not None for one in gpt.positions.parameters())
    again = beside_none(name, "seed=7")
    again.load_state_dict(gpt.state_dict())
    assert torch.equal(again(ids), gpt(ids))
    gpt.bfloat16()
    assert {one.dtype for one in gpt.positions.parameters()} <= {torch.float32}
    with torch.no_grad():
        assert gpt(torch.randint(50, (1, 600))).isfinite().all()


@torch.no_grad()
def test_scores_grow_with_the_tokens_that_a_layer_sees():
    windows = "window_layers=[null, 20, 100]"
    ids = torch.randint(50, (1, 141))
    gpt = model("pos_emb=alibi", "logn_scale=true", windows)
    scales = [inputs.query_scale for inputs in gpt._attention_inputs(0, 141, None, None)[:3]]
    seen = torch.arange(1, 142).double()
    for scale, window in zip(scales, (1000, 20, 100), strict=True):
        expected = (seen.clamp(max=window).log() / math.log(48)).clamp(min=1)
        torch.testing.assert_close(scale.double(), expected, rtol=1e-6, atol=0)
    assert not torch.equal(gpt(ids), model("pos_emb=alibi", windows)(ids))


def test_layers_that_choose_several_backends_are_all_named():
    gpt = model("pos_emb_layers=[rotary, cope]")
    assert [one.backend for one in gpt.attention_choices] == ["sdpa", "eager"] * 3
    assert gpt.resolved_backend == "sdpa and eager"
    assert gpt.backends == {"sdpa", "eager"}


def test_the_hash_counts_patterns_by_what_they_mean():
    plain = config_hash("pos_emb_layers=[rotary, none]")
    assert plain != config_hash()
    assert plain == config_hash("pos_emb_layers=[{rotary: {}}, none]")
    assert plain == config_hash("pos_emb_layers=[{rotary: {base: 10000}}, none]")
    assert plain != config_hash("pos_emb_layers=[{rotary: {base: 500}}, none]")
    of_lists = config_hash("pos_emb_layers=[{fire: {mlp_layers: [32]}}, none]")
    assert of_lists == config_hash("pos_emb_layers=[fire, none]")
    assert plain != config_hash("pos_emb_layers=[none, rotary]")
    assert plain != config_hash("pos_emb_layers=[rotary, none]", "window_layers=[9, null]")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pos_emb_layers=[rotary, alibbi]"], "entry 2: .*'alibbi'; did you mean alibi"),
        (["pos_emb_layers=[{rotary: {}, none: {}}]"], "entry 1: .* is no encoding; write its name"),
        (["pos_emb_layers=[{rotary: 5}]"], "entry 1: .* is no encoding; write its name"),
        (
            ["pos_emb_layers=[{rotary: {bas: 5}}]"],
            "pos_emb_layers: .*'bas'; did you mean base",
        ),
        (["pos_emb_layers=[rotary, none]", "pos_emb=alibi"], "pos_emb and pos_emb_layers contr"),
        (
            ["pos_emb_layers=[rotary]", "pos_emb_args={base: 5}"],
            "pos_emb_args and pos_emb_layers contradict",
        ),
        (["window_layers=[9, null]", "window=7"], "window and window_layers contradict"),
        (["pos_emb_layers=[none,none,none,none,none,none,none]"], "7 entries are more than num_l"),
        (["window_layers=[1,2,3,4,5,6,7]"], "7 entries are more than num_layers = 6"),
        (["window_layers=[0]"], "window_layers"),
        (["pos_emb_layers=[learned, none]"], "learned adds positions to the embeddings"),
        (["pos_emb_layers=[rotary, fox]", "paper_precision=true"], "paper_precision"),
    ],
)
def test_bad_patterns_are_one_message(words, message):
    with pytest.raises(UserError) as fault:
        load([], [*SHAPE, *words])
    assert re.search(message, str(fault.value)), str(fault.value)


def test_one_encoding_on_the_embeddings_may_be_that_of_all_layers():
    assert model("pos_emb_layers=[learned, learned]").positions[0].has("on_embeddings")


def test_a_later_file_replaces_patterns(tmp_path: Path):
    first, second = tmp_path / "first.yml", tmp_path / "second.yml"
    first.write_text("pos_emb_layers: [rotary, none]\nwindow_layers: [9, null]\n")
    second.write_text("pos_emb: alibi\nwindow: 7\n")
    config = load([first, second], SHAPE)
    assert (config.position.pos_emb, config.position.pos_emb_layers) == ("alibi", ())
    assert (config.attention.window, config.attention.window_layers) == (7, ())
    config = load([second, first], SHAPE)
    assert config.position.pos_emb_layers == ("rotary", "none")
    assert config.attention.window_layers == (9, None)
    saved = tmp_path / "config.yml"
    config.save(saved)
    assert load([saved]).hash == config.hash


SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 320,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "pad_token_id": 0,
}
LLAMA_LIKE = [
    "num_layers=4",
    "hidden_size=32",
    "num_attention_heads=4",
    "num_key_value_heads=2",
    "intermediate_size=48",
    "seq_length=64",
    "norm=rmsnorm",
    "activation=swiglu",
    "layernorm_epsilon=1e-6",
    "parallel_residual=false",
    "no_weight_tying=true",
    "use_bias_in_attn_linear=false",
    "use_bias_in_mlp=false",
]
SMOL = {
    "no_rope_layers": [1, 1, 1, 0],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
}
LOCAL = {
    "use_sliding_window": True,
    "sliding_window": 23,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
}
THEIRS = {
    "SmolLM3": (
        SMOL,
        "pos_emb_layers=[{a}, {a}, {a}, none]".replace("{a}", "{rotary: {base: 50000}}"),
    ),
    "Qwen2": (LOCAL, "window_layers=[23, 23, 23, null]"),
}


@pytest.mark.parametrize("name", THEIRS)
@torch.no_grad()
def test_logits_are_those_of_transformers(name):
    changes, word = THEIRS[name]
    torch.manual_seed(3)
    settings = getattr(transformers, f"{name}Config")(**SIZES, **changes)
    theirs = getattr(transformers, f"{name}ForCausalLM")(settings).eval()
    biases = ["use_bias_in_attn_linear=true", "use_bias_in_attn_output=false"]
    words = [*LLAMA_LIKE, word, *(biases if name == "Qwen2" else [])]
    config = load([], words)
    ours = from_config(config, vocab=50).eval()
    family = FAMILIES["Qwen2ForCausalLM" if name == "Qwen2" else "LlamaForCausalLM"]
    ours.load_state_dict(
        read_weights(family, theirs.state_dict(), ours.state_dict(), Architecture.of(config.model)),
        strict=False,
    )
    ids = torch.randint(50, (2, 150))
    expected = theirs(ids).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(ours(ids), expected, rtol=1e-4, atol=1e-4)
