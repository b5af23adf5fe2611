"""A few kills -9 of each kind; `make faults` does more than a hundred kills."""

import os

import pytest

from tests.checkpoints import make_checkpoint
from tests.faults.kills import check_kills, evaluation, preparation, trainings
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
