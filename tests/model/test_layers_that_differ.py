"""Layers with encodings and windows of their own."""

import json
from pathlib import Path

import pytest
import torch

from megatron.config import load
from megatron.model import GPT, from_config
from megatron.model.size import parameters
from megatron.positions import REGISTRY, Position
from tests.encodings import SAMPLE
from tests.model.test_cache import in_pieces
from tests.support import NEEDED

SHAPE = ["num_layers=6", "hidden_size=32", "num_attention_heads=4", "seq_length=48"]
LARGE = ["max_position_embeddings=256", "init_method_std=0.15"]


def model(*settings: str) -> GPT:
    return from_config(load([], [*SHAPE, *LARGE, *settings]), vocab=50).eval()


def config_hash(*settings: str) -> str:
    return load([], [*SHAPE, *settings]).hash


def test_a_layer_computes_what_a_model_of_its_encoding_and_window_does():
    """Two layers whose blocks are swapped with their encodings are the same function."""
    gpt = model("num_layers=1", "pos_emb_layers=[alibi]", "window_layers=[7]")
    plain = model("num_layers=1", "pos_emb=alibi", "window=7")
    ids = torch.randint(50, (2, 60))
    assert torch.equal(gpt(ids), plain(ids))


def test_equal_entries_share_their_numbers_unless_layers_are_to_have_their_own():
    pattern = "pos_emb_layers=[kerple_log, none, kerple_log]"
    shared, separate = model(pattern), model(pattern, "pos_emb_shared=false")
    assert len(shared.positions) == 2
    assert len(separate.positions) == 6
    assert shared.learned().keys() == {"layer0.kerple_log.p", "layer0.kerple_log.a"}
    expected = {"layer0", "layer2", "layer3", "layer5"}
    assert {name.split(".")[0] for name in separate.learned()} == expected
    for gpt, words in ((shared, []), (separate, ["pos_emb_shared=false"])):
        counted = parameters(load([], [*SHAPE, *LARGE, pattern, *words]), 50)
        assert counted.whole == sum(parameter.numel() for parameter in gpt.parameters())
        assert counted.positions == sum(
            parameter.numel() for parameter in gpt.positions.parameters()
        )


ANYWHERE = [
    name
    for name in SAMPLE
    if REGISTRY[name].on_embeddings is Position.on_embeddings
    and REGISTRY[name].on_embeddings_by_ids is Position.on_embeddings_by_ids
    and REGISTRY[name].heads_per_query == 1
]


LOGN = ("logn_scale=true", "logn_scale=false")


def beside_none(name: str, *settings: str) -> GPT:
    options = json.dumps(NEEDED.get(name, {}))
    pattern = f"pos_emb_layers=[{{{name}: {options}}}, none]"
    return model("num_layers=2", pattern, "window_layers=[null, 20]", *settings)


@pytest.mark.parametrize("name", ANYWHERE)
def test_every_encoding_may_be_that_of_some_layers(name):
    gpt, ids = beside_none(name), torch.randint(50, (2, 141))
    long = gpt(ids)
    with torch.no_grad():
        torch.testing.assert_close(in_pieces(gpt, ids, [1, 5, 64, 71]), long, rtol=0, atol=2e-4)
    long.square().mean().backward()
    assert all(parameter.grad is not None for parameter in gpt.positions.parameters())
    again = beside_none(name, "seed=7")
    again.load_state_dict(gpt.state_dict())
    assert torch.equal(again(ids), long)


@torch.no_grad()
def test_scores_grow_with_the_tokens_that_a_layer_sees():
    """A window of 60 has the scale of 60 tokens, which ssmax has for the query at index 59."""
    ids = torch.randint(50, (1, 141))
    shape = ["num_layers=1", "pos_emb=none"]
    windows = [model(*shape, "window_layers=[60]", word)(ids) for word in LOGN]
    whole = [model(*shape, word)(ids[:, 81:]) for word in LOGN]
    for window_loss, text_loss in zip(windows, whole, strict=True):
        torch.testing.assert_close(window_loss[:, -1], text_loss[:, -1], rtol=0, atol=1e-5)
    assert (windows[0] - windows[1]).abs().max() > 1e-3


def test_layers_that_choose_several_backends_are_all_named():
    gpt = model("pos_emb_layers=[rotary, cope]")
    assert [choice.backend for choice in gpt.attention_choices] == ["sdpa", "eager"] * 3
    assert gpt.attention_choice.backend == "sdpa and eager"
    assert {choice.backend for choice in gpt.attention_choices} == {"sdpa", "eager"}


def test_the_hash_counts_patterns_by_what_they_mean():
    plain = config_hash("pos_emb_layers=[rotary, none]")
    assert plain == config_hash("pos_emb_layers=[{rotary: {base: 10000}}, none]")
    assert plain != config_hash("pos_emb_layers=[none, rotary]")
    assert plain != config_hash("pos_emb_layers=[rotary, none]", "window_layers=[9, null]")


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
