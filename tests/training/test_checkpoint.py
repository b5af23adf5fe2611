"""Checkpoints: what they hold, resuming to the last bit, what is never lost, and what a missing one says."""

import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.config import load
from megatron.errors import UserError
from megatron.training import checkpoint
from megatron.training.run import train
from tests.support import ROOT, run, unlaunched
from tests.training.conftest import tiny

MODEL = ["pos_emb=mep_param", "hidden_dropout=0.1"]


def settings(corpus: Path, folder: Path, *more: str):
    paths = [f"data_path={corpus}", f"save={folder}", f"load={folder}"]
    return load([], tiny(*paths, "train_iters=8", "save_interval=4", *MODEL, *more))


def records(folder: Path, kind: str = "train") -> dict[int, dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == kind}


def test_a_resumed_run_logs_the_uninterrupted_ones_means_between_checkpoints(
    grid, corpus, tmp_path
):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    every = ["save_interval=3", "log_interval=4"]
    train(settings(corpus, straight, *every), grid)
    shutil.copytree(straight, broken)
    for step in (6, 8):
        shutil.rmtree(broken / f"global_step{step}")
    train(settings(corpus, broken, *every), grid)
    assert records(straight).keys() == {4, 8}
    assert [records(broken)[step]["loss"] for step in (4, 8)] == [
        records(straight)[step]["loss"] for step in (4, 8)
    ]


def test_a_resumed_run_with_larger_batches_goes_on_with_text_it_has_not_seen(
    grid, corpus, tmp_path
):
    train(settings(corpus, tmp_path, "train_iters=4"), grid)
    train(settings(corpus, tmp_path, "train_micro_batch_size_per_gpu=8"), grid)
    _, _, meta = checkpoint.load_for_evaluation(tmp_path)
    assert (meta["step"], meta["windows"], meta["windows_per_step"]) == (8, 4 * 4 + 4 * 8, 8)
    assert records(tmp_path)[8]["tokens"] == (4 * 4 + 4 * 8) * 64


@pytest.mark.parametrize(
    "how",
    [
        [],
        ["precision=bf16"],
        ["zero_optimization.stage=2"],
        ["precision=bf16", "zero_optimization.stage=3"],
    ],
    ids=["fp32", "bf16", "zero2", "bf16-zero3"],
)
def test_a_resumed_run_repeats_the_uninterrupted_one_to_the_last_bit(grid, corpus, tmp_path, how):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train(settings(corpus, straight, *how), grid)
    shutil.copytree(straight, broken)
    shutil.rmtree(broken / "global_step8")
    (broken / "latest").write_text("global_step4")
    train(settings(corpus, broken, *how), grid)
    first, second = records(straight), records(broken)
    assert first.keys() == second.keys() == set(range(1, 9))
    for step in first:
        for key in ("loss", "grad_norm", "lr", "position"):
            assert first[step][key] == second[step][key], (step, key)
    weights = load_file(broken / "global_step8" / "model.safetensors")
    for name, tensor in load_file(straight / "global_step8" / "model.safetensors").items():
        assert torch.equal(weights[name], tensor), name


SPEED = ("model_tflops_per_second", "mfu", "mfu_without_attention", "peak_memory_gib")
PEAK = ["peak_theoretical_tflops=0.5"]


def test_the_console_and_the_files_tell_loss_rate_speed_norm_and_the_encodings_numbers(
    grid, corpus, tmp_path, caplog
):
    events = tmp_path / "events"
    with caplog.at_level("INFO"):
        config = settings(
            corpus,
            tmp_path / "run",
            "eval_interval=4",
            "eval_iters=2",
            f"tensorboard_dir={events}",
            *PEAK,
        )
        train(config, grid)
    record = records(tmp_path / "run")[8]
    assert record.keys() >= {
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_second",
        "tokens",
        "position",
        *SPEED,
    }
    assert record["tokens"] == 8 * 4 * 64
    assert record["mfu"] == pytest.approx(record["model_tflops_per_second"] / 0.5)
    assert {name: len(values) for name, values in record["position"].items()} == {
        "kernels.1.p": 4,
        "kernels.1.a": 4,
    }
    valid = records(tmp_path / "run", "valid")
    assert valid.keys() == {4, 8}
    assert valid[8]["perplexity"] == pytest.approx(math.exp(valid[8]["loss"]))
    lines = [message for message in caplog.messages if message.startswith("step 8/8")]
    assert len(lines) == 1
    for word in ("loss", "lr", "grad norm", "tokens/s", "% without attention)", "GiB", "left"):
        assert word in lines[0]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(events)).Reload()
    assert {
        "train/loss",
        "train/mfu",
        "train/peak_memory_gib",
        "valid/perplexity",
        "position/kernels.1.p/mean",
    } <= set(seen.Tags()["scalars"])
    assert seen.Scalars("train/loss")[-1].value == pytest.approx(record["loss"])


