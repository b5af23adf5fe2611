"""A new run from the weights of another one: what it takes, what it remembers, what is refused."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoints.manifest import entry_of, read_record, write_record
from megatron.checkpoints.read import read_meta
from megatron.checkpoints.saved import with_parent
from megatron.config import load
from megatron.errors import UserError
from megatron.model import from_config
from megatron.training.loop import train
from megatron.training.optimizer import learning_rate
from megatron.training.start import Saved, match_weights
from tests.checkpoints import make_checkpoint
from tests.training.conftest import MODEL, check_same, copy_of, records, tiny

WEIGHTS = "model.safetensors"


def finetuned(corpus, parent, folder, *more: str):
    """Two steps from a parent; `more` wins."""
    paths = [f"data_path={corpus}", f"load={parent}", f"save={folder}", "finetune=true"]
    return load([], tiny(*paths, "train_iters=2", "seed=7", *MODEL, *more))


def weights_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"global_step{step}" / WEIGHTS)


@pytest.mark.parametrize(
    "how", ["optimizer.type=Muon", "precision=bf16", "zero_optimization.stage=3"]
)
def test_it_starts_from_the_parents_weights_to_the_last_bit_with_all_else_fresh(
    grid, corpus, trained, tmp_path, how
):
    config = finetuned(corpus, trained, tmp_path, "extra_save_iters=0", how)
    train(config, grid)
    parent, first = weights_at(trained, 4), weights_at(tmp_path, 0)
    assert parent.keys() == first.keys()
    for name, weight in parent.items():
        assert torch.equal(weight, first[name]), name
    record = records(tmp_path)[1]
    assert record["tokens"] == 4 * 64
    assert record["lr"] == learning_rate(0, config.optimizer)
    if "Muon" not in how:
        assert load_file(tmp_path / "global_step2/optimizer.safetensors")["step"] == 2


def test_the_same_command_goes_on_after_a_kill_also_without_its_parent(
    grid, corpus, trained, tmp_path
):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    parent = copy_of(trained, tmp_path)
    train(finetuned(corpus, parent, straight, "train_iters=4"), grid)
    config = finetuned(corpus, parent, broken, "train_iters=4", "exit_interval=2")
    begun = with_parent(config)
    train(config, grid)
    (parent / "global_step4").rename(parent / "global_step9")  # as if it were trained further
    (parent / "latest").unlink()
    assert with_parent(config) == begun
    shutil.rmtree(parent)
    train(config, grid)
    check_same(straight, broken)
    # Continued as its own run, it remembers whose child it is.
    paths = [f"data_path={corpus}", f"load={broken}", f"save={broken}"]
    alone = load([], tiny(*paths, "train_iters=5", "seed=7", *MODEL))
    train(alone, grid)
    assert with_parent(alone).checkpoint.parent == begun.checkpoint.parent
    assert read_record(broken / "global_step5")["parent_model"] == "mep_param step 4"


def test_the_parent_is_in_the_record_the_log_and_the_hash(grid, corpus, trained, tmp_path, caplog):
    config = finetuned(corpus, trained, tmp_path / "child", "pos_emb=kerple_log")
    with caplog.at_level("INFO"):
        train(config, grid)
    parent = {
        "path": str(trained / "global_step4"),
        "step": 4,
        "config_hash": read_record(trained / "global_step4")["config_hash"],
        "weights": entry_of(trained / "global_step4" / WEIGHTS)["sha256"][:12],
    }
    record = read_record(tmp_path / "child" / "global_step2")
    assert (record["parent"], record["parent_model"]) == (parent, "mep_param step 4")
    assert caplog.text.count(
        f"fine-tuning {parent['path']} (mep_param step 4):\n"
        "  kept outside the encoding: all weights\n"
        "  kept in the encoding: nothing\n"
        "  dropped: positions.0.kernels.1.a, positions.0.kernels.1.p\n"
        "  new: positions.0.a, positions.0.p\n"
    )

    config = with_parent(finetuned(corpus, trained, tmp_path / "other"))
    copied = with_parent(finetuned(corpus, copy_of(trained, tmp_path), tmp_path / "other"))
    assert config.hash == copied.hash, "not where it lies"
    hashes = {config.hash}
    for key, value in {"weights": "0" * 12, "step": 5}.items():
        changed = config.checkpoint.parent.model_copy(update={key: value})
        other = config.checkpoint.model_copy(update={"parent": changed})
        hashes.add(replace(config, checkpoint=other).hash)
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("parent_words", "child_words", "sources"),
    [
        (["pos_emb=kerple_log"], ["pos_emb=kerple_log"], {"0.p": "0.p", "0.a": "0.a"}),
        (["pos_emb=learned"], ["pos_emb=kerple_log"], {}),
        (["pos_emb=kerple_power"], ["pos_emb=kerple_log"], {}),  # one name in another kind
        (
            ["pos_emb=mep", "pos_emb_args.kernels=[exp, kerple_log]"],
            ["pos_emb=mep", "pos_emb_args.kernels=[kerple_log, kerple_log]"],
            {"0.kernels.1.p": "0.kernels.1.p", "0.kernels.1.a": "0.kernels.1.a"},
        ),
        (
            ["pos_emb=kerple_log"],
            ["pos_emb=kerple_log", "pos_emb_shared=false"],
            {"0.p": "0.p", "0.a": "0.a", "1.p": "0.p", "1.a": "0.a"},
        ),
        (["pos_emb=kerple_log", "pos_emb_shared=false"], ["pos_emb=kerple_log"], {}),
        (["pos_emb=t5"], ["pos_emb=t5", "pos_emb_args.num_buckets=64"], {}),
        (["pos_emb=learned"], ["pos_emb=learned", "seq_length=96"], {"0.weight": "0.weight"}),
    ],
)
def test_of_an_encoding_is_taken_what_has_its_name_kind_and_shape(
    corpus, tmp_path, parent_words, child_words, sources
):
    path = make_checkpoint(tmp_path, corpus, *parent_words) / "global_step5"
    parent = Saved(path, *read_meta(path))
    model = from_config(load([], tiny("train_iters=2", *child_words)), 512)
    matches = match_weights(parent, model, "parent")
    taken = {name: source for name, source in matches.items() if source.name}
    of_encoding = {
        name.removeprefix("positions."): source.name.removeprefix("positions.")
        for name, source in taken.items()
        if name.startswith("positions.")
    }
    assert of_encoding == sources
    assert len(taken) - len(of_encoding) == 28  # all that is not of the encoding
    assert {source.rows for source in taken.values()} <= {None, 4, 64}


def test_learned_positions_are_taken_as_far_as_they_reach(grid, corpus, tmp_path):
    parent = make_checkpoint(tmp_path / "learned", corpus, "pos_emb=learned", "seed=3")
    rows = weights_at(parent, 5)["positions.0.weight"]
    more = ["pos_emb=learned", "seq_length=96", "extra_save_iters=0", "split=8,1,1"]
    train(finetuned(corpus, parent, tmp_path / "child", *more), grid)
    rows_of_child = weights_at(tmp_path / "child", 0)["positions.0.weight"]
    assert torch.equal(rows_of_child[:64], rows)
    assert 0.01 < rows_of_child[64:].std() < 0.03


def test_the_rows_of_the_embedding_are_the_parents(grid, corpus, trained, tmp_path):
    path = copy_of(trained, tmp_path) / "global_step4"
    record = {**read_record(path), "tokenizer": None}
    write_record(path, record)
    # A parent that names no tokenizer needs a row for every token.
    train(finetuned(corpus, path, tmp_path / "a", "make_vocab_size_divisible_by=100"), grid)
    assert record["vocab"] % 100
    assert read_record(tmp_path / "a" / "global_step2")["vocab"] == record["vocab"]
    write_record(path, {**record, "vocab": 100})
    message = r"load: .* was trained with another tokenizer .* 100 rows, .* prepare the data"
    with pytest.raises(UserError, match=message):
        train(finetuned(corpus, path, tmp_path / "b"), grid)
