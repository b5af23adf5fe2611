"""tools/doctor.py: each kind of trouble is made for real if that can be done, and found."""

import os

import pytest

from tests.support import ROOT, run
from tools import doctor


def test_this_machine_is_well_and_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    save = tmp_path / "file" / "runs"
    words = ["--save", save, "--data", tmp_path]
    done = run("tools/doctor.py", *words, env={"MASTER_ADDR": "nowhere"}, timeout=300)
    assert done.returncode == 1
    *lines, last = done.stdout.splitlines()
    stopping = [line for line in lines if line.startswith("stops")]
    assert len(stopping) == 1
    assert f"save         {save} cannot be written: " in stopping[0]
    assert last.startswith("1 finding(s) would stop a run")
    subjects = {line.split()[1] for line in lines}
    assert {"python", "packages", "torch", "gpu", "training", "processes"} <= subjects
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize(
    ("torch", "ending"),
    [
        (
            "raise ImportError('libtorch.so is missing')",
            "ended with status 1: ImportError: libtorch.so is missing",
        ),
        ("import os; os.kill(os.getpid(), 11)", "ended with status -11: "),
    ],
)
def test_a_torch_that_fails_or_crashes_is_a_finding(torch, ending, tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(torch)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")  # looked through first
    monkeypatch.chdir(tmp_path)
    (finding,) = doctor.tried()
    assert finding[:2] == ("stops", "torch")
    assert finding.text.startswith(ending)
    assert [file.name for file in tmp_path.iterdir()] == ["torch"]  # no traceback for a report


def test_gpus_need_a_driver_a_build_and_a_compiler(tmp_path, monkeypatch):
    def judged(build, *names):
        return [diagnosis.level for diagnosis in doctor.gpus(build, names, "old")]

    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "none")
    assert judged("12.8") == ["ok"]
    monkeypatch.setattr(doctor, "DRIVER", tmp_path)
    assert judged(None) == ["warning"]
    assert judged("12.8") == ["stops"]
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert judged("12.8", "H100", "H100") == ["ok", "ok", "stops"]


def test_missing_packages_and_other_versions_are_warnings(tmp_path, monkeypatch):
    lines = ["pytest>=1", "pytest<1  # old", "no-such-package"]
    (tmp_path / "requirements.txt").write_text("\n".join(lines))
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    levels = [finding.level for finding in doctor.packages()]
    assert levels == ["ok", "warning", "warning", "ok"]


def test_little_room_is_a_warning_or_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "free_disk", lambda path: 50)
    levels = [
        doctor.folder(tmp_path, "save", enough=enough, least=least).level
        for enough, least in ((40, 30), (60, 40), (70, 60))
    ]
    assert levels == ["ok", "warning", "stops"]