def test_a_large_table_of_learned_positions_is_not_written_out_at_every_step(
    grid, corpus, tmp_path
):
    train(settings(corpus, tmp_path, "pos_emb=learned"), grid)
    assert "position" not in records(tmp_path)[8]
    assert (tmp_path / "metrics.jsonl").stat().st_size < 10_000


def test_a_new_run_leaves_the_records_of_another_in_the_same_folder(grid, corpus, tmp_path):
    logs = f"log_dir={tmp_path / 'logs'}"
    train(settings(corpus, tmp_path / "a", logs, "train_iters=2"), grid)
    first = (tmp_path / "logs" / "metrics.jsonl").read_text()
    train(settings(corpus, tmp_path / "b", logs, "train_iters=3"), grid)
    assert (tmp_path / "logs" / "metrics.1.jsonl").read_text() == first
    assert records(tmp_path / "logs").keys() == {1, 2, 3}


def test_a_record_that_was_cut_off_does_not_stop_a_resumed_run(grid, corpus, tmp_path):
    train(settings(corpus, tmp_path, "train_iters=4"), grid)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-2])
    train(settings(corpus, tmp_path), grid)
    assert records(tmp_path).keys() == {1, 2, 3, 5, 6, 7, 8}


def test_weights_that_are_no_numbers_never_replace_good_ones(grid, corpus, tmp_path):
    train(settings(corpus, tmp_path, "train_iters=2"), grid)
    broken = [
        "optimizer.params.lr=1e30",
        "gradient_clipping=0",
        "warmup=0",
        "log_interval=50",
        "save_interval=1",
    ]
    with pytest.raises(UserError, match=r"loss: nan by step \d+ - lower optimizer.params.lr"):
        train(
            settings(corpus, tmp_path, *broken, "keep_last_n_checkpoints=1", "train_iters=40"), grid
        )
    weights = load_file(checkpoint.find(tmp_path) / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_the_checkpoint_just_written_is_never_deleted(grid, corpus, tmp_path):
    train(settings(corpus, tmp_path, "save_interval=2"), grid)
    (tmp_path / "latest").write_text("global_step2")
    train(settings(corpus, tmp_path, "train_iters=4", "keep_last_n_checkpoints=1"), grid)
    assert checkpoint.latest_step(tmp_path) == 4
    assert checkpoint.steps_in(tmp_path) == [4, 6, 8]


def test_only_the_newest_checkpoints_stay(grid, corpus, tmp_path):
    train(settings(corpus, tmp_path, "save_interval=2", "keep_last_n_checkpoints=2"), grid)
    assert checkpoint.steps_in(tmp_path) == [6, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step6",
        "global_step8",
        "latest",
        "metrics.jsonl",
    ]


def test_a_checkpoint_gives_back_the_trained_model_and_its_own_configuration(
    grid, corpus, tmp_path
):
    config = settings(corpus, tmp_path, "precision=bf16")
    train(config, grid)
    model, saved, meta = checkpoint.load_for_evaluation(tmp_path)
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
    assert checkpoint.load_for_evaluation(tmp_path, step=4)[2]["step"] == 4
    assert checkpoint.load_for_evaluation(tmp_path / "global_step4")[2]["step"] == 4


@pytest.fixture(scope="module")
def trained(grid, corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(settings(corpus, folder, "train_iters=4"), grid)
    return folder


def copy_of(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def test_an_absent_checkpoint_says_what_was_looked_for(trained, tmp_path):
    with pytest.raises(
        UserError, match=rf"checkpoint: no folder {tmp_path}/no - train first, or set load"
    ):
        checkpoint.load_for_evaluation(tmp_path / "no")
    with pytest.raises(
        UserError, match=r"looked for global_stepN/checkpoint.json in .*, steps there: none"
    ):
        checkpoint.load_for_evaluation(tmp_path)
    with pytest.raises(
        UserError,
        match=r"looked for global_step9/checkpoint.json in .*, steps there: 4 - check load",
    ):
        checkpoint.load_for_evaluation(trained, step=9)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("checkpoint.json", "{", "checkpoint.json: not readable"),
        ("checkpoint.json", "{}", "checkpoint.json: not readable .KeyError"),
        ("model.safetensors", "x", "model.safetensors: cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named(trained, tmp_path, name, content, message):
    folder = copy_of(trained, tmp_path)
    (folder / "global_step4" / name).write_text(content)
    with pytest.raises(UserError, match=message):
        checkpoint.load_for_evaluation(folder)


def test_an_edited_configuration_is_noticed(trained, tmp_path):
    path = copy_of(trained, tmp_path) / "global_step4" / "config.yml"
    path.write_text(path.read_text().replace("pos_emb: mep_param", "pos_emb: mep_free"))
    with pytest.raises(
        UserError, match=r"its hash is \w+, the checkpoint says \w+ - it was edited after training"
    ):
        checkpoint.load_for_evaluation(path.parent)


def test_a_new_run_never_overwrites_an_old_one(grid, corpus, trained, tmp_path):
    folder = copy_of(trained, tmp_path)
    config = load([], tiny(f"data_path={corpus}", f"save={folder}", "train_iters=4"))
    with pytest.raises(
        UserError,
        match=r"save: .* holds a checkpoint of step 4 already - set load: .* to continue it",
    ):
        train(config, grid)


def test_another_model_is_not_continued(grid, corpus, trained, tmp_path):
    config = settings(corpus, copy_of(trained, tmp_path), "pos_emb=alibi", "num_layers=3")
    with pytest.raises(UserError) as fault:
        train(config, grid)
    for part in (
        "is another model",
        "num_layers: 2 there, 3 here",
        "pos_emb: 'mep_param' there, 'alibi' here",
    ):
        assert part in str(fault.value)


def test_a_folder_of_one_step_can_be_continued_elsewhere(grid, corpus, trained, tmp_path):
    start = copy_of(trained, tmp_path) / "global_step4"
    config = load(
        [],
        tiny(
            f"data_path={corpus}",
            f"load={start}",
            f"save={tmp_path / 'new'}",
            "train_iters=6",
            *MODEL,
        ),
    )
    train(config, grid)
    assert records(tmp_path / "new").keys() == {5, 6}


def test_defaults_written_out_are_the_same_model(grid, corpus, trained, tmp_path):
    folder = copy_of(trained, tmp_path)
    written = ["pos_emb_args.kernels=[gaussian, kerple_log]", "pos_emb_args.weights=equal"]
    train(settings(corpus, folder, *written, "max_position_embeddings=99", "train_iters=5"), grid)
    assert checkpoint.latest_step(folder) == 5


def test_text_of_another_tokenizer_is_not_continued_with(grid, corpus, trained, tmp_path):
    (tmp_path / "text.txt").write_text((ROOT / "README.md").read_text() * 30)
    words = [
        "--input",
        tmp_path / "text.txt",
        "--name",
        "other",
        "-t",
        "HFTokenizer",
        "--vocab-size",
        300,
    ]
    assert run("prepare_data.py", *words, "-d", tmp_path).returncode == 0
    other = tmp_path / "other" / "other_text_document"
    more = ["tokenizer_type=HFTokenizer", "split=[1, 0, 0]"]
    config = settings(other, copy_of(trained, tmp_path), *more)
    with pytest.raises(
        UserError, match=r"load: .* learned with CharLevelTokenizer .* written by HFTokenizer"
    ):
        train(config, grid)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            ["precision=bf16"],
            "was written with fp32, ZeRO stage 0; the engine's state does not fit bf16, ZeRO stage 1",
        ),
        (["zero_optimization.stage=2"], "does not fit fp32, ZeRO stage 2, 1 rank"),
    ],
)
def test_another_kind_of_engine_is_not_continued_with(
    grid, corpus, trained, tmp_path, how, message
):
    with pytest.raises(UserError) as fault:
        train(settings(corpus, copy_of(trained, tmp_path), *how), grid)
    assert message in str(fault.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            ["pos_emb=learned", "seq_length_val=128"],
            "learned positions end at 64, so length 128 cannot be computed",
        ),
        (["split=[100, 0, 0]"], "leaves none for valid"),
    ],
)
def test_a_validation_that_cannot_be_is_refused_before_the_first_step(
    grid, corpus, tmp_path, how, message
):
    with pytest.raises(UserError, match=message):
        train(settings(corpus, tmp_path, "eval_interval=4", *how), grid)
    assert list(tmp_path.iterdir()) == []


