"""tools/explain_config.py: origins of keys, and sizes held against built models."""

import re

import pytest

from megatron.config import load
from megatron.config.schema import all_keys
from megatron.sweeps.cost import training_cost
from tests.published import MEP, Experiment, experiments, files_of, write_bases
from tests.support import ROOT, blocks
from tools.explain_config import main

SHAPE = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
BASE = str(ROOT / "configs" / "125M.yml")


def explained(capsys, *words):
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_every_key_is_shown_with_its_value_origin_and_meaning(capsys, tmp_path):
    mine = tmp_path / "mine.yml"
    mine.write_text("checkpoint_factor: 2500\npos_emb: kerple_log\nbias_gelu_fusion: true\n")
    printed = explained(capsys, BASE, str(mine), "optimizer.params.lr=3e-4")
    for key in all_keys():
        assert f"  {key.name}: " in printed, key.name
    for line in (
        f"  hidden_size: 768    [{BASE}]\n      Width of the residual stream.\n",
        f"  save_interval: 2500    [{mine}]\n",
        "  optimizer.params.lr: 0.0003    [command line]\n",
        "  num_key_value_heads: 12    [default, follows num_attention_heads]\n",
        "-p · log(1 + a·d)",
        "notes: keys that were converted or dropped, or that have no effect\n",
        "  bias_gelu_fusion: accepted, has no effect here",
    ):
        assert line in printed
    listed = explained(capsys, *SHAPE, "--given")
    assert "  hidden_size: 32    [command line]\n" in listed
    assert "  weight_decay: " not in listed


def test_the_papers_run_by_hand_and_what_the_page_shows(capsys, monkeypatch):
    """The sizes of KERPLE's GPT, and its GPU hours from NVIDIA's 989 TFLOP/s."""
    config = load([BASE])
    matrices = 12 * 12 * 768**2 + 50304 * 768
    forward = 2 * matrices + 4 * 12 * 768 * 512 / 2
    tokens, flops = training_cost(config, 50304, 50_000)
    assert (tokens, flops) == (50_000 * 32 * 512, 3 * forward * 50_000 * 32 * 512)
    hours = flops / 989e12 / 0.4 / 3600
    eight = ["train_batch_size=256", "--brief", "--gpu", "h100", "--mfu", "0.4"]
    printed = explained(capsys, BASE, *eight)
    pattern = r"h100 +([\d.]+) hours \(([\d.]+) hours on 8\) to train, ([\d.]+) minutes to evaluate"
    match = re.search(pattern, printed)
    assert match is not None
    # The file asks for TF32, of which an H100 has half of bf16's speed.
    far = sum(2 * matrices + 4 * 12 * 768 * length / 2 for length in config.evaluation.eval_lengths)
    minutes = 327_680 * far / 67e12 / 0.4 / 60
    assert float(match[3]) == pytest.approx(minutes, rel=2e-2)
    assert float(match[1]) == pytest.approx(8 * hours, rel=1e-2)
    assert float(match[2]) == pytest.approx(hours, rel=1e-2)

    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/explain_config.md").read_text(encoding="utf-8")
    block = blocks("docs/explain_config.md", "sh")[0]
    printed = "".join(explained(capsys, *line.split()[2:]) for line in block.splitlines())
    for shown in blocks("docs/explain_config.md", "text"):
        assert shown in printed
    for advised in re.findall(r"(\d+) hours of one H100", " ".join(text.split())):
        assert int(advised) == round(6 * 3 * 5 * hours * 0.4 / 0.35)  # encodings, corpora, seeds


HIDING = "snope_norm_original_scaling__"
NAMED = Experiment("ali_tanh_gau_all003_fp32", "openwebtext2", 1235, HIDING, "160")
UNKNOWN = Experiment("snope_sigmoid_hall_fp32", "openwebtext2", 1235, HIDING, "160")


def without_encoding(config):
    return {key: value for key, value in config.flat().items() if not key.startswith("pos_emb")}


def test_published_files_in_todays_spelling_are_the_same_run_and_no_kernels_are_guessed(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_bases(tmp_path)
    kinds = {experiment.pos_emb: experiment for experiment in experiments(MEP)}
    for experiment in [*kinds.values(), UNKNOWN, NAMED]:
        files = files_of(experiment, tmp_path, "train")
        output = f"today/{experiment.stem}.yml"
        printed = explained(capsys, *map(str, files), "-o", output)
        before, after = load(files), load([output])
        assert without_encoding(after) == without_encoding(before)
        assert not any("accepted" in note for note in after.notes)
        if after.position.pos_emb != "mep":
            assert after.position == before.position
        if experiment is UNKNOWN:
            assert "not say which kernels were used: the released code has no sigmoid" in printed
    assert after.position.pos_emb_args == {"kernels": ["exp", "tanh", "gaussian"]}
    assert "# pos_emb: these kernels were derived from the file's name; check them\n" in printed
    assert main([str(files[0]), "-o", output]) == 1  # nothing is replaced
