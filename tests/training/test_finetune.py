"""A new run from the weights of another one: what it takes, what it remembers, what is refused."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megatron.checkpoints.manifest import entry_of, read_record, write_record
from megatron.checkpoints.parent import with_parent
from megatron.checkpoints.saved import latest_step
from megatron.config import load
from megatron.errors import UserError
from megatron.evaluation.opened import opened
from megatron.sweeps.plan import load_sweep
from megatron.sweeps.state import state_of
from megatron.training.run import train
from megatron.training.schedule import learning_rate
from tests.checkpoints import make_checkpoint
from tests.training.conftest import MODEL, copy_of, records, tiny

WEIGHTS = "model.safetensors"


def finetuned(corpus, parent, folder, *more: str):
    """Two steps from a parent; `more` wins."""
    paths = [f"data_path={corpus}", f"load={parent}", f"save={folder}", "finetune=true"]
    return load([], tiny(*paths, "train_iters=2", "seed=7", *MODEL, *more))


def weights_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"global_step{step}" / WEIGHTS)


@pytest.mark.parametrize(
    "how",
    [[], ["precision=bf16"], ["zero_optimization.stage=3"]],
    ids=["fp32", "bf16", "zero3"],
)
def test_it_starts_from_the_parents_weights_to_the_last_bit_with_all_else_fresh(
    grid, corpus, trained, tmp_path, how
):
    config = finetuned(corpus, trained, tmp_path, "extra_save_iters=0", *how)
    train(config, grid)
    parent, first = weights_at(trained, 4), weights_at(tmp_path, 0)
    assert parent.keys() == first.keys()
    for name, weight in parent.items():
        assert torch.equal(weight, first[name]), name
    record = records(tmp_path)[1]
    assert record["tokens"] == 4 * 64
    assert record["lr"] == learning_rate(0, config.optimizer)
    if not how:
        state = tmp_path / "global_step2" / "mp_rank_00_model_states.pt"
        adam = torch.load(state, weights_only=True)["optimizer"]["state"]
        assert {float(one["step"]) for one in adam.values()} == {2.0}


def test_the_same_command_goes_on_after_a_kill_as_if_there_had_been_none(
    grid, corpus, trained, tmp_path
):
    every = ["train_iters=4", "save_interval=2"]
    train(finetuned(corpus, trained, tmp_path / "straight", *every), grid)
    broken = finetuned(corpus, trained, tmp_path / "broken", *every, "exit_interval=2")
    train(broken, grid)
    assert latest_step(tmp_path / "broken") == 2
    train(broken, grid)
    first, second = records(tmp_path / "straight"), records(tmp_path / "broken")
    assert first.keys() == second.keys() == {1, 2, 3, 4}
    assert [first[step]["loss"] for step in first] == [second[step]["loss"] for step in first]
    last = weights_at(tmp_path / "broken", 4)
    for name, weight in weights_at(tmp_path / "straight", 4).items():
        assert torch.equal(weight, last[name]), name


def test_it_goes_on_where_its_parent_was_trained_further_or_is_gone(
    grid, corpus, trained, tmp_path, caplog
):
    caplog.set_level("INFO", logger="megatron")
    parent, child = copy_of(trained, tmp_path), tmp_path / "child"
    config = finetuned(corpus, parent, child, "train_iters=4", "exit_interval=2")
    begun = with_parent(config)
    train(config, grid)
    (parent / "global_step4").rename(parent / "global_step9")
    (parent / "latest").unlink()
    assert with_parent(config) == begun
    assert "is gone: going on from the checkpoint in save" in caplog.text
    shutil.rmtree(parent)
    assert with_parent(config) == begun
    train(config, grid)
    assert latest_step(child) == 4
    # Continued as its own run, it remembers whose child it is.
    paths = [f"data_path={corpus}", f"load={child}", f"save={child}"]
    alone = load([], tiny(*paths, "train_iters=5", "seed=7", *MODEL))
    train(alone, grid)
    assert with_parent(alone).checkpoint.parent == begun.checkpoint.parent
    assert read_record(child / "global_step5")["parent"]["weights"] == (
        begun.checkpoint.parent.weights
    )


def test_the_parent_is_in_the_configuration_the_record_and_the_rows(
    grid, corpus, trained, tmp_path, caplog
):
    with caplog.at_level("INFO"):
        train(finetuned(corpus, trained, tmp_path, "pos_emb=kerple_log"), grid)
    parent = {
        "path": str(trained / "global_step4"),
        "step": 4,
        "config_hash": read_record(trained / "global_step4")["config_hash"],
        "weights": entry_of(trained / "global_step4" / WEIGHTS)["sha256"][:12],
    }
    child = tmp_path / "global_step2"
    assert yaml.safe_load((child / "config.yml").read_text())["parent"] == parent
    assert json.loads((child / "checkpoint.json").read_text())["parent"] == parent
    facts = opened(None, tmp_path, None).facts()
    assert (facts["parent"], facts["parent_model"]) == (parent, "mep_param step 4")
    assert "parent" not in opened(None, trained, None).facts()
    # Evaluated with the configuration of its training, `load` is not what is measured.
    given = finetuned(corpus, trained, tmp_path, "pos_emb=kerple_log")
    assert opened(given, None, None).path == child

    start = caplog.messages.index(f"fine-tuning {parent['path']} (mep_param step 4):")
    kept, dropped, new = caplog.messages[start + 1 : start + 4]
    assert re.match(r"  kept: [\d,]+ numbers of the model, and of its encoding nothing", kept)
    names = r"8 numbers \(positions.0.kernels.1.a 4, positions.0.kernels.1.p 4\)"
    assert re.match(rf"  dropped: {names}", dropped)
    assert new == "  new: 8 numbers (positions.0.p 4, positions.0.a 4)"


def test_the_hash_counts_the_parents_weights_and_step_and_not_where_it_lies(
    corpus, trained, tmp_path
):
    config = finetuned(corpus, trained, tmp_path / "child")
    copied = finetuned(corpus, copy_of(trained, tmp_path), tmp_path / "child")
    assert with_parent(config).hash == with_parent(copied).hash
    assert with_parent(config).checkpoint.parent.path != with_parent(copied).checkpoint.parent.path

    from_scratch = load([], tiny("train_iters=2", "seed=7", *MODEL, f"data_path={corpus}"))
    hashes = {with_parent(config).hash, from_scratch.hash}
    for key, value in {"weights": "0" * 12, "step": 5}.items():
        checkpoint = with_parent(config).checkpoint
        parent = checkpoint.parent.model_copy(update={key: value})
        other = checkpoint.model_copy(update={"parent": parent})
        hashes.add(replace(config, checkpoint=other).hash)
    assert len(hashes) == 4
    assert with_parent(from_scratch).hash == from_scratch.hash


def test_a_shared_encoding_and_learned_positions_are_taken_as_far_as_they_reach(
    grid, corpus, trained, tmp_path
):
    train(
        finetuned(corpus, trained, tmp_path / "own", "pos_emb_shared=false", "extra_save_iters=0"),
        grid,
    )
    shared, own = weights_at(trained, 4), weights_at(tmp_path / "own", 0)
    for layer in range(2):
        for name in ("p", "a"):
            source = shared[f"positions.0.kernels.1.{name}"]
            assert torch.equal(own[f"positions.{layer}.kernels.1.{name}"], source)

    parent = make_checkpoint(tmp_path / "learned", corpus, "pos_emb=learned", "seed=3")
    longer = ["pos_emb=learned", "seq_length=96", "extra_save_iters=0"]
    train(finetuned(corpus, parent, tmp_path / "longer", *longer), grid)
    rows = weights_at(parent, 5)["positions.0.weight"]
    more = weights_at(tmp_path / "longer", 0)["positions.0.weight"]
    assert more.shape == (96, 32)
    assert torch.equal(more[:64], rows)
    assert 0.01 < more[64:].std() < 0.03


def test_the_rows_of_the_embedding_are_the_parents(grid, corpus, trained, tmp_path):
    train(finetuned(corpus, trained, tmp_path, "make_vocab_size_divisible_by=100"), grid)
    rows = read_record(trained / "global_step4")["vocab"]
    assert rows % 100
    assert read_record(tmp_path / "global_step2")["vocab"] == rows


def test_a_parent_that_names_no_tokenizer_needs_a_row_for_every_token(
    grid, corpus, trained, tmp_path
):
    path = copy_of(trained, tmp_path) / "global_step4"
    record = {**read_record(path), "tokenizer": None}
    write_record(path, record)
    train(finetuned(corpus, path, tmp_path / "child"), grid)
    write_record(path, {**record, "vocab": 100})
    with pytest.raises(
        UserError,
        match=r"load: .* learned with a tokenizer that it does not name \(100 rows .*"
        r" prepare them with that tokenizer",
    ):
        train(finetuned(corpus, path, tmp_path / "other"), grid)


def test_weights_alone_are_continued_with_a_fresh_optimizer_where_that_is_said(
    grid, corpus, tmp_path
):
    parent = make_checkpoint(tmp_path, corpus)
    words = [f"data_path={corpus}", f"load={parent}", f"save={parent}", "train_iters=6"]
    words = tiny(*words, "split=8,1,1")
    with pytest.raises(UserError, match=r"finetune=true starts a new run .* no_load_optim=true"):
        train(load([], words), grid)
    train(load([], [*words, "no_load_optim=true"]), grid)
    assert records(tmp_path).keys() == {6}
    assert "parent" not in read_record(tmp_path / "global_step6")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["load=null"], r"load: not given; finetune starts from the checkpoint"),
        (["load={gone}"], r"checkpoint: no folder .*gone"),
        (["save={parent}"], r"finetune: load and save are both .* no fine-tuned checkpoint"),
        (["parent.step=3"], r"parent.step: 3 is not that of this run, 4 - drop parent"),
        (
            ["hidden_size=48", "num_layers=1", "intermediate_size=96", "layernorm_epsilon=1e-4"],
            r"weights of another model \(num_layers: 2 there, 1 here; hidden_size: 32 there, 48"
            r" here; head_dim: 8 there, 12 here; intermediate_size: 128 there, 96 here;"
            r" layernorm_epsilon: 1e-05 there, 0.0001 here\)",
        ),
    ],
    ids=["no load", "gone", "one folder", "parent by hand", "shapes"],
)
def test_what_cannot_be_fine_tuned_is_refused_with_nothing_written(
    grid, corpus, trained, tmp_path, words, message
):
    filled = [word.format(parent=trained, gone=tmp_path / "gone") for word in words]
    with pytest.raises(UserError, match=message):
        train(finetuned(corpus, trained, tmp_path / "child", *filled), grid)
    assert not list(tmp_path.glob("child/global_step*"))
    assert latest_step(trained) == 4


def test_a_folder_of_something_else_is_not_written_into(grid, corpus, trained, tmp_path):
    other = make_checkpoint(tmp_path, corpus)
    with pytest.raises(
        UserError, match=r"step 5 already of another configuration than this fine-tuning - set load"
    ):
        train(finetuned(corpus, trained, other), grid)


def test_a_damaged_parent_is_refused(grid, corpus, trained, tmp_path):
    parent = copy_of(trained, tmp_path)
    file = parent / "global_step4" / WEIGHTS
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"was changed after it was written - copy the parent"):
        train(finetuned(corpus, parent, tmp_path / "child"), grid)


def test_a_cell_of_a_sweep_is_done_when_its_checkpoint_has_the_parents_hash(
    grid, corpus, trained, tmp_path
):
    words = finetuned(corpus, trained, tmp_path / "unused")
    words.save(tmp_path / "base.yml")
    (tmp_path / "continued.yml").write_text(
        "base: [base.yml]\ngrid:\n  seed: [7]\n  pos_emb: [none]\n", encoding="utf-8"
    )
    (cell,) = load_sweep(tmp_path / "continued.yml", tmp_path / "runs").cells
    assert cell.config["load"] == str(trained)
    assert state_of(cell).kind == "waiting"
    train(cell.config, grid)
    assert state_of(cell).kind == "done"
    (again,) = load_sweep(tmp_path / "continued.yml", tmp_path / "runs").cells
    assert again.config.hash == cell.config.hash


@pytest.mark.distributed
def test_two_ranks_start_from_the_parent_too(forks, corpus, trained, tmp_path):
    words = [f"data_path={corpus}", f"load={trained}", f"save={tmp_path}", "finetune=true"]
    more = ["train_iters=1", "extra_save_iters=0", "precision=bf16", "zero_optimization.stage=1"]
    log = tmp_path / "log"
    ranks = forks.start_ranks(2, "train.py", *tiny(*words, *MODEL, *more), log=log)
    assert [forks.wait(rank) for rank in ranks] == [0, 0], log.read_text()
    first = weights_at(tmp_path, 0)
    for name, weight in weights_at(trained, 4).items():
        assert torch.equal(weight, first[name]), name
