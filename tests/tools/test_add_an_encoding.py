"""docs/add_an_encoding.md is carried out: its file, its YAML, its commands, and dropping the file into the project."""

import json
import re
import shutil

import pytest

from tests.support import ROOT, run

GUIDE = (ROOT / "docs" / "add_an_encoding.md").read_text(encoding="utf-8")
SMALL = [
    "num_layers=1",
    "hidden_size=24",
    "seq_length=64",
    "train_iters=2",
    "lr_decay_iters=2",
    "eval_interval=0",
]
SMALL += [
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


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", GUIDE, flags=re.DOTALL)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder: the two files of the guide, and the project by its names."""
    path = tmp_path_factory.mktemp("guide")
    (path / "my_encoding.py").write_text(block("python"))
    (path / "mine.yml").write_text(block("yaml"))
    for name in ("train.py", "evaluate.py", "tools", "configs"):
        (path / name).symlink_to(ROOT / name)
    return path


def succeed(folder, words) -> str:
    done = run(*words, cwd=folder)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_the_example_is_short():
    assert len([line for line in block("python").splitlines() if line.strip()]) <= 22


def test_the_commands_run_in_their_order_without_any_other_edit(folder, corpus):
    outputs = []
    for command in block("sh").splitlines():
        python, *words = command.split()
        assert python == "python"
        more = next((small for script, small in SMALLER.items() if script in command), [])
        more = [*more, f"data_path={corpus}"] if "train.py" in command else more
        outputs.append(succeed(folder, [*words, *more]))
    checked, plotted, trained, evaluated, learned, documented = outputs
    assert "0 fail: the encoding keeps what it must" in checked
    assert (folder / "plots/soft_window.png").exists()
    assert "soft_window.svg" in plotted
    assert "soft_window: " in trained
    assert " 4 of them in the encoding" in trained
    assert re.search(r"64\*\s+128", evaluated)
    assert all(
        f"{stem}.svg" in learned for stem in ("encoding", "learned", "trajectory", "attention")
    )
    assert (
        "| [soft_window](#soft_window) | -height · sigmoid((d - width) / softness), height ~ U(1, 4)"
        in documented
    )
    run_folder = folder / "runs/soft_window"
    assert (run_folder / "global_step2/pos_emb_file.py").read_text() == block("python")
    record = json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert len(record["position"]["height"]) == 4

    refused = run("evaluate.py", "--checkpoint", "runs/soft_window", cwd=folder)
    assert refused.returncode == 1
    assert "code that lies in a checkpoint is not run unasked" in refused.stderr
    assert "Traceback" not in refused.stderr

    again = [
        *SMALL,
        "train_iters=3",
        f"data_path={corpus}",
        "save=runs/soft_window",
        "load=runs/soft_window",
    ]
    (folder / "renamed.py").write_text(block("python"))
    resumed = succeed(
        folder, ["train.py", "configs/demo.yml", "mine.yml", *again, "pos_emb_file=renamed.py"]
    )
    assert "step 3/3" in resumed
    (folder / "edited.py").write_text(block("python") + "# edited\n")
    other = run(
        "train.py", "configs/demo.yml", "mine.yml", *again, "pos_emb_file=edited.py", cwd=folder
    )
    assert other.returncode == 1
    assert "and edited.py says something else" in other.stderr


def test_dropped_into_the_project_it_gets_tests_a_plot_and_a_row(tmp_path):
    ignore = shutil.ignore_patterns("__pycache__", "golden")
    for name in ("megatron", "tools", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    for name in ("train.py", "evaluate.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "megatron/positions/soft_window.py").write_text(block("python"))
    quick = "soft_window and not (finite_losses or later_tokens or training)"
    words = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/positions/test_every_encoding.py",
        "-k",
        quick,
    ]
    tested = succeed(tmp_path, words)
    assert int(re.search(r"(\d+) passed", tested)[1]) >= 5
    succeed(tmp_path, ["tools/plot_positions.py", "soft_window", "--length", "300"])
    assert (tmp_path / "plots/soft_window.svg").exists()
    assert "\n## soft_window\n" in succeed(tmp_path, ["tools/document_positions.py"])
