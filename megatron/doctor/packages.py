"""The versions of Python and of the packages, held against requirements.txt."""

import importlib.util
import platform
import re
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from megatron.doctor.finding import Finding, ok, stops, warning
from megatron.files import ROOT

SUBJECT = "packages"
OLDEST_PYTHON = (3, 11)  # pyproject.toml's requires-python
DISTRIBUTION = "megatron-positions"
INSTALL = "pip install -r requirements.txt"
NAMED = ("torch", "deepspeed", "transformers", "datasets", "tokenizers", "safetensors", "numpy")
"""Packages whose versions a report should have."""

Installed = Callable[[str], str | None]


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Whether this Python is new enough."""
    text = ".".join(str(part) for part in version)
    if version[:2] < OLDEST_PYTHON:
        oldest = ".".join(str(part) for part in OLDEST_PYTHON)
        return stops(
            "python", f"{text} is too old", f"make PYTHON=python{oldest}, or a newer Python"
        )
    return ok("python", f"{text} ({sys.executable}), {platform.system()} {platform.machine()}")


def wanted(path: Path = ROOT / "requirements.txt") -> list[str]:
    """The requirements as they are written, `torch>=2.11,<2.14`: of the file, or as installed."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return _of_distribution()
    bare = [re.split(r"(?:^|\s)#", line)[0].strip() for line in lines]
    return [line for line in bare if line]


def _of_distribution() -> list[str]:
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []


def installed_version(name: str) -> str | None:
    """The version of an installed package; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions(
    requirements: Iterable[str], installed: Installed = installed_version
) -> list[Finding]:
    """What is missing or outside its tested range, and a line with the versions that matter.

    No missing package stops a run by itself: `probe` tries to load what a training loads.
    """
    if importlib.util.find_spec("packaging") is None:
        return [stops(SUBJECT, "`packaging` is not installed, so nothing can be compared", INSTALL)]
    from packaging.requirements import InvalidRequirement, Requirement

    findings = []
    outside = 0
    found: dict[str, str] = {}
    for line in requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            findings.append(
                warning(SUBJECT, f"{line!r} is no requirement", "restore requirements.txt")
            )
            continue
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        version = installed(requirement.name)
        if version is None:
            text = f"{requirement.name} is not installed; commands that need it fail"
            findings.append(warning(SUBJECT, text, INSTALL))
            continue
        found[requirement.name] = version
        if not requirement.specifier.contains(version, prereleases=True):
            outside += 1
            text = f"{requirement.name} {version} is outside the tested range"
            fix = f"pip install '{requirement.name}{requirement.specifier}'"
            findings.append(warning(SUBJECT, f"{text} {requirement.specifier}", fix))
    if not found and not findings:
        return [
            warning(SUBJECT, "requirements.txt is not at hand", "run from the project's folder")
        ]
    named = ", ".join(f"{name} {found[name]}" for name in NAMED if name in found)
    within = len(found) - outside
    return [*findings, ok(SUBJECT, f"{within} within their tested ranges: {named}")]


def triton_of_torch(
    installed: Installed = installed_version, requires: Iterable[str] | None = None
) -> str | None:
    """What is wrong with triton for this torch: a build for CUDA wants one version; None: nothing.

    requires: torch's own requirements
    """
    from packaging.requirements import Requirement

    if requires is None:
        requires = metadata.requires("torch") or []
    version = installed("triton")
    for line in requires:
        requirement = Requirement(line)
        if requirement.name != "triton":
            continue
        if version is None:
            return f"triton is not installed, and torch wants {requirement.specifier}"
        if not requirement.specifier.contains(version, prereleases=True):
            return f"triton {version} is not what torch wants, {requirement.specifier}"
    return None if version else "triton is not installed"
