"""Model FLOPs, their share of the peak, and memory, against figures worked out by hand."""

from pathlib import Path

import pytest
import torch

from megatron.config import load
from megatron.model import from_config
from megatron.training.throughput import (
    Throughput,
    flops_per_token,
    peak_memory,
    peak_of,
    peak_tflops,
    speed_text,
)
from tests.support import ROOT
from tests.training.conftest import tiny


def test_a_token_of_the_125m_model_costs_742_and_57_megaflops():
    # 12 layers of 12 * 768² + 13 * 768 weights, a norm of 2 * 768, 50304 rows of 768:
    # 123,689,472 weights.
    linear, attention = flops_per_token(load([ROOT / "configs" / "125M.yml"]).model, 50304)
    assert linear == 6 * 123_689_472
    assert attention == 12 * 12 * 768 * 512


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_that_count_are_all_but_the_encoding_and_the_looked_up_embedding(tied):
    config = load([], tiny("pos_emb=mep_param", f"no_weight_tying={not tied}"))
    model = from_config(config, 61)
    looked_up = 0 if tied else model.word_embeddings.weight.numel()
    encoding = sum(weight.numel() for weight in model.positions.parameters())
    counted = sum(weight.numel() for weight in model.parameters()) - looked_up - encoding
    assert flops_per_token(config.model, 61)[0] == 6 * counted


def test_utilisation_is_the_share_of_the_peak_and_is_left_out_where_that_is_unknown():
    known = Throughput(6e9, 2e9, peak=312.0).numbers(tokens_per_second=15_600)
    assert known["model_tflops_per_second"] == pytest.approx(124.8)
    assert known["mfu"] == pytest.approx(0.4)
    assert known["mfu_without_attention"] == pytest.approx(0.3)
    assert speed_text(known) == "MFU 40.0% (30.0% without attention)"
    unknown = Throughput(6e9, 2e9).numbers(tokens_per_second=1000)
    assert unknown == {"model_tflops_per_second": pytest.approx(8)}
    assert speed_text(unknown) == "8 model TFLOP/s"


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H200", "fp16", 989),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
    ],
)
def test_a_peak_is_that_of_exactly_this_device_or_unknown(name, precision, peak):
    assert peak_of(name, precision) == peak


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_cpu_has_no_peak_and_counts_the_memory_of_the_process():
    cpu = torch.device("cpu")
    assert peak_tflops(cpu, "fp32") is None
    status = Path("/proc/self/status").read_text().splitlines()
    counted = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
    assert peak_memory(cpu) == pytest.approx(counted, rel=0.05)
