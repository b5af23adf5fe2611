"""docs/add_an_encoding.md is carried out: its files, its YAML, its commands, and its examples."""

import json
import re
import runpy
import shutil
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file as load_tensors

from megatron.attention import attention
from megatron.conformance.checks import CHECKS, examine, finite_losses
from megatron.conformance.subject import FAILS, Subject
from megatron.positions import FILES, REGISTRY, Position, Shape, build, load_file
from tests.forks import OTHERS, Forks
from tests.support import ROOT, run

GUIDE = (ROOT / "docs" / "add_an_encoding.md").read_text(encoding="utf-8")
GOLDEN = ROOT / "tests" / "golden" / "encodings"
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
    "plot_positions.py": ["--length", "300", "--tokens", "16"],
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, flags=re.DOTALL)


def file_of(name: str) -> str:
    """The example that registers this encoding."""
    (text,) = [text for text in blocks("python") if f'@register("{name}")' in text]
    return text


def code_lines(text: str) -> int:
    return len([line for line in text.splitlines() if line.strip()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder: the files of the guide, and the project by its names."""
    path = tmp_path_factory.mktemp("guide")
    (path / "my_encoding.py").write_text(file_of("soft_window"))
    (path / "p_rope.py").write_text(file_of("p_rope"))
    (path / "gates.py").write_text(file_of("gates"))
    (path / "mine.yml").write_text(blocks("yaml")[0])
    for name in ("train.py", "evaluate.py", "tools", "configs"):
        (path / name).symlink_to(ROOT / name)
    return path


def succeed(run, words) -> str:
    done = run(*words)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture
def tool(folder, monkeypatch, capsys, own_registry):
    """Run a tool of the guide in this process, as the user's command would: its output."""
    tables = (REGISTRY, FILES)
    fresh = [dict(table) for table in tables]

    def output(words) -> str:
        for table, entries in zip(tables, fresh, strict=True):
            table.clear()
            table.update(entries)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            runpy.run_path(words[0], run_name="__main__")
        printed = capsys.readouterr()
        assert not end.value.code, f"{words}\n{printed.out}\n{printed.err}"
        return printed.out + printed.err

    return output


def test_the_examples_are_short():
    assert code_lines(file_of("soft_window")) <= 22
    assert code_lines(file_of("p_rope")) <= 25
    assert code_lines(file_of("gates")) <= 25


def test_every_hook_is_in_the_table():
    rows = re.findall(
        r"^\| `(\w+)\(.*?\)` \| (.*?) \| .*? \| `(\w+)` \|$", GUIDE, flags=re.MULTILINE
    )
    hooks = {hook: name for hook, _, name in rows}
    ours = {name for name, value in vars(Position).items() if callable(value)}
    helpers = {"has", "distances", "indices", "table", "log_n_scale", "reference", "__init__"}
    helpers |= {"use_paper_precision", "check_documents"}
    assert hooks.keys() == ours - helpers
    for hook, name in hooks.items():
        overridden = getattr(REGISTRY[name], hook) is not getattr(Position, hook)
        assert overridden, f"{name} does not have {hook}"


def test_the_commands_run_in_their_order_without_any_other_edit(folder, forks, tool, corpus):
    run = partial(forks.run, cwd=folder)
    outputs = []
    for command in blocks("sh")[0].splitlines():
        python, *words = command.split()
        assert python == "python"
        script = words[0].rpartition("/")[2]
        words += SMALLER.get(script, [])
        if script == "train.py":
            words.append(f"data_path={corpus}")
        outputs.append(tool(words) if words[0].startswith("tools/") else succeed(run, words))
    checked, plotted, trained, evaluated, learned, documented = outputs
    assert "0 fail: the encoding keeps what it must" in checked
    assert (folder / "plots/soft_window.png").exists()
    assert "soft_window.svg" in plotted
    assert "soft_window: " in trained
    assert " 4 of them in the encoding" in trained
    assert re.search(r"64\*\s+128", evaluated)
    for stem in ("encoding", "learned", "trajectory", "attention"):
        assert f"{stem}.svg" in learned
    formula = "-height · sigmoid((d - width) / softness), height ~ U(1, 4)"
    assert f"| [soft_window](#soft_window) | {formula}" in documented
    run_folder = folder / "runs/soft_window"
    kept = run_folder / "global_step2/pos_emb_file.py"
    assert kept.read_text() == file_of("soft_window")
    record = json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert len(record["position"]["height"]) == 4

    refused = run("evaluate.py", "--checkpoint", "runs/soft_window")
    assert refused.returncode == 1
    assert "code that lies in a checkpoint is not run unasked" in refused.stderr
    assert "Traceback" not in refused.stderr

    run_name = "runs/soft_window"
    again = [*SMALL, "train_iters=3", f"data_path={corpus}", f"save={run_name}", f"load={run_name}"]
    train = ["train.py", "configs/demo.yml", "mine.yml", *again]
    (folder / "renamed.py").write_text(file_of("soft_window"))
    assert "step 3/3" in succeed(run, [*train, "pos_emb_file=renamed.py"])


def test_dropped_into_the_project_it_gets_tests_a_plot_and_a_row(tmp_path):
    ignore = shutil.ignore_patterns("__pycache__", "golden")
    for name in ("megatron", "tools", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    for name in ("train.py", "evaluate.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "megatron/positions/soft_window.py").write_text(file_of("soft_window"))
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    words.append("tests/positions/test_every_encoding.py::test_every_encoding_keeps_what_it_must")
    tested = succeed(partial(run, cwd=tmp_path), [*words, "-k", "soft_window"])
    assert "1 passed" in tested
    with Forks(tmp_path, OTHERS) as forks:
        succeed(forks.run, ["tools/plot_positions.py", "soft_window", "--length", "300"])
        assert (tmp_path / "plots/soft_window.svg").exists()
        assert "\n## soft_window\n" in succeed(forks.run, ["tools/document_positions.py"])


@pytest.mark.parametrize(("name", "options"), [("p_rope", {"p": 0.25}), ("gates", {})])
def test_the_other_examples_keep_what_they_must(name, options, folder, own_registry):
    command = next(line for line in blocks("sh")[1].splitlines() if f" {name} " in line)
    assert f"tools/check_encoding.py {name} --from {name}.py" in command
    load_file(folder / f"{name}.py")
    findings = examine(
        Subject(name, options), [check for check in CHECKS if check is not finite_losses]
    )
    failed = [
        f"{finding.check}: {finding.detail}" for finding in findings if finding.verdict == FAILS
    ]
    assert failed == []


INPUTS = load_tensors(GOLDEN / "inputs.safetensors")
LOWER = torch.ones(16, 16).tril().bool()


def attend(scores: torch.Tensor) -> torch.Tensor:
    """Causal attention by its definition: the output [batch, heads, length, head_dim]."""
    return scores.masked_fill(~LOWER, -torch.inf).softmax(dim=-1) @ INPUTS["L16.v"].double()


@pytest.fixture
def example(folder, own_registry):
    """An example of the guide in the shape of the golden values, in float64."""

    def built(name: str, **options) -> Position:
        load_file(folder / f"{name}.py")
        shape = Shape(heads=3, head_dim=8, hidden=24, train_length=16)
        return build(name, shape, **options).double()

    return built


def test_gates_have_the_bias_output_and_gradients_of_the_authors_code(example):
    golden = load_tensors(GOLDEN / "fox.safetensors")
    gates = example("gates")
    with torch.no_grad():
        gates.weight.copy_(golden["param.gate_weight"])
        gates.bias.copy_(golden["param.gate_bias"])
    x = INPUTS["L16.x"].double()
    bias = bias_of(gates, x)[:, :, LOWER]
    torch.testing.assert_close(bias, golden["L16.bias"].double(), rtol=0, atol=1e-5)
    longer = bias_of(gates, INPUTS["L48.x"][:1].double())
    lower = torch.ones(48, 48).tril().bool()
    expected = golden["L48.bias"].double()
    torch.testing.assert_close(longer[:, :, lower], expected, rtol=1e-6, atol=1e-5)

    q = INPUTS["L16.q"].double().requires_grad_()
    k = INPUTS["L16.k"].double().requires_grad_()
    out = attention(q, k, INPUTS["L16.v"].double(), score_bias=gates.score_bias(x, {}))
    torch.testing.assert_close(out, golden["L16.out"].double(), rtol=0, atol=1e-6)
    leaves = {"q": q, "k": k, "gate_weight": gates.weight, "gate_bias": gates.bias}
    found = torch.autograd.grad((out * INPUTS["L16.dout"]).sum(), list(leaves.values()))
    for name, gradient in zip(leaves, found, strict=True):
        expected = golden[f"L16.grad_{name}"].double()
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def bias_of(gates: Position, x: torch.Tensor) -> torch.Tensor:
    """The bias of every pair of tokens: [batch, heads, length, length], 0 for a token itself."""
    _, of_keys = gates.score_bias(x, {})
    return of_keys[:, :, None] - of_keys[..., None]


def test_p_rope_has_the_frequencies_scores_and_output_of_hugging_face(example):
    golden = load_tensors(GOLDEN / "p_rope.safetensors")
    q, k = INPUTS["L16.q"].double(), INPUTS["L16.k"].double()
    scores = {}
    for p in (0.25, 0.75):
        p_rope = example("p_rope", p=p)
        expected = golden[f"p{p}.inv_freq"]
        torch.testing.assert_close(p_rope.inv_freq.float(), expected, rtol=1e-6, atol=0)
        turned_q, turned_k = p_rope.on_queries_keys(q, k)
        scores[p] = turned_q @ turned_k.transpose(-1, -2) / 8**0.5
    packed = scores[0.25][:, :, LOWER].float()
    torch.testing.assert_close(packed, golden["p0.25.L16.scores"], rtol=0, atol=2e-6)
    out = attend(scores[0.75]).float()
    torch.testing.assert_close(out, golden["p0.75.L16.out"], rtol=0, atol=2e-6)
