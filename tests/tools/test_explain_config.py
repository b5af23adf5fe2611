"""tools/explain_config.py: origins and effects of keys, and sizes held against built models."""

import json
import re
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import load
from megatron.config.keys import all_keys
from megatron.explain.effects import EFFECTS
from megatron.explain.sizes import Sizes, device_hours
from megatron.model import from_config
from megatron.training.throughput import PEAKS, peak_of
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


# --- Keys ---


def test_every_key_is_shown_with_its_value_origin_meaning_and_effect(capsys, tmp_path):
    mine = tmp_path / "mine.yml"
    mine.write_text("checkpoint_factor: 2500\npos_emb: kerple_log\n")
    printed = explained(capsys, BASE, str(mine), "optimizer.params.lr=3e-4")
    for key in all_keys():
        assert f"  {key.name}: " in printed, key.name
    assert f"  hidden_size: 768    [{BASE}]\n      Width of the residual stream.\n" in printed
    assert f"  save_interval: 2500    [{mine}, written as checkpoint_factor: 2500]\n" in printed
    assert "  optimizer.params.lr: 0.0003    [command line]\n" in printed
    assert "  lr_decay_iters: 50000    [" in printed
    assert "  num_key_value_heads: 12    [default, follows num_attention_heads]\n" in printed
    assert (
        "      here: 32 windows in a step = micro batch 32 * accumulation 1 * 1 device(s)\n"
        in printed
    )
    assert "-p · log(1 + a·d)" in printed
    assert "24 learned numbers\n" in printed  # KERPLE: two for each of 12 heads, in all layers
    assert "      here: 500 steps\n" in printed  # warmup 0.01 of 50000


def test_every_effect_belongs_to_a_key():
    assert set(EFFECTS) <= {key.name for key in all_keys()}


def test_what_was_converted_or_has_no_effect_is_listed(capsys):
    words = [*SHAPE, "bias_gelu_fusion=true", "sliding_window_width=7"]
    printed = explained(capsys, *words)
    assert "notes: what was converted, dropped, or has no effect\n" in printed
    assert "  sliding_window_width: 7 means window: 8" in printed
    assert "  bias_gelu_fusion: accepted, has no effect here" in printed
    assert printed.count("here: no effect: precision is fp32\n") == 5  # keys of fp16's loss scale
    assert "  window: 8    [command line, written as sliding_window_width: 7]\n" in printed


def test_only_what_is_given_or_only_the_size_can_be_shown(capsys):
    given = explained(capsys, *SHAPE, "--given")
    assert "  hidden_size: 32    [command line]\n" in given
    assert "  weight_decay: " not in given
    brief = explained(capsys, *SHAPE, "--brief")
    assert brief.startswith("this run (hash ")
    assert brief.splitlines() == given.splitlines()[-len(brief.splitlines()) :]


def test_layers_that_differ_are_listed(capsys):
    pattern = "pos_emb_layers=[rotary, none]"
    printed = explained(capsys, *SHAPE, "num_layers=3", pattern)
    assert "here: layer by layer: rotary, none, rotary\n" in printed
    assert "here: replaced by pos_emb_layers\n" in printed


# --- Sizes ---


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["no_weight_tying=false", "pos_emb=t5"],
        ["activation=swiglu", "norm=rmsnorm", "num_key_value_heads=2", "pos_emb=kerple_log"],
        ["pos_emb=learned", "pos_emb_shared=true", "qk_norm=true"],
    ],
)
def test_parameters_are_those_of_the_built_model(capsys, words):
    found = record(capsys, *SHAPE, *words)
    model = from_config(load([], [*SHAPE, *words]), found["vocab"])
    assert found["parameters"] == sum(number.numel() for number in model.parameters())


def test_operations_are_those_that_torch_counts():
    """torch counts all pairs of the eager backend; a causal token attends to half of them."""
    config = load([], [*SHAPE, "attention_backend=eager", "pos_emb=none"])
    sizes = Sizes.of(config)
    model = from_config(config, sizes.vocab)
    ids = torch.randint(0, 100, (3, 65))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids[:, :-1], ids[:, 1:])
    all_pairs = 4 * 2 * 32 * 64  # of each token: scores and sums, layers, features, keys
    of_token = counter.get_total_flops() / (3 * 64) - all_pairs / 2
    assert sizes.flops_per_token == 3 * of_token


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


def test_devices_follow_from_the_batch_and_share_the_hours(capsys):
    eight = ["train_batch_size=256", "train_iters=50000"]
    found = record(capsys, BASE, *eight)
    assert found["devices"] == 8
    assert found["tokens"] == 50_000 * 256 * 512
    printed = explained(capsys, BASE, *eight, "--brief", "--gpu", "a100")
    assert re.search(r"a100 +training 12\.8 hours, 1\.6 hours on 8; ", printed)


