"""Cells of a sweep as jobs of a cluster: tasks of Ray, or jobs of Slurm by submitit.

The engine schedules the jobs. If a job ends without a result, we submit its cell again.
"""

import importlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.errors import UserError, in_words
from megatron.parallel.grid import free_port
from megatron.sweeps.cells import Arguments, Cell, Sweep, described, load_sweep, state_of
from megatron.sweeps.runner import SIGNALS, Runner

ATTEMPTS = 3  # jobs of a cell that end without a new checkpoint
PATIENCE = 120.0  # seconds: NFS keeps the locks of a dead node for 90 seconds
PAUSE = 5.0  # seconds between two requests to Slurm, because all users share one controller
TIME_LIMITS = 1000  # times that submitit may requeue a job

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """What a job does. It reads the sweep again, because the file may refer to the user's code.

    place: the current folder of `run`
    sweep: the arguments of load_sweep
    starter: the command that starts a script in every process of the job; (): only one process
    """

    place: Path
    sweep: Arguments
    starter: tuple[str, ...] = ()

    def __call__(self, name: str) -> None:
        os.chdir(self.place)
        (cell,) = (cell for cell in load_sweep(*self.sweep).cells if cell.name == name)
        runner = Runner(logger.info, PATIENCE, self.starter)
        meeting = {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(free_port())}
        # In this thread, because Ray's cancellation doesn't interrupt waiting for another one.
        with runner.stoppable(*SIGNALS, signal.SIGUSR2):
            runner.work(cell, meeting if self.starter else {})
        if runner.stopping == signal.SIGUSR2:  # the time limit: submitit requeues the job
            signal.raise_signal(signal.SIGUSR2)

    def checkpoint(self, name: str) -> Any:
        """The function that submitit requeues."""
        return importlib.import_module("submitit.helpers").DelayedSubmission(self, name)


class Ray:
    """Tasks on the cluster in RAY_ADDRESS or one that runs here, else on this machine.

    options: those of ray.remote
    """

    def __init__(self, work: Work, options: dict[str, Any]) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.ray, self.work = importlib.import_module("ray"), work
        self.ray.init(log_to_driver=False)
        if not options:
            device = "num_gpus" if "GPU" in self.ray.cluster_resources() else "num_cpus"
            options = {device: 1}
        self.task = self.ray.remote(max_retries=0, **options)(Work.__call__)

    def submit(self, cells: Sequence[Cell]) -> list[Any]:
        return [self.task.options(name=cell.name).remote(self.work, cell.name) for cell in cells]

    def ended(self, jobs: list[Any]) -> Iterator[tuple[Any, str]]:
        """Jobs that end within a second, with their faults."""
        for job in self.ray.wait(jobs, num_returns=len(jobs), timeout=1)[0]:
            error = job.future().exception()
            yield job, str(error or "")

    def cancel(self, jobs: list[Any]) -> None:
        for job in jobs:
            self.ray.cancel(job)


class Slurm:
    """Jobs by the names of their cells; logs are in the sweep's folder.

    options: those of sbatch, with `_` for `-`
    """

    def __init__(self, work: Work, options: dict[str, Any]) -> None:
        nodes, on_each = options.get("nodes", 1), options.get("ntasks_per_node", 1)
        if not isinstance(options.get("time"), int):
            raise ValueError("set the time limit of a job with --launcher-args time=MINUTES")
        alone = ("--overlap", "--nodes=1", "--ntasks=1")
        starter = ("srun", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes * on_each}")
        starter += (f"--ntasks-per-node={on_each}", "--wait=60")
        self.work = work if nodes * on_each == 1 else replace(work, starter=starter)
        self.logs = work.sweep[1] / "slurm"
        submitit = importlib.import_module("submitit")
        self.executor = submitit.SlurmExecutor(self.logs, max_num_timeout=TIME_LIMITS)
        parameters = {"requeue": True, **options}
        self.executor.update_parameters(
            time=options["time"], additional_parameters=parameters, srun_args=alone
        )
        # Since Slurm 22.05 srun doesn't inherit it from sbatch.
        os.environ["SRUN_CPUS_PER_TASK"] = str(options.get("cpus_per_task", 1))

    def submit(self, cells: Sequence[Cell]) -> list[Any]:
        jobs = []
        for cell in cells:  # not an array, because its jobs would share one name
            self.executor.update_parameters(job_name=cell.name)
            jobs.append(self.executor.submit(self.work, cell.name).job_id)
        return jobs

    def ended(self, jobs: list[Any]) -> Iterator[tuple[Any, str]]:
        """Jobs that are no longer in the queue, with their logs."""
        time.sleep(PAUSE)
        # Not sacct, because it needs a database that not every Slurm has.
        command = f"squeue --user={os.getuid()} --array --noheader --format=%i"
        queue = subprocess.run(command.split(), capture_output=True, text=True)
        if queue.returncode == 0:
            for job in set(jobs).difference(queue.stdout.split()):
                yield job, f"log: {self.logs}/{job}_0_log.err"

    def cancel(self, jobs: list[Any]) -> None:
        subprocess.run(["scancel", *jobs])


LAUNCHERS = {"ray": (Ray, "ray>=2.60,<3"), "slurm": (Slurm, "submitit>=1.5.4,<2")}


@contextmanager
def _explained(launcher: str) -> Iterator[None]:
    """Turn a fault of the engine into one message."""
    try:
        yield
    except UserError:
        raise
    except ImportError as fault:
        package = LAUNCHERS[launcher][1]
        raise UserError(f"--launcher {launcher}: {fault} - pip install '{package}'") from None
    except Exception as fault:  # Ray itself raises that class when it cannot start
        raise UserError(f"--launcher {launcher}: {in_words(fault)}") from None


def run_on(
    launcher: str,
    options: dict[str, Any],
    runner: Runner,
    sweep: Sweep,
    jobs: int | None,
) -> None:
    """Run until no cell is left to submit; after a signal, until cancelled jobs have ended.

    options: resources of each job, by the engine's own names
    jobs: how many may be in the queue; default: all
    """
    with _explained(launcher):
        kind, _ = LAUNCHERS[launcher]
        engine = kind(Work(Path.cwd(), sweep.arguments), options)
    waiting = [cell for cell in sweep.cells if state_of(cell).kind != "done"]
    running: dict[Any, Cell] = {}
    attempts: Counter[tuple[str, int, int]] = Counter()
    with runner.stoppable(*SIGNALS):
        while running or (waiting and not runner.stopping):
            free = (jobs or len(sweep.cells)) - len(running)
            if runner.stopping:
                engine.cancel(list(running))
            elif waiting[:free]:
                with _explained(launcher):
                    running |= zip(engine.submit(waiting[:free]), waiting, strict=False)
                runner.say(f"{launcher}: {len(running)} jobs are submitted")
                del waiting[:free]
            for job, note in engine.ended(list(running)):
                cell = running.pop(job)
                state = state_of(cell)
                text = f"{cell.name}: {described(cell, state)}"
                if note and state.kind != "done":
                    text += f" ({note.strip().splitlines()[-1]})"
                progress = (cell.name, state.step, len(state.missing))
                attempts[progress] += 1
                has_lost_job = state.kind in ("waiting", "stopped", "trained")
                if has_lost_job and not runner.stopping and attempts[progress] < ATTEMPTS:
                    waiting.append(cell)
                    text += " - again, because its job has ended"
                runner.say(text)
