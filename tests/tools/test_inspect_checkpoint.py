"""The tool that verifies and shows checkpoints."""

from megatron.checkpoints.manifest import read_record
from megatron.checkpoints.saved import keep_weights_only
from tests.checkpoints import make_checkpoint
from tests.support import call


def inspect(*words):
    done = call("tools/inspect_checkpoint.py", *words)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_whole_checkpoints_are_shown_and_damage_is_named_with_status_1(corpus, tmp_path):
    run = tmp_path / "run"
    for step in (5, 10):
        make_checkpoint(run, corpus, step=step)
    (run / "latest").write_text("global_step10")
    keep_weights_only(run)
    status, shown = inspect(run)
    lines = [line.split() for line in shown]
    assert lines[0] == ["step", "size", "files", "config", "for", "state"]
    config_hash = read_record(run / "global_step5")["config_hash"]
    assert lines[1][0] == "5"
    assert lines[1][3:] == ["3", config_hash, "evaluation", "verified"]
    assert (status, shown[3:]) == (0, ["latest: step 10"])

    weights = run / "global_step5" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
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
