"""Ranks on two machines, which are two network namespaces of this one: docs/parallel.md."""

import os
import shutil
import subprocess

import pytest

from megatron.parallel.grid import free_port
from tests.parallel.test_context import EXACT
from tests.support import ROOT
from tests.training.conftest import records, tiny


@pytest.fixture
def hosts():
    """The namespaces of two hosts and the address of the first; they are joined by a cable."""
    if not shutil.which("ip"):
        pytest.skip("needs the command ip of iproute2")
    names = [f"host{os.getpid()}{end}" for end in "ab"]
    ends = [f"v{name[4:]}" for name in names]
    cable = [*("link", "add", ends[0], "netns", names[0]), "type", "veth"]
    cable += ["peer", "name", ends[1], "netns", names[1]]
    orders = [["netns", "add", name] for name in names] + [cable]
    for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
        orders.append(["-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end])
        orders += [["-n", name, "link", "set", device, "up"] for device in ("lo", end)]
    try:
        for order in orders:
            done = subprocess.run(["ip", *order], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"network namespaces are not permitted: {done.stderr.strip()}")
        yield names, "10.77.0.1"
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.mark.distributed
def test_two_machines_that_share_texts_train_as_one_rank(forks, corpus, hosts, tmp_path):
    names, address = hosts
    words = [f"data_path={corpus}", "hidden_dropout=0", "pos_emb=fox", "train_iters=2"]
    words = tiny(*words, "precision=fp32")
    log = tmp_path / "log"
    alone = forks.start(ROOT / "train.py", *words, f"save={tmp_path / 'alone'}", log=log)
    assert forks.wait(alone) == 0, log.read_text()

    words += [f"save={tmp_path / 'together'}", "context_parallel_size=2"]
    place = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    place |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    script = ROOT / "tests" / "parallel" / "on_host.py"
    pids = []
    for rank, name in enumerate(names):
        run = [script, name, ROOT / "train.py", *words]
        pids.append(forks.start(*run, log=log, env={**place, "RANK": str(rank)}))
    assert not any([forks.wait(pid, timeout=120) for pid in pids]), log.read_text()
    together = records(tmp_path / "together")
    for step, record in records(tmp_path / "alone").items():
        for key in ("loss", "grad_norm"):
            assert together[step][key] == pytest.approx(record[key], rel=EXACT)
