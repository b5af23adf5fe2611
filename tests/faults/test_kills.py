"""A few kills -9 of each kind, and cut data; `make faults` does more than a hundred kills."""

import os
import shutil
import time

import pytest

from megatron.data.token_index import AGAIN
from tests.checkpoints import make_checkpoint
from tests.faults.kills import MODEL, check_kills, evaluation, preparation, trainings
from tests.support import make_texts

KILLS = int(os.environ.get("KILLS", "1"))
SEED = int(os.environ.get("SEED", "1"))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind", [0, 1, *(pytest.param(kind, marks=pytest.mark.campaign) for kind in (2, 3, 4))]
)
def test_a_killed_training_goes_on_as_if_nothing_had_happened(kind, forks, corpus, tmp_path):
    command = trainings(corpus)[kind]
    check_kills(forks, command, tmp_path / "runs", kills=KILLS, seed=SEED + kind)


@pytest.mark.campaign
def test_a_killed_evaluation_ends_with_the_same_rows(forks, corpus, tmp_path):
    command = evaluation(make_checkpoint(tmp_path / "run", corpus))
    check_kills(forks, command, tmp_path / "rows", kills=KILLS, seed=SEED)


@pytest.mark.campaign
def test_a_killed_preparation_ends_with_the_same_files(forks, tmp_path):
    texts = make_texts(tmp_path / "texts")
    check_kills(forks, preparation(texts), tmp_path / "data", kills=KILLS, seed=SEED)


@pytest.mark.campaign
def test_data_cut_under_a_training_are_one_message_and_its_checkpoint_stays(
    forks, corpus, tmp_path
):
    for path in corpus.parent.glob(corpus.name + ".*"):
        shutil.copy(path, tmp_path)
    ids = tmp_path / f"{corpus.name}.bin"
    folder, log = tmp_path / "run", tmp_path / "log"
    saving = ["save_interval=0", "extra_save_iters=[2]", "log_interval=1", "eval_interval=0"]
    places = [f"data_path={tmp_path / corpus.name}", f"save={folder}", "num_workers=2"]
    pid = forks.start("train.py", *MODEL, *saving, *places, "train_iters=100000", log=log)
    while not (folder / "latest").exists():
        assert forks.poll(pid) is None, log.read_text()
        time.sleep(0.01)
    step = folder / "global_step2"
    before = {path.name: path.read_bytes() for path in step.iterdir()}
    whole = ids.stat().st_size
    os.truncate(ids, whole // 2)
    assert forks.wait(pid) == 1
    text = log.read_text()
    assert text.splitlines()[-1] == (
        f"{ids}: was changed while it was read: it has {whole // 2} bytes, it had {whole} - {AGAIN}"
    )
    assert "Traceback" not in text
    assert {path.name: path.read_bytes() for path in step.iterdir()} == before
