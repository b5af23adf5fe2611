"""The processes of a run: how many, which one this is, its device. One alone needs no network.

Processes of one machine meet on its loopback interface, where no other machine can reach them:
torch's own store and gloo listen on every interface, and ask nobody who connects for a password.
"""

import fcntl
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any

import torch
import torch.distributed
from torch import Tensor

# torch documents these three, but its __all__ lacks them.
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from megatron.cli_errors import message_of, print_line
from megatron.errors import UserError, cannot_write, in_words

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MEETING_PLACE = ("MASTER_ADDR", "MASTER_PORT")
"""What a launcher says to each of its processes."""
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
"""Where a step of Slurm and Open MPI give rank, number of ranks and rank on this machine."""
MPIRUN = {"mpirun", "mpiexec", "orterun", "orted", "prterun", "prted"}
"""Programs of Open MPI, of which its processes are children."""
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
"""How gloo says that another rank has ended or no longer answers."""
LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Ranks of this machine, as launchers say it."""
ADDRESS_OF_INTERFACE = 0x8915  # Linux's SIOCGIFADDR
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
HEAD_START = 3.0  # seconds in which a launcher that knows more ends this process
MEETING = 300.0  # seconds in which all processes must come
SHOWN = 8  # absent ranks in one message
PAUSE = 0.2  # seconds between two looks


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
                f" {context_ranks} ranks, and this run has {self.ranks} - start it with deepy.py,"
                f" num_gpus={context_ranks}, or set it to 1"
            )
        return replace(self, context_ranks=context_ranks)

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


def here() -> Grid:
    """The processes that a launcher or a scheduler started, or this one alone without a network."""
    learn_place()
    if "WORLD_SIZE" in os.environ and number("WORLD_SIZE", least=1) > 1:
        return connect()
    return Grid(device=device_alone())


def device_alone() -> torch.device:
    """The device of a process that needs no other one.

    Raises UserError on all processes but the first, if several were started.
    """
    learn_place()
    rank = os.environ.get("RANK", "0")
    if rank != "0" and "WORLD_SIZE" in os.environ:
        raise UserError(
            f"RANK: {rank}, but this command is one process - start it without torchrun or srun, or"
            " unset RANK"
        )
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def connect(backend: str | None = None) -> Grid:
    """Join the processes that a launcher (deepy.py, torchrun) or scheduler started; one runs alone.

    backend: nccl or gloo; None takes nccl on CUDA and gloo on the CPU
    Raises UserError if the environment is wrong or the others do not come.
    """
    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
    learn_place()
    if "WORLD_SIZE" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone, MASTER_PORT=str(free_port()))
    ranks, rank = number("WORLD_SIZE", least=1), number("RANK")
    local_rank, port = number("LOCAL_RANK"), os.environ.get("MASTER_PORT", "")
    if rank >= ranks:
        raise UserError(f"RANK: {rank} is not below WORLD_SIZE = {ranks} - ranks begin at 0")
    is_port = port.isdecimal() and 0 < int(port) < 65536
    if not (os.environ.get("MASTER_ADDR") and is_port):
        raise UserError(
            "MASTER_ADDR: it and MASTER_PORT, a number below 65536, must name the place where the"
            f" {ranks} processes of WORLD_SIZE meet - export them (the first machine, a free port),"
            " or start with deepy.py or torchrun"
        )
    if cuda and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"LOCAL_RANK: {local_rank}, but this process sees {torch.cuda.device_count()} CUDA"
            " devices - start at most one process for each"
        )
    device = torch.device("cuda", local_rank) if cuda else CPU
    if cuda:
        torch.cuda.set_device(device)
    grid = Grid(rank, ranks, device)
    if torch.distributed.is_initialized():
        return grid

    import deepspeed  # only now: it reads DS_ACCELERATOR when it is imported
    import deepspeed.ops

    # DeepSpeed would compile its shared-memory operation at a first run, which needs g++ and ninja
    # and takes half a minute; after a killed build, every later run waits for its lock for ever.
    # gloo does the same work. DeepSpeed asks a dict, for which it would run compilers.
    ops: Any = deepspeed.ops
    ops.__compatible_ops__ = {"deepspeed_shm_comm": False}

    stay_inside()
    several = ranks > 1
    backend = (backend or "nccl") if cuda else "gloo"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # torchrun has its own store
        try:
            torch.distributed.init_process_group(
                backend,
                store=_meet(rank, ranks) if several else HashStore(),
                rank=rank,
                world_size=ranks,
                timeout=deepspeed.comm.default_pg_timeout,  # DeepSpeed takes over this group
                device_id=device if cuda and several else None,
            )
        except RuntimeError as fault:
            raise UserError(
                f"ranks: this process cannot open connections to the others ({in_words(fault)}) -"
                " see whether another has ended, and let GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
                " be the network interface by which the machines reach each other, or unset them"
            ) from fault
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return grid


def number(name: str, least: int = 0) -> int:
    """An environment variable as a whole number; raises UserError if it is not or is too small."""
    text = os.environ.get(name, "")
    if not text.isdecimal() or int(text) < least:
        raise UserError(
            f"{name}: {text!r} is not a whole number of at least {least} - launchers set it;"
            " start with deepy.py or torchrun, or unset WORLD_SIZE to run one process alone"
        )
    return int(text)


def stay_inside() -> None:
    """Let gloo and NCCL use the loopback interface if all ranks are known to be on this machine."""
    ranks = os.environ["WORLD_SIZE"]
    inside = ranks in ("1", *(os.environ.get(name) for name in LOCAL_RANKS))
    inside = inside or os.environ.get("SLURM_NNODES") == "1"
    if not (inside or _is_loopback(os.environ.get("MASTER_ADDR", ""))):
        _reach_others()
        return
    if "lo" in {name for _, name in socket.if_nameindex()}:
        for name in INTERFACES:
            os.environ.setdefault(name, "lo")


def _reach_others() -> None:
    """Let gloo use the interface that leads to MASTER_ADDR where this machine's name is loopback's.

    Debian writes such a name into /etc/hosts. gloo listens at the address of the name, where no
    other machine can reach it.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if not _is_loopback(socket.gethostbyname(socket.gethostname())):
            return
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing; any port will do
        address = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without address
                answer = fcntl.ioctl(probe, ADDRESS_OF_INTERFACE, struct.pack("40s", name.encode()))
                if answer[20:24] == address:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _meet(rank: int, ranks: int) -> Store:
    """Wait, but not for ever, until every rank has come; raises UserError that names the absent."""
    host, port = os.environ["MASTER_ADDR"], number("MASTER_PORT")
    first = rank == 0
    listening = None
    end = time.monotonic() + MEETING
    while True:
        try:
            if first and _is_loopback(host):
                listening = socket.create_server((host, port)).detach()  # torch closes it
            elif not first:
                socket.create_connection((host, port), timeout=5).close()
            break
        except OSError as fault:
            if first or time.monotonic() > end:
                raise UserError(
                    f"MASTER_ADDR: the processes cannot meet at {host}:{port} ({in_words(fault)})"
                    " - start rank 0 there, with a port that no other program uses"
                ) from None
        time.sleep(PAUSE)
    try:
        place = TCPStore(
            host, port, ranks, is_master=first, wait_for_workers=False, master_listen_fd=listening
        )
        place.set(f"here/{rank}", "")
        absent = list(range(ranks))
        while absent := [
            absent_rank for absent_rank in absent if not place.check([f"here/{absent_rank}"])
        ]:
            if time.monotonic() > end:
                raise UserError(
                    f"ranks: {', '.join(map(str, absent[:SHOWN]))} of {ranks} have not come to"
                    f" {host}:{port} within {MEETING:g} seconds - start all of them with this"
                    " address and port, or let WORLD_SIZE be the number that you start"
                )
            time.sleep(PAUSE)
    except RuntimeError as fault:  # the first has gone, and its store with it; or the port is taken
        raise UserError(
            f"ranks: rank 0 has ended, or cannot use the port {port} ({in_words(fault)}) - see its"
            " message, and start all again"
        ) from None
    return place


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
        if not (_says_lost(fault) and torch.distributed.is_initialized()):
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


