"""The tool that verifies and shows checkpoints."""

import shutil

import pytest

from megatron.checkpoints.manifest import read_record, write_record
from megatron.checkpoints.saved import keep_weights_only
from tests.checkpoints import make_checkpoint
from tests.support import call

PARENT = {
    "path": "runs/old/global_step7",
    "step": 7,
    "config_hash": "aa11",
    "weights": "bb22",
}


@pytest.fixture(scope="module")
def made(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect") / "run"
    for step in (5, 10):
        make_checkpoint(folder, corpus, step=step)
    (folder / "latest").write_text("global_step10")
    return folder


def inspect(*words):
    done = call("tools/inspect_checkpoint.py", *words)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_whole_checkpoints_are_verified_and_shown(made):
    status, shown = inspect(made)
    config_hash = read_record(made / "global_step5")["config_hash"]
    lines = [line.split() for line in shown.splitlines()]
    assert lines[0] == ["step", "size", "files", "config", "engine", "ranks", "state"]
    assert [line[0] for line in lines[1:3]] == ["5", "10"]
    assert lines[1][2:] == ["KB", "3", config_hash, "weights", "only", "?", "verified"]
    assert shown.splitlines()[3:] == ["latest: step 10"]
    assert status == 0
    status, shown = inspect(made / "global_step5", "--quick")
    assert (status, shown.splitlines()[1].endswith("sizes as written")) == (0, True)


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (
            {"parent": PARENT, "parent_model": "rotary step 7"},
            "fine-tuned from runs/old/global_step7 (rotary step 7, config aa11, weights bb22)",
        ),
        (
            {"origin": {"source": "models/pythia", "architecture": "GPTNeoXForCausalLM"}},
            "imported from models/pythia (GPTNeoXForCausalLM)",
        ),
    ],
)
def test_parent_and_origin_are_shown(facts, line, made, tmp_path):
    run = shutil.copytree(made, tmp_path / "run")
    for step in (5, 10):
        path = run / f"global_step{step}"
        write_record(path, {**read_record(path), **facts})
    assert inspect(run)[1].splitlines()[3:] == [line, "latest: step 10"]
    assert inspect(run / "global_step5")[1].splitlines()[2:] == [line]


def test_damage_is_named_and_the_status_is_1(made, tmp_path):
    run = shutil.copytree(made, tmp_path / "run")
    weights = run / "global_step5" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert inspect(run, "--quick")[0] == 0, "sizes alone do not show it"
    (run / "global_step10" / "checkpoint.json").write_text("{")
    (run / "latest").write_text("global_step7")
    (run / "partial_step12").mkdir()
    status, shown = inspect(run)
    assert status == 1
    assert shown.count("damaged") == 2
    for line in (
        f"{weights}: was changed after it was written",
        f"left over by a process that died: {run}/partial_step12",
        f"latest: step 10 ({run}/latest names global_step7, which is not there)",
    ):
        assert line in shown.splitlines()
    assert f"{run}/global_step10/checkpoint.json: not readable (" in shown


def test_a_checkpoint_without_its_record_is_damaged(made, tmp_path):
    run = shutil.copytree(made, tmp_path / "run")
    (run / "global_step10" / "checkpoint.json").unlink()
    status, shown = inspect(run)
    assert status == 1
    assert f"{run}/global_step10/checkpoint.json: is missing" in shown.splitlines()


def test_weights_that_lost_their_states_on_purpose_are_whole(made, tmp_path):
    run = shutil.copytree(made, tmp_path / "run")
    keep_weights_only(run)
    assert inspect(run)[0] == 0


def test_a_folder_without_checkpoints_is_one_message(tmp_path):
    for name, what in (("", "holds no checkpoint"), ("gone", "no such folder")):
        done = call("tools/inspect_checkpoint.py", tmp_path / name)
        assert done.returncode == 1
        assert done.stderr == (
            f"{tmp_path / name}: {what} - name a run's folder or one checkpoint\n"
        )
