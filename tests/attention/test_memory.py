"""Peak memory of attention on the CPU beyond its inputs, in a process where a matrix would show."""

from pathlib import Path

import pytest

from tests.support import run

# Nothing is shared by heads, so that 12 need at most four times what 3 need.
HEADS, ALL_HEADS = 3, 12
LONGEST = 16384
GROWTH = 2.2  # of memory, at most, where the length doubles
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc"
)

SCRIPT = """
import sys
from pathlib import Path
import torch
from megatron.attention import attention
from megatron.attention.terms import Terms

def kib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if name in line)

def extra(length, learned, kind):
    fused = torch.randn(1, length, HEADS, 3, 64).permute(3, 0, 2, 1, 4)  # as the model has them
    q, k, v = (x.detach().requires_grad_(learned) for x in fused)
    bias = torch.randn(HEADS, length, requires_grad=learned) if kind == "table" else None
    u = torch.randn(1, HEADS, length) if kind == "product" else None
    w = torch.rand(1, HEADS, length) * 1e-3  # nothing may be skipped
    score_bias = (u, w.cumsum(2)) if kind == "product" else None
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = kib("VmRSS")
    out = attention(q, k, v, bias, score_bias=score_bias, backend="sdpa")
    if learned:
        leaves = [q, k, v] if bias is None else [q, k, v, bias]
        torch.autograd.grad(out, leaves, out.detach())
    return kib("VmHWM") - before

torch.set_num_threads(1)
for kind in sys.argv[1:]:
    extra(512, True, kind)  # what is loaded and kept at the first call
    for length in LENGTHS:
        print(extra(length, False, kind), extra(length, True, kind))
"""


@pytest.mark.parametrize(
    ("lengths", "kinds"),
    [
        ((1024, 2048, 4096), ["table"]),
        pytest.param((1024, 2048, 4096), ["product"], marks=pytest.mark.campaign),
        pytest.param((4096, 8192, LONGEST), ["table", "product"], marks=pytest.mark.campaign),
    ],
)
def test_memory_grows_with_length_and_16384_tokens_with_12_heads_need_less_than_256_mib(
    lengths, kinds
):
    # glibc would keep and reuse freed memory; above this size it returns every piece at once.
    env = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    script = SCRIPT.replace("HEADS", str(HEADS)).replace("LENGTHS", str(lengths))
    done = run("-c", script, *kinds, env=env, timeout=400)
    assert done.returncode == 0, done.stderr
    numbers = [map(int, line.split()) for line in done.stdout.splitlines()]
    for number, kind in enumerate(kinds):
        of_kind = numbers[3 * number : 3 * number + 3]
        forward, both = zip(*of_kind, strict=True)
        for used, most in ((forward, 256), (both, 768)):  # MiB
            assert used[2] < GROWTH * used[1] < GROWTH**2 * used[0], f"{kind}: {used} KiB"
            by_token = (used[2] - used[1]) / (lengths[2] - lengths[1])
            longest = used[2] + by_token * (LONGEST - lengths[2])
            assert longest * ALL_HEADS / HEADS < most * 1024, f"{kind}: {used} KiB"
