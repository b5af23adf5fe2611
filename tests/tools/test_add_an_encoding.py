"""docs/add_an_encoding.md is carried out: its files, its YAML, its commands, and its examples."""

import json
import re
from functools import partial

import pytest
import torch

from megatron.positions import REGISTRY, Position, Shape, build, load_file
from tests.support import ROOT, blocks

PAGE = "docs/add_an_encoding.md"
SMALL = [
    "num_layers=1",
    "hidden_size=24",
    "seq_length=64",
    "train_iters=2",
    "lr_decay_iters=2",
    "eval_interval=0",
    "train_micro_batch_size_per_gpu=1",
    "tokenizer_type=CharLevelTokenizer",
    "vocab_file=null",
    "log_interval=1",
]
SMALLER = {
    "train.py": SMALL,
    "evaluate.py": ["--lengths", "64", "128"],
}


def file_of(name):
    """The example that registers this encoding."""
    (text,) = [text for text in blocks(PAGE, "python") if f'@register("{name}")' in text]
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder: the files of the guide, and the project by its names."""
    path = tmp_path_factory.mktemp("guide")
    (path / "my_encoding.py").write_text(file_of("soft_window"))
    (path / "fast_rope.py").write_text(file_of("fast_rope"))
    (path / "gates.py").write_text(file_of("gates"))
    (path / "mine.yml").write_text(blocks(PAGE, "yaml")[0])
    for name in ("train.py", "evaluate.py", "tools", "configs"):
        (path / name).symlink_to(ROOT / name)
    return path


def succeed(run, words):
    done = run(*words)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_every_hook_is_in_the_table():
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)\(.*?\)` \| (.*?) \| .*? \| `(\w+)` \|$", text, re.MULTILINE)
    hooks = {hook: name for hook, _, name in rows}
    ours = {name for name, value in vars(Position).items() if callable(value)}
    helpers = {"has", "distances", "indices", "table", "log_n_scale", "reference", "__init__"}
    helpers |= {"use_paper_precision", "use_scaling", "bias_between", "once"}
    helpers |= {f"check_{what}" for what in ("documents", "heads", "parts", "cached", "tokens")}
    assert hooks.keys() == ours - helpers
    for hook, name in hooks.items():
        overridden = getattr(REGISTRY[name], hook) is not getattr(Position, hook)
        assert overridden, f"{name} does not have {hook}"


def test_the_commands_run_in_their_order_without_any_other_edit(folder, forks, corpus):
    run = partial(forks.run, cwd=folder)
    outputs = []
    for command in blocks(PAGE, "sh")[0].splitlines():
        python, *words = command.split()
        assert python == "python"
        script = words[0].rpartition("/")[2]
        words += SMALLER.get(script, [])
        if script == "train.py":
            words.append(f"data_path={corpus}")
        outputs.append(succeed(run, words))
    checked, plotted, trained, evaluated, learned = outputs
    assert "0 fail: the encoding has all properties that it must have" in checked
    assert "soft_window.svg" in plotted
    assert (folder / "learned.svg").exists()
    assert "soft_window: " in trained
    assert " 4 of them in the encoding" in trained
    assert re.search(r"64\*\s+128", evaluated)
    assert "learned.svg" in learned
    run_folder = folder / "runs/soft_window"
    copy = run_folder / "global_step2/pos_emb_file.py"
    assert copy.read_text() == file_of("soft_window")
    record = json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert len(record["position"]["height"]) == 4

    refused = run("evaluate.py", "--checkpoint", "runs/soft_window")
    assert refused.returncode == 1
    assert "code inside a checkpoint never runs without your consent" in refused.stderr
    assert "Traceback" not in refused.stderr

    run_name = "runs/soft_window"
    again = [*SMALL, "train_iters=3", f"data_path={corpus}", f"save={run_name}", f"load={run_name}"]
    train = ["train.py", "configs/demo.yml", "mine.yml", *again]
    (folder / "renamed.py").write_text(file_of("soft_window"))
    assert "step 3/3" in succeed(run, [*train, "pos_emb_file=renamed.py"])


def test_the_other_examples_compute_what_the_registry_does(folder, own_registry):
    """fox and a part of rotary, which test_authors.py compares with their authors' numbers."""
    for name in ("fast_rope", "gates"):
        load_file(folder / f"{name}.py")
    shape = Shape(heads=3, head_dim=8, hidden=24, train_length=16)
    gates, fox = build("gates", shape), build("fox", shape)
    fox.load_state_dict(gates.state_dict())
    x = torch.randn(2, 16, 24)
    (u, ours), (theirs_u, theirs) = gates.score_bias(x, {}), fox.score_bias(x, {})
    assert u is theirs_u is None
    # What is the same for all keys of a query drops out of the softmax.
    ours, theirs = ours - ours[..., :1], theirs - theirs[..., :1]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    q, k = torch.randn(2, 1, 3, 16, 8)
    turned = build("fast_rope", shape, p=0.75).on_queries_keys(q, k)
    expected = build("p_rope", shape, fraction=0.75).on_queries_keys(q, k)
    for ours, theirs in zip(turned, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
