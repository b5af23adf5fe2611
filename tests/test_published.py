"""The commands of docs/published_files.md, on files like the published ones and a small model."""

import os
import re
import sys

import pytest

import deepy
from megatron.results.files import read_results
from tests.published import KERPLE, MEP, experiments, write_bases
from tests.support import ROOT

pytestmark = pytest.mark.docs

PAGE = (ROOT / "docs" / "published_files.md").read_text(encoding="utf-8")
SMALL = [
    "num_layers=1",
    "hidden_size=24",
    "seq_length=16",
    "max_position_embeddings=16",
    "seq_length_val=32",
    "tokenizer_type=CharLevelTokenizer",
    "train_micro_batch_size_per_gpu=1",
    "gradient_accumulation_steps=1",
    "eval_iters=2",
    "split=80,10,10",
]
TRAIN = ["train_iters=2", "lr_decay_iters=2", "save_interval=0"]


def commands() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.removeprefix("python ").split(" ") for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The forks' folders beside each other."""
    folder = tmp_path_factory.mktemp("forks")
    for name, table in (("kerple_configs", KERPLE), ("mep_configs", MEP)):
        for part in ("exp_configs", "lengths"):
            (folder / name / part).mkdir(parents=True)
        write_bases(folder / name)
        for file in (folder / name).glob("length_*.yml"):
            file.rename(folder / name / "lengths" / file.name)
        for one in experiments(table):
            if one.seed == 1235 and one.name.startswith(("kerple_log", "ali_tanh", "t5")):
                (folder / name / "exp_configs" / f"{one.stem}.yml").write_text(one.text)
    return folder


def test_the_pages_commands_run_in_their_order(folder, corpus, forks):
    ran = []
    data = [f"data_path={corpus}", *SMALL]
    for words in commands():
        if words[:2] == ["deepy.py", "1.5"]:
            continue  # the same once more, started by the test below
        if words[0] == "deepy.py":
            words = [*words[1:], *data, *(TRAIN if "ex_eval" not in " ".join(words) else [])]
        if words[0] == "evaluate.py":
            words = [*words, "eval_tokens=4096"]
            words[words.index("runs/mine")] = "kerple_log_github_1235_checkpoints"
        if "-o" in words:
            files = sorted(folder.glob("mep_configs/exp_configs/*.yml"))
            words = [words[0], *map(str, files), *words[-2:]]
        done = forks.run(ROOT / words[0], *words[1:], cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        ran.append(words[0])
    assert ran.count("train.py") == 2
    assert ran.count("tools/migrate_config.py") == 2
    run = folder / "kerple_log_github_1235_checkpoints"
    assert len([*run.glob("evaluation/*-valid-*-paper-bf16.jsonl")]) == 1
    (file,) = run.glob("evaluation/*-test-*-paper-bf16.jsonl")
    (row,) = read_results([file])
    assert (row["length"], row["windows"], row["start"]) == (32, 2, 0)
    assert len([*(folder / "configs/mine").iterdir()]) > 5
    variants = read_results([*run.glob("evaluation/*paper_precision*.jsonl")])
    assert [row["length"] for row in variants] == [512, 1024, 2048, 4096]


def test_deepy_makes_no_training_steps_an_evaluation(folder, monkeypatch, capsys):
    started = []

    def execve(_, command, environment):
        started.append(command)
        sys.exit(0)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.chdir(folder)
    train = next(words for words in commands() if words[:2] == ["deepy.py", "1.5"])
    measure = next(words for words in commands() if "ex_eval" in " ".join(words))
    for words, script in ((train, "train.py"), (measure, "evaluate.py")):
        with pytest.raises(SystemExit) as ended:
            deepy.main([*words[1:], *SMALL, f"data_path={folder}/none"])
        assert (ended.value.code, started.pop()[2]) == (0, str(ROOT / script))
    said = capsys.readouterr().err
    assert "the leading 1.5 is accepted and has no effect" in said
    assert "lr_schedule: neox-2022" in said
