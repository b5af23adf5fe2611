"""tools/explain_config.py: origins of keys, and sizes held against built models."""

import json
import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import load
from megatron.config.schema import all_keys
from megatron.model import from_config
from tests.support import ROOT
from tools.explain_config import main

SHAPE = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
DOCS = ROOT / "docs" / "explain_config.md"
BASE = str(ROOT / "configs" / "125M.yml")


def explained(capsys, *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def record(capsys, *words: str) -> dict:
    return json.loads(explained(capsys, *words, "--json"))


def test_every_key_is_shown_with_its_value_origin_and_meaning(capsys, tmp_path):
    mine = tmp_path / "mine.yml"
    mine.write_text("checkpoint_factor: 2500\npos_emb: kerple_log\nbias_gelu_fusion: true\n")
    printed = explained(capsys, BASE, str(mine), "optimizer.params.lr=3e-4")
    for key in all_keys():
        assert f"  {key.name}: " in printed, key.name
    assert f"  hidden_size: 768    [{BASE}]\n      Width of the residual stream.\n" in printed
    assert f"  save_interval: 2500    [{mine}, written as checkpoint_factor: 2500]\n" in printed
    assert "  optimizer.params.lr: 0.0003    [command line]\n" in printed
    assert "  num_key_value_heads: 12    [default, follows num_attention_heads]\n" in printed
    assert "-p · log(1 + a·d)" in printed
    assert "notes: what was converted, dropped, or has no effect\n" in printed
    assert "  bias_gelu_fusion: accepted, has no effect here" in printed
    given = explained(capsys, *SHAPE, "--given")
    assert "  hidden_size: 32    [command line]\n" in given
    assert "  weight_decay: " not in given


def test_parameters_are_those_of_the_built_model(capsys):
    for words in (
        [],
        ["no_weight_tying=false", "pos_emb=t5"],
        ["activation=swiglu", "norm=rmsnorm", "num_key_value_heads=2", "pos_emb=kerple_log"],
        ["pos_emb=learned", "pos_emb_shared=true", "qk_norm=true"],
    ):
        found = record(capsys, *SHAPE, *words)
        model = from_config(load([], [*SHAPE, *words]), found["vocab"])
        assert found["parameters"] == sum(number.numel() for number in model.parameters())


def test_operations_are_those_that_torch_counts(capsys):
    """torch counts all pairs of the eager backend; a causal token attends to half of them."""
    words = [*SHAPE, "attention_backend=eager", "pos_emb=none"]
    found = record(capsys, *words)
    model = from_config(load([], words), found["vocab"])
    ids = torch.randint(0, 100, (3, 65))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids[:, :-1], ids[:, 1:])
    all_pairs = 4 * 2 * 32 * 64  # of each token: scores and sums, layers, features, keys
    of_token = counter.get_total_flops() / (3 * 64) - all_pairs / 2
    assert found["flops_per_token"] == 3 * of_token


def test_the_papers_run_by_hand(capsys):
    """The sizes of KERPLE's GPT, and its GPU hours from NVIDIA's 989 TFLOP/s."""
    found = record(capsys, BASE, "--gpu", "h100", "--mfu", "0.4")
    matrices = 12 * 12 * 768**2 + 50304 * 768
    forward = 2 * matrices + 4 * 12 * 768 * 512 / 2
    tokens = 50_000 * 32 * 512
    assert found["tokens"] == tokens
    assert found["training_flops"] == pytest.approx(3 * forward * tokens)
    [time] = found["times"]
    assert time["training_gpu_hours"] == pytest.approx(3 * forward * tokens / 989e12 / 0.4 / 3600)
    assert 162e6 < found["parameters"] < 163e6  # docs of the papers: 162 million
    eight = ["train_batch_size=256", "train_iters=50000"]
    printed = explained(capsys, BASE, *eight, "--brief", "--gpu", "a100")
    assert re.search(r"a100 +12\.8 hours to train \(1\.6 hours on 8\), ", printed)


def test_steps_of_epochs_need_the_data(capsys):
    words = [*SHAPE, "train_epochs=2", "data_path=absent/text_document", "--gpu", "h100"]
    printed = explained(capsys, *words)
    assert "tokens              unknown: train_epochs needs the data\n" in printed
    assert " to evaluate; 67 TFLOP/s" in printed
    assert record(capsys, *words)["tokens"] is None


def test_the_page_shows_what_the_commands_print(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = DOCS.read_text(encoding="utf-8")
    block = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)[0]
    printed = "".join(explained(capsys, *line.split()[2:]) for line in block.splitlines())
    for shown in re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL):
        assert shown in printed
    for gpu in ("h100", "a100"):
        [time] = record(capsys, BASE, "--gpu", gpu)["times"]
        hours = 6 * 3 * 5 * time["training_gpu_hours"]  # encodings, corpora, seeds
        assert f"{hours:.0f} hours of one {gpu.upper()}" in " ".join(text.split())


def test_bad_input_is_one_message(capsys):
    for words, message in (
        (["--gpu", "h1000"], "--gpu: h1000 is not known - use one of cpu, v100, a100"),
        (["--mfu", "0"], "--mfu: 0 is not a share - give more than 0 and at most 1"),
        (["--devices", "3"], "train_batch_size: 32 is not train_micro_batch_size_per_gpu 32"),
        (["hidden_sise=3"], "hidden_sise: no such key; did you mean hidden_size?"),
    ):
        assert main([BASE, *words]) == 1
        assert message in capsys.readouterr().err
