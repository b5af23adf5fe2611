"""The processes of a run: how many, which one this is, its device. One alone needs no network."""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from megatron.errors import UserError
from megatron.parallel.loopback import stay_inside, store

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
SCHEDULERS = (
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
"""Where Slurm and Open MPI give rank, number of ranks and rank on this machine."""
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""How gloo says that another rank has ended."""
HEAD_START = 3.0  # seconds in which a launcher that knows more ends this process
MEETING = 300.0  # seconds in which the first process must be reached
JOINING = {"gloo": 45.0, "nccl": 300.0}  # seconds in which those who have met must connect
SILENT = 10.0  # seconds after which a process says that it waits
SHOWN = 8  # absent ranks in one message
PAUSE = 0.2  # seconds between two attempts
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@dataclass(frozen=True)
class Grid:
    """This process's rank, the number of ranks, and its device. `Grid()` is a process alone."""

    rank: int = 0
    ranks: int = 1
    device: torch.device = CPU

    @property
    def first(self) -> bool:
        """Whether this process writes files and logs."""
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a tensor over all ranks; any shape, kept."""
        if self.ranks == 1:
            return value
        return self.sum(value) / self.ranks

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all ranks; any shape, kept."""
        if self.ranks == 1:
            return value
        total = value.clone()
        torch.distributed.all_reduce(total)
        return total

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, ordered by rank, on every rank; plain data only."""
        values = [value] * self.ranks
        if self.ranks > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Wait until every rank calls this."""
        if self.ranks > 1:
            torch.distributed.barrier()


def here() -> Grid:
    """The processes that a launcher or a scheduler started, or this one alone without a network."""
    if "WORLD_SIZE" in os.environ:
        several = number("WORLD_SIZE", least=1) > 1
    else:
        several = bool(_environment_of_scheduler())
    if several:
        return connect()
    return Grid(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def connect(backend: str | None = None) -> Grid:
    """Join the processes that a launcher (deepy.py, torchrun) or scheduler started; one runs alone.

    backend: nccl or gloo; None takes nccl on CUDA and gloo on the CPU
    UserError where the environment is wrong or the others do not come.
    """
    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if "WORLD_SIZE" not in os.environ:
        alone = ALONE | {"MASTER_PORT": str(free_port())}
        os.environ.update(_environment_of_scheduler() or alone)
    check_environment()
    _import_deepspeed()

    rank, ranks = number("RANK"), number("WORLD_SIZE")
    device = CPU
    if cuda:
        device = torch.device("cuda", number("LOCAL_RANK"))
        torch.cuda.set_device(device)
    if not torch.distributed.is_initialized():
        if not cuda:
            backend = "gloo"
        if ranks > 1:
            _meet(rank)
        _join(backend or "nccl", device)
    return Grid(rank, ranks, device)


def number(name: str, least: int = 0) -> int:
    """An environment variable as a whole number; UserError where it is none or too small."""
    text = os.environ.get(name, "")
    if not text.isdecimal() or int(text) < least:
        raise UserError(
            f"{name}: {text!r} is not a whole number of at least {least} - launchers set it;"
            " start with deepy.py or torchrun, or unset WORLD_SIZE to run one process alone"
        )
    return int(text)


def check_environment() -> None:
    """Check what says who this process is; UserError with the variable that is wrong."""
    ranks = number("WORLD_SIZE", least=1)
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UserError(
                f"{name}: not set, but WORLD_SIZE is {ranks} - start with deepy.py or torchrun, or"
                " unset WORLD_SIZE to run one process alone"
            )
    if number("RANK") >= ranks:
        raise UserError(
            f"RANK: {os.environ['RANK']} is not below WORLD_SIZE = {ranks} - ranks begin at 0"
        )
    devices = torch.cuda.device_count()
    if torch.cuda.is_available() and number("LOCAL_RANK") >= devices:
        raise UserError(
            f"LOCAL_RANK: {os.environ['LOCAL_RANK']}, but this process sees {devices} CUDA devices"
            " - start at most one process for each"
        )
    if not 0 < number("MASTER_PORT", least=1) < 65536:
        raise UserError(f"MASTER_PORT: {os.environ['MASTER_PORT']} is no port; give 1 to 65535")


def _meet(rank: int) -> None:
    """Wait, but not for ever, until the first process can be reached; UserError says that not."""
    host, port = os.environ["MASTER_ADDR"], number("MASTER_PORT")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun has met already
        return
    if rank == 0:
        if not is_free(port):
            raise UserError(f"MASTER_PORT: another program uses {port} here - choose another port")
        return
    begin = time.monotonic()
    announced = False
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as fault:
            reason = fault.strerror or str(fault)
        waited = time.monotonic() - begin
        place = f"MASTER_ADDR: nobody answers at {host}:{port} ({reason})"
        if waited > MEETING:
            raise UserError(
                f"{place} after {MEETING:g} seconds - start rank 0 there, or export its address and"
                " port as MASTER_ADDR and MASTER_PORT"
            )
        if waited > SILENT and not announced:
            logger.error(f"rank {rank}: {place}; waiting up to {MEETING:g} seconds")
            announced = True
        time.sleep(PAUSE)


def _import_deepspeed() -> None:
    """Import DeepSpeed without its shared-memory operation for the CPU.

    DeepSpeed would compile that at a first run, which needs g++ and ninja and takes half a minute;
    after a killed build, every later run waits for its lock for ever. gloo does the same work.
    DeepSpeed asks a dict, for which it would run compilers and ask GPUs unless it is there.
    """
    import deepspeed.ops  # only now: it reads DS_ACCELERATOR when it is imported

    ops: Any = deepspeed.ops
    ops.__compatible_ops__ = {"deepspeed_shm_comm": False}


def _join(backend: str, device: torch.device) -> None:
    import deepspeed

    stay_inside()
    ranks = int(os.environ["WORLD_SIZE"])
    seconds = JOINING[backend]
    with _in_time(seconds, ranks):
        place = store()
    if place is None:  # nobody calls the roll, so some may still be starting
        seconds += MEETING
    elif ranks > 1:
        _call_the_roll(place, number("RANK"), ranks)
    with _in_time(seconds, ranks):
        if place is not None:
            torch.distributed.init_process_group(
                backend,
                store=place,
                rank=int(os.environ["RANK"]),
                world_size=ranks,
                # As DeepSpeed does; it takes over a group that exists.
                timeout=deepspeed.comm.default_pg_timeout,
                device_id=device if device.type == "cuda" and ranks > 1 else None,
            )
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


@contextmanager
def _in_time(seconds: float, ranks: int) -> Iterator[None]:
    """A block in which the ranks connect; where it takes longer, the process ends with a message.

    torch would wait for 30 minutes for a rank that is gone, and cannot be interrupted there.
    """
    if ranks == 1:
        yield
        return
    message = (
        f"ranks: they did not connect to each other within {seconds:g} seconds, so one of them has"
        " ended or cannot be reached - see its message, and start all again"
    )
    timer = threading.Timer(seconds, give_up, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def give_up(message: str) -> NoReturn:
    """End this process from any of its threads: a message, and status 1."""
    logger.error(message)
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(1)


def _call_the_roll(place: Store, rank: int, ranks: int) -> None:
    """Wait, but not for ever, until every rank has come; UserError names those that have not.

    torch would wait for 30 minutes without a word.
    """
    place.set(f"here/{rank}", "")
    begin = time.monotonic()
    announced = False
    while not _are_there(place, range(ranks)):
        waited = time.monotonic() - begin
        if waited > MEETING:
            raise UserError(
                f"{_who_came(place, ranks)} after {MEETING:g} seconds - start all of them with"
                " this address and port, or let WORLD_SIZE be the number that you start"
            )
        if waited > SILENT and rank == 0 and not announced:
            logger.warning(f"{_who_came(place, ranks)}; waiting up to {MEETING:g} seconds")
            announced = True
        time.sleep(PAUSE)


def _who_came(place: Store, ranks: int) -> str:
    absent = [str(rank) for rank in range(ranks) if not _are_there(place, [rank])]
    shown = ", ".join(absent[:SHOWN])
    if len(absent) > SHOWN:
        shown += ", …"
    meeting_point = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return f"ranks: {ranks - len(absent)} of {ranks} have come to {meeting_point}, not {shown}"


def _are_there(place: Store, ranks: Iterable[int]) -> bool:
    try:
        return place.check([f"here/{rank}" for rank in ranks])
    except RuntimeError:  # the first has gone, and its store with it
        raise UserError("ranks: rank 0 has ended, see its message - start all again") from None


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
        if not (torch.distributed.is_initialized() and _lost_another(fault)):
            raise
        time.sleep(HEAD_START)
        raise UserError(
            "ranks: another process of this run has ended, see its message or its launcher's -"
            " the checkpoints are whole; start again"
        ) from fault
    finally:
        joined_inside = torch.distributed.is_initialized() and not joined_before
        if joined_inside and (completed or torch.distributed.get_backend() == "gloo"):
            import deepspeed  # its own groups must be destroyed too

            deepspeed.comm.destroy_process_group()


def _lost_another(fault: RuntimeError) -> bool:
    return any(words in str(fault) for words in LOST)


def _environment_of_scheduler() -> dict[str, str]:
    """RANK, WORLD_SIZE and LOCAL_RANK by Slurm or Open MPI; {} where they started one process."""
    for rank_name, ranks_name, local_name in SCHEDULERS:
        rank = os.environ.get(rank_name)
        ranks = os.environ.get(ranks_name)
        if rank is None or ranks is None or number(ranks_name) <= 1:
            continue
        if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
            raise UserError(
                f"{ranks_name}: {ranks} processes were started, but no MASTER_ADDR and MASTER_PORT"
                " to meet at - export them (the first machine, a free port) before starting them"
            )
        local_rank = os.environ.get(local_name) or "0"
        return {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local_rank}
    return {}


def free_port() -> int:
    """A TCP port that nothing uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_free(port: int) -> bool:
    """Whether this machine's TCP port can be opened."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
