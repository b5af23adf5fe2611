"""tools/doctor.py: each kind of trouble is made for real if that can be done, and found."""

import json
import os

import pytest

from tests.support import ROOT, run
from tools import doctor


def found(*words: str, **variables: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit status, and what was found about each subject."""
    done = run("tools/doctor.py", "--json", *words, env=variables, timeout=300)
    answer = json.loads(done.stdout)
    assert answer["ready"] == (done.returncode == 0)
    return done.returncode, {finding["subject"]: finding for finding in answer["findings"]}


def test_this_machine_is_well_and_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    save = tmp_path / "file" / "runs"
    status, findings = found("--save", str(save), "--data", str(tmp_path), MASTER_ADDR="nowhere")
    assert status == 1
    assert findings.pop("save")["text"].startswith(f"{save} cannot be written: ")
    assert {"python", "packages", "torch", "gpu", "training", "processes"} <= findings.keys()
    assert "stops" not in {finding["level"] for finding in findings.values()}
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize(
    ("torch", "ending"),
    [
        ("raise ImportError('libtorch.so is missing')", "libtorch.so is missing"),
        ("import os; os.kill(os.getpid(), 11)", "ended with status -11"),
    ],
)
def test_a_torch_that_fails_or_crashes_is_a_finding(torch, ending, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(torch)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    code = "import sys; from tools import doctor; print([*doctor.tried()])"
    done = run(
        "-c",
        code.replace("import sys;", f"import sys; sys.path.insert(0, {str(ROOT)!r});"),
        env={"PYTHONPATH": path},
    )
    assert "Finding(level='stops', subject='torch', text='ended with status" in done.stdout
    assert ending in done.stdout


def test_gpus_need_a_driver_a_build_and_a_compiler(tmp_path, monkeypatch):
    def judged(build, *names):
        return [tuple(one[:2]) for one in doctor.gpus(build, {"names": names, "reason": "old"})]

    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "none")
    assert judged("12.8") == [("ok", "gpu")]
    monkeypatch.setattr(doctor, "DRIVER", tmp_path)
    assert judged(None) == [("warning", "gpu")]
    assert judged("12.8") == [("stops", "gpu")]
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert judged("12.8", "H100", "H100") == [
        ("ok", "gpu 0"),
        ("ok", "gpu 1"),
        ("stops", "compiler"),
    ]


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
