"""Write docs/dependencies.md and docs/sbom.json (CycloneDX) from constraints.txt.

python tools/list_dependencies.py

Licences and requirements are read from the installed packages. The same environment gives the same
bytes: there is no date in them, and the serial number follows from the contents.
"""

import ast
import json
import sys
import uuid
from dataclasses import dataclass
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distribution,
    packages_distributions,
)
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron.files import ROOT, write_text

LONGEST = 80  # characters of a licence's name; some packages give its whole text
HEAD = """\
# Dependencies

Written by `python tools/list_dependencies.py` from constraints.txt. docs/sbom.json is the same list
in CycloneDX's form. "Imported" says whether this project's own code imports the package; others
are there for the packages that need them.

| package | version | licence | imported | needed by |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Package:
    """One line of constraints.txt, and what the installed package says of itself."""

    name: str
    version: str
    licence: str
    imported: bool
    needs: frozenset[str]


def packages() -> list[Package]:
    """Every package of constraints.txt, by name. SystemExit where one is not installed."""
    versions = fixed_versions()
    imported = imported_packages()
    found = []
    for name, version in sorted(versions.items()):
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"{name}: is not installed - run make, then try again")
        needs = _needs(installed) & versions.keys()
        licence = licence_of(installed)
        found.append(Package(name, version, licence, name in imported, frozenset(needs)))
    return found


def fixed_versions() -> dict[str, str]:
    """Name and version of every line of constraints.txt."""
    versions = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text:
            name, _, version = text.partition("==")
            versions[canonicalize_name(name)] = version
    return versions


def imported_packages() -> set[str]:
    """Packages that a module of this project imports, tests and tools left out."""
    modules = set()
    for path in [*(ROOT / "megatron").rglob("*.py"), *ROOT.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module.split(".")[0])
    providers = packages_distributions()
    names = {name for module in modules for name in providers.get(module, [])}
    return {canonicalize_name(name) for name in names}


def licence_of(installed: Distribution) -> str:
    """A package's licence in its own words; "not stated" where there are none."""
    classified = _classified(installed.metadata.get_all("Classifier") or [])
    text = _entry(installed, "License-Expression") or classified or _entry(installed, "License")
    first_line = text.strip().partition("\n")[0]
    if first_line in ("", "UNKNOWN"):
        return "not stated"
    return first_line if len(first_line) <= LONGEST else first_line[:LONGEST] + "…"


def _entry(installed: Distribution, key: str) -> str:
    entries = installed.metadata.get_all(key) or [""]
    return entries[0]


def _classified(classifiers: list[str]) -> str:
    licences = [line for line in classifiers if line.startswith("License ::")]
    return " AND ".join(line.rpartition(" :: ")[2] for line in licences)


def _needs(installed: Distribution) -> set[str]:
    needs = set()
    for text in installed.requires or []:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            needs.add(canonicalize_name(wanted.name))
    return needs


def markdown(listed: list[Package]) -> str:
    """docs/dependencies.md."""
    lines = []
    for package in listed:
        users = [other.name for other in listed if package.name in other.needs]
        imported = "yes" if package.imported else ""
        cells = [package.name, package.version, package.licence, imported, ", ".join(users)]
        lines.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(lines)


def bill(listed: list[Package]) -> dict[str, Any]:
    """docs/sbom.json, in the form of CycloneDX 1.6."""
    components = [_component(package) for package in listed]
    uses = [{"ref": _url(package), "dependsOn": _urls(package.needs, listed)} for package in listed]
    contents = json.dumps([components, uses], sort_keys=True)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, contents)}",
        "version": 1,
        "components": components,
        "dependencies": uses,
    }


def _component(package: Package) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": _url(package),
        "name": package.name,
        "version": package.version,
        "purl": _url(package),
    }
    if package.licence != "not stated":
        component["licenses"] = [{"license": {"name": package.licence}}]
    return component


def _url(package: Package) -> str:
    return f"pkg:pypi/{package.name}@{package.version}"


def _urls(names: frozenset[str], listed: list[Package]) -> list[str]:
    return [_url(package) for package in listed if package.name in names]


def main() -> None:
    listed = packages()
    write_text(ROOT / "docs" / "dependencies.md", markdown(listed))
    write_text(ROOT / "docs" / "sbom.json", json.dumps(bill(listed), indent=1) + "\n")


if __name__ == "__main__":
    main()
