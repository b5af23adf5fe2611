"""A few kills -9 of each kind; `make faults` does more than a hundred."""

import pytest

from tests.faults.forks import Forks
from tests.faults.kills import KINDS, Campaign
from tests.faults.restarts import evaluation, killed, preparation
from tests.support import make_checkpoint


@pytest.fixture(scope="module")
def forks():
    with Forks() as forks:
        yield forks


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "kills"), [(KINDS[0], 3), (KINDS[3], 1)], ids=["alone", "one of two ranks"]
)
def test_a_killed_training_goes_on_as_if_nothing_had_happened(kind, kills, forks, corpus, tmp_path):
    tally = Campaign(forks, kind, corpus, tmp_path / "runs", seed=1).run(kills)
    assert not tally.faults
    assert tally.kills == kills


def test_a_killed_evaluation_ends_with_the_same_rows(forks, corpus, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "run", corpus)
    tally = killed(forks, *evaluation(checkpoint), tmp_path / "rows", kills=2, seed=1)
    assert not tally.faults


def test_a_killed_preparation_ends_with_the_same_files(forks, tmp_path, texts):
    tally = killed(forks, *preparation(texts), tmp_path / "data", kills=2, seed=1)
    assert not tally.faults


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of this project's own modules."""
    from tests.support import modules

    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(modules()):
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return folder
