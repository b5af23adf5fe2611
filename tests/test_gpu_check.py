"""What `make gpu-check` runs: every GPU test, within its minutes, and a dry run of it."""

import re
import subprocess
from argparse import Namespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.nanogpt import NanoGPT
from tests.support import ROOT
from tools.bench import main as bench

MINUTES = {"1": 7, "2": 5, "3": 3}
ENCODINGS = {"none", "rotary", "alibi", "kerple_log", "mep_free", "fox", "t5"}


def gpu_test_files():
    files = (ROOT / "tests").rglob("test_*.py")
    marked = [file for file in files if re.search(r"pytest\.mark\.gpu\b", file.read_text())]
    return {str(file.relative_to(ROOT)) for file in marked}


def steps(block, *more):
    """The commands of a block by the names of their logs: seconds and words."""
    listed = subprocess.run(
        ["make", "-n", "gpu-check", f"BLOCK={block}", "OUT=out", *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.replace("\\\n", "")
    found = re.findall(r"^timeout -k 20 (\d+) python3 (.*) >out/(\w+)\.log 2>&1$", listed, re.M)
    return {name: (int(seconds), command.split()) for seconds, command, name in found}


def test_blocks_have_every_gpu_test_and_at_most_their_minutes():
    page = (ROOT / "docs/first_gpu.md").read_text()
    words = set()
    for block, minutes in MINUTES.items():
        chosen = steps(block)
        assert sum(seconds for seconds, _ in chosen.values()) <= 60 * minutes
        assert f"at most {minutes} minutes" in page
        for name, (_, command) in chosen.items():
            shown = re.sub("^(train|evaluate)_(rotary|kerple_log)$", r"\1_NAME", name)
            assert f"`{shown}`" in page
            words |= set(command)
        assert steps(block, "DRY=1").keys() - {"data"} == chosen.keys()
    assert gpu_test_files() <= words
    assert {"configs/data/openwebtext2.yml", "save=out/runs/rotary"} <= words


def test_every_encoding_is_timed_beside_flash_and_nanogpt_compiled_and_not():
    compiled = [steps("3")[f"steps_compiled_{half}"][1] for half in (1, 2)]
    assert all({"nanogpt", "--compile"} < set(words) for words in compiled)
    assert {*compiled[0], *compiled[1]} > ENCODINGS
    assert ENCODINGS | {"nanogpt"} < set(steps("2")["steps"][1])
    assert ENCODINGS | {"--attention", "16384"} < set(steps("1")["attention"][1])


@pytest.mark.parametrize(("block", "name"), [("1", "attention"), ("2", "steps")])
def test_the_dry_run_times_every_row(block, name, capsys):
    _, (script, *words) = steps(block, "DRY=1")[name]
    assert script == "tools/bench.py"
    assert bench(words) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^\| (\w+) \| [\d.]+ \|", printed, re.M)
    assert set(rows) >= ENCODINGS


def test_nanogpt_has_the_loss_of_hugging_faces_gpt_2_with_its_weights():
    shape = {"vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    settings = GPT2Config(**shape, activation_function="gelu", attn_implementation="eager")
    theirs = GPT2LMHeadModel(settings).eval()
    sizes = {"vocab": 61, "length": 16, "train_length": 16, "hidden": 32, "layers": 2, "heads": 4}
    ours = NanoGPT(Namespace(**sizes))
    source = theirs.transformer
    pairs = [(ours.tokens, source.wte), (ours.places, source.wpe), (ours.norm, source.ln_f)]
    for layer, block in zip(ours.layers, source.h, strict=True):
        pairs += [(layer.norms[0], block.ln_1), (layer.norms[1], block.ln_2)]
        pairs += [(layer.qkv, block.attn.c_attn), (layer.out, block.attn.c_proj)]
        pairs += [(layer.mlp[0], block.mlp.c_fc), (layer.mlp[2], block.mlp.c_proj)]
    for module, original in pairs:
        weights = dict(original.named_parameters())
        for name, parameter in module.named_parameters():
            weight = weights[name].detach()
            is_turned = isinstance(module, torch.nn.Linear) and weight.dim() == 2
            parameter.data = weight.T if is_turned else weight
    ids = torch.randint(61, (3, 16))
    loss = theirs(ids, labels=ids).loss
    torch.testing.assert_close(ours(ids[:, :-1], ids[:, 1:]), loss)
