"""Where GPT-NeoX and its forks keep a checkpoint, and the configuration that lies with it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config import Config, load
from megatron.config.yaml_files import read_file
from megatron.errors import UserError
from megatron.files import read_small

PATTERNS = ("layer_*-model_*-model_states.pt", "mp_rank_*_model_states.pt")
OF_OURS = ("checkpoint.json", "config.yml")
ONE_RANK = ("model_parallel_size=1", "pipe_parallel_size=1")  # its ranks are joined here
LONGEST_POINTER = 4096  # bytes of `latest`


def checkpoint_in(source: Path) -> Path | None:
    """The folder of GPT-NeoX's files that `source` is, or that its file `latest` names, or None.

    A checkpoint of ours, which holds such files too, is none.
    """
    if _holds_files(source):
        return source
    pointer = source / "latest"
    if not pointer.is_file():
        return None
    name = read_small(pointer, LONGEST_POINTER).decode("utf-8", "replace").strip()
    named = source / name
    is_inside = bool(name) and Path(name).name == name
    return named if is_inside and _holds_files(named) else None


def steps_in(run: Path) -> list[str]:
    """Names of the folders with checkpoints of GPT-NeoX in a run's folder."""
    return sorted(folder.name for folder in run.glob("global_step*") if _holds_files(folder))


def _holds_files(folder: Path) -> bool:
    if any((folder / name).exists() for name in OF_OURS):
        return False
    return any(next(folder.glob(pattern), None) for pattern in PATTERNS)


def configuration(folder: Path, overrides: Sequence[str] = ()) -> Config | None:
    """What the files in `configs` beside the weights say, or None where there are none.

    overrides: `key=value` words that win over the files
    UserError where two of them disagree: GPT-NeoX does not store the order in which they were
    given, and in its forks the later file wins.
    """
    files = sorted((folder / "configs").glob("*.yml"))
    if not files:
        return None
    given: dict[str, tuple[Path, Any]] = {}
    for file in files:
        for key, value in _contents(file).items():
            earlier, before = given.setdefault(key, (file, value))
            if before != value:
                raise UserError(
                    f"{folder}/configs: {earlier.name} has {key}: {before}, {file.name} has"
                    f" {value}, and their order is not stored - name the files in their order"
                )
    return load(files, [*ONE_RANK, *overrides])


def _contents(file: Path) -> dict[str, Any]:
    try:
        return read_file(file)
    except ValueError as fault:
        raise UserError(str(fault)) from None
