"""What cannot fit is refused with its number; what hardly fits is a warning."""

import logging
import shutil

import pytest
import torch

from megatron.checkpoints import read
from megatron.config import load
from megatron.errors import UserError
from megatron.parallel.machine import free_disk, in_bytes, total_memory
from megatron.training import fits

CPU = torch.device("cpu")
GIGABYTE = 10**9
TINY = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64", "train_iters=4"]


@pytest.fixture(autouse=True)
def a_machine(monkeypatch):
    monkeypatch.setattr(fits, "total_memory", lambda: 16 * GIGABYTE)
    monkeypatch.setattr(read, "total_memory", lambda: 16 * GIGABYTE)
    monkeypatch.setattr(fits, "free_disk", lambda folder: 100 * GIGABYTE)
    monkeypatch.setattr(fits, "available_cores", lambda: 8)


def needs(*words, ranks=1):
    return fits.needs(load([], [*TINY, *words]), 512, ranks, CPU)


def fault(*words, ranks=1):
    config = load([], [*TINY, *words])
    with pytest.raises(UserError) as raised:
        fits.check_fits(config, 512, ranks=ranks, ranks_here=ranks, device=CPU)
    head, *lines = str(raised.value).split("\n  ")
    assert head == "this machine is too small for the training"
    return lines


def test_a_model_beyond_the_memory_is_refused_with_its_numbers():
    assert fault("num_layers=1e9") == [
        "num_layers = 1000000000, hidden_size = 32: 12,704,000,032,832 parameters need 203 TB for"
        " weights, gradients and Adam, and there are 16 GB of memory; lower them,"
        " make_vocab_size_divisible_by or the encoding's options"
    ]


def test_a_micro_batch_beyond_the_memory_is_refused_with_its_numbers():
    assert fault("train_micro_batch_size_per_gpu=100000000") == [
        "train_micro_batch_size_per_gpu = 100000000, seq_length = 64: weights, gradients, Adam and"
        " the inputs of the layers alone need 1.64 TB, and there are 16 GB of memory; lower them"
    ]


def test_processes_of_a_machine_share_its_memory():
    words = ["num_layers=40000", "hidden_size=128"]  # 7.9e9 numbers: 126 GB
    line = fault(*words, ranks=2)[0]
    assert " need 254 GB for weights, gradients and Adam in 2 processes, " in line


def test_more_samples_than_memory_are_refused():
    words = ["train_iters=1e9", "gradient_accumulation_steps=100"]
    assert fault(*words) == [
        "train_iters: 1000000000 steps need 1.6 TB for the order of their samples, and there are"
        " 16 GB of memory; lower train_iters"
    ]


def test_a_checkpoint_beyond_the_disk_is_refused(monkeypatch):
    monkeypatch.setattr(fits, "free_disk", lambda folder: 500_000)
    assert fault("save=somewhere") == [
        "save: one checkpoint needs 932 KB, and somewhere has 500 KB free;"
        " choose another folder, or free some space"
    ]


def test_what_hardly_fits_is_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(fits, "free_disk", lambda folder: 1_500_000)
    monkeypatch.setattr(fits, "total_memory", lambda: 100_000_000)
    config = load([], [*TINY, "save=somewhere", "num_workers=9"])
    need = fits.check_fits(config, 512, ranks=1, ranks_here=1, device=CPU)
    with caplog.at_level(logging.WARNING):
        fits.warn_if_tight(config, need, ranks_here=1, device=CPU)
    first, second, third = caplog.messages
    assert first.startswith("memory: about 504 MB are needed and there are 100 MB;")
    assert second == (
        "save: 1 checkpoint(s) and the one that is written need about 1.86 MB, and somewhere has"
        " 1.5 MB free; set keep_last_n_checkpoints, or raise save_interval"
    )
    assert third == "num_workers: 9 processes would share 8 core(s); lower num_workers"


def test_weights_of_a_checkpoint_beyond_the_memory_are_refused(tmp_path):
    config = load([], [*TINY, "num_layers=1e9"])
    with pytest.raises(UserError, match=r"the weights need 50.8 TB, and there are 16 GB of memory"):
        read.load_model(tmp_path, config, 512)


def test_zero_divides_the_state():
    count = needs().parameters.whole
    fp32 = [needs(f"zero_optimization.stage={stage}", ranks=4).state / count for stage in range(4)]
    assert fp32 == pytest.approx([16, 4 + 4 + 2, 4 + 1 + 2, 1 + 1 + 2], abs=0.01)
    assert needs("precision=bf16", ranks=4).state / count == pytest.approx(2 + 2 + 3, abs=0.01)


def test_checkpoints_follow_what_is_kept():
    one = fits.CHECKPOINT * needs().parameters.whole
    assert needs().disk == 2 * one
    assert needs("train_iters=100", "save_interval=10").disk == 11 * one
    kept = ["train_iters=100", "save_interval=10", "keep_last_n_checkpoints=3"]
    assert needs(*kept).disk == 4 * one


def test_bytes_for_people():
    assert [in_bytes(count) for count in (0, 999, 1500, 25.3e9, 2e24)] == [
        "0 bytes",
        "999 bytes",
        "1.5 KB",
        "25.3 GB",
        "2e+06 EB",
    ]


def test_the_machine_is_read(tmp_path):
    assert total_memory() > 10**8
    assert free_disk(tmp_path / "not" / "yet") > 0


def test_what_a_killed_run_left_is_no_lack_of_space(tmp_path, monkeypatch):
    one = fits.CHECKPOINT * needs().parameters.whole
    monkeypatch.setattr(fits, "free_disk", lambda folder: one // 2)
    assert "one checkpoint needs" in fault(f"save={tmp_path}")[0]
    (tmp_path / "partial_step3").mkdir()
    (tmp_path / "partial_step3/model.safetensors").write_bytes(bytes(one))
    config = load([], [*TINY, f"save={tmp_path}"])
    fits.check_fits(config, 512, ranks=1, ranks_here=1, device=CPU)


def test_a_file_system_that_does_not_tell_its_size_is_not_full(tmp_path, monkeypatch):
    empty = type(shutil.disk_usage(tmp_path))(total=0, used=0, free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: empty)
    assert free_disk(tmp_path) is None
