"""Dockerfile, .dockerignore, .devcontainer and Makefile name what exists."""

import json
import re
import shlex

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
