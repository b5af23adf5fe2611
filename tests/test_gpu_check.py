"""What `make gpu-check` runs: it starts where little is installed, and goes on where it stopped."""

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support import ROOT, run

sys.path.insert(0, str(ROOT / "tools/bench"))

from first_gpu import run_command, run_steps, steps

ABSENT = """
from importlib.machinery import PathFinder

NAMES = {"deepspeed", "pydantic", "hypothesis", "xdist", "yaml", "safetensors", "tokenizers"}
NAMES |= {"transformers", "datasets", "psutil", "rich", "wandb", "zstandard", "matplotlib"}
find_spec = PathFinder.find_spec


def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in NAMES else find_spec(name, path, target)


PathFinder.find_spec = staticmethod(find_others)

import attention
import step
"""


def gpu_test_files() -> set[str]:
    files = (ROOT / "tests").rglob("test_*.py")
    found = [file for file in files if re.search(r"pytest\.mark\.gpu\b", file.read_text())]
    return {str(file.relative_to(ROOT)) for file in found}


def test_tests_of_kernels_and_benchmarks_need_torch_numpy_and_pytest_alone(tmp_path):
    (tmp_path / "absent.py").write_text(ABSENT)
    options = ["-p", "absent", "-p", "no:cacheprovider", "-q", "-rs"]
    done = run(
        *("-m", "pytest", *options, "-k", "gpu and not compiles or cannot_compute"),
        *sorted(gpu_test_files()),
        env={
            "PYTHONPATH": f"{ROOT}:{ROOT}/tools/bench:{tmp_path}",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reasons = re.findall(r"^SKIPPED \[(\d+)\] (\S+?):.*?: (.*)$", done.stdout, re.M)
    assert {Path(file).as_posix() for _, file, _ in reasons} == gpu_test_files()
    no_device = "needs a CUDA device and TEST_GPU=1, as make gpu-check sets it"
    for _, file, reason in reasons:
        whole_engine = file == "tests/test_no_sync.py"
        assert "could not import" in reason if whole_engine else reason == no_device


def test_every_gpu_test_is_in_a_block_and_every_step_on_the_page(tmp_path):
    page = (ROOT / "docs/first_gpu.md").read_text()
    every = [step for block in "123" for step in steps(block, tmp_path, ["data.yml"], dry=False)]
    assert gpu_test_files() <= {word for step in every for word in step["command"]}
    for step in every:
        name = re.sub("^(train|evaluate)_.*", r"\1_NAME", step["name"])
        assert f"`{name}`" in page
    training = next(step for step in every if step["name"] == "train_alibi")["command"]
    assert {"train.py", "data.yml", f"save={tmp_path}/runs/alibi"} <= set(training)


def counted(folder: Path, name: str, then: str = "", seconds: float = 60, needs=()):
    """A step that adds a letter to a file and does something more."""
    line = f"open({str(folder / name)!r}, 'a').write('x'); {then}"
    command = [sys.executable, "-c", line]
    return {"name": name, "command": command, "seconds": seconds, "needs": needs}


def test_a_block_goes_on_with_what_is_missing(tmp_path):
    def statuses(*steps, **more):
        records = run_steps(steps, tmp_path, **more)
        assert json.loads((tmp_path / "summary.json").read_text()) == records
        return {name: record["status"] for name, record in records.items()}

    good, late = counted(tmp_path, "good"), counted(tmp_path, "late")
    failing = counted(tmp_path, "failing", "raise SystemExit(3)")
    waiting = counted(tmp_path, "waiting", needs=["failing"])
    long = counted(tmp_path, "long", "import time; time.sleep(600)", 1.5)
    first = {"good": "done", "failing": "failed", "waiting": "not begun", "long": "stopped"}
    assert statuses(good, failing, waiting, long) == first
    repaired = [counted(tmp_path, name) for name in ("failing", "waiting", "long")]
    assert statuses(good, *repaired) == dict.fromkeys(first, "done")
    counts = {name: (tmp_path / name).read_text() for name in ("good", "failing", "waiting")}
    assert counts == {"good": "x", "failing": "xx", "waiting": "x"}

    file = tmp_path / "summary.json"
    file.write_text(file.read_text().replace('"commit": "', '"commit": "another'))
    assert statuses(good) == {"good": "done"}
    assert (tmp_path / "good").read_text() == "xx"
    assert statuses(late, seconds=0.0) == {"late": "not begun"}


def test_a_signal_ends_the_step_that_runs(tmp_path):
    own = tmp_path / "pid"
    line = f"import os, time; open({str(own)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    def interrupt():
        while not (own.exists() and own.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    until = time.monotonic() + 60
    with pytest.raises(KeyboardInterrupt):
        run_command([sys.executable, "-c", line], tmp_path / "log", until)
    with pytest.raises(ProcessLookupError):
        os.kill(int(own.read_text()), 0)


@pytest.mark.campaign
def test_a_dry_run_of_all_blocks_ends_well(tmp_path):
    words = ["1", "2", "3", "--dry", "--output", tmp_path]
    done = run("tools/bench/first_gpu.py", *words, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("block1/trace", "block2/steps", "block2/attention_64"):
        assert "conditions" in json.loads((tmp_path / f"{name}.json").read_text())
    assert "kerple_log" in (tmp_path / "block3/table.md").read_text()
