"""The processes of a run: how many, which one this is, on which device; alone it needs no network."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from megatron.errors import UserError

CPU = torch.device("cpu")
SCHEDULERS = (
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@dataclass(frozen=True)
class Grid:
    """rank of ranks, and its device. `Grid()` is one process that knows no other."""

    rank: int = 0
    ranks: int = 1
    device: torch.device = CPU

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and logs."""
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all ranks of a tensor of any shape."""
        if self.ranks == 1:
            return value
        total = value.clone()
        torch.distributed.all_reduce(total)
        return total / self.ranks

    def gather(self, value: Any) -> list[Any]:
        """What every rank gave, by rank, on every rank; plain data."""
        found = [value] * self.ranks
        if self.ranks > 1:
            torch.distributed.all_gather_object(found, value)
        return found

    def wait(self) -> None:
        """Until every rank has come here."""
        if self.ranks > 1:
            torch.distributed.barrier()


def here() -> Grid:
    """The processes where a launcher or a scheduler started several, else this one alone, which then asks nobody."""
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1 or (
        "WORLD_SIZE" not in os.environ and _told_by_a_scheduler()
    )
    return (
        connect()
        if several
        else Grid(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    )


def connect(backend: str | None = None) -> Grid:
    """Join the other processes as the launcher (deepy.py, torchrun) says, or run alone where nobody launched.

    backend: nccl or gloo; None takes nccl on CUDA and gloo on CPU.
    """
    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(_told_by_a_scheduler() or ALONE | {"MASTER_PORT": str(free_port())})
    import deepspeed  # after DS_ACCELERATOR is known
    import deepspeed.ops

    # On CPU DeepSpeed would compile a shared-memory op at a first run: that needs g++ and ninja, takes half a minute,
    # and a killed build leaves a lock on which every later run waits for ever. gloo does the same work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else CPU
    if cuda:
        torch.cuda.set_device(device)
    if not torch.distributed.is_initialized():
        backend = "gloo" if not cuda else backend or "nccl"
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return Grid(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device)


@contextmanager
def left_at_the_end() -> Iterator[None]:
    """Processes joined inside are left at the end, before this one ends; those joined before stay.

    gloo's threads may still hold tensors when the interpreter ends, and then abort it (pytorch#179291): status -6 after
    all the work was done. After a fault nccl is not asked: it would wait for the others.
    """
    outside = torch.distributed.is_initialized()
    orderly = False
    try:
        yield
        orderly = True
    finally:
        joined = torch.distributed.is_initialized() and not outside
        if joined and (orderly or torch.distributed.get_backend() == "gloo"):
            import deepspeed  # connect() did so, and it keeps groups of its own

            deepspeed.comm.destroy_process_group()


def _told_by_a_scheduler() -> dict[str, str]:
    """RANK, WORLD_SIZE and LOCAL_RANK where Slurm or Open MPI started several processes; else nothing."""
    for names in SCHEDULERS:
        rank, ranks, local = (os.environ.get(name) for name in names)
        if rank is not None and ranks is not None and int(ranks) > 1:
            if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
                raise UserError(
                    f"{names[1]}: {ranks} processes were started, and nothing says where they meet"
                    " - export MASTER_ADDR (the first machine) and MASTER_PORT (a free port) before starting them"
                )
            return {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local or "0"}
    return {}


def free_port() -> int:
    """A TCP port that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
