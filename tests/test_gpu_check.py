"""What `make gpu-check` runs: it starts where little is installed, and ends in its minutes."""

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

from first_gpu import GRACE, PLAN, run_command, run_steps, steps

ABSENT = """
from importlib.machinery import PathFinder

NAMES = {"deepspeed", "pydantic", "hypothesis", "xdist", "yaml", "safetensors", "tokenizers"}
NAMES |= {"transformers", "datasets", "psutil", "wandb", "zstandard", "matplotlib"}
find_spec = PathFinder.find_spec


def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in NAMES else find_spec(name, path, target)


PathFinder.find_spec = staticmethod(find_others)

import attention
import step
"""


def gpu_test_files():
    files = (ROOT / "tests").rglob("test_*.py")
    marked = [file for file in files if re.search(r"pytest\.mark\.gpu\b", file.read_text())]
    return {str(file.relative_to(ROOT)) for file in marked}


@pytest.mark.campaign
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


def test_blocks_have_every_gpu_test_and_seven_five_and_ten_minutes(tmp_path):
    page = (ROOT / "docs/first_gpu.md").read_text()
    plan = [step for block in "123" for step in steps(block, tmp_path, ["data.yml"], dry=False)]
    assert gpu_test_files() <= {word for step in plan for word in step["command"]}
    for step in plan:
        name = re.sub("^(train|evaluate)_.*", r"\1_NAME", step["name"])
        assert f"`{name}`" in page
    training = next(step for step in plan if step["name"] == "train_rotary")["command"]
    assert {"train.py", "data.yml", f"save={tmp_path}/runs/rotary"} <= set(training)
    minutes = {block: (seconds + GRACE) / 60 for block, seconds in PLAN["seconds"].items()}
    assert minutes == {"1": 7, "2": 5, "3": 10}
    for minute in (7, 5, 10):
        assert f"at most {minute} minutes" in page


def python(code, name, seconds=60):
    return {"name": name, "command": [sys.executable, "-c", code], "seconds": seconds}


def test_a_block_ends_in_its_time_and_a_summary_says_how_each_step_ended(tmp_path):
    commands = [
        python("", "good"),
        python("raise SystemExit(3)", "failing"),
        python("import time; time.sleep(600)", "long", 1.5),
        python("import time; time.sleep(600)", "longer"),
        python("", "late"),
    ]
    records = run_steps(commands, tmp_path, 6.0)
    assert json.loads((tmp_path / "summary.json").read_text()) == records
    statuses = {record["name"]: record["status"] for record in records}
    ends = ("done", "failed", "stopped", "stopped", "not begun")
    assert statuses == dict(zip(statuses, ends, strict=True))


def test_a_signal_ends_the_step_that_runs(tmp_path):
    pid_file = tmp_path / "pid"
    line = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    def interrupt():
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_command([sys.executable, "-c", line], tmp_path / "log", 60)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.campaign
def test_a_dry_run_of_all_blocks_ends_well(tmp_path):
    words = ["1", "2", "3", "--dry", "--output", tmp_path]
    done = run("tools/bench/first_gpu.py", *words, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("block1/attention_first", "block1/trace", "block2/steps", "block2/attention_64"):
        assert "conditions" in json.loads((tmp_path / f"{name}.json").read_text())
    assert "| flex, learned |" in (tmp_path / "block1/attention_first.log").read_text()
    assert "kerple_log" in (tmp_path / "block2/table.md").read_text()
