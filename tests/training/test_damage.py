"""Every file of a checkpoint damaged in every way: no resume and no evaluation uses it."""

import shutil

import pytest

from megatron.config import load
from megatron.errors import UserError
from megatron.positions import FILES, REGISTRY
from megatron.training.checkpoint import READ_BY_EVALUATION, load_for_evaluation
from megatron.training.manifest import RECORD, read_record
from megatron.training.run import train
from megatron.training.saved import latest_step
from megatron.training.start import starting_point
from tests.faults.damage import changed, outcomes
from tests.training.conftest import tiny

OWN = """
from megatron.positions import DistanceBias, register

@register("slanted")
class Slanted(DistanceBias):
    def log_kernel(self, distance):
        return (-distance.float() / 4).expand(self.shape.heads, -1)
"""
KINDS = {
    "fp32": ["pos_emb=slanted", "pos_emb_file={here}/slanted.py"],
    "bf16": ["precision=bf16"],
    "zero1": ["zero_optimization.stage=1"],
    "zero2": ["zero_optimization.stage=2"],
    "zero3": ["zero_optimization.stage=3"],
}
READS = {"evaluation": {RECORD, *READ_BY_EVALUATION}}
ENGINE_FILES = {"fp32": 1, "bf16": 2, "zero1": 2, "zero2": 2, "zero3": 2}


def settings(corpus, here, kind, *more):
    words = [word.format(here=here) for word in KINDS[kind]]
    paths = [f"data_path={corpus}", f"save={here}/run", f"load={here}/run"]
    small = ["num_layers=1", "hidden_size=16", "num_attention_heads=2", "seq_length=16"]
    return load([], tiny(*small, *paths, "train_iters=2", "save_interval=1", *words, *more))


@pytest.fixture(scope="module", params=KINDS)
def run_of(request, grid, corpus, tmp_path_factory):
    """(kind, folder): a run with checkpoints of steps 1 and 2."""
    here = tmp_path_factory.mktemp(request.param)
    (here / "slanted.py").write_text(OWN)
    train(settings(corpus, here, request.param), grid)
    yield request.param, here
    REGISTRY.pop("slanted", None)
    FILES.clear()


def test_no_damage_to_any_file_is_used(run_of, grid, corpus):
    kind, here = run_of
    run = here / "run"
    config = settings(corpus, here, kind, "train_iters=3")
    uses = {
        "resume": lambda: train(config, grid),
        "evaluation": lambda: load_for_evaluation(run),
    }
    load_for_evaluation(run)
    found = outcomes(run / "global_step2", run / "global_step1", uses, READS)
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
