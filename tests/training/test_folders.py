"""Who may write a run's folders, and what a new owner finds there."""

import pytest

from megatron.config import load
from megatron.errors import UserError
from megatron.folder_lock import owned_folder
from megatron.parallel.grid import Grid
from megatron.parallel.owned import owned_by_first
from megatron.training.folders import folders_of
from megatron.training.run import train
from tests.training.conftest import settings, tiny


@pytest.mark.parametrize(("key", "folder"), [("save", "run"), ("log_dir", "logs")])
def test_a_second_training_into_one_folder_is_refused_before_it_writes(
    key, folder, grid, corpus, tmp_path
):
    config = settings(corpus, tmp_path / "run", f"log_dir={tmp_path / 'logs'}")
    with (
        owned_folder(tmp_path / folder, key),
        pytest.raises(UserError, match=rf"{key}: {tmp_path}/{folder} is in use by process \d+ on"),
    ):
        train(config, grid)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_for_both_checkpoints_and_metrics_is_owned_once(tmp_path):
    both = load([], tiny(f"save={tmp_path / 'run'}", f"log_dir={tmp_path}/./run"))
    with owned_by_first(Grid(), *folders_of(both)):
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".owner"]


def test_a_new_owner_removes_what_killed_runs_left_half_done(tmp_path):
    for name in ("partial_step6", "removing_global_step2", "global_step4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    with owned_by_first(Grid(), *folders_of(load([], tiny(f"save={tmp_path}")))):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".owner", "global_step4"]


def test_ranks_without_the_lock_end_with_the_message_of_the_first(tmp_path, monkeypatch):
    """What the first rank met reaches the others in the exchange that all take part in."""
    message = "save: run is in use"
    monkeypatch.setattr(Grid, "gather", lambda self, value: [message, value])
    with pytest.raises(UserError, match=message), owned_by_first(Grid(1, ranks=2)):
        pass