def _says_lost(fault: Exception) -> bool:
    return any(words in str(fault) for words in LOST)


def learn_place() -> None:
    """Let RANK, WORLD_SIZE and LOCAL_RANK be what the launcher of this process says.

    Without a launcher it is alone, whatever its environment has: Slurm gives a job's script the
    variables of all its processes, and every process hands on what it got.
    """
    if torch.distributed.is_initialized():
        return
    environment = os.environ
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and _torchrun_has_ended():
        _forget(*PLACE, *MEETING_PLACE, "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
    if {"RANK", "WORLD_SIZE", *MEETING_PLACE} <= environment.keys():
        return
    names = None
    if "SLURM_STEP_ID" in environment:  # only srun gives it
        names = SLURM if SLURM[1] in environment else ("SLURM_PROCID", "SLURM_NTASKS", SLURM[2])
    elif OPEN_MPI[1] in environment:
        names = OPEN_MPI if _is_below_mpirun() else None
        if names is None:
            _forget(*OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE")
    if names is not None and environment.get(names[1], "1") != "1":
        for name, source in zip(PLACE, names, strict=True):
            environment[name] = environment.get(source, "")
    elif "WORLD_SIZE" in environment:
        _forget(*PLACE, "LOCAL_WORLD_SIZE")


def _forget(*names: str) -> None:
    """Remove variables of a launcher that did not start this process."""
    removed = [name for name in names if os.environ.pop(name, None) is not None]
    logger.warning(
        f"{', '.join(removed)}: inherited, for no launcher has started this process; it runs alone"
    )


def _torchrun_has_ended() -> bool:
    """Whether nothing listens at the store that torchrun opens before it starts processes."""
    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(place, timeout=5).close()
    except (OSError, ValueError, LookupError, OverflowError) as fault:
        return isinstance(fault, ConnectionRefusedError | LookupError)
    return False


def _is_below_mpirun() -> bool:
    import psutil  # only here: most processes have no such variables

    with suppress(psutil.Error):
        return any(process.name() in MPIRUN for process in psutil.Process().parents())
    return False


def free_port() -> int:
    """A TCP port that nothing uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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


@contextmanager
def ended_together(grid: Grid) -> Iterator[None]:
    """A block in which a fault of any rank ends all of them with one message; every rank enters it.

    The others may be inside an exchange, which nothing interrupts: a thread of each looks for the
    message, and ends its process.
    """
    if grid.ranks == 1:
        yield
        return
    joined: Any = _get_default_store()
    store = PrefixStore("fault", joined.clone())  # one for the thread, which torch asks for
    over = threading.Event()

    def watch() -> None:
        try:
            while not store.check(["message"]):
                if over.wait(PAUSE):
                    return
            message = store.get("message").decode()
        except RuntimeError:  # the first process has gone, and its store: the exchange says so
            return
        if grid.first:
            print_line(message)
        else:  # a launcher asks the first that ends for its message
            time.sleep(HEAD_START)
        time.sleep(HEAD_START)
        os._exit(1)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    except Exception as fault:
        if not _says_lost(fault):
            place = "" if grid.first else f"rank {grid.rank}: "
            store.set("message", place + message_of(fault))
            watching.join()
        raise
    finally:
        over.set()
