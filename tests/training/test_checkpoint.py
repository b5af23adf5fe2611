"""What a checkpoint holds, which ones are kept, and what a missing or damaged one says."""

import json

import pytest
import torch

from megatron.checkpoints.manifest import read_record
from megatron.checkpoints.read import load_for_evaluation
from megatron.checkpoints.saved import find, latest_step, steps_in
from megatron.errors import UserError
from megatron.training.run import train
from tests.training.conftest import copy_of, settings


def test_a_checkpoint_gives_back_the_trained_model_and_its_own_configuration(
    grid, corpus, tmp_path
):
    config = settings(corpus, tmp_path, "precision=bf16")
    train(config, grid)
    model, saved, meta = load_for_evaluation(tmp_path)
    assert (meta["step"], meta["config_hash"], meta["vocab"], meta["corpus"]) == (
        8,
        config.hash,
        512,
        "tiny",
    )
    assert saved.flat() == config.flat()
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    # Float32 masters, not bfloat16 copies: most of them are no bfloat16 numbers.
    weight = model.layers[0].mlp.dense_h_to_4h.weight
    assert (weight != weight.bfloat16().float()).float().mean() > 0.9
    assert load_for_evaluation(tmp_path, step=4)[2]["step"] == 4
    assert load_for_evaluation(tmp_path / "global_step4")[2]["step"] == 4


def test_a_run_that_was_set_back_deletes_nothing_newer_and_not_what_proved_good(
    grid, corpus, tmp_path, caplog
):
    train(settings(corpus, tmp_path, "save_interval=2"), grid)
    (tmp_path / "latest").write_text("global_step2")
    train(settings(corpus, tmp_path, "train_iters=4", "keep_last_n_checkpoints=1"), grid)
    assert (
        f"{tmp_path}/latest: is older than other checkpoints there (4, 6, 8); step 2 is used"
        in caplog.messages
    )
    assert latest_step(tmp_path) == 4
    assert steps_in(tmp_path) == [2, 4, 6, 8], "no loss was computed from step 4"
    train(settings(corpus, tmp_path, "train_iters=5", "keep_last_n_checkpoints=1"), grid)
    assert steps_in(tmp_path) == [4, 5, 6, 8]


def test_only_the_newest_checkpoints_stay(grid, corpus, tmp_path):
    train(settings(corpus, tmp_path, "save_interval=2", "keep_last_n_checkpoints=2"), grid)
    assert steps_in(tmp_path) == [6, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step6",
        "global_step8",
        "latest",
        "metrics.jsonl",
    ]


def test_an_absent_checkpoint_says_what_was_looked_for(trained, tmp_path):
    with pytest.raises(
        UserError, match=rf"checkpoint: no folder {tmp_path}/no - train first, or set load"
    ):
        load_for_evaluation(tmp_path / "no")
    with pytest.raises(
        UserError, match=r"looked for global_stepN/checkpoint.json in .*, steps there: none"
    ):
        load_for_evaluation(tmp_path)
    with pytest.raises(
        UserError,
        match=r"looked for global_step9/checkpoint.json in .*, steps there: 4 - check load",
    ):
        load_for_evaluation(trained, step=9)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("checkpoint.json", "{", "checkpoint.json: not readable"),
        ("checkpoint.json", "{}", "checkpoint.json: not readable .no step in it"),
        ("model.safetensors", "x", "model.safetensors: has 1 bytes, [0-9,]+ were written"),
    ],
)
def test_a_damaged_checkpoint_is_named(trained, tmp_path, name, content, message):
    folder = copy_of(trained, tmp_path)
    (folder / "global_step4" / name).write_text(content)
    with pytest.raises(UserError, match=message):
        load_for_evaluation(folder)


def forget_sums(path):
    """As checkpoints were written before they had sums, with as little as every reader needs."""
    record = read_record(path)
    old = {key: record[key] for key in ("step", "config_hash", "vocab")}
    (path / "checkpoint.json").write_text(json.dumps(old))


def test_a_checkpoint_without_sums_is_read_with_a_note(grid, corpus, trained, tmp_path, caplog):
    folder = copy_of(trained, tmp_path)
    forget_sums(folder / "global_step4")
    caplog.set_level("INFO")
    note = "global_step4: written before checkpoints had sums, so its files are not verified"
    load_for_evaluation(folder)
    assert [message.endswith(note) for message in caplog.messages].count(True) == 1
    train(settings(corpus, folder, "train_iters=5"), grid)
    assert [message.endswith(note) for message in caplog.messages].count(True) == 2
    assert read_record(folder / "global_step5")["windows"] == 5 * 4


def test_an_edited_configuration_is_noticed(trained, tmp_path):
    path = copy_of(trained, tmp_path) / "global_step4" / "config.yml"
    path.write_text(path.read_text().replace("pos_emb: mep_param", "pos_emb: mep_xxxxx"))
    with pytest.raises(UserError, match=r"config.yml: was changed after it was written"):
        load_for_evaluation(path.parent)
    path.write_text(path.read_text().replace("pos_emb: mep_xxxxx", "pos_emb: mep_free"))
    forget_sums(path.parent)
    with pytest.raises(
        UserError, match=r"its hash is \w+, the checkpoint says \w+ - it was edited after training"
    ):
        load_for_evaluation(path.parent)


def test_a_planted_half_written_checkpoint_is_not_taken_for_one(grid, corpus, trained, tmp_path):
    folder = copy_of(trained, tmp_path)
    (folder / "partial_step6").mkdir()
    (folder / "global_step6").mkdir()
    assert latest_step(folder) == 4


def test_a_checkpoint_can_be_read_by_whom_the_umask_lets(trained):
    modes = {
        path.stat().st_mode & 0o777
        for path in (trained / "global_step4").iterdir()
        if path.is_file()
    }
    assert len(modes) == 1


@pytest.mark.parametrize("file", ["config.json", "layer_00-model_00-model_states.pt"])
def test_a_folder_of_another_program_names_the_command_that_brings_it_in(file, tmp_path):
    (tmp_path / file).touch()
    with pytest.raises(UserError, match=rf"import_checkpoint.py {tmp_path} -o RUN brings in"):
        find(tmp_path)
