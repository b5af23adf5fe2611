"""The tool that verifies and shows checkpoints."""

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


@pytest.fixture
def run(corpus, tmp_path):
    folder = tmp_path / "run"
    for step in (5, 10):
        make_checkpoint(folder, corpus, step=step)
    (folder / "latest").write_text("global_step10")
    return folder


def inspect(*words):
    done = call("tools/inspect_checkpoint.py", *words)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_whole_checkpoints_are_verified_and_shown_with_their_origin(run):
    keep_weights_only(run)
    status, shown = inspect(run)
    lines = [line.split() for line in shown]
    assert lines[0] == ["step", "size", "files", "config", "engine", "ranks", "state"]
    config_hash = read_record(run / "global_step5")["config_hash"]
    assert lines[1][0] == "5"
    assert lines[1][3:] == ["3", config_hash, "weights", "only", "?", "verified"]
    assert (status, shown[3:]) == (0, ["latest: step 10"])
    status, shown = inspect(run / "global_step5", "--quick")
    assert (status, shown[1].endswith("sizes as written")) == (0, True)
    origin = {"source": "models/pythia", "architecture": "GPTNeoXForCausalLM"}
    for facts, line in (
        ({"origin": origin}, "imported from models/pythia (GPTNeoXForCausalLM)"),
        (
            {"parent": PARENT, "parent_model": "rotary step 7"},
            "fine-tuned from runs/old/global_step7 (rotary step 7, config aa11, weights bb22)",
        ),
    ):
        path = run / "global_step5"
        write_record(path, {**read_record(path), **facts})
        assert inspect(run / "global_step5")[1][2:] == [line]


def test_damage_is_named_and_the_status_is_1(run):
    weights = run / "global_step5" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert inspect(run, "--quick")[0] == 0, "sizes alone do not show it"
    (run / "global_step10" / "checkpoint.json").unlink()
    (run / "latest").write_text("global_step7")
    (run / "partial_step12").mkdir()
    status, shown = inspect(run)
    assert status == 1
    for line in (
        f"{weights}: was changed after it was written",
        f"{run}/global_step10/checkpoint.json: is missing",
        f"left over by a process that died: {run}/partial_step12",
    ):
        assert line in shown
    (run / "global_step10" / "checkpoint.json").write_text("{")
    status, shown = inspect(run)
    assert any("checkpoint.json: not readable (" in line for line in shown)


def test_a_folder_without_checkpoints_is_one_message(tmp_path):
    for name, what in (("", "holds no checkpoint"), ("gone", "no such folder")):
        done = call("tools/inspect_checkpoint.py", tmp_path / name)
        assert done.returncode == 1
        place = f"{tmp_path / name}: {what}"
        assert done.stderr == f"{place} - name a run's folder or one checkpoint\n"
