"""What `make gpu-check` runs: it starts where little is installed, and goes on where it stopped."""

import json
import re
import subprocess
import sys
import tarfile
import time
from argparse import Namespace
from pathlib import Path

import pytest

from megatron.errors import UserError
from tests.support import ROOT, run, unlaunched

sys.path.insert(0, str(ROOT / "tools/bench"))

import first_gpu
import trace_step
from first_gpu import run_steps, status_of
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
    found = [file for file in files if re.search(r"pytest\.mark\.gpu\b", file.read_text())]
    return {str(file.relative_to(ROOT)) for file in found}


def test_tests_of_kernels_need_torch_numpy_and_pytest_alone(tmp_path):
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
    no_device = "needs a CUDA device and TEST_GPU=1, as make gpu-check sets it"
    for _, file, reason in reasons:
        whole_engine = file == "tests/test_no_sync.py"
        assert "could not import" in reason if whole_engine else reason == no_device
    assert re.search(r"^1 passed, \d+ skipped", done.stdout, re.M)


def test_every_gpu_test_is_in_a_block(tmp_path):
    places = Places(tmp_path, [], 10)
    words = [word for block in (1, 2) for step in steps(block, places) for word in step.words]
    assert gpu_test_files() | {"tests/attention/test_triton_ops.py"} <= set(words)


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
    folder = tmp_path / "check/block1"
    folder.mkdir(parents=True)
    wanted = [
        counted(tmp_path, "good"),
        counted(tmp_path, "failing", "raise SystemExit(3)"),
        counted(tmp_path, "long", wait, seconds=1.5),
        counted(tmp_path, "lacking", packages=["no_such_package"]),
    ]
    first = {"good": "done", "failing": "failed", "long": "stopped", "lacking": "skipped"}
    assert statuses(folder, wanted) == first
    mended = [*wanted[:1], counted(tmp_path, "failing"), counted(tmp_path, "long"), wanted[3]]
    again = {**first, "failing": "done", "long": "done"}
    assert statuses(folder, mended, archive=tmp_path / "all.tar.gz") == again
    counts = {name: (tmp_path / name).read_text() for name in ("good", "failing", "long")}
    assert counts == {"good": "x", "failing": "xx", "long": "xx"}
    assert "not installed: no_such_package" in (folder / "summary.md").read_text()
    assert (tmp_path / "all.tar.gz").stat().st_size > 0


def needing(folder: Path, *, unfinished: bool, packages: tuple[str, ...] = ()) -> list[Step]:
    """A training, its evaluation and a table; the training waits until it is stopped or ends."""
    then = f"import time; time.sleep(600 * {unfinished})"
    seconds = 1.5 if unfinished else 60
    return [
        counted(folder, "train", then, seconds=seconds, packages=list(packages)),
        counted(folder, "evaluate", needs=["train"]),
        counted(folder, "table", needs=["evaluate"]),
    ]


def test_what_needs_a_step_waits_until_it_is_done(tmp_path):
    first = {"train": "stopped", "evaluate": "not begun", "table": "not begun"}
    assert statuses(tmp_path, needing(tmp_path, unfinished=True)) == first
    assert "train is not done" in (tmp_path / "summary.md").read_text()
    all_done = dict.fromkeys(first, "done")
    whole = needing(tmp_path, unfinished=False)
    assert statuses(tmp_path, whole) == all_done
    assert statuses(tmp_path, whole) == all_done
    counts = {name: (tmp_path / name).read_text() for name in first}
    assert counts == {"train": "xx", "evaluate": "x", "table": "x"}


def test_what_needs_a_step_is_done_again_after_it(tmp_path):
    wanted = needing(tmp_path, unfinished=False)
    statuses(tmp_path, wanted)
    again = {"train": "done", "evaluate": "not begun", "table": "not begun"}
    assert statuses(tmp_path, wanted, steps=["train"]) == again
    assert "train ran again" in (tmp_path / "summary.md").read_text()
    assert statuses(tmp_path, wanted) == dict.fromkeys(again, "done")
    assert [(tmp_path / name).read_text() for name in again] == ["xx", "xx", "xx"]


def test_what_needs_a_skipped_step_is_skipped_for_the_same_reason(tmp_path):
    wanted = needing(tmp_path, unfinished=False, packages=("no_such_package",))
    names = ("train", "evaluate", "table")
    assert statuses(tmp_path, wanted) == dict.fromkeys(names, "skipped")
    records = json.loads((tmp_path / "steps.json").read_text())
    assert {one["reason"] for one in records.values()} == {"not installed: no_such_package"}


def test_evaluations_need_their_training_and_the_table_needs_all_evaluations(tmp_path):
    needs = {step.name: step.needs for step in steps(3, Places(tmp_path, [], 10))}
    names = [name.removeprefix("train_") for name in needs if name.startswith("train_")]
    assert len(names) == 4
    for name in names:
        assert needs[f"evaluate_{name}"] == [f"train_{name}"]
    assert needs["table"] == [f"evaluate_{name}" for name in names]


