"""Shared by test files: the project's root, commands, a corpus of bytes.

Tests of the kernels import it where torch, numpy and pytest alone are installed.
"""

import json
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.parallel.grid import PLACE
from megatron.positions import REGISTRY

ROOT = Path(__file__).resolve().parents[1]
NEEDED = {
    "abacus": {"digits": list(range(10, 40))},
    "attn_temperature": {"floor_scale": 8},
    "mep": {"kernels": ["exp", "kerple_log"]},
    "fire": {"mlp_layers": [4]},
    "sum": {"parts": ["rotary", "kerple_log"]},
    **{name: {"factor": 4} for name in ("pi", "ntk", "by_parts", "yarn", "llama3")},
    "longrope": {"factor": 4, "long_factor": 4},
}  # without a default, for speed, or for an effect on short texts
LAUNCHED = (*PLACE, "MASTER_ADDR", "MASTER_PORT")
"""What a launcher says in the environment, and connect() after it."""


def run(
    *words: object, env: dict[str, str] | None = None, cwd: Path = ROOT, timeout: float = 180
) -> subprocess.CompletedProcess[str]:
    """This Python with these arguments, outside whatever launched the tests."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command,
        cwd=cwd,
        env=unlaunched(cwd if (cwd / "megatron").is_dir() else ROOT) | (env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def call(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has imported the packages already; logs are left out.

    An exception other than SystemExit is the test's.
    """
    command = [str(ROOT / script), *map(str, words)]
    out, err = StringIO(), StringIO()
    status = 0
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.dict(os.environ),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as ended:
            status = ended.code
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())


def unlaunched(root: Path = ROOT) -> dict[str, str]:
    """The environment without what a launcher says in it, with the package of this folder."""
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHED}
    return environment | {"PYTHONPATH": str(root)}


def blocks(page: str, language: str) -> list[str]:
    """The examples of a page in a language: `blocks("docs/data.md", "sh")`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def modules() -> list[str]:
    """A real text at hand: this project's own modules."""
    return [path.read_text(encoding="utf-8") for path in sorted((ROOT / "megatron").rglob("*.py"))]


def of_encoding(name: str) -> list[str]:
    """The settings of an encoding by its name, with the options that it needs."""
    words = [f"pos_emb={name}", f"pos_emb_args={json.dumps(NEEDED.get(name, {}))}"]
    return [*words, f"heads_per_query={REGISTRY[name].heads_per_query}"]


def fill(module: Any, values: Mapping[str, Any]) -> None:
    """Give parameters these values, by name; a value may have another shape, not another size."""
    for name, value in values.items():
        parameter = module.get_parameter(name)
        parameter.data.copy_(value.reshape(parameter.shape))


def make_texts(folder: Path) -> Path:
    """A folder with a file for each of `modules`."""
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(modules()):
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return folder


def make_corpus(folder: Path) -> Path:
    """Prefix of a token file of `modules`, in bytes."""
    make_texts(folder)
    words = ["--input", folder, "--name", "tiny", "-t", "CharLevelTokenizer", "-d", folder / "data"]
    done = call("prepare_data.py", *words)
    assert done.returncode == 0, done.stderr
    return folder / "data" / "tiny" / "tiny_text_document"


def together(work: Callable[[Barrier], Any], processes: int) -> list[Any]:
    """The results of `work` in several forked processes; it waits for all at the barrier."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(processes, timeout=60), context.Queue()
    # Daemons: what a failed test leaves behind does not keep pytest from ending.
    several = [
        context.Process(target=lambda: results.put(work(barrier)), daemon=True)
        for _ in range(processes)
    ]
    for process in several:
        process.start()
    returned = [results.get(timeout=90) for _ in several]
    for process in several:
        process.join(30)
        assert process.exitcode == 0
    return returned
