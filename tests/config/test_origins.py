"""Every key knows the source that set it, also where the source spells it in an older way."""

import pytest

from megatron.config import load
from megatron.config.legacy import AFTER_MERGE
from megatron.config.origins import BECOME, Origins
from tests.support import ROOT

SHAPE = "num_layers: 2\nhidden_size: 32\nnum_attention_heads: 4\nseq_length: 64\n"


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A function that writes files a.yml, b.yml … and gives {key: origin in words}."""
    monkeypatch.chdir(tmp_path)

    def origins(*texts: str, words=()):
        names = [f"{chr(ord('a') + number)}.yml" for number in range(len(texts))]
        for name, text in zip(names, texts, strict=True):
            (tmp_path / name).write_text(text)
        found = Origins()
        load(names, words, trace=found.after)
        return {name: str(origin) for name, origin in found.of.items()}

    return origins


def test_the_last_source_that_sets_a_key_is_its_origin(sources):
    found = sources(SHAPE + "seed: 1", "seed: 2\nhidden_size: 32", words=["seed=3"])
    assert found["num_layers"] == "a.yml"
    assert found["hidden_size"] == "b.yml"  # the same value, chosen again
    assert found["seed"] == "command line"
    assert "weight_decay" not in found


def test_entries_of_a_mapping_have_origins_of_their_own(sources):
    optimizer = "optimizer: {type: Adam, params: {lr: 1.0e-3, eps: 1.0e-8}}"
    found = sources(SHAPE + optimizer, words=["optimizer.params.lr=3e-4"])
    assert found["optimizer.params.lr"] == "command line"
    assert found["optimizer.params.eps"] == "a.yml"
    # A later file replaces the whole mapping, so nobody has set its other entries.
    found = sources(SHAPE + optimizer, "optimizer: {params: {lr: 1.0e-4}}")
    assert found["optimizer.params.lr"] == "b.yml"
    assert "optimizer.params.eps" not in found


@pytest.mark.parametrize(
    ("text", "key", "spelled"),
    [
        ("checkpoint_factor: 5", "save_interval", "checkpoint_factor: 5"),
        ("bf16: {enabled: true}", "precision", "bf16: {'enabled': True}"),
        (
            "fp16: {enabled: true, type: bfloat16}",
            "precision",
            "fp16: {'enabled': True, 'type': 'bfloat16'}",
        ),
        (
            "optimizer: {type: Adam, params: {lr: 1.0e-3, weight_decay: 0.1}}",
            "weight_decay",
            "optimizer: {'type': 'Adam', 'params': {'lr': 0.001, 'weight_decay': 0.1}}",
        ),
        ("sliding_window_width: 7", "window", "sliding_window_width: 7"),
        ("pos_emb: kerple_power_a_", "pos_emb", "pos_emb: kerple_power_a_"),
        ("pos_emb: kerple_power_a_", "pos_emb_args", "pos_emb: kerple_power_a_"),
        ("rotary_pct: 0.5", "pos_emb_args", "rotary_pct: 0.5"),
        ("norm: rmsnorm\nrms_norm_epsilon: 1.0e-6", "layernorm_epsilon", "rms_norm_epsilon: 1e-06"),
        ("mlp_multiple_of: 64", "intermediate_size", "mlp_multiple_of: 64"),
    ],
)
def test_older_spellings_are_shown_as_they_are_written(sources, text, key, spelled):
    found = sources(SHAPE, text)
    assert found[key] == f"b.yml, written as {spelled}"


def test_what_a_recipe_of_2022_brings_is_named(sources):
    found = sources(SHAPE + "fp16: {enabled: true, type: bfloat16}")
    assert found["lr_schedule"] == "the recipe of 2022"


def test_dropped_options_have_no_origin(sources):
    found = sources(SHAPE + "pos_emb: rotary\npos_emb_args: {base: 500000}", "pos_emb: alibi")
    assert found["pos_emb"] == "b.yml"
    assert "pos_emb_args" not in found


def test_every_key_that_is_converted_at_the_end_is_known():
    assert set(AFTER_MERGE) == set(BECOME)


def test_a_trace_changes_nothing():
    path = ROOT / "configs" / "mep.yml"
    traced = load([path], trace=Origins().after)
    assert traced == load([path])
    assert traced.notes == load([path]).notes
