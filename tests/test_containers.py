"""Dockerfile, .dockerignore, .devcontainer and Makefile name what exists."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

from megatron.sweeps.cells import load_sweep
from tests.support import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
DEVCONTAINER = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))


def test_the_image_is_made_of_existing_files_and_leaves_out_what_git_ignores():
    joined = DOCKERFILE.replace("\\\n", " ")
    for arguments in re.findall(r"^COPY (.*)$", joined, flags=re.MULTILINE):
        *sources, _ = [word for word in arguments.split() if not word.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists(), source
    [run] = re.findall(r"^# docker run (.*)$", DOCKERFILE, flags=re.MULTILINE)
    for word in shlex.split(run):
        if word.endswith((".py", ".yml")):
            assert (ROOT / word).is_file(), word
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for rule in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines():
        name = rule.strip("/")
        if name and not name.startswith("#"):
            assert (name if rule.startswith("/") else f"**/{name}") in ignored, rule


def test_devcontainer_and_workflow_have_the_python_of_the_tests_and_install_as_make_does():
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    assert f"-{oldest[1]}-" in DEVCONTAINER["image"]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert f'python: ["{oldest[1]}", "3.13"]' in workflow
    assert shlex.split(DEVCONTAINER["postCreateCommand"]) == ["make", ".venv/installed"]


def test_a_failed_installation_leaves_no_stamp(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements.txt", "requirements-dev.txt", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_text("")
    python = tmp_path / ".venv/bin/python"  # has pip, which cannot install
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\n[ "$*" = "-m pip --version" ]\n')
    python.chmod(0o755)
    stamp = tmp_path / ".venv/installed"
    stamp.touch()
    os.utime(stamp, (0, 0))
    make = ["make", f"PYTHON={sys.executable}", stamp.relative_to(tmp_path)]
    assert subprocess.run(make, cwd=tmp_path, capture_output=True, check=False).returncode != 0
    assert not stamp.exists()


def test_the_results_are_made_by_scripts_of_this_project_and_probe_runs_of_the_sweep():
    printed = {}
    for part in ("cpu", "tasks", "context", "recipe"):
        words = ["make", "-n", "results", f"PART={part}"]
        printed[part] = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout
        assert f"configs/sweeps/{part}.yml" in printed[part]
        for path in re.findall(r"[\w/]+\.(?:py|yml)\b", printed[part]):
            assert (ROOT / path).is_file(), path
    default = subprocess.run(["make", "-n", "results"], cwd=ROOT, capture_output=True, text=True)
    assert default.stdout == printed["cpu"]
    [pattern] = re.findall(r"for run in (\S+);", printed["cpu"])
    runs = [cell.folder for cell in load_sweep(ROOT / "configs/sweeps/cpu.yml").cells]
    assert len([run for run in runs if run.match(pattern)]) == 8
