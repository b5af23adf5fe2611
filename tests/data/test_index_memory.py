"""How much memory the order of many samples takes; docs/performance.md has the figures of 10^9."""

import numpy as np
import pytest

from tests.support import run

SAMPLES = 30_000_000
BUILD = """
import sys
from pathlib import Path
import numpy as np
from megatron.data.parts import Turns
from megatron.data.samples import Plan, _write_maps

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024

sizes = np.load(sys.argv[1])
total = int(sizes.sum(dtype=np.int64))
plan = Plan(range(len(sizes)), total, 1, total // int(sys.argv[3]), 1234)
before = peak()
turns = Turns([5, 3, 2])[plan.samples]
blended = peak()
_write_maps(Path(sys.argv[2]), sizes, plan)
print(before, blended, peak(), plan.samples, *turns)
"""


@pytest.mark.campaign
def test_the_order_of_many_samples_takes_little_memory_and_a_blend_none(tmp_path):
    sizes = np.random.default_rng(0).lognormal(6.4, 1.0, SAMPLES // 2).astype(np.int32) + 1
    np.save(tmp_path / "sizes.npy", sizes)
    (tmp_path / "maps").mkdir()
    done = run("-c", BUILD, tmp_path / "sizes.npy", tmp_path / "maps", SAMPLES, timeout=600)
    assert done.returncode == 0, done.stderr
    before, blended, built, samples, corpus, number = map(int, done.stdout.split())
    assert len(np.load(tmp_path / "maps" / "order.npy", mmap_mode="r")) == samples >= SAMPLES
    assert built - before < max(4 * samples, 16 * len(sizes)) + 2**26
    assert blended - before < 2**24
    share = [0.5, 0.3, 0.2][corpus]
    assert abs(number - share * samples) <= 2