@pytest.mark.parametrize(
    "changed", [{"dry": False}, {"device": "a GPU"}, {"commit": "another"}, {"command": ["python"]}]
)
def test_what_was_done_otherwise_is_run_again(tmp_path, changed):
    wanted = [counted(tmp_path, "good")]
    for _ in range(2):
        assert statuses(tmp_path, wanted) == {"good": "done"}
    assert (tmp_path / "good").read_text() == "x"
    records = json.loads((tmp_path / "steps.json").read_text())
    records["good"] |= changed
    (tmp_path / "steps.json").write_text(json.dumps(records))
    assert statuses(tmp_path, wanted) == {"good": "done"}
    assert (tmp_path / "good").read_text() == "xx"


@pytest.mark.parametrize(
    ("exit_statuses", "status"),
    [
        ([0, 5, 0], "done"),
        ([5, 5], "failed"),
        ([5], "failed"),
        ([0, 5, 1], "failed"),
        ([0, 5, None], "stopped"),
    ],
)
def test_a_part_of_the_tests_may_be_empty_but_not_all_parts(exit_statuses, status):
    assert status_of(exit_statuses) == status


def test_more_parts_than_tests_end_well(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    test = "tests/test_gpu_check.py::test_gaps_are_the_times_in_which_nothing_runs"
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    assert statuses(tmp_path, [Step("one", words, 60, parts=8)]) == {"one": "done"}
    (record,) = json.loads((tmp_path / "steps.json").read_text()).values()
    assert sorted(record["exit_statuses"]) == [0, 5]


def test_a_refusal_of_the_machine_counts_as_skipped_only_in_the_run_that_has_it(tmp_path):
    refusals = {"ERR_OF_OLD": "the machine refuses"}
    refused = counted(tmp_path, "a", "raise SystemExit('ERR_OF_OLD')", refusals=refusals)
    assert statuses(tmp_path, [refused]) == {"a": "skipped"}
    assert "ERR_OF_OLD: the machine refuses" in (tmp_path / "summary.md").read_text()
    broken = counted(tmp_path, "a", "raise SystemExit('broken')", refusals=refusals)
    assert statuses(tmp_path, [broken]) == {"a": "failed"}


def test_profiled_steps_are_skipped_in_a_dry_run(tmp_path):
    profiled = Step("profiled", ["-c", ""], 60, program=["env"])
    assert statuses(tmp_path, [profiled]) == {"profiled": "skipped"}
    assert "needs a CUDA device" in (tmp_path / "summary.md").read_text()


def test_an_archive_inside_the_results_does_not_contain_itself(tmp_path):
    archive = tmp_path / "all.tar.gz"
    (tmp_path / "block1").mkdir()
    wanted = [counted(tmp_path, "a"), counted(tmp_path, "b")]
    statuses(tmp_path / "block1", wanted, archive=archive)
    with tarfile.open(archive) as packed:
        names = packed.getnames()
    assert "block1/steps.json" in names
    assert not [name for name in names if name.startswith(archive.name)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["2", "--steps", "tunes"], "block 2 has no step 'tunes'; did you mean tune?"),
        (["1", "--steps", "zzz"], "block 1 has no step 'zzz'; use tests_cuda, tests_triton, "),
        (["1", "--archive", "no_such_folder/a.tar.gz"], "no_such_folder is no folder; make it"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(tmp_path, capsys, words, message):
    output = tmp_path / "results"
    assert first_gpu.main([*words, "--dry", "--output", str(output)]) == 1
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_a_dry_run_has_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first_gpu.main(["1", "--dry", "--minutes", "0"])
    assert [path.name for path in tmp_path.iterdir()] == ["dry"]


def test_attention_ends_with_1_where_a_required_way_does_not_run(tmp_path):
    words = [
        "--device",
        "cpu",
        "--lengths",
        "32",
        "--tokens",
        "32",
        "--heads",
        "1",
        "--rounds",
        "1",
    ]
    words += ["--head_dim", "16", "--no-memory", "--dtypes", "float32", "--tables", "frozen"]
    words += ["--only", "triton", "plain", "--passes", "forward"]
    no_triton_on_the_cpu = {"TRITON_INTERPRET": "0"}
    for required, status in (["triton"], 1), ([], 0):
        done = run(
            "tools/bench/attention.py", *words, "--required", *required, env=no_triton_on_the_cpu
        )
        assert done.returncode == status, done.stdout + done.stderr


def test_a_search_for_tiles_needs_a_compiler_not_an_interpreter():
    pytest.importorskip("triton")
    env = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run("tools/bench/tune_attention.py", "--programs", "forward", env=env)
    assert done.returncode == 1
    assert "at 1 Triton compiles nothing; set it to 0" in done.stderr
    assert "internal error" not in done.stderr


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


def test_a_profile_without_a_kernel_is_no_measurement():
    with pytest.raises(UserError, match="the profiler saw no kernel"):
        trace_step.figures([])
