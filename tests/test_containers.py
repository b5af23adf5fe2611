"""Dockerfile, .dockerignore and .devcontainer name what exists; the linter objects to faults."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.support import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
DEVCONTAINER = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
HADOLINT = shutil.which("hadolint", path=Path(sys.executable).parent)
needs_hadolint = pytest.mark.skipif(
    HADOLINT is None, reason="hadolint is not installed beside this Python; run make lint"
)
ANYWHERE = "**/"


def linted(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    assert HADOLINT is not None
    (folder / "Dockerfile").write_text(text, encoding="utf-8")
    command = [HADOLINT, "--no-color", "Dockerfile"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@needs_hadolint
def test_the_linter_objects_to_nothing(tmp_path):
    found = linted(tmp_path, DOCKERFILE)
    assert (found.returncode, found.stdout) == (0, "")


@needs_hadolint
@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        (":13.0.1-runtime-ubuntu24.04", "", "DL3006"),
        ("--no-cache-dir ", "", "DL3042"),
        ("--no-install-recommends ", "", "DL3015"),
        ("    && rm -rf /var/lib/apt/lists/*\n", "", "DL3009"),
        ("COPY --chown=researcher . .", "ADD . .", "DL3020"),
        ('["python", "deepy.py", "--help"]', "python deepy.py --help", "DL3025"),
        ("# hadolint ignore=DL3008\n", "", "DL3008"),
        ("USER $USER_ID", "USER root", "DL3002"),
    ],
)
def test_the_linter_objects_to_a_spoiled_file(tmp_path, before, after, rule):
    spoiled = DOCKERFILE.replace(before, after)
    assert spoiled != DOCKERFILE
    if before.startswith("    &&"):
        spoiled = spoiled.replace("python3-venv \\\n", "python3-venv\n")
    found = linted(tmp_path, spoiled)
    assert found.returncode == 1
    assert rule in found.stdout


def instructions(name: str) -> list[str]:
    """The arguments of each instruction of this name, with continued lines joined."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", joined, flags=re.MULTILINE)


def test_what_the_linter_does_not_ask_holds_too():
    assert instructions("WORKDIR") == ["/app"]
    assert len(instructions("USER")) == 1
    assert "org.opencontainers.image.licenses" in instructions("LABEL")[0]
    [command] = instructions("CMD")
    assert (ROOT / json.loads(command)[1]).is_file()


def test_the_image_is_made_of_existing_files():
    for arguments in instructions("COPY"):
        *sources, _ = [word for word in arguments.split() if not word.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists(), source
    [run] = re.findall(r"^# docker run (.*)$", DOCKERFILE, flags=re.MULTILINE)
    for word in shlex.split(run):
        if word.endswith((".py", ".yml")):
            assert (ROOT / word).is_file(), word


def rules(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def is_left_out(path: str) -> bool:
    """Whether .dockerignore leaves out a path below the root."""
    top, *_ = parts = path.split("/")
    for rule in rules(".dockerignore"):
        if rule.startswith(ANYWHERE):
            if any(fnmatch(part, rule.removeprefix(ANYWHERE)) for part in parts):
                return True
        elif fnmatch(top, rule):
            return True
    return False


def test_rules_of_dockerignore_are_names_at_the_root_or_anywhere():
    for rule in rules(".dockerignore"):
        name = rule.removeprefix(ANYWHERE)
        assert "/" not in name, rule
        assert not name.startswith("!"), rule


def test_what_git_ignores_is_not_sent_to_the_image():
    for rule in rules(".gitignore"):
        at_the_root = rule.startswith("/")
        name = rule.strip("/")
        expected = name if at_the_root else f"{ANYWHERE}{name}"
        assert expected in rules(".dockerignore"), rule


def test_no_tracked_file_is_left_out_of_the_image():
    """Otherwise every result of a container would have a commit with "+"."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("this copy of the project is no clone: git lists no files")
    assert [path for path in listed.stdout.splitlines() if is_left_out(path)] == []
    assert is_left_out("runs/demo/model.safetensors")
    assert is_left_out("tests/__pycache__/a.pyc")


def test_the_devcontainer_has_the_python_of_the_tests_and_installs_as_make_does():
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    assert f"-{oldest[1]}-" in DEVCONTAINER["image"]
    program, target = shlex.split(DEVCONTAINER["postCreateCommand"])
    assert program == "make"
    known = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert known.returncode == 0, known.stderr
    assert target == ".venv/installed"


def test_the_devcontainer_forwards_no_port_and_names_existing_places():
    assert DEVCONTAINER["forwardPorts"] == []
    assert DEVCONTAINER["otherPortsAttributes"] == {"onAutoForward": "ignore"}
    settings = DEVCONTAINER["customizations"]["vscode"]["settings"]
    interpreter = settings["python.defaultInterpreterPath"]
    folder, _, python = interpreter.partition("/")
    assert folder == "${containerWorkspaceFolder}"
    assert f"VENV := {Path(python).parts[0]}" in (ROOT / "Makefile").read_text()
    for place in settings["python.testing.pytestArgs"]:
        assert (ROOT / place).is_dir()
    index = DEVCONTAINER["containerEnv"]["PIP_EXTRA_INDEX_URL"]
    assert f"PIP_EXTRA_INDEX_URL={index}" in (ROOT / "README.md").read_text(encoding="utf-8")
