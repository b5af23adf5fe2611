"""What `make gpu-check` runs: it starts where little is installed, and goes on where it stopped."""

import json
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from tests.support import ROOT, run, unlaunched

sys.path.insert(0, str(ROOT / "tools/bench"))

import trace_step
from first_gpu import run_steps
from gpu_steps import SMALL_TRACE, Places, Step, steps

ABSENT = """
from importlib.machinery import PathFinder

NAMES = {"deepspeed", "pydantic", "hypothesis", "xdist", "yaml", "safetensors", "tokenizers"}
NAMES |= {"transformers", "datasets", "psutil", "rich", "wandb", "zstandard", "matplotlib"}
find_spec = PathFinder.find_spec


def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in NAMES else find_spec(name, path, target)


PathFinder.find_spec = staticmethod(find_others)
"""


def gpu_test_files() -> set[str]:
    files = (ROOT / "tests").rglob("test_*.py")
    found = [file for file in files if re.search(r"pytest\.mark\.gpu$", file.read_text(), re.M)]
    return {str(file.relative_to(ROOT)) for file in found}


def test_tests_of_kernels_need_torch_and_pytest_alone(tmp_path):
    (tmp_path / "absent.py").write_text(ABSENT)
    options = ["-p", "absent", "-p", "no:cacheprovider", "-q", "-rs"]
    every_gpu_test_and_one_more = "gpu and not compiles or one_token"
    done = run(
        *("-m", "pytest", *options, "-k", every_gpu_test_and_one_more),
        *sorted(gpu_test_files()),
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reasons = re.findall(r"^SKIPPED \[(\d+)\] (\S+?):.*?: (.*)$", done.stdout, re.M)
    assert {Path(file).as_posix() for _, file, _ in reasons} == gpu_test_files()
    assert {reason for _, _, reason in reasons} == {
        "needs a CUDA device and TEST_GPU=1, as make gpu-check sets it"
    }
    assert re.search(r"^1 passed, \d+ skipped", done.stdout, re.M)


def test_every_gpu_test_is_in_a_block(tmp_path):
    places = Places(tmp_path, [], 10)
    words = [word for block in (1, 2) for step in steps(block, places) for word in step.words]
    assert gpu_test_files() <= set(words)


def test_the_page_explains_every_step(tmp_path):
    page = (ROOT / "docs/first_gpu.md").read_text()
    for block in (1, 2, 3):
        for step in steps(block, Places(tmp_path, [], 10)):
            name = re.sub("^(train|evaluate)_.*", r"\1_NAME", step.name)
            assert f"`{name}`" in page


OPTIONS = {"dry": True, "steps": None, "minutes": 5.0, "archive": None}


def statuses(folder: Path, wanted: list[Step], **options) -> dict[str, str]:
    records = run_steps(wanted, folder, Namespace(**{**OPTIONS, **options}))
    written = json.loads((folder / "steps.json").read_text())
    assert written == records
    return {name: record["status"] for name, record in records.items()}


def counted(folder: Path, name: str, then: str = "", **more) -> Step:
    """A step that adds a letter to a file and does something more."""
    line = f"open({str(folder / name)!r}, 'a').write('x'); {then}"
    return Step(name, ["-c", line], **{"seconds": 60, **more})


def test_a_block_goes_on_with_what_is_missing(tmp_path):
    wait = "import time; time.sleep(600)"
    wanted = [
        counted(tmp_path, "good"),
        counted(tmp_path, "failing", "raise SystemExit(3)"),
        counted(tmp_path, "long", wait, seconds=1.5),
        counted(tmp_path, "lacking", packages=["no_such_package"]),
    ]
    first = {"good": "done", "failing": "failed", "long": "stopped", "lacking": "skipped"}
    assert statuses(tmp_path, wanted) == first
    mended = [*wanted[:1], counted(tmp_path, "failing"), counted(tmp_path, "long"), wanted[3]]
    again = {**first, "failing": "done", "long": "done"}
    assert statuses(tmp_path, mended, archive=tmp_path.parent / "all.tar.gz") == again
    counts = {name: (tmp_path / name).read_text() for name in ("good", "failing", "long")}
    assert counts == {"good": "x", "failing": "xx", "long": "xx"}
    assert "not installed: no_such_package" in (tmp_path / "summary.md").read_text()
    assert (tmp_path.parent / "all.tar.gz").stat().st_size > 0


def test_a_block_whose_time_is_over_begins_nothing(tmp_path):
    wanted = [counted(tmp_path, "good")]
    assert statuses(tmp_path, wanted, minutes=0.0) == {"good": "not begun"}
    assert not (tmp_path / "good").exists()


def test_a_dry_run_measures_on_the_cpu_with_the_commands_of_a_gpu(tmp_path):
    words = ["1", "--dry", "--output", tmp_path, "--steps", "errors_ieee"]
    done = run("tools/bench/first_gpu.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads((tmp_path / "block1/steps.json").read_text())
    (name,) = records
    step = {one.name: one for one in steps(1, Places(tmp_path / "block1", [], 10))}[name]
    assert records[name]["command"][1:] == [*step.words, *step.small]
    errors = json.loads((tmp_path / f"block1/{name}.json").read_text())
    assert all(row["out"] < 1e-2 for row in errors["rows"])


def test_a_traced_step_has_operations_and_gaps(tmp_path):
    output = tmp_path / "trace.json"
    assert trace_step.main([*SMALL_TRACE, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert 0 <= found["idle_ms"] < found["span_ms"]
    assert sum(found["kernels_ms"].values()) > 0
    assert output.with_suffix(".trace.json.gz").stat().st_size > 0


def test_a_signal_ends_the_step_that_runs(tmp_path):
    words = ["tools/bench/first_gpu.py", "1", "--dry", "--steps", "trace", "--output", tmp_path]
    tool = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=unlaunched())
    children = Path(f"/proc/{tool.pid}/task/{tool.pid}/children")
    while tool.poll() is None and not children.read_text().split():
        time.sleep(0.05)
    (child,) = children.read_text().split()
    tool.terminate()
    assert tool.wait(60) == 143
    assert not Path(f"/proc/{child}").exists()
    assert not (tmp_path / "block1/steps.json").exists()


@pytest.mark.campaign
def test_a_dry_run_of_all_blocks_ends_well(tmp_path):
    done = run(
        "tools/bench/first_gpu.py", "1", "2", "3", "--dry", "--output", tmp_path, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for block, files in {1: ["trace"], 2: ["steps", "attention_64"], 3: ["steps"]}.items():
        for name in files:
            assert json.loads((tmp_path / f"block{block}/{name}.json").read_text())
    assert "kerple_log" in (tmp_path / "block3/table.md").read_text()


def test_gaps_are_the_times_in_which_nothing_runs():
    work = [("a", (0.0, 1000.0)), ("b", (500.0, 1500.0)), ("a", (4000.0, 5000.0))]
    work += [("c", (4200.0, 4400.0)), ("b", (5500.0, 6000.0))]
    found = trace_step.figures(work)
    assert found["span_ms"] == 6.0
    assert found["gaps_ms"] == [2.5, 0.5]
    assert found["idle_share"] == pytest.approx(0.5)
    assert found["kernels_ms"] == {"a": 2.0, "b": 1.5, "c": 0.2}