def test_a_validation_part_of_few_windows_starts_over(grid, corpus, tmp_path):
    train(
        settings(
            corpus,
            tmp_path,
            "eval_interval=4",
            "eval_iters=1",
            "seq_length_val=4096",
            "train_iters=4",
        ),
        grid,
    )
    assert math.isfinite(records(tmp_path, "valid")[4]["loss"])


def test_a_checkpoint_to_start_from_must_be_there(grid, corpus, tmp_path):
    config = load(
        [],
        tiny(
            f"data_path={corpus}", f"load={tmp_path / 'gone'}", f"save={tmp_path}", "train_iters=4"
        ),
    )
    with pytest.raises(UserError, match=r"checkpoint: no folder .*gone"):
        train(config, grid)


def test_pickles_that_would_run_code_are_not_loaded(grid, corpus, trained, tmp_path):
    class Harmful:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    folder = copy_of(trained, tmp_path)
    state = folder / "global_step4" / "mp_rank_00_model_states.pt"
    torch.save({"module": Harmful()}, state)
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        train(settings(corpus, folder), grid)
    assert not (tmp_path / "ran").exists()


def test_a_planted_half_written_checkpoint_is_not_taken_for_one(grid, corpus, trained, tmp_path):
    folder = copy_of(trained, tmp_path)
    (folder / "partial_step6").mkdir()
    (folder / "global_step6").mkdir()
    assert checkpoint.latest_step(folder) == 4


