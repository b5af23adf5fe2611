"""tools/doctor.py: each kind of trouble is made for real where that can be done, and found."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.doctor import devices, packages, places
from megatron.doctor.finding import ok, stops, warning
from tests.support import ROOT
from tools.doctor import main, report

CUDA_TORCH = {"version": "2.13.0", "cuda_build": "12.8", "hip_build": None}
CPU_TORCH = {"version": "2.13.0+cpu", "cuda_build": None, "hip_build": None}
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "capability": "9.0",
    "memory": 85_000_000_000,
    "free": 84_000_000_000,
    "fault": None,
}


def doctor(*words: str, python: str = sys.executable, **variables: str):
    return subprocess.run(
        [python, str(ROOT / "tools/doctor.py"), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def module(folder: Path, name: str, text: str) -> str:
    """A path for PYTHONPATH on which a package of that name is found first."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)
    return os.pathsep.join([str(folder), str(ROOT)])


def levels(findings) -> list[str]:
    return [finding.level for finding in findings]


# --- The command ---


def test_this_machine_is_well_and_the_findings_are_json(tmp_path):
    done = doctor("--json", "--save", str(tmp_path / "runs"), "--data", str(tmp_path))
    answer = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert answer["ready"] is True
    subjects = {finding["subject"] for finding in answer["findings"]}
    assert {"python", "packages", "torch", "training", "processes", "save"} <= subjects
    assert not (tmp_path / "runs").exists()  # the doctor leaves nothing behind
    assert [*tmp_path.iterdir()] == []


