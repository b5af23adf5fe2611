"""The list of dependencies is that of constraints.txt."""

import json

from packaging.utils import canonicalize_name

from tests.support import ROOT
from tools.list_dependencies import bill, packages

CURE = "run `python tools/list_dependencies.py`"


def constrained() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def test_the_documents_list_what_constraints_fix():
    written = json.loads((ROOT / "docs/sbom.json").read_text())
    components = {one["name"]: one["version"] for one in written["components"]}
    assert components == constrained(), CURE
    table = (ROOT / "docs/dependencies.md").read_text().splitlines()
    rows = [line.split(" | ") for line in table if line.startswith("| ")][1:]
    assert {row[0].removeprefix("| "): row[1] for row in rows} == constrained(), CURE


def test_a_bill_has_what_cyclonedx_requires_and_is_the_same_each_time():
    listed = packages()
    made = bill(listed)
    assert made == bill(packages())
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    references = {one["bom-ref"] for one in made["components"]}
    assert len(references) == len(listed)
    for component in made["components"]:
        assert component["type"] == "library"
        assert component["purl"] == f"pkg:pypi/{component['name']}@{component['version']}"
    for use in made["dependencies"]:
        assert {use["ref"], *use["dependsOn"]} <= references


def test_torch_is_imported_and_what_it_needs_is_not():
    by_name = {package.name: package for package in packages()}
    assert by_name["torch"].imported
    assert not by_name["mpmath"].imported
    assert "mpmath" in by_name["sympy"].needs