def test_a_loss_that_is_not_a_number_stops_the_run(grid, corpus, tmp_path):
    config = settings(
        corpus,
        tmp_path,
        "optimizer.params.lr=1e30",
        "gradient_clipping=0",
        "warmup=0",
        "lr_decay_style=constant",
    )
    with pytest.raises(UserError, match=r"loss: nan by step \d+ - lower optimizer.params.lr"):
        train(config, grid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint_to_continue_from(
    corpus, tmp_path, number
):
    words = [
        f"data_path={corpus}",
        f"save={tmp_path}",
        f"load={tmp_path}",
        "train_iters=100000",
        *MODEL,
    ]
    process = subprocess.Popen(
        [sys.executable, "train.py", *tiny(*words)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=unlaunched(),
    )
    for line in process.stderr:
        if line.startswith("step 3/"):
            process.send_signal(number)
            break
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 128 + number
    stopped = re.search(
        r"stopped at step (\d+) of 100000, saved (\S+); load=\S+ continues it", rest
    )
    assert stopped, rest
    assert checkpoint.latest_step(tmp_path) == int(stopped[1])
    assert max(records(tmp_path)) == int(stopped[1])


def test_a_save_folder_that_cannot_be_made_is_refused_before_training(grid, corpus, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError,
        match=r"save: .*file/run cannot be made \(Not a directory\) - choose another folder",
    ):
        train(
            load(
                [],
                tiny(f"data_path={corpus}", f"save={tmp_path / 'file' / 'run'}", "train_iters=1"),
            ),
            grid,
        )


def test_a_checkpoint_can_be_read_by_whom_the_umask_lets(trained):
    modes = {
        path.stat().st_mode & 0o777
        for path in (trained / "global_step4").iterdir()
        if path.is_file()
    }
    assert len(modes) == 1
