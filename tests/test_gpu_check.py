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

import first_gpu
from first_gpu import Step, run_steps, status_of, steps

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
    every_gpu_test_and_one_more = "gpu and not compiles or one_token"
    done = run(
        *("-m", "pytest", *options, "-k", every_gpu_test_and_one_more),
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
    assert re.search(r"^\d passed, \d+ skipped", done.stdout, re.M)


def test_every_gpu_test_is_in_a_block_and_every_step_on_the_page(tmp_path):
    page = (ROOT / "docs/first_gpu.md").read_text()
    every = [step for block in (1, 2, 3) for step in steps(block, tmp_path, [], 10)]
    assert gpu_test_files() <= {word for step in every for word in step.words}
    for step in every:
        name = re.sub("^(train|evaluate)_.*", r"\1_NAME", step.name)
        assert f"`{name}`" in page
    needs = {step.name: step.needs for step in every}
    evaluations = [name for name in needs if name.startswith("evaluate_")]
    assert needs["table"] == evaluations
    assert needs["evaluate_alibi"] == ["train_alibi"]


OPTIONS = {"dry": True, "steps": None, "minutes": 5.0}


def statuses(folder: Path, wanted: list[Step], **options) -> dict[str, str]:
    records = run_steps(wanted, folder, Namespace(**{**OPTIONS, **options}))
    assert json.loads((folder / "steps.json").read_text()) == records
    return {name: record["status"] for name, record in records.items()}


def counted(folder: Path, name: str, then: str = "", **more) -> Step:
    """A step that adds a letter to a file and does something more."""
    line = f"open({str(folder / name)!r}, 'a').write('x'); {then}"
    return Step(name, ["-c", line], **{"seconds": 60, **more})


def test_a_block_goes_on_with_what_is_missing(tmp_path):
    wanted = [
        counted(tmp_path, "good"),
        counted(tmp_path, "failing", "raise SystemExit(3)"),
        counted(tmp_path, "long", "import time; time.sleep(600)", seconds=1.5),
        counted(tmp_path, "lacking", packages=["no_such_package"]),
    ]
    first = dict.fromkeys(["good", "failing", "long", "lacking"], "skipped")
    first |= {"good": "done", "failing": "failed", "long": "stopped"}
    assert statuses(tmp_path, wanted) == first
    mended = [wanted[0], counted(tmp_path, "failing"), counted(tmp_path, "long"), *wanted[3:]]
    assert statuses(tmp_path, mended) == {**first, "failing": "done", "long": "done"}
    counts = {name: (tmp_path / name).read_text() for name in ("good", "failing", "long")}
    assert counts == {"good": "x", "failing": "xx", "long": "xx"}
    summary = (tmp_path / "summary.md").read_text()
    assert "not installed: no_such_package" in summary
    late = [counted(tmp_path, "late")]
    assert statuses(tmp_path, late, minutes=0.0) == {"late": "not begun"}
    assert not (tmp_path / "late").exists()


def test_what_needs_a_step_waits_for_it(tmp_path):
    failing = counted(tmp_path, "train", "raise SystemExit(3)")
    evaluate = counted(tmp_path, "evaluate", needs=["train"])
    waiting = {"train": "failed", "evaluate": "not begun"}
    assert statuses(tmp_path, [failing, evaluate]) == waiting
    done = dict.fromkeys(("train", "evaluate"), "done")
    for _ in range(2):
        assert statuses(tmp_path, [counted(tmp_path, "train"), evaluate]) == done
    assert [(tmp_path / name).read_text() for name in ("train", "evaluate")] == ["xx", "x"]


def test_what_was_done_otherwise_is_run_again(tmp_path):
    wanted = [counted(tmp_path, "good")]
    for number, changed in enumerate(({"dry": False}, {"commit": "x"}, {"command": ["python"]})):
        assert statuses(tmp_path, wanted) == {"good": "done"}
        records = json.loads((tmp_path / "steps.json").read_text())
        records["good"] |= changed
        (tmp_path / "steps.json").write_text(json.dumps(records))
        assert (tmp_path / "good").read_text() == "x" * (number + 1)


def test_a_part_of_the_tests_may_be_empty_but_not_all_parts():
    assert status_of([0, 5, 0]) == "done"
    assert status_of([5, 5]) == status_of([0, 5, 1]) == "failed"
    assert status_of([0, 5, None]) == "stopped"


def test_an_unknown_step_is_said_before_anything_runs(tmp_path, capsys):
    output = tmp_path / "results"
    words = ["2", "--steps", "stepss", "--dry", "--output", str(output)]
    assert first_gpu.main(words) == 1
    message = "these blocks have no step 'stepss'; did you mean steps?"
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_a_signal_ends_the_step_that_runs(tmp_path):
    words = ["tools/bench/first_gpu.py", "1", "--dry", "--steps", "trace", "--output", tmp_path]
    tool = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=unlaunched())
    children = Path(f"/proc/{tool.pid}/task/{tool.pid}/children")
    log = tmp_path / "block1/trace.log"  # what the tool runs before the step has ended by then
    while tool.poll() is None and not (log.exists() and children.read_text().split()):
        time.sleep(0.05)
    (child,) = children.read_text().split()
    tool.terminate()
    assert tool.wait(60) == 143
    until = time.monotonic() + 10  # who adopts it may be late to collect it
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
    assert not (tmp_path / "block1/steps.json").exists()


@pytest.mark.campaign
def test_a_dry_run_of_all_blocks_ends_well(tmp_path):
    words = ["1", "2", "3", "--dry", "--output", tmp_path]
    done = run("tools/bench/first_gpu.py", *words, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("block1/trace", "block2/steps", "block2/attention_64"):
        assert json.loads((tmp_path / f"{name}.json").read_text())
    assert "kerple_log" in (tmp_path / "block3/table.md").read_text()
