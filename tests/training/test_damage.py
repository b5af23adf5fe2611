"""Every file of a checkpoint damaged in every way: no resume and no evaluation uses it."""

import shutil

import pytest

from megatron.checkpoints.manifest import RECORD, read_record
from megatron.checkpoints.read import load_for_evaluation
from megatron.checkpoints.saved import latest_step
from megatron.errors import UserError
from megatron.training.run import train
from megatron.training.start import starting_point
from tests.faults.damage import KINDS, changed, found_by_use, own_encoding, settings

ENGINE_FILES = {"fp32": 1, "bf16": 2, "zero1": 2, "zero2": 2, "zero3": 2}


@pytest.fixture(scope="module", params=KINDS)
def run_of(request, grid, corpus, tmp_path_factory):
    """(kind, folder): a run with checkpoints of steps 1 and 2."""
    here = tmp_path_factory.mktemp(request.param)
    with own_encoding(here):
        train(settings(corpus, here, request.param), grid)
        yield request.param, here


def test_no_damage_to_any_file_is_used(run_of, grid, corpus):
    kind, here = run_of
    run = here / "run"
    found = found_by_use(corpus, here, kind, grid)
    silent = [one for one in found if one.message is None]
    assert not silent
    assert all(one.named for one in found), [one for one in found if not one.named]
    better = f"the newest good checkpoint of the run is {run}/global_step1: "
    assert all(better in one.message for one in found)
    files = len(list((run / "global_step2").iterdir()))
    identical = files - 2 - ENGINE_FILES[kind]  # config.yml and the user's file
    assert len([one for one in found if one.use == "resume"]) == 5 * files - identical
    assert latest_step(run) == 2


def test_any_flipped_bit_of_the_record_is_noticed(run_of):
    kind, here = run_of
    file = here / "run" / "global_step2" / RECORD
    content = file.read_bytes()
    read_record(file.parent)
    if kind != "fp32":
        return
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        with changed(file, bytes(damaged)), pytest.raises(UserError, match=RECORD):
            read_record(file.parent)


def test_a_whole_folder_of_another_step_is_noticed(run_of, grid, corpus, tmp_path):
    kind, here = run_of
    run = tmp_path / "run"
    shutil.copytree(here / "run", run)
    shutil.rmtree(run / "global_step2")
    shutil.copytree(run / "global_step1", run / "global_step2")
    config = settings(corpus, here, kind, f"load={run}", f"save={run}")
    message = rf"{run}/global_step2/{RECORD}: is the one of step 1 - the newest good checkpoint"
    with pytest.raises(UserError, match=message):
        starting_point(config, {}, grid)
    with pytest.raises(UserError, match=message):
        load_for_evaluation(run)
