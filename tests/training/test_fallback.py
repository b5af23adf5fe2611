"""Which checkpoint a run continues from where `latest` or the newest checkpoint is damaged."""

import shutil

import pytest

from megatron.checkpoints.manifest import read_record
from megatron.checkpoints.read import load_for_evaluation
from megatron.checkpoints.saved import latest_step, steps_in
from megatron.errors import UserError
from megatron.training.run import train
from megatron.training.start import starting_point
from tests.training.conftest import copy_of, settings


@pytest.fixture(scope="module")
def three(grid, corpus, tmp_path_factory):
    """A run with checkpoints of steps 1, 2 and 3; not to be changed."""
    folder = tmp_path_factory.mktemp("three")
    train(settings(corpus, folder, "train_iters=3", "save_interval=1"), grid)
    return folder


def facts(folder):
    return read_record(folder / "global_step1")


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_refused_or_replaced_by_the_newest_good_one(
    grid, corpus, three, tmp_path, caplog
):
    folder = copy_of(three, tmp_path)
    damage(folder / "global_step3/mp_rank_00_model_states.pt")
    damage(folder / "global_step2/model.safetensors")
    fault = f"{folder}/global_step3/mp_rank_00_model_states.pt: was changed after it was written"
    good = f"{folder}/global_step1"
    with pytest.raises(UserError) as refused:
        train(settings(corpus, folder), grid)
    assert str(refused.value) == (
        f"{fault} - the newest good checkpoint of the run is {good}:"
        f" load={good} or load_fallback=true takes it"
    )
    assert load_for_evaluation(folder)[2]["step"] == 3, "it does not read the engine's state"
    start = starting_point(settings(corpus, folder, "load_fallback=true"), facts(folder), grid)
    assert (start.step, start.path) == (1, folder / "global_step1")
    assert f"{fault}; load_fallback: continuing from {good}" in caplog.messages
    train(settings(corpus, folder, "load_fallback=true", "train_iters=3"), grid)
    assert latest_step(folder) == 3
    load_for_evaluation(folder)


def test_without_a_good_checkpoint_the_message_says_so(grid, corpus, three, tmp_path):
    folder = copy_of(three, tmp_path)
    for step in (1, 2, 3):
        (folder / f"global_step{step}/config.yml").write_text("")
    with pytest.raises(UserError, match=r"no other checkpoint of the run is good: copy it again"):
        train(settings(corpus, folder, "load_fallback=true"), grid)
    with pytest.raises(UserError, match=r"config.yml: has 0 bytes, [\d,]+ were written - no other"):
        load_for_evaluation(folder)


def test_engine_files_of_other_ranks_are_not_loaded_beside_ours(grid, corpus, three, tmp_path):
    folder = copy_of(three, tmp_path)
    surplus = folder / "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(folder / "global_step3/mp_rank_00_model_states.pt", surplus)
    with pytest.raises(UserError, match=rf"{surplus}: is not of this checkpoint"):
        train(settings(corpus, folder), grid)


def test_a_run_whose_only_checkpoint_lost_its_record_does_not_start_anew(
    grid, corpus, trained, tmp_path
):
    folder = copy_of(trained, tmp_path)
    (folder / "global_step4/checkpoint.json").unlink()
    message = r"global_step4/checkpoint.json: is missing - no other checkpoint"
    for _ in range(2):
        with pytest.raises(UserError, match=message):
            train(settings(corpus, folder), grid)
        with pytest.raises(UserError, match=message):
            load_for_evaluation(folder)
        (folder / "latest").unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"holds a checkpoint of step 4 already"):
        train(settings(corpus, folder, f"load={trained}"), grid)


@pytest.mark.parametrize(
    ("content", "note", "step"),
    [
        (b"global_step9\n", "names global_step9, which is not there", 3),
        (b"", "is empty", 3),
        (b"\xff\x00\x80", "is damaged (it holds b'\\xff\\x00\\x80')", 3),
        (b"global_step2", "is older than other checkpoints there (3)", 2),
        ("a folder", "cannot be read (it is no regular file)", 3),
        (None, "is missing", 3),
    ],
    ids=["dangling", "empty", "binary", "older", "folder", "missing"],
)
def test_an_odd_latest_is_a_warning_with_the_step_that_is_used(
    grid, corpus, three, tmp_path, caplog, content, note, step
):
    folder = copy_of(three, tmp_path)
    pointer = folder / "latest"
    pointer.unlink()
    if content == "a folder":
        pointer.mkdir()
    elif content is not None:
        pointer.write_bytes(content)
    warning = f"{pointer}: {note}; step {step} is used"
    assert starting_point(settings(corpus, folder), facts(folder), grid).step == step
    assert caplog.messages.count(warning) == 1
    assert load_for_evaluation(folder)[2]["step"] == step
    assert caplog.messages.count(warning) == 2
    assert steps_in(folder) == [1, 2, 3]


def test_a_newer_checkpoint_without_a_record_is_mentioned(grid, corpus, three, tmp_path, caplog):
    folder = copy_of(three, tmp_path)
    (folder / "global_step3/checkpoint.json").unlink()
    (folder / "latest").unlink()
    assert starting_point(settings(corpus, folder), facts(folder), grid).step == 2
    assert (
        f"{folder}/latest: global_step3 has no checkpoint.json; step 2 is used" in caplog.messages
    )
