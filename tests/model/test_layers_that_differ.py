"""Layers with encodings and windows of their own."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from megatron.config import load
from megatron.errors import UserError
from megatron.model import GPT, Cache, from_config
from megatron.model.size import parameters
from megatron.positions import REGISTRY, Position
from tests.encodings import SAMPLE
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


def test_bad_patterns_are_one_message():
    for words, message in (
        (["pos_emb_layers=[rotary, alibbi]"], "entry 2: .*'alibbi'; did you mean alibi"),
        (["pos_emb_layers=[{rotary: 5}]"], "entry 1: .* write its name"),
        (["pos_emb_layers=[{rotary: {bas: 5}}]"], "pos_emb_layers: .*'bas'; did you mean base"),
        (["pos_emb_layers=[rotary, none]", "pos_emb=alibi"], "pos_emb and pos_emb_layers contr"),
        (["window_layers=[9, null]", "window=7"], "window and window_layers contradict"),
        (["window_layers=[1,2,3,4,5,6,7]"], "7 entries are more than num_layers = 6"),
        (["pos_emb_layers=[learned, none]"], "learned adds positions to the embeddings"),
        (["pos_emb_layers=[rotary, fox]", "paper_precision=true"], "paper_precision"),
    ):
        with pytest.raises(UserError) as fault:
            load([], [*SHAPE, *words])
        assert re.search(message, str(fault.value)), str(fault.value)


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