def test_hours_are_of_operations_speed_and_utilisation():
    assert device_hours(3600e12, 100e12, 0.5) == 0.02


def test_steps_of_epochs_need_the_data(capsys):
    words = [*SHAPE, "train_epochs=2", "data_path=absent/text_document"]
    printed = explained(capsys, *words, "--gpu", "h100")
    assert "tokens      unknown: train_epochs needs the data\n" in printed
    assert "  h100        an evaluation in float32" in printed
    assert record(capsys, *words)["tokens"] is None


def test_what_a_run_does_not_do_has_no_size(capsys):
    printed = explained(capsys, *SHAPE, "train_iters=0", "--brief")
    assert "tokens      none: train_iters is 0\n" in printed
    assert "training " not in printed.replace("of training", "")


def test_an_encoding_that_keeps_all_scores_says_what_they_take(capsys):
    """One float32 number for each layer, window, head, query and key: 12 * 32 * 12 * 512 ** 2."""
    printed = " ".join(explained(capsys, BASE, "pos_emb=cope", "--brief").split())
    assert 4 * 12 * 32 * 12 * 512**2 == 4_831_838_208
    assert "without the scores that this encoding keeps, 4.83 GB or several times" in printed
    assert "without the scores" not in explained(capsys, BASE, "pos_emb=t5", "--brief")


MEASURE = """
import re, resource, sys, torch
from megatron.config import load
from megatron.model import from_config
torch.set_num_threads(1)
model = from_config(load([], sys.argv[1:]), 8192).eval()
ids = torch.randint(0, 8192, (2, 2049))
with torch.inference_mode():
    model(ids[:, :16], ids[:, 1:17])
    before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
    model(ids[:, :-1], ids[:, 1:])
weights = 4 * sum(number.numel() for number in model.parameters())
# getrusage has the peak of the process that started this one, too.
peak = 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
print(peak - before + weights)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")
def test_the_memory_of_an_evaluation_is_about_what_a_process_takes():
    words = ["num_layers=2", "hidden_size=512", "num_attention_heads=8", "seq_length=512"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    settings = ["eval_batch_tokens=4096", "eval_lengths=2048", "make_vocab_size_divisible_by=8192"]
    sizes = Sizes.of(load([], [*words, *settings]), device="cpu")
    table = 4 * (sizes.vocab - 8192) * 512 * 2  # GPT-2's rows beyond those of the measured model
    logits = 8 * 2048 * (sizes.vocab - 8192)
    estimate = sizes.evaluation_memory[2048] - table - logits
    assert 0.6 < int(done.stdout) / estimate < 2


# --- The page ---


def test_the_pages_answer_about_table_3_is_what_the_command_says(capsys):
    text = DOCS.read_text(encoding="utf-8")
    cells = 6 * 3 * 5  # encodings, corpora, seeds
    for gpu in ("h100", "a100"):
        [time] = record(capsys, BASE, "--gpu", gpu)["times"]
        hours = cells * time["training_gpu_hours"]
        assert f"{hours:.0f} hours of one {gpu.upper()}" in " ".join(text.split())


def test_the_pages_commands_run_and_print_what_the_page_shows(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = DOCS.read_text(encoding="utf-8")
    block = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)[0]
    printed = ""
    for line in block.splitlines():
        python, script, *words = line.split()
        assert (python, script) == ("python", "tools/explain_config.py")
        printed += explained(capsys, *words)
    shown = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    assert len(shown) == 2
    assert shown[1] in printed
    for line in shown[0].splitlines():
        assert f"{line}\n" in printed, line


def test_the_pages_table_of_peaks_is_the_projects():
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \| ([\d.]+) \|", DOCS.read_text(), re.MULTILINE)
    assert len(rows) == len({name for _, name, _ in rows}) == 8
    for device, _, peak in rows:
        half = peak_of(device, "bf16") or peak_of(device, "fp16")
        assert half == float(peak), device
    assert len(PEAKS) >= 8


# --- Bad input ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([BASE, "--gpu", "h1000"], "--gpu: h1000 is not known - use one of cpu, v100, a100"),
        ([BASE, "--mfu", "0"], "--mfu: 0 is no share - give more than 0 and at most 1"),
        ([BASE, "--devices", "0"], "--devices: 0 is no number of devices - give 1 or more"),
        ([BASE, "--devices", "3"], "train_batch_size: 32 is not train_micro_batch_size_per_gpu 32"),
        ([BASE, "hidden_sise=3"], "hidden_sise: no such key; did you mean hidden_size?"),
        (["absent.yml"], "absent.yml: no such file"),
        ([BASE, "num_attention_heads=7"], "cannot be split over num_attention_heads = 7"),
        ([BASE, "pos_emb=rotery"], "no encoding is called 'rotery'; did you mean rotary?"),
    ],
)
def test_bad_input_is_one_message(capsys, words, message):
    assert main(words) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
