"""Two ranks that share each text compute what one process does: docs/parallel.md."""

import json
import math

import pytest
import torch

from megatron.config import load
from megatron.errors import UserError
from megatron.model import from_config
from megatron.positions import REGISTRY, Shape
from megatron.positions.base import Position
from tests.encodings import FEW, SAMPLE
from tests.parallel import context_ranks as ranks
from tests.training.conftest import grid, records, tiny  # noqa: F401

EXACT = 1e-5
REFUSED = {
    *("abacus", "carope", "cope", "dape", "dape_v2", "grape_a", "grape_ap", "path", "path_fox"),
    *("randomized", "selective_rope", "stick_breaking", "wall"),
}


@pytest.mark.distributed
def test_two_ranks_have_the_losses_and_gradients_of_one(forks, grid, tmp_path):  # noqa: F811
    file = tmp_path / "found.json"
    forks.run_ranks(2, ranks.__file__, file, log=tmp_path / "log")
    results = json.loads(file.read_text())
    assert {*results["refused"]} == REFUSED
    sample = {*SAMPLE} - REFUSED
    assert len(results["models"]) == 2 * len(sample | ranks.OPTIONS.keys())
    for case, difference in results["models"].items():
        assert difference <= EXACT, case
    assert len(results["stages"]) == len({*FEW} - REFUSED) > 8  # each stage with each exchange
    check_stages(results["stages"])
    alone = {}
    for name, kind, stage in ranks.ENGINES:
        if name not in alone:
            alone[name] = ranks.steps(grid, [f"pos_emb={name}"])
        numbers = results["engines"][f"{name}, {kind}, stage {stage}"]
        assert numbers == pytest.approx(alone[name], rel=EXACT), (name, kind, stage)


def check_stages(results):
    for case, differences in results.items():
        assert (
            len(differences) > 20
        )  # gradients of the first step, and of all steps losses and norms
        assert max(differences.values()) <= EXACT, (case, differences)


@pytest.mark.distributed
@pytest.mark.campaign
def test_every_encoding_trains_at_every_stage_as_on_one_rank(forks, tmp_path):
    file = tmp_path / "found.json"
    forks.run_ranks(2, ranks.__file__, file, "stages", log=tmp_path / "log", timeout=3600)
    results = json.loads(file.read_text())["stages"]
    assert len(results) == 2 * 4 * (len(REGISTRY) - len(REFUSED))
    check_stages(results)


@pytest.mark.distributed
def test_a_run_goes_on_and_is_measured_with_other_ranks(forks, corpus, tmp_path):
    """One rank, then four that share texts at stage 3, then one again: as without interruption."""

    def run(script, save, load_from, ranks, *more):
        words = [f"data_path={corpus}", f"save={tmp_path / save}", "hidden_dropout=0"]
        words += [f"load={load_from}"] if load_from else []
        words = tiny(*words, "pos_emb=fox", "layers=[gated_delta, attention]", *more)
        forks.run_ranks(ranks, script, *words, log=tmp_path / "log")
        return tmp_path / save

    shared = ["context_parallel_size=2", "zero_optimization.stage=3"]
    whole = run("train.py", "whole", None, 1, "train_iters=6", "save_interval=2")
    first = whole / "global_step2"
    # Two groups of two ranks, each with one of two micro batches of a window.
    shared += ["train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=2"]
    two = run("train.py", "two", first, 4, "train_iters=6", "exit_interval=4", *shared)
    alone_again = run("train.py", "one", two / "global_step4", 1, "train_iters=6")
    expected = records(whole)
    for step, record in (records(two) | records(alone_again)).items():
        assert record["loss"] == pytest.approx(expected[step]["loss"], abs=EXACT)

    rows = {}
    # What a training with this length, these heads or a compiler refuses, an evaluation can do.
    three = ["context_parallel_size=3", "torch_compile=true"]
    for ranks_of, more in ((1, []), (3, three)):
        output = tmp_path / f"{ranks_of}.jsonl"
        words = ["--checkpoint", whole, "--output", output, "--lengths", "64", "255", "75"]
        words += ["eval_tokens=512", *more]
        forks.run_ranks(ranks_of, "evaluate.py", *words, log=tmp_path / "log")
        rows[ranks_of] = [json.loads(line) for line in output.read_text().splitlines()]
    for alone, together in zip(rows[1], rows[3], strict=True):
        assert math.isclose(alone["loss"], together["loss"], rel_tol=1e-6)
        assert together["block_losses"] == pytest.approx(alone["block_losses"], abs=2e-6)


def test_an_encoding_says_why_its_text_cannot_be_cut():
    """tests/bad_inputs has what users meet."""

    class Convolving(Position):
        crosses_documents = "its convolution over tokens"

    class Drawing(Position):
        def prepare(self, length: int) -> None:
            self.shift = torch.rand(())

    reasons = {
        Convolving: "its convolution over tokens reads the text",
        Drawing: "prepare would draw in each process",
    }
    for encoding, reason in reasons.items():
        with pytest.raises(UserError, match=reason):
            encoding(Shape(2, 8, 16, 64)).check_parts()
    shape = ["seq_length=48", "context_parallel_size=3", "cp_comm_type=all_gather"]
    assert load([], tiny(*shape)).hash == load([], tiny(shape[0])).hash


def test_a_length_that_the_last_rank_alone_would_refuse_is_refused_before(grid):  # noqa: F811
    factors = "long_factor: [2, 2, 2, 2], short_factor: [1, 1, 1, 1]"
    stretched = f"pos_emb_args={{scaling: longrope, original_length: 64, {factors}}}"
    from_config(load([], tiny("pos_emb=rotary", stretched)), 61).check_length(65)
    for words in (["pos_emb=learned"], ["pos_emb=xpos"]):
        model = from_config(load([], tiny(*words)), 61)
        model.check_length(64)
        with pytest.raises(UserError, match="100000"):
            model.check_length(100_000)
