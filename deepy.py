#!/usr/bin/env python
"""Start a script on every device of this machine or of several machines.

It first checks the script's configuration, then starts one process per device.

python deepy.py train.py configs/mep.yml seed=1235
python deepy.py evaluate.py configs/mep.yml --lengths 512 1024

Exit status: 0; 1 for bad input; 128 + N after signal N (130 after ctrl-C, 143 after SIGTERM;
training has saved) or if a process was killed by signal N; otherwise that of the first process that
failed. With a hostfile, DeepSpeed's launcher starts the processes: after a signal it kills them
within 30 seconds and exits with 1.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

import torch

from megatron import entry
from megatron.checkpoints.saved import with_parent
from megatron.cli_errors import CommandParser, print_line, status_of
from megatron.config import Config
from megatron.errors import UserError
from megatron.files import ROOT
from megatron.parallel.grid import Grid, free_port, learn_place, process_count
from megatron.parallel.launcher import environments, run

LAUNCHER = "deepy.py"
ON_THIS_MACHINE = ("evaluate.py", "generate.py")
ONE_PROCESS = ("generate.py",)
PURPOSES = {"train.py": "train", "evaluate.py": "evaluate"}
HELP = {"-h", "--help"}

Device = int | str  # as CUDA_VISIBLE_DEVICES names it: a number, or an identifier of a MIG slice


def main(argv: Sequence[str]) -> None:
    """Check whatever can be checked, then start the processes and exit with their status.

    Raises SystemExit(1) with one message if something is wrong.
    """
    status = status_of(lambda: _start(list(argv)))
    if status:
        sys.exit(status)


def _start(words: list[str]) -> None:
    if words and words[0].replace(".", "", 1).isdecimal():
        ignored = f"the leading {words[0]} is accepted but has no effect"
        entry.print_notes([f"{ignored}: in the MEP fork only dead code used it"])
        words = words[1:]
    if not words or words[0] in HELP:
        print(f"usage: {LAUNCHER} SCRIPT FILE… key=value… [-d DIR] [options of the script]")
        print(f"\n{__doc__}\nKeys of the configuration: see configs/README.md")
        return
    script, rest = find_script(words[0]), words[1:]
    if HELP & set(rest):
        os.execv(sys.executable, [sys.executable, str(script), "--help"])
    learn_place()
    if process_count() > 1:  # srun, mpirun or torchrun has started one process per device
        _become(["-u", str(script), *rest], os.environ)
    config = checked_config(script, rest)
    if config is not None and config.only_measures and script.name == "train.py":
        script = find_script("evaluate.py")  # its processes, one per device of this machine
    launch(script, rest, config)


def find_script(name: str) -> Path:
    """The script to start, in the current folder or next to deepy.py."""
    for candidate in (Path(name), ROOT / name):
        if candidate.is_file() and candidate.suffix == ".py":
            return candidate.resolve()
    raise UserError(
        f"{LAUNCHER}: {name} is not a script - for example, write {LAUNCHER} train.py FILE…"
    )


def checked_config(script: Path, words: Sequence[str]) -> Config | None:
    """The configuration that the script will load; None if the command line names none."""
    parser = CommandParser(add_help=False, allow_abbrev=False)
    entry.add_conf_dir(parser)
    parser.add_argument("--checkpoint", type="path")
    parser.add_argument("--step")
    options, words_left = parser.parse_known_args(words)
    # Files come before the script's own options, whose values could look like files.
    leading = list(takewhile(lambda word: not word.startswith("-"), words_left))
    files = entry.split_words(leading, options.conf_dir)[0]
    overrides = entry.split_words(words_left)[1]
    if not files and not overrides and script.name != "train.py":
        return None
    return entry.load_configuration(files, overrides, options, PURPOSES.get(script.name))


def launch(script: Path, words: Sequence[str], config: Config | None) -> NoReturn:
    """Become the script if one process is enough, else start one per device and wait."""
    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
    environment = dict(os.environ)
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}".rstrip(":")
    hostfile = config.launch.hostfile if config else None
    if config and hostfile is not None and script.name not in ON_THIS_MACHINE:
        if (config.launch.num_nodes or 1) > 1 or os.path.exists(hostfile):
            os.environ.update(environment)
            launch_on_many_machines(script, words, config)
        # GPT-NeoX's own files name /mock_path, and GPT-NeoX trains anyway.
        print_line(f"warning: hostfile: {hostfile} does not exist, so only this machine is used")

    devices = devices_for(script, config)
    if cuda:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    if config and script.name == "train.py":
        with_parent(config)  # find a missing parent before processes start
        count = len(devices)
        shared = Grid(ranks=count).sharing(config.parallel.context_parallel_size)
        config.check_batch(shared.data_ranks)

    command = ["-u", str(script), *words]
    port = (config.launch.master_port if config else None) or free_port()
    ranks = environments(environment, len(devices), port)
    if len(ranks) == 1:
        _become(command, ranks[0])
    sys.exit(run([sys.executable, *command], ranks))


def _become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by Python with other arguments."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *command], environment)


def devices_for(script: Path, config: Config | None) -> list[Device]:
    """One name per process: CUDA devices as in CUDA_VISIBLE_DEVICES, or numbers on a CPU.

    Raises UserError if num_gpus is more than the number of visible CUDA devices.
    """
    cuda = torch.cuda.is_available()
    count = torch.cuda.device_count() if cuda else os.cpu_count() or 1
    devices: list[Device] = list(range(count))
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cuda and names:
        devices = [*names.split(",")[:count]]

    number = len(devices) if cuda else 1  # on a CPU one process is enough
    if config is not None:
        if config.launch.include or config.launch.exclude:
            raise UserError(
                "include, exclude: choose devices of a hostfile's machines - to choose devices of"
                " this machine set CUDA_VISIBLE_DEVICES"
            )
        number = config.launch.num_gpus or number
    if script.name in ONE_PROCESS:
        number = 1
    elif script.name in ON_THIS_MACHINE:
        # A run trained on eight devices is measured on the devices of this machine.
        number = min(number, len(devices))
    if number > len(devices) and cuda:
        raise UserError(
            f"num_gpus: {number} devices requested, but {len(devices)} are visible; lower num_gpus"
        )
    if number > len(devices):
        return [*range(number)]  # processes may share a core
    return devices[:number]


def launch_on_many_machines(script: Path, words: Sequence[str], config: Config) -> NoReturn:
    """Let DeepSpeed's launcher start the script on the machines of a hostfile, and wait.

    Raises UserError if it cannot.
    """
    from deepspeed.launcher import runner

    try:
        os.stat(str(config.launch.hostfile))  # without it, the launcher would look for devices here
        runner.main(launcher_words(script, words, config))
    except (ValueError, RuntimeError, OSError, subprocess.CalledProcessError) as fault:
        raise UserError(
            f"hostfile: {config.launch.hostfile}: DeepSpeed's launcher cannot start ({fault}) -"
            " write lines `host slots=8`, make sure that ssh reaches every machine without a"
            " password, or start torchrun on each machine"
        ) from None
    sys.exit(0)


def launcher_words(script: Path, words: Sequence[str], config: Config) -> list[str]:
    """The arguments of DeepSpeed's launcher."""
    options = [f"--{name}={value}" for name, value in config.launch if value is not None]
    return [*options, "--no_local_rank", str(script), *words]


if __name__ == "__main__":
    main(sys.argv[1:])
