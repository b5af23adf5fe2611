"""A disk that is full costs what does not fit, and nothing that was there."""

from tests.faults.full_disk import on_small_disk
from tests.support import run

TINY = [
    "num_layers=2",
    "hidden_size=32",
    "num_attention_heads=4",
    "seq_length=64",
    "eval_interval=0",
    "tokenizer_type=CharLevelTokenizer",
    "save_interval=1",
    "train_iters=100",
]


def test_a_run_whose_checkpoint_does_not_fit_ends_with_the_one_before(corpus, tmp_path):
    def trained() -> dict:
        done = run("train.py", *TINY, f"data_path={corpus}", f"save={tmp_path}")
        return {
            "status": done.returncode,
            "message": done.stderr.splitlines()[-1],
            "files": sorted(path.name for path in tmp_path.iterdir()),
            "latest": (tmp_path / "latest").read_text(),
            "whole": "Traceback" not in done.stderr,
        }

    ending = on_small_disk(tmp_path, 3 * 1024, trained)
    assert ending["whole"], ending
    assert ending["status"] == 1
    step = int(ending["latest"].removeprefix("global_step"))
    assert step >= 1
    steps = [name for name in ending["files"] if name.startswith("global_step")]
    assert len(steps) == step
    assert set(ending["files"]) == {*steps, "latest"}
    assert ending["message"].startswith(f"{tmp_path}/partial_step{step + 1} cannot be written (")
    assert ending["message"].endswith(" - free some space or save elsewhere")
