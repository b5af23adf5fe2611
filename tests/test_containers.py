"""Dockerfile, .dockerignore, .devcontainer and Makefile name what exists."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from megatron.sweeps.cells import load_sweep
from tests.support import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
DEVCONTAINER = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
HADOLINT = shutil.which("hadolint", path=Path(sys.executable).parent)


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed beside this Python")
def test_the_linter_objects_to_nothing():
    found = subprocess.run([HADOLINT, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_image_is_made_of_existing_files():
    joined = DOCKERFILE.replace("\\\n", " ")
    for arguments in re.findall(r"^COPY (.*)$", joined, flags=re.MULTILINE):
        *sources, _ = [word for word in arguments.split() if not word.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists(), source
    [run] = re.findall(r"^# docker run (.*)$", DOCKERFILE, flags=re.MULTILINE)
    for word in shlex.split(run):
        if word.endswith((".py", ".yml")):
            assert (ROOT / word).is_file(), word


def test_the_image_has_all_tracked_files_and_nothing_that_git_ignores():
    """A tracked file that is missing would give every result of a container a commit with "+"."""

    def rules(name: str) -> list[str]:
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    for rule in rules(".gitignore"):
        name = rule.strip("/")
        assert (name if rule.startswith("/") else f"**/{name}") in rules(".dockerignore"), rule
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("this copy of the project is no clone: git lists no files")
    for path in listed.stdout.splitlines():
        parts = path.split("/")
        for rule in rules(".dockerignore"):
            names = parts if rule.startswith("**/") else parts[:1]
            assert not any(fnmatch(name, rule.removeprefix("**/")) for name in names), path


def test_the_devcontainer_has_the_python_of_the_tests_and_installs_as_make_does():
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    assert f"-{oldest[1]}-" in DEVCONTAINER["image"]
    assert shlex.split(DEVCONTAINER["postCreateCommand"]) == ["make", ".venv/installed"]
    assert DEVCONTAINER["forwardPorts"] == []


def test_a_failed_installation_leaves_no_stamp(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements.txt").write_text("./no-such-folder\n")
    for name in ("requirements-dev.txt", "constraints.txt", "pyproject.toml", "installed"):
        (tmp_path / name).write_text("")
    (tmp_path / ".venv").mkdir()
    stamp = tmp_path / ".venv/installed"
    make = ["make", f"PYTHON={sys.executable}", stamp.relative_to(tmp_path)]
    done = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert not stamp.exists()


def test_the_results_are_made_by_scripts_of_this_project_and_probe_runs_of_the_sweep():
    done = subprocess.run(["make", "-n", "results"], cwd=ROOT, capture_output=True, text=True)
    scripts = re.findall(r"(?:tools/)?\w+\.py", done.stdout)
    assert {"prepare_data.py", "tools/sweep.py", "tools/probe.py", "tools/report.py"} <= {*scripts}
    [pattern] = re.findall(r"for run in (\S+);", done.stdout)
    runs = [cell.folder for cell in load_sweep(ROOT / "configs/sweeps/cpu.yml").cells]
    assert len([run for run in runs if run.match(pattern)]) == 8
