"""The pictures: the numbers behind them, their files, and a message where one is missing."""

import json
import math
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import save_file

from megatron.attention import BACKENDS, eager
from megatron.config import load
from megatron.evaluation.attention_probes import attention_of, sampled
from megatron.model import from_config
from megatron.positions import REGISTRY, Shape, build
from megatron.report.curves import write
from megatron.report.encoding_figures import draw, effective_length, panels, tables_of
from tests.support import NEEDED
from tools.plot_positions import main

SHAPE = [
    "num_layers=2",
    "hidden_size=32",
    "num_attention_heads=4",
    "seq_length=64",
    "tokenizer_type=CharLevelTokenizer",
]


def checkpoint(folder, *words, steps=(5, 10)):
    """As training leaves it, with random weights: a checkpoint of step 10 and the log before it."""
    config = load([], [*SHAPE, f"save={folder}", *words])
    model, path = from_config(config, vocab=512), folder / "global_step10"
    path.mkdir(parents=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        path / "model.safetensors",
    )
    config.save(path / "config.yml")
    (path / "checkpoint.json").write_text(
        json.dumps({"step": 10, "config_hash": config.hash, "vocab": 512})
    )
    learned = {name: tensor.flatten().tolist() for name, tensor in model.learned().items()}
    records = [
        {"step": step, "kind": "train", **({"position": learned} if learned else {})}
        for step in steps
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return model


def test_the_effective_length_is_where_alibis_bias_falls_below_minus_two():
    slopes = [2 ** (-8 * (head + 1) / 8) for head in range(8)]
    bias = build("alibi", Shape(8, 8, 64, 512)).distance_bias(600)
    assert effective_length(bias).tolist() == [math.floor(2 / slope) + 1 for slope in slopes[:8]]
    assert effective_length(bias[:, :400]).tolist()[-1] == 400  # 513 lies beyond


def test_the_sampled_distances_hold_every_near_one_and_both_ends():
    at = sampled(16384, 100).tolist()
    assert at[:6] == [0, 1, 2, 3, 4, 5]
    assert at[-1] == 16383
    assert at == sorted(set(at))
    assert sampled(2, 100).tolist() == [0, 1]


def test_the_panels_say_what_the_hooks_do():
    shape = Shape(4, 8, 32, 64)
    titles = {
        name: [panel.title for panel in panels(build(name, shape).eval(), 512)]
        for name in ("alibi", "fire", "cable")
    }
    assert titles == {
        "alibi": ["bias", "kernel exp(bias)", "effective length"],
        "fire": ["bias of query 63", "bias of query 511"],
        "cable": ["added to the scores of a random text"],
    }
    rotary = panels(build("rotary", shape), 512)[0].values[0]
    angles = torch.arange(512, dtype=torch.float64)[:, None] * torch.tensor(
        [1, 0.1, 0.01, 0.001], dtype=torch.float64
    )
    torch.testing.assert_close(rotary, angles.cos().mean(dim=1), rtol=0, atol=1e-4)
    bias, kernel, _ = panels(build("alibi", shape), 512)
    torch.testing.assert_close(kernel.values, bias.values.exp())


def test_the_tool_draws_what_is_named_with_its_options_and_says_what_cannot_be_drawn(
    tmp_path, capsys
):
    words = ["rotary", "none", "--output", str(tmp_path), "--length", "300", "--option", "base=500"]
    assert main(words) == 1  # none has no option base
    assert main([*words[:4], "--length", "300"]) == 0
    assert "none: nothing to draw" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rotary.png", "rotary.svg"]
    assert main(["bias"]) == 1
    assert "pos_emb: no encoding is called 'bias'" in capsys.readouterr().err


def test_a_checkpoint_gives_curves_numbers_their_way_and_attention(tmp_path, capsys):
    checkpoint(tmp_path / "run", "pos_emb=mep_param_t5")
    (tmp_path / "page.txt").write_text("The quick brown fox jumps over the lazy dog.")
    words = ["--checkpoint", str(tmp_path / "run"), "--length", "200", "--tokens", "20"]
    assert main([*words, "--text", str(tmp_path / "page.txt")]) == 0
    pictures = sorted(path.name for path in (tmp_path / "run/plots/global_step10").iterdir())
    stems = ("attention", "encoding", "learned", "trajectory")
    assert pictures == [f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")]
    words_of = (tmp_path / "run/plots/global_step10/attention.svg").read_text()
    assert "20 tokens: The quick brown fox" in words_of
    assert capsys.readouterr().err == ""


def test_what_a_picture_lacks_is_said_and_the_others_are_drawn(tmp_path, capsys):
    checkpoint(tmp_path / "run", "pos_emb=none")
    (tmp_path / "run/metrics.jsonl").unlink()
    assert (
        main(["--checkpoint", str(tmp_path / "run"), "--text", str(tmp_path / "nowhere.txt")]) == 0
    )
    printed = capsys.readouterr()
    assert "none, step 10: learns nothing" in printed.out
    assert "no attention: --text:" in printed.err
    checkpoint(tmp_path / "other", "pos_emb=kerple_log", steps=())
    assert main(["--checkpoint", str(tmp_path / "other"), "--length", "100"]) == 0
    printed = capsys.readouterr()
    assert "no trajectory:" in printed.err
    assert "no attention:" in printed.err
    assert (tmp_path / "other/plots/global_step10/learned.png").exists()
    assert main(["--checkpoint", str(tmp_path / "nowhere")]) == 1


@pytest.mark.parametrize(
    "settings",
    [
        ["pos_emb=mep_free", "window=10"],
        ["pos_emb=kerple_bias_wht"],
        ["pos_emb=fire"],
        ["pos_emb=cable"],
    ],
)
def test_the_drawn_attention_is_the_models(settings):
    """Probabilities times values, projected, are the output of each layer's attention."""
    model = from_config(load([], [*SHAPE, *settings]), vocab=512).eval()
    recorded = []
    for block in model.layers:
        block.attention.register_forward_hook(
            lambda module, given, out: recorded.append((module, given[0], out))
        )
    ids = torch.randint(512, (24,))
    found = attention_of(model, ids)
    assert found.shape == (2, 4, 24, 24)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(2, 4, 24))
    assert (found.triu(1) == 0).all()
    for layer, (module, x, out) in enumerate(recorded):
        v = module.query_key_value(x).view(1, 24, 4, 3, 8)[..., 2, :].transpose(1, 2)
        mixed = (found[layer] @ v[0]).transpose(0, 1).reshape(1, 24, 32)
        torch.testing.assert_close(module.dense(mixed), out, rtol=0, atol=1e-5)
    assert BACKENDS["eager"] is eager
    assert model.backend == "auto"


def test_learned_numbers_are_rows_by_heads_and_layers_become_rows():
    numbers = {"p": torch.arange(4.0), "weight": torch.ones(32, 4), "c": torch.tensor(0.1)}
    shapes = {name: tuple(table.shape) for name, table in tables_of(numbers, 4).items()}
    assert shapes == {"p": (1, 4), "weight": (32, 4), "c": (1, 1)}
    layers = {f"layer{layer}.p": torch.full((4,), float(layer)) for layer in range(3)}
    assert tables_of(layers, 4)["p"].tolist() == [[0.0] * 4, [1.0] * 4, [2.0] * 4]


def test_every_encoding_can_be_drawn_or_does_nothing(tmp_path):
    for name in REGISTRY:
        found = panels(build(name, Shape(4, 8, 32, 64), **NEEDED.get(name, {})).eval(), 512)
        # ssmax multiplies the scores of all keys of a query alike.
        assert bool(found) == (name not in ("none", "ssmax")), name
        assert all(panel.values.isfinite().all() for panel in found), name
        if found:
            path = tmp_path / f"{name}.svg"
            write(draw(found, name), path)
            words = "".join(ElementTree.fromstring(path.read_text()).itertext())
            assert name in words
            assert "distance d (tokens), scale log(1 + d)" in words


def test_layers_of_their_own_are_drawn_one_by_one_with_held_out_text(corpus, tmp_path, capsys):
    words = ["pos_emb=kerple_log", "pos_emb_shared=false", f"data_path={corpus}", "split=5,4,1"]
    checkpoint(tmp_path / "run", *words)
    words = ["--checkpoint", str(tmp_path / "run"), "--length", "100"]
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    names = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert names == {"encoding-layer0", "encoding-layer1", "learned", "trajectory", "attention"}
    assert capsys.readouterr().err == ""


def test_pictures_have_the_same_scales():
    bias, kernel, effective = draw(
        panels(build("alibi", Shape(4, 8, 32, 64)), 16384), "alibi"
    ).axes[:3]
    assert (bias.get_xscale(), kernel.get_yscale()) == ("function", "linear")
    assert bias.get_title(loc="left") == "bias, cut at -12"
    assert bias.get_ylim()[0] == -12
    assert effective.get_ylabel() == "tokens, scale log(1 + n)"
