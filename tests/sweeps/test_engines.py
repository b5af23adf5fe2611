"""tools/sweep.py on Ray and on Slurm: a killed worker, node and driver, a time limit, ctrl-C."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron.parallel.grid import free_port
from megatron.sweeps.cells import load_sweep, state_of
from megatron.sweeps.engines import Slurm, Work
from tests.support import ROOT, call, unlaunched
from tests.sweeps.conftest import SWEEP

SLURM = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdTimeout=10
NodeName=a NodeHostname={host} Port={ports[1]} CPUs=1
NodeName=b NodeHostname={host} Port={ports[2]} CPUs=1
PartitionName=all Nodes=a,b Default=YES MaxTime=INFINITE
"""


@pytest.fixture(scope="module")
def ray():
    """Two nodes with a core each, and a head without one."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        handler = signal.getsignal(signal.SIGTERM)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        for _ in range(2):
            cluster.add_node(num_cpus=1, num_gpus=0)
        signal.signal(signal.SIGTERM, handler)  # Ray's would end this process
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield
        cluster.shutdown()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Two nodes with a core each."""
    pytest.importorskip("submitit", reason="submitit is not installed")
    if os.getuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
        pytest.skip("Slurm needs root, slurmctld, slurmd and munged here")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "a", "b"):
        (folder / name).mkdir()
    text = SLURM.format(
        host=socket.gethostname(), folder=folder, ports=[free_port() for _ in range(3)]
    )
    (folder / "slurm.conf").write_text(text)
    key = folder / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    files = {"socket": "munge", "pid-file": "munged.pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{name}={folder / file}" for name, file in files.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        munged = ["munged", "--force", f"--key-file={key}", *options]
        for command in (munged, ["slurmctld"], ["slurmd", "-Na"], ["slurmd", "-Nb"]):
            subprocess.run(command, check=True)
        yield
        for file in folder.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.fixture(params=["ray", "slurm"])
def launcher(request):
    request.getfixturevalue(request.param)
    return request.param


@pytest.fixture
def start(tmp_path, corpus):
    """Starts a sweep of two cells on a launcher, and waits until all have a checkpoint."""
    started: list[subprocess.Popen] = []

    def function(launcher, steps, *options, only=("data=good",)):
        file = tmp_path / "tiny.yml"
        text = SWEEP.format(corpus=corpus, steps=steps).replace("seed: [1]", "seed: [1, 2]")
        file.write_text(text.replace("save_interval: 15", "save_interval: 100"))
        words = ["run", file, "--folder", tmp_path / "runs", "--only", *only]
        words += ["--launcher", launcher]
        if launcher == "slurm":
            words += ["--launcher-args", "time=60", "nice=1", *options]
        with (tmp_path / "log").open("ab") as log:
            command = [sys.executable, ROOT / "tools/sweep.py", *words]
            started.append(
                subprocess.Popen(
                    command, env=unlaunched(), stdout=log, stderr=log, start_new_session=True
                )
            )
        cells = load_sweep(file, tmp_path / "runs", only).cells
        for cell in cells:
            wait(lambda: state_of(cell).step > 0)  # noqa: B023
        return started[-1], cells

    yield function
    for process in started:
        process.kill()


def wait(condition, seconds=300):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "in vain"
        time.sleep(0.1)
    return value


def training(cell):
    """The process that trains a cell."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:] == [str(ROOT / "train.py"), str(cell.folder / "cell.yml")]:
            return process
    return None


@pytest.mark.campaign
def test_ctrl_c_saves_every_training_of_a_cluster(launcher, start):
    process, cells = start(launcher, 10**5)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(120) == 130
    for cell in cells:
        assert state_of(cell).kind == "stopped"
        assert state_of(cell).step % 100, "a checkpoint at the signal"
        assert training(cell) is None


@pytest.mark.campaign
def test_a_killed_run_leaves_no_training_on_ray(ray, start):
    process, cells = start("ray", 10**5)
    process.kill()
    for cell in cells:
        wait(lambda: training(cell) is None, 20)  # noqa: B023


@pytest.mark.campaign
def test_slurm_queues_a_cell_again_at_its_time_limit(slurm, start, tmp_path):
    process, cells = start("slurm", 1000)
    steps = [state_of(cell).step for cell in cells]
    subprocess.run(["scancel", "--signal=USR2", "--user=root"], check=True)  # as at the limit
    for cell, step in zip(cells, steps, strict=True):
        wait(lambda: training(cell) is None)  # noqa: B023
        assert state_of(cell).step > step
    assert process.wait(900) == 0, (tmp_path / "log").read_text()
    assert "- again," not in (tmp_path / "log").read_text(), "Slurm queues it, not `run`"


# After the others: it leaves one node.
@pytest.mark.campaign
def test_a_killed_worker_and_a_killed_node_lose_no_cell(launcher, start, tmp_path):
    process, (first, second) = start(launcher, 1000)
    training(first).parent().kill()
    worker = training(second).parent()
    node = worker.parent()
    workers: list[psutil.Process] = []  # Ray's end with their node
    if launcher == "slurm":  # the daemon of a node, and a process for each step of a job
        job, name = worker.environ()["SLURM_JOB_ID"], worker.environ()["SLURMD_NODENAME"]
        file = Path(os.environ["SLURM_CONF"]).with_name(f"{name}.pid")
        node = psutil.Process(int(file.read_text()))
        workers = [worker]
        for other in psutil.process_iter(["cmdline"]):
            if f"slurmstepd: [{job}." in " ".join(other.info["cmdline"] or []):
                workers.append(other)
    for victim in (node, *workers):
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    with contextlib.suppress(psutil.TimeoutExpired):
        node.wait(5)  # a child of this process must not stay as a zombie: Ray takes it as alive
    assert process.wait(900) == 0, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert "good-1: stopped at step" in log
    assert "good-2: done" in log


def test_a_job_of_slurm_has_the_name_of_its_cell(tmp_path, corpus, monkeypatch):
    """So squeue tells cells apart; what the user gives wins, as in sbatch's script."""
    file = tmp_path / "tiny.yml"
    file.write_text(SWEEP.format(corpus=corpus, steps=10).replace("seed: [1]", "seed: [1, 2]"))
    cells = load_sweep(file, tmp_path / "runs", ["data=good"]).cells

    class Executor:
        """As submitit's: what is set once holds for later jobs."""

        def __init__(self, folder, max_num_timeout):
            self.set, self.submitted = {}, []

        def update_parameters(self, **parameters):
            self.set |= parameters

        def submit(self, work, name):
            self.submitted.append((name, {**self.set, **self.set["additional_parameters"]}))
            return SimpleNamespace(job_id=str(len(self.submitted)))

    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(SlurmExecutor=Executor))
    monkeypatch.setenv("SRUN_CPUS_PER_TASK", "")  # which Slurm sets
    for options, names in (({}, ["good-1", "good-2"]), ({"job_name": "mine"}, ["mine"] * 2)):
        engine = Slurm(Work(tmp_path, (file, tmp_path, ())), {"time": 60, **options})
        assert engine.submit(cells) == ["1", "2"]
        assert [given["job_name"] for _, given in engine.executor.submitted] == names
        assert [name for name, _ in engine.executor.submitted] == ["good-1", "good-2"]


def test_a_launcher_that_cannot_start_is_one_message(tmp_path, corpus, monkeypatch):
    file = tmp_path / "tiny.yml"
    file.write_text(SWEEP.format(corpus=corpus, steps=10))
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "submitit", None)
    faults = {
        "ray": "--launcher ray: import of ray halted; None in sys.modules"
        " - pip install 'ray>=2.60,<3'",
        "slurm --launcher-args time=60": "--launcher slurm: import of submitit halted; None in"
        " sys.modules - pip install 'submitit>=1.5.4,<2'",
        "slurm --launcher-args time=1-0": "--launcher slurm: set the time limit of a"
        " job with --launcher-args time=MINUTES",
        "local --launcher-args num_gpus=1": "--launcher-args: needs KEY=VALUE, and --launcher ray"
        " or slurm",
    }
    for words, fault in faults.items():
        options = ["--only", "data=good", "--launcher", *words.split()]
        done = call("tools/sweep.py", "run", file, "--folder", tmp_path / "runs", *options)
        assert (done.returncode, done.stderr) == (1, f"{fault}\n")
    assert not (tmp_path / "runs").exists()
