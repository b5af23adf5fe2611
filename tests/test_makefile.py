"""The installation rule of the Makefile, on a copy that requires nothing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.sweeps.plan import load_sweep

ROOT = Path(__file__).resolve().parent.parent
STAMP = Path(".venv/installed")


PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "nothing"
version = "0"
"""
# The least that `pip install -e .` asks for, so that no setuptools is fetched.
BACKEND = """
import zipfile


def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(f"{folder}/nothing-0-py3-none-any.whl", "w") as wheel:
        about = "nothing-0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\\nName: nothing\\nVersion: 0\\n")
        kind = "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        wheel.writestr(f"{about}/WHEEL", kind)
        wheel.writestr(f"{about}/RECORD", "")
    return "nothing-0-py3-none-any.whl"
"""


@pytest.fixture
def project(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements.txt", "requirements-dev.txt", "constraints.txt"):
        (tmp_path / name).write_text("# nothing\n")
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "backend.py").write_text(BACKEND)
    return tmp_path


def make(folder, *words):
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "PIP_", "VIRTUAL_ENV"))
    }
    command = ["make", f"PYTHON={sys.executable}", *words]
    return subprocess.run(
        command, cwd=folder, env=clean, capture_output=True, text=True, timeout=120
    )


def test_the_environment_is_made_once_and_again_when_the_requirements_change(project):
    assert make(project, STAMP).returncode == 0
    assert (project / STAMP).exists()
    assert "up to date" in make(project, STAMP).stdout
    changed = (project / STAMP).stat().st_mtime + 1
    os.utime(project / "requirements.txt", (changed, changed))
    assert "pip install" in make(project, STAMP).stdout


def test_a_failed_installation_leaves_no_stamp(project):
    (project / "requirements.txt").write_text("./no-such-folder\n")
    assert make(project, STAMP).returncode != 0
    assert not (project / STAMP).exists()


def test_a_broken_environment_is_made_anew(project):
    (project / ".venv/bin").mkdir(parents=True)
    (project / ".venv/bin/python").write_text("not a program\n")
    result = make(project, STAMP)
    assert result.returncode == 0, result.stderr


def test_the_results_are_made_by_scripts_of_this_project_and_probe_runs_of_the_sweep():
    done = subprocess.run(
        ["make", "-n", "results"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    scripts = re.findall(r"(?:tools/)?\w+\.py", done.stdout)
    assert {"prepare_data.py", "tools/sweep.py", "tools/probe.py", "tools/report.py"} <= {*scripts}
    [pattern] = re.findall(r"for run in (\S+);", done.stdout)
    runs = [cell.folder for cell in load_sweep(ROOT / "configs/sweeps/cpu.yml").cells]
    probed = [run for run in runs if run.match(pattern)]
    assert len(probed) == 8
