"""A few kills -9 of each kind, and cut data; `make faults` does more than a hundred kills."""

import os
import shutil
import time
from pathlib import Path

import pytest

from megatron.data.token_index import AGAIN
from tests.checkpoints import make_checkpoint
from tests.faults.kills import KINDS, MODEL, Campaign
from tests.faults.restarts import evaluation, killed, preparation


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "kills"), [(KINDS[0], 1), (KINDS[3], 1)], ids=["alone", "one of two ranks"]
)
def test_a_killed_training_goes_on_as_if_nothing_had_happened(kind, kills, forks, corpus, tmp_path):
    tally = Campaign(forks, kind, corpus, tmp_path / "runs", seed=1).run(kills)
    assert not tally.faults
    assert tally.kills == kills


@pytest.mark.campaign
def test_a_killed_evaluation_ends_with_the_same_rows(forks, corpus, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "run", corpus)
    tally = killed(forks, *evaluation(checkpoint), tmp_path / "rows", kills=2, seed=1)
    assert not tally.faults


@pytest.mark.campaign
def test_a_killed_preparation_ends_with_the_same_files(forks, tmp_path, texts):
    tally = killed(forks, *preparation(texts), tmp_path / "data", kills=2, seed=1)
    assert not tally.faults


def training_on(data: Path, folder: Path, *words: str) -> list[str]:
    """Words of a training that has one checkpoint, of step 2, before its end."""
    saving = ["save_interval=0", "extra_save_iters=[2]", "log_interval=1", "eval_interval=0"]
    return [*MODEL, *saving, f"data_path={data}", f"save={folder}", *words]


def copied(corpus: Path, folder: Path) -> Path:
    for path in corpus.parent.glob(corpus.name + ".*"):
        shutil.copy(path, folder)
    return folder / corpus.name


def started(forks, words: list[str], folder: Path, log: Path) -> int:
    """The id of a training that has written its first checkpoint."""
    pid = forks.start("train.py", *words, log=log)
    while not (folder / "latest").exists():
        assert forks.poll(pid) is None, log.read_text()
        time.sleep(0.01)
    return pid


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "global_step2").iterdir()}


@pytest.mark.campaign
@pytest.mark.parametrize("workers", [0, 2])
def test_data_cut_under_a_training_are_one_message_and_its_checkpoint_stays(
    workers, forks, corpus, tmp_path
):
    data, folder, log = copied(corpus, tmp_path), tmp_path / "run", tmp_path / "log"
    words = training_on(data, folder, f"num_workers={workers}", "train_iters=100000")
    pid = started(forks, words, folder, log)
    before = contents(folder)
    ids = data.with_name(data.name + ".bin")
    whole = ids.stat().st_size
    os.truncate(ids, whole // 2)
    assert forks.wait(pid) == 1
    text = log.read_text()
    assert text.splitlines()[-1] == (
        f"{ids}: was changed while it was read: it has {whole // 2} bytes, it had {whole} - {AGAIN}"
    )
    assert "Traceback" not in text
    assert contents(folder) == before
    assert (folder / "latest").read_text() == "global_step2"


@pytest.mark.campaign
def test_data_deleted_under_a_training_stay_readable_to_its_end(forks, corpus, tmp_path):
    data, folder, log = copied(corpus, tmp_path), tmp_path / "run", tmp_path / "log"
    pid = started(forks, training_on(data, folder, "train_iters=60"), folder, log)
    for path in tmp_path.glob(data.name + ".*"):
        path.unlink()
    assert not (folder / "global_step60").exists(), "too fast for this test"
    assert forks.wait(pid) == 0, log.read_text()
    assert (folder / "global_step60").exists()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of this project's own modules."""
    from tests.support import modules

    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(modules()):
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return folder
