"""The processes of a run: their number, this one's rank, its device. A single one needs no
network."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from megatron.errors import UserError, cannot_write, in_words

CPU = torch.device("cpu")
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables that deepy.py, torchrun and DeepSpeed set, in addition to MASTER_ADDR and
MASTER_PORT."""
SCHEDULERS = (
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
)
"""The same for srun and Open MPI. A batch script without srun has no SLURM_STEP_NUM_TASKS."""
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
"""Gloo's messages if another rank has ended or no longer answers."""
HEAD_START = 10.0  # seconds for that rank to print its message, and for a launcher to end this one


@dataclass(frozen=True)
class Grid:
    """This process's rank, the number of ranks, and its device. `Grid()` is a single process.

    context_ranks: how many neighbouring ranks share each text (`context_parallel_size`)
    """

    rank: int = 0
    ranks: int = 1
    device: torch.device = CPU
    context_ranks: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and logs."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which texts this process gets: ranks that share texts have the same number."""
        return self.rank // self.context_ranks

    @property
    def data_ranks(self) -> int:
        """How many texts are processed at a time."""
        return self.ranks // self.context_ranks

    def sharing(self, context_ranks: int) -> "Grid":
        """The same process when this many neighbours share each text.

        Raises UserError if the number doesn't divide the number of ranks.
        """
        if self.ranks % context_ranks:
            raise UserError(
                f"context_parallel_size: needs a multiple of {context_ranks} ranks, but this run"
                f" has {self.ranks} - start more with deepy.py and num_gpus, or set it to 1"
            )
        return replace(self, context_ranks=context_ranks)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a tensor over all ranks: any shape -> same."""
        if self.ranks == 1:
            return value
        total = value.clone()
        torch.distributed.all_reduce(total)
        return total / self.ranks

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks in order, on every rank; plain data only."""
        values = [value] * self.ranks
        if self.ranks > 1:
            torch.distributed.all_gather_object(values, value)
        return values


def here() -> Grid:
    """The processes that a launcher or scheduler started, or only this one, without a network."""
    learn_place()
    return connect() if process_count() > 1 else Grid(device=device_alone())


def device_alone() -> torch.device:
    """The device of a process that runs alone."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def set_matmul_precision(precision: str, dtype: str, device: torch.device) -> None:
    """Apply the key float32_matmul_precision to a model of a dtype on a GPU.

    Encodings compute tables in float32 for every dtype, and those of a bf16 or fp16 model must stay
    exact. The CPU stays exact too, because torch's `medium` would mean bf16 there.
    """
    if dtype != "fp32" or device.type != "cuda":
        precision = "highest"
    torch.set_float32_matmul_precision(precision)


def connect(backend: str | None = None) -> Grid:
    """Join the processes that a launcher (deepy.py, torchrun) or scheduler started; a single one
    runs alone.

    backend: nccl or gloo; None means nccl on CUDA and gloo on a CPU
    Raises UserError if the environment is wrong or the other processes don't appear.
    """
    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
    learn_place()
    ranks = process_count()
    if ranks == 1:
        os.environ.update(RANK="0", WORLD_SIZE="1")
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if cuda else CPU
    grid = Grid(rank, ranks, device)
    if torch.distributed.is_initialized():
        return grid

    import deepspeed  # only now, because it reads DS_ACCELERATOR when it is imported

    if not cuda:
        use_gloo_alone()
    backend = (backend or "nccl") if cuda else "gloo"
    try:
        if cuda:
            torch.cuda.set_device(device)
        torch.distributed.init_process_group(
            backend,
            store=None if ranks > 1 else HashStore(),
            rank=rank,
            world_size=ranks,
            timeout=deepspeed.comm.default_pg_timeout,  # DeepSpeed takes over this group
            device_id=device if cuda and ranks > 1 else None,
        )
    except (RuntimeError, ValueError) as fault:
        raise UserError(
            f"ranks: rank {rank} of {ranks} cannot join the others ({in_words(fault)}) - check"
            " whether another one has ended; without deepy.py or torchrun, export MASTER_ADDR (the"
            " first machine) and MASTER_PORT (a free port) and, if machines have several networks,"
            " GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        ) from fault
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return grid


def use_gloo_alone() -> None:
    """Give DeepSpeed a CPU accelerator that doesn't compile any operation.

    Otherwise its first run compiles one for shared memory, which needs g++ and ninja and takes half
    a minute; after a killed build, every later run waits for its lock forever. gloo does the same
    work.
    """
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class WithoutOperations(CPU_Accelerator):
        def create_op_builder(self, op_name: str) -> None:
            """There is no builder for the operation with this name."""

    set_accelerator(WithoutOperations())


def learn_place() -> None:
    """Set PLACE from srun's or mpirun's variables, unless another launcher has set it."""
    if "RANK" in os.environ:
        return
    for names in SCHEDULERS:
        if os.environ.get(names[1], "1") != "1":
            for name, source in zip(PLACE, names, strict=True):
                # Slurm has `2(x3),1` for nodes of 2, 2, 2 and 1 tasks: the first stands for all.
                os.environ[name] = os.environ[source].split(",")[0].split("(")[0]


def process_count() -> int:
    """The number of processes; a WORLD_SIZE without a rank is for processes that this one will
    start."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def free_port() -> int:
    """A TCP port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def left_at_the_end() -> Iterator[None]:
    """Leave a process group that was joined inside this block; one that was joined before stays.

    Otherwise gloo's threads may still hold tensors when the interpreter ends, and abort it with
    status -6 (pytorch#179291). After a fault nccl's group is kept, because leaving would wait for
    the others.
    """
    joined_before = torch.distributed.is_initialized()
    completed = False
    try:
        yield
        completed = True
    except RuntimeError as fault:
        is_lost = any(words in str(fault) for words in LOST)
        if not (is_lost and torch.distributed.is_initialized()):
            raise
        time.sleep(HEAD_START)
        raise UserError(
            "ranks: another process of this run has ended or does not answer; see its message or"
            " its launcher's - the checkpoints are complete, so start the run again"
        ) from fault
    finally:
        joined_inside = torch.distributed.is_initialized() and not joined_before
        if joined_inside and (completed or torch.distributed.get_backend() == "gloo"):
            import deepspeed  # its own groups must be destroyed too

            deepspeed.comm.destroy_process_group()


# --- What several processes write together ---


@contextmanager
def shared_faults(grid: Grid) -> Iterator[None]:
    """A block in which a fault on any rank is raised on all ranks; every rank calls this.

    Otherwise the others would wait forever. Raises UserError with the message of the first rank
    that has one. An OSError becomes a UserError too.
    """
    message = None
    try:
        yield
    except UserError as fault:
        message = str(fault)
    except OSError as fault:
        message = str(cannot_write(fault.filename or "a file of this run", fault))
    for rank_message in grid.gather(message):
        if rank_message is not None:
            raise UserError(rank_message)


@contextmanager
def owned_by_first(grid: Grid, *places: AbstractContextManager[None]) -> Iterator[None]:
    """The first rank owns some files and folders until the block ends; every rank calls this.

    places: from `owned_folder` and `owned_file`
    Raises UserError on every rank if the first cannot own one.
    """
    with ExitStack() as stack:
        with shared_faults(grid):
            if grid.first:
                for place in places:
                    stack.enter_context(place)
        yield
