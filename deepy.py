#!/usr/bin/env python
"""Start a script on all devices: merge and check its configuration, then hand over to DeepSpeed's launcher.

python deepy.py train.py configs/mep.yml seed=1235
python deepy.py evaluate.py configs/mep.yml --lengths 512 1024
"""

import argparse
import base64
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron import entry
from megatron.config import Config
from megatron.config.document import help_text
from megatron.errors import UserError
from megatron.parallel.grid import free_port

ROOT = Path(__file__).resolve().parent
ONE_PROCESS = ("generate.py",)
ON_THIS_MACHINE = (
    "evaluate.py",
    *ONE_PROCESS,
)  # alone without a launcher, which takes seconds and words of its own
PURPOSES = {"train.py": "train", "evaluate.py": "evaluate"}


def main(argv: Sequence[str]) -> None:
    """Check everything that can be checked, then become the launcher; SystemExit(1) with one message otherwise."""
    words = list(argv)
    try:
        if words and _is_number(words[0]):
            entry.say(
                [
                    f"the leading {words[0]} is accepted and has no effect: in the MEP fork only dead code used it"
                ]
            )
            words = words[1:]
        if not words or words[0] in ("-h", "--help"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `deepy.py --help | head`
            print(_help())
            return
        script, rest = find_script(words[0]), words[1:]
        if {"-h", "--help"} & set(rest):
            os.execv(sys.executable, [sys.executable, str(script), "--help"])
        config = checked_config(script, rest)
        launch(script, rest, config)
    except UserError as fault:
        entry.complain(str(fault))
        sys.exit(1)


def find_script(name: str) -> Path:
    """The script to start, here or beside deepy.py."""
    for candidate in (Path(name), ROOT / name):
        if candidate.is_file() and candidate.suffix == ".py":
            return candidate.resolve()
    known = [path.name for path in sorted(ROOT.glob("*.py")) if path.name != Path(__file__).name]
    raise UserError(
        f"deepy.py: {name} is not a script; write deepy.py SCRIPT FILE… key=value…, SCRIPT one of {', '.join(known)}"
    )


def checked_config(script: Path, words: Sequence[str]) -> Config | None:
    """The configuration that the script will load, or None if the words name none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    entry.add_conf_dir(parser)
    parser.add_argument("--checkpoint")
    parser.add_argument("--step")
    given, others = parser.parse_known_args(words)
    # Files come before the script's own options, whose values would look like files.
    first = next((index for index, word in enumerate(others) if word.startswith("-")), len(others))
    files, overrides = entry.split(others[:first], given.conf_dir)
    overrides += entry.split(others[first:])[1]
    if not files and not overrides and script.name != "train.py":
        return None
    config = entry.load_given(files, overrides, given)
    entry.require(config, PURPOSES.get(script.name), given)
    entry.say(config.notes)
    return config


def launch(script: Path, words: Sequence[str], config: Config | None) -> None:
    """Become DeepSpeed's launcher: its exit status and its handling of signals are ours."""
    environment = dict(os.environ)
    if config is not None:
        environment[entry.NOTES_SAID] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), environment.get("PYTHONPATH")])
    )
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
    if (
        config is not None
        and config.launch.hostfile is not None
        and script.name not in ON_THIS_MACHINE
    ):
        command = _on_many_machines(script, words, config)
    else:
        devices = devices_for(script, config)
        if config is not None and script.name == "train.py":
            config.check_batch(len(devices))
        if not torch.cuda.is_available():
            threads = max((os.cpu_count() or 1) // len(devices), 1)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        if script.name in ON_THIS_MACHINE and len(devices) == 1:
            command = ["-u", str(script), *words]
            if torch.cuda.is_available():
                environment["CUDA_VISIBLE_DEVICES"] = str(devices[0])
        else:
            command = _on_this_machine(script, words, devices, config)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *command], environment)


def devices_for(script: Path, config: Config | None) -> list[int | str]:
    """One process for each: CUDA devices as CUDA_VISIBLE_DEVICES names them, or numbers on CPU."""
    cuda = torch.cuda.is_available()
    found: list[int | str] = _visible() if cuda else [*range(os.cpu_count() or 1)]
    wanted, chosen = None, False
    if config is not None:
        wanted, chosen = (
            config.launch.num_gpus,
            bool(config.launch.include or config.launch.exclude),
        )
        found = _filtered(found, config) if chosen else found
    if script.name in ONE_PROCESS or not (wanted or chosen or cuda):
        wanted = 1
    wanted = wanted or len(found)
    if script.name in ON_THIS_MACHINE:
        wanted = min(
            wanted, len(found)
        )  # what was trained on eight devices is measured on those that are here
    if wanted <= len(found):
        return found[:wanted]
    if cuda:
        raise UserError(
            f"num_gpus: {wanted} devices are wanted and {len(found)} are visible; lower num_gpus"
        )
    return [*range(wanted)]  # processes may share a core


def _visible() -> list[int | str]:
    """CUDA devices by number, or by the names that CUDA_VISIBLE_DEVICES gives them."""
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if not named:
        return [*range(count)]
    return [int(name) if name.isdecimal() else name for name in named.split(",")][:count]


def _filtered(found: list[int | str], config: Config) -> list[int | str]:
    from deepspeed.launcher.runner import parse_resource_filter

    include, exclude = config.launch.include or "", config.launch.exclude or ""
    try:
        left = parse_resource_filter({"localhost": list(range(len(found)))}, include, exclude).get(
            "localhost", []
        )
    except ValueError as fault:
        raise UserError(
            f"include: {include or exclude!r} does not fit this machine: {fault}; write localhost:0,1"
        ) from None
    if not left:
        raise UserError(f"exclude: {exclude!r} leaves no device")
    return [found[slot] for slot in left]


def _on_this_machine(
    script: Path, words: Sequence[str], devices: list[int | str], config: Config | None
) -> list[str]:
    """Straight to the part of the launcher that starts processes here: no ssh, and device names of any form."""
    world = base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()
    port = (config.launch.master_port if config is not None else None) or free_port()
    options = [
        f"--world_info={world}",
        "--master_addr=127.0.0.1",
        f"--master_port={port}",
        "--no_local_rank",
    ]
    return [
        "-u",
        "-m",
        "deepspeed.launcher.launch",
        *options,
        "--log_level=error",
        str(script),
        *words,
    ]


def _on_many_machines(script: Path, words: Sequence[str], config: Config) -> list[str]:
    chosen = config.launch
    if not Path(str(chosen.hostfile)).is_file():
        raise UserError(f"hostfile: {chosen.hostfile} does not exist; it has lines `host slots=8`")
    named = (
        "hostfile",
        "num_nodes",
        "num_gpus",
        "include",
        "exclude",
        "launcher",
        "master_addr",
        "master_port",
    )
    options = [
        f"--{name}={getattr(chosen, name)}" for name in named if getattr(chosen, name) is not None
    ]
    return [
        "-u",
        "-m",
        "deepspeed.launcher.runner",
        *options,
        "--no_local_rank",
        str(script),
        *words,
    ]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _help() -> str:
    usage = "usage: deepy.py SCRIPT FILE… key=value… [-d DIR] [options of the script]"
    return f"{usage}\n\n{__doc__}\nKeys, in files and as key=value:\n\n{help_text()}"


if __name__ == "__main__":
    main(sys.argv[1:])
