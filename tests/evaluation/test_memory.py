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
from megatron.evaluation.perplexity import measure
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
ids = np.random.default_rng(0).integers(0, 50304, 16385)
(result,) = measure(model, [Windows(16384, [ids], [0])])
assert result.reason is None and result.windows == 1, result
print(peak())
"""


def test_one_window_of_16384_tokens_with_the_125m_shape_needs_less_than_3_gib():
    # Two of its twelve layers are in memory, the weights of ten are added. At 2048 tokens two
    # layers may need no more than one does; so at 16384, where a layer takes ten seconds, one
    # computes. With all twelve: 1.7 GiB in 132 s, once.
    # glibc would keep and reuse freed memory; above this size it returns every piece at once.
    found = run("-c", SCRIPT, env={"MALLOC_MMAP_THRESHOLD_": "65536"}, timeout=400)
    assert found.returncode == 0, found.stderr
    one, two, window = map(int, found.stdout.split())
    one_activation = 2048 * 768 * 4 / 1024  # KiB, what a layer would leave behind at the least
    assert two - one < one_activation, f"{one} and {two} KiB"
    ten_layers = 10 * 12 * 768**2 * 4 / 1024
    assert window + ten_layers < 3 * GIB, f"{window / GIB:.2f} GiB"
