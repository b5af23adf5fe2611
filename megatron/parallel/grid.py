"""The processes of a run: how many, which one this is, its device. One alone needs no network."""

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
"""What deepy.py, torchrun and DeepSpeed say to each process, beside MASTER_ADDR and MASTER_PORT."""
SCHEDULERS = (
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
)
"""The same of srun and of Open MPI. A batch script without srun has no SLURM_STEP_NUM_TASKS."""
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
"""How gloo says that another rank has ended or no longer answers."""
HEAD_START = 10.0  # seconds in which that rank prints its message, and a launcher ends this one


@dataclass(frozen=True)
class Grid:
    """This process's rank, the number of ranks, and its device. `Grid()` is a process alone.

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
        """Which texts this process has: ranks that share texts have one number."""
        return self.rank // self.context_ranks

    @property
    def data_ranks(self) -> int:
        """How many texts are at work at a time."""
        return self.ranks // self.context_ranks

    def sharing(self, context_ranks: int) -> "Grid":
        """The same process where so many neighbours share each text.

        Raises UserError if they do not divide the ranks.
        """
        if self.ranks % context_ranks:
            raise UserError(
                f"context_parallel_size: {context_ranks} ranks that share need a multiple of"
                f" {context_ranks} ranks, and this run has {self.ranks} - start more with deepy.py"
                " and num_gpus, or set it to 1"
            )
        return replace(self, context_ranks=context_ranks)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a tensor over all ranks; any shape, kept."""
        if self.ranks == 1:
            return value
        total = value.clone()
        torch.distributed.all_reduce(total)
        return total / self.ranks

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, ordered by rank, on every rank; plain data only."""
        values = [value] * self.ranks
        if self.ranks > 1:
            torch.distributed.all_gather_object(values, value)
        return values


def here() -> Grid:
    """The processes that a launcher or a scheduler started, or this one alone without a network."""
    learn_place()
    return connect() if process_count() > 1 else Grid(device=device_alone())


def device_alone() -> torch.device:
    """The device of a process that needs no other one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def set_matmul_precision(precision: str, dtype: str, device: torch.device) -> None:
    """Apply the key float32_matmul_precision to a model of a dtype, on a GPU.

    Encodings compute tables in float32 in every dtype: those of a bf16 or fp16 model stay exact. So
    does the CPU, where torch's `medium` would be bf16.
    """
    if dtype != "fp32" or device.type != "cuda":
        precision = "highest"
    torch.set_float32_matmul_precision(precision)


def connect(backend: str | None = None) -> Grid:
    """Join the processes that a launcher (deepy.py, torchrun) or scheduler started; one runs alone.

    backend: nccl or gloo; None takes nccl on CUDA and gloo on the CPU
    Raises UserError if the environment is wrong or the others do not come.
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

    import deepspeed  # only now: it reads DS_ACCELERATOR when it is imported

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
            f"ranks: rank {rank} of {ranks} cannot join the others ({in_words(fault)}) - see"
            " whether another has ended; without deepy.py or torchrun, export MASTER_ADDR (the"
            " first machine) and MASTER_PORT (a free port), and if machines have several networks,"
            " GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        ) from fault
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return grid


def use_gloo_alone() -> None:
    """Give DeepSpeed an accelerator for the CPU that builds no operation of its own.

    It would compile one for shared memory at a first run, which needs g++ and ninja and takes half
    a minute; after a killed build, every later run waits for its lock for ever. gloo does the same.
    """
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class WithoutOperations(CPU_Accelerator):
        def create_op_builder(self, op_name: str) -> None:
            """Nothing builds the operation of this name."""

    set_accelerator(WithoutOperations())


def learn_place() -> None:
    """Let PLACE be what srun or mpirun says, where no other launcher has said it."""
    if "RANK" in os.environ:
        return
    for names in SCHEDULERS:
        if os.environ.get(names[1], "1") != "1":
            for name, source in zip(PLACE, names, strict=True):
                # Slurm has `2(x3),1` for nodes of 2, 2, 2 and 1 tasks: the first stands for all.
                os.environ[name] = os.environ[source].split(",")[0].split("(")[0]


def process_count() -> int:
    """Processes of this run; a WORLD_SIZE without a rank is for processes that this one starts."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def free_port() -> int:
    """A TCP port that nothing uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def left_at_the_end() -> Iterator[None]:
    """Leave the group of processes that was joined inside this block; one joined before stays.

    Otherwise gloo's threads may still hold tensors when the interpreter ends, and abort it with
    status -6 (pytorch#179291). After a fault nccl's group stays: leaving would wait for the others.
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
            "ranks: another process of this run has ended or does not answer, see its message or"
            " its launcher's - the checkpoints are whole; start again"
        ) from fault
    finally:
        joined_inside = torch.distributed.is_initialized() and not joined_before
        if joined_inside and (completed or torch.distributed.get_backend() == "gloo"):
            import deepspeed  # its own groups must be destroyed too

            deepspeed.comm.destroy_process_group()


# --- What several processes write together ---


@contextmanager
def shared_faults(grid: Grid) -> Iterator[None]:
    """A block of which a fault on any rank is raised on all; every rank calls this.

    The others would wait for it for ever. Raises UserError with the message of the first rank that
    has one. An OSError becomes one too.
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
    """The first rank owns some places until the block ends; every rank calls this.

    places: of `owned_folder` and `owned_file`
    Raises UserError on every rank if the first cannot own one.
    """
    with ExitStack() as stack:
        with shared_faults(grid):
            if grid.first:
                for place in places:
                    stack.enter_context(place)
        yield