def test_a_torch_that_cannot_be_imported_is_one_line_and_status_1(tmp_path):
    path = module(tmp_path, "torch", "raise OSError('libcudart.so.12: cannot open shared object')")
    done = doctor(PYTHONPATH=path)
    assert done.returncode == 1
    [line] = [line for line in done.stdout.splitlines() if line.startswith("stops")]
    assert line == (
        "stops    torch        cannot be imported: OSError: libcudart.so.12: cannot open shared"
        " object - pip install -r requirements.txt"
    )
    assert "1 finding(s) would stop a run" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_torch_that_crashes_the_process_is_a_finding(tmp_path):
    path = module(tmp_path, "torch", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    done = doctor(PYTHONPATH=path)
    assert done.returncode == 1
    assert "it ended the process with status -11" in done.stdout


def test_a_package_that_training_needs_and_cannot_load_is_named(tmp_path):
    path = module(tmp_path, "pydantic", "raise ImportError('no compiled core')")
    done = doctor(PYTHONPATH=path)
    assert done.returncode == 1
    assert "stops    training     failed: ImportError: no compiled core" in done.stdout


def test_what_only_slows_or_annoys_is_a_warning_with_status_0(tmp_path):
    """PyPI's apex, and more threads than cores."""
    path = module(tmp_path, "apex", "from pyramid.config import Configurator")
    done = doctor(PYTHONPATH=path, OMP_NUM_THREADS="64", MKL_NUM_THREADS="64")
    assert done.returncode == 0, done.stdout
    assert "warning  apex         the installed package is not NVIDIA apex" in done.stdout
    assert "pip uninstall apex" in done.stdout
    assert "warning  threads" in done.stdout
    assert "set OMP_NUM_THREADS=" in done.stdout
    assert done.stdout.endswith("nothing would stop a run, 2 warning(s)\n")


def test_a_python_without_any_package_is_told_what_is_missing():
    plain = getattr(sys, "_base_executable", sys.executable)
    done = subprocess.run(
        [plain, "-S", str(ROOT / "tools/doctor.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "`packaging` is not installed" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_folders_that_cannot_be_written_stop_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    finding = places.folder(tmp_path / "file", "save", enough=0, least=0)
    assert str(finding) == (
        f"stops    save         {tmp_path / 'file'} is a file - name a folder, or move the file"
    )
    inside = Path("/proc/runs")  # where nobody can write, root neither
    finding = places.folder(inside, "save", enough=0, least=0)
    assert finding.level == "stops"
    assert finding.text.startswith("/proc/runs: cannot be written: ")
    assert places.folder(inside, "data", enough=0, least=None).level == "warning"


def test_the_report_counts_what_it_found(capsys):
    text = report([ok("a", "x"), warning("b", "y", "z"), stops("c", "p", "q")])
    assert text.splitlines()[-1] == "1 finding(s) would stop a run, 1 warning(s)"
    assert text.splitlines()[1] == "warning  b            y - z"
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "Nothing\nis changed or sent" in capsys.readouterr().out


# --- Packages ---


def test_versions_are_held_against_their_ranges():
    installed = {"torch": "2.9.1", "deepspeed": "0.19.8", "numpy": "2.4.6"}
    lines = ["torch>=2.11,<2.14", "deepspeed==0.19.8", "numpy>=2.2,<3", "rich>=14,<16"]
    found = packages.versions(lines, installed.get)
    assert [str(finding) for finding in found] == [
        "warning  packages     torch 2.9.1 is outside the tested range <2.14,>=2.11"
        " - pip install 'torch<2.14,>=2.11'",
        "warning  packages     rich is not installed; commands that need it fail"
        " - pip install -r requirements.txt",
        "ok       packages     2 within their tested ranges:"
        " torch 2.9.1, deepspeed 0.19.8, numpy 2.4.6",
    ]


def test_the_projects_requirements_are_read_without_their_comments():
    wanted = packages.wanted()
    assert "deepspeed==0.19.8" in wanted
    assert not [line for line in wanted if "#" in line]


def test_an_old_python_stops():
    assert packages.python((3, 10, 2)).level == "stops"
    assert packages.python().level == "ok"


def test_tritons_version_is_the_one_that_torch_wants():
    requires = ["filelock", 'triton==3.7.0; platform_system == "Linux"']
    assert packages.triton_of_torch({"triton": "3.7.0"}.get, requires) is None
    assert packages.triton_of_torch({"triton": "3.6.0"}.get, requires) == (
        "triton 3.6.0 is not what torch wants, ==3.7.0"
    )
    assert "not installed" in str(packages.triton_of_torch({}.get, requires))


# --- GPUs: the facts are those of a machine that is not here ---


@pytest.fixture
def a_driver(monkeypatch):
    monkeypatch.setattr(devices, "driver_release", lambda: "550.54.15")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpus(torch, cuda, **facts):
    steps = {"torch": torch, "driver": {"cuda": cuda}, "devices": {"devices": [], **facts}}
    return [finding for finding in devices.judged(steps) if finding.subject.startswith("gpu")]


def test_a_driver_older_than_torchs_cuda_stops_and_one_of_the_same_major_does_not(a_driver):
    """NVIDIA: CUDA 13.x needs driver 580, CUDA 12.x driver 525 whatever its minor version."""
    [finding] = gpus({**CUDA_TORCH, "cuda_build": "13.0"}, 12040)
    assert finding.level == "stops"
    assert "driver 550.54.15 (CUDA 12.4) is too old for torch's CUDA 13.0" in finding.text
    assert "install driver 580 or newer" in finding.fix
    assert levels(gpus(CUDA_TORCH, 12040, devices=[H100])) == ["ok"]


def test_a_torch_for_the_cpu_beside_a_gpu_is_a_warning(a_driver):
    [finding] = gpus(CPU_TORCH, 12040)
    assert (finding.level, "training would run there" in finding.text) == ("warning", True)


def test_devices_that_are_hidden_or_fail_are_named(a_driver, monkeypatch):
    [finding] = gpus(CUDA_TORCH, 12080, reason="no CUDA-capable device is detected")
    assert finding.level == "stops"
    assert "docker run --gpus all" in finding.fix
    broken = {**H100, "fault": "CUDA error: no kernel image is available"}
    [finding] = gpus(CUDA_TORCH, 12080, devices=[broken])
    assert (finding.level, "no kernel image" in finding.text) == ("stops", True)
    full = {**H100, "free": 1_000_000_000}
    assert levels(gpus(CUDA_TORCH, 12080, devices=[full])) == ["warning"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    [finding] = gpus(CUDA_TORCH, 12080)
    assert (finding.level, finding.fix) == ("warning", "unset it to train on the GPU")


def test_a_gpu_needs_a_compiler_and_a_cpu_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)

    def compiler(found):
        steps = {"torch": CUDA_TORCH, "devices": {"devices": found}}
        every = devices.judged(steps)
        [finding] = [finding for finding in every if finding.subject == "compiler"]
        return finding

    assert compiler([]).level == "ok"
    assert compiler([H100]).level == "stops"
    assert "apt install gcc" in compiler([H100]).fix


def test_the_release_of_the_driver_is_read(tmp_path):
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
        "GCC version:  gcc version 12.3.0\n"
    )
    assert devices.driver_release(file) == "570.86.15"
    assert devices.driver_release(tmp_path / "absent") is None


# --- The probe ---


def test_a_step_that_hangs_is_ended_and_named():
    text = """import json, time
print(json.dumps({"begins": "torch"})); print(json.dumps({"step": "torch", "version": "1"}))
print("a library talks")
print(json.dumps({"begins": "devices"}), flush=True)
time.sleep(600)"""
    began = time.monotonic()
    steps = devices.probed([sys.executable, "-c", text], patience=3)
    assert time.monotonic() - began < 60
    assert steps["torch"]["version"] == "1"
    assert steps["devices"]["fault"].startswith("no answer within 3 seconds")


# --- Places ---


def test_the_lock_that_torch_leaves_behind_is_found(tmp_path, monkeypatch):
    from torch.utils.file_baton import FileBaton

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    build = tmp_path / "py311_cpu" / "deepspeed_shm_comm"
    build.mkdir(parents=True)
    assert FileBaton(str(build / "lock")).try_acquire()  # whose process is then killed
    assert levels(places.stale_locks()) == ["ok"]  # a build that has just begun
    [finding] = places.stale_locks(now=time.time() + 7200)
    assert finding.level == "warning"
    assert "2.0 hours old" in finding.text
    assert finding.fix == f"rm '{build / 'lock'}'"


def test_little_space_is_a_warning_and_too_little_stops(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    assert places.folder(tmp_path, "save", enough=0, least=0).level == "ok"
    assert places.folder(tmp_path, "save", enough=2 * free, least=0).level == "warning"
    assert places.folder(tmp_path, "save", enough=2 * free, least=2 * free).level == "stops"


def test_shared_memory_that_is_absent_is_a_warning(tmp_path):
    assert places.shared_memory(tmp_path / "absent").level == "warning"
    assert "--shm-size" in places.shared_memory(tmp_path / "absent").fix


def test_a_loopback_that_is_down_stops():
    """In a new network namespace of the kernel, where lo is down."""
    check = "from megatron.doctor.places import loopback; print(loopback())"
    command = ["unshare", "--map-root-user", "--net", sys.executable, "-c", check]
    if not shutil.which("unshare"):
        pytest.skip("unshare is not on this machine")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "unshare:" in done.stderr:
        pytest.skip("this machine allows no new network namespace")
    assert done.stdout.startswith("stops    loopback"), done.stderr
    assert places.loopback().level == "ok"
