"""Peak memory of evaluation on the CPU, in a process of its own, with random weights."""

from pathlib import Path

import pytest

from tests.support import run

GIB = 2**20  # in KiB, as /proc counts

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc"
)

SCRIPT = """
import sys
from pathlib import Path
import numpy as np, torch
from megatron.config import load
from megatron.evaluation.perplexity import measured
from megatron.evaluation.protocols import Windows
from megatron.model import from_config

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if "VmHWM" in line)

shape = ["num_layers=2", "hidden_size=768", "num_attention_heads=12", "seq_length=512"]
config = load([], [*shape, "no_weight_tying=true", "pos_emb=mep_free"])
torch.set_num_threads(2)
model = from_config(config, vocab=50304).eval()
layers = list(model.layers)

ids = torch.randint(0, 50304, (1, 2048))
for count in (1, 2):
    model.layers = torch.nn.ModuleList(layers[:count])
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    with torch.inference_mode():
        model.features(ids)
    print(peak())

model.layers = torch.nn.ModuleList(layers[:1])
for length in MEASURED:
    ids = np.random.default_rng(0).integers(0, 50304, length + 1)
    Path("/proc/self/clear_refs").write_text("5")
    result = measured(model, Windows(length, [ids], [0]))
    assert result["reason"] is None and result["windows"] == 1, result
    print(peak())
"""
ONE_ACTIVATION = 2048 * 768 * 4 / 1024  # KiB, what a layer would leave behind at the least
ONE_BLOCK = 2048 * 50304 * 4 / 1024  # of logits
TEN_LAYERS = 10 * 12 * 768**2 * 4 / 1024


def peaks(*lengths: int) -> list[int]:
    """Peak KiB of one layer, of two, and of a window of each length."""
    # glibc would keep and reuse freed memory; above this size it returns every piece at once.
    env = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    found = run("-c", SCRIPT.replace("MEASURED", repr(lengths)), env=env, timeout=400)
    assert found.returncode == 0, found.stderr
    return [int(word) for word in found.stdout.split()]


def test_neither_a_layer_nor_a_block_of_logits_stays_in_memory():
    one, two, one_block, two_blocks = peaks(2048, 4096)
    assert two - one < ONE_ACTIVATION, f"{one} and {two} KiB"
    assert two_blocks - one_block < ONE_BLOCK / 2, f"{one_block} and {two_blocks} KiB"


@pytest.mark.campaign
def test_one_window_of_16384_tokens_with_the_125m_shape_needs_less_than_3_gib():
    # Two of its twelve layers are in memory, the weights of ten are added. At 16384 tokens, where
    # a layer takes ten seconds, one computes. With all twelve: 1.7 GiB in 132 s, once.
    *_, window = peaks(16384)
    assert window + TEN_LAYERS < 3 * GIB, f"{window / GIB:.2f} GiB"
