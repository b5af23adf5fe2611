"""The agreed shape of the house (docs/design.md), read from the sources."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron.positions import ALIASES, REGISTRY

ROOT = Path(__file__).resolve().parent.parent
# Arrows only downward: a file may import from its own part and from parts further up in this list.
LEVELS = [
    {"errors", "commit", "process", "strict_json", "network"},
    {"files"},
    {"folder_lock", "cli_errors"},
    {"positions", "attention", "results", "splits", "address"},
    {"config", "parallel"},
    {"model", "data"},
    {"checkpoints"},
    {"training", "interop", "conformance"},
    {"evaluation"},
    {"generation"},
    {"report", "sweeps", "doctor", "harness"},
    {"explain"},
    {"entry"},
    {"__main__", "entries"},  # train.py, tools/ ... at the root
]
TORCH_ONLY = {"positions", "attention"}
TAKES_PLAIN_NUMBERS = {"data", "evaluation", "results"}  # never the configuration, but for
TAKES_THE_CONFIGURATION = {
    "megatron/data/corpora/recipe.py",
    "megatron/data/corpora/tokenizer_files.py",
    "megatron/data/parts.py",  # its section: ten keys say what a part is
    "megatron/evaluation/published.py",
    "megatron/evaluation/opened.py",
    "megatron/evaluation/run.py",
    "megatron/evaluation/probes/run.py",
}
MAY_SPEAK_DISTRIBUTED = {"parallel", "training"}
MAY_SPEAK_DISTRIBUTED_FILES = {"deepy.py"}
MAY_PRINT = {"cli_errors", "entry", "__main__"}
TRITON_PROGRAMS = "megatron/attention/triton_programs.py"  # imported only where the backend is used
# Names that are also ordinary words count only beside a word for the encoding.
ORDINARY_WORDS = {"none", "learned", "window"}


def sources(*patterns: str) -> list[str]:
    return sorted(
        str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)
    )


PACKAGE = sources("megatron/**/*.py")
PRODUCT = sources("*.py", "tools/**/*.py") + PACKAGE
every_package_file = pytest.mark.parametrize("file", PACKAGE)
every_product_file = pytest.mark.parametrize("file", PRODUCT)


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


@cache
def imports(file: str) -> frozenset[str]:
    """Dotted names of everything that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = Path(file).with_suffix("").parts[: -node.level] if node.level else ()
            base = ".".join([*package, *([node.module] if node.module else [])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return frozenset(found)


def part(name: str) -> str:
    """positions, config, ... of a dotted module name or a file."""
    words = name.removesuffix(".py").replace("/", ".").split(".")
    if words[0] != "megatron":
        return "entries"
    return words[1] if len(words) > 1 and words[1] != "__init__" else "errors"


def level(name: str) -> int:
    places = [height for height, parts in enumerate(LEVELS) if part(name) in parts]
    file = Path(__file__).name
    assert places, f"{name}: megatron/{part(name)} has no place in LEVELS of {file}; give it one"
    return places[0]


@every_product_file
def test_imports_point_only_downward(file):
    ours = [name for name in imports(file) if name.split(".")[0] == "megatron"]
    upward = [name for name in ours if part(name) != part(file) and level(name) >= level(file)]
    if part(file) == "entries":  # entries stand side by side
        upward = [name for name in upward if part(name) not in LEVELS[-1]]
    assert not upward, f"{file} (megatron/{part(file)}) may not import {upward}"


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_modules(file: str) -> set[str]:
    """Modules of the package that a file imports; `from a.b import c` may mean a.b.c."""
    modules = {module_of(name) for name in PACKAGE}
    found = set()
    for name in imports(file):
        parent = name.rpartition(".")[0]
        found.add(name if name in modules else parent)
    return found & modules


def test_no_module_imports_itself_by_a_detour():
    remaining = {module_of(file): imported_modules(file) for file in PACKAGE}
    while True:  # take away what imports nothing that is left; only circles stay
        free = [name for name, needs in remaining.items() if not needs & remaining.keys()]
        if not free:
            break
        for name in free:
            del remaining[name]
    circle = {name: sorted(needs & remaining.keys()) for name, needs in remaining.items()}
    assert not circle, f"modules that import each other, inside functions too: {circle}"


@every_package_file
def test_positions_and_attention_know_only_torch(file):
    if part(file) not in TORCH_ONLY:
        return
    tops = {name.split(".")[0] for name in imports(file)} - sys.stdlib_module_names
    known = {"torch", "megatron"} | ({"triton"} if file == TRITON_PROGRAMS else set())
    assert tops <= known, f"{file} imports {tops}"


@every_package_file
def test_data_and_evaluation_take_plain_numbers_not_the_configuration(file):
    if part(file) in TAKES_PLAIN_NUMBERS and file not in TAKES_THE_CONFIGURATION:
        assert not [name for name in imports(file) if name.startswith("megatron.config")], file


@every_product_file
def test_only_parallel_and_training_speak_of_processes(file):
    if part(file) in MAY_SPEAK_DISTRIBUTED or file in MAY_SPEAK_DISTRIBUTED_FILES:
        return
    named = [name for name in imports(file) if re.match(r"deepspeed\b|torch\.distributed\b", name)]
    attributes = [node for node in ast.walk(tree(file)) if isinstance(node, ast.Attribute)]
    used = [node.lineno for node in attributes if ast.unparse(node) == "torch.distributed"]
    assert not named, f"{file} imports {named}"
    assert not used, f"{file} uses torch.distributed in lines {used}"


@every_package_file
def test_the_package_logs_and_does_not_print(file):
    if part(file) in MAY_PRINT:
        return
    calls = [node for node in ast.walk(tree(file)) if isinstance(node, ast.Call)]
    lines = [
        call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"
    ]
    assert not lines, f"{file} prints in lines {lines}"


def texts(node: ast.AST) -> set[str]:
    return {
        leaf.value
        for leaf in ast.walk(node)
        if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
    }


def branches(file: str) -> list[tuple[int, str, set[str]]]:
    """Line, source and texts of every comparison, match case and prefix test in a file."""
    found = []
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Compare):
            compared = [
                side
                for side in (node.left, *node.comparators)
                if not isinstance(side, ast.Call | ast.Subscript)
            ]
            found.append((node.lineno, ast.unparse(node), set().union(*map(texts, compared))))
        elif isinstance(node, ast.match_case):
            found.append((node.pattern.lineno, ast.unparse(node.pattern), texts(node.pattern)))
        elif isinstance(node, ast.Call) and re.search(
            r"\.(starts|ends)with$", ast.unparse(node.func)
        ):
            found.append((node.lineno, ast.unparse(node), set().union(*map(texts, node.args))))
    return found


@every_product_file
def test_no_encoding_is_branched_on_outside_the_registry(file):
    if part(file) == "positions":
        return
    names = REGISTRY.keys() | ALIASES.keys()
    families = {name.split("_")[0] for name in names if "_" in name}
    for line, source, compared in branches(file):
        hits = {text for text in compared if text in names or text.rstrip("_") in families}
        if not re.search("pos_emb|position|encoding", source):
            hits -= ORDINARY_WORDS
        assert not hits, (
            f"{file}:{line} branches on {sorted(hits)} ({source}): a method of Position is missing"
        )


def requirements(*files: str) -> list[Requirement]:
    texts_of_lines = [
        line.split(" #")[0].strip()
        for file in files
        for line in (ROOT / file).read_text().splitlines()
    ]
    return [Requirement(text) for text in texts_of_lines if text and not text.startswith("#")]


def test_constraints_fix_every_requirement_inside_its_tested_range():
    fixed = {canonicalize_name(one.name): one for one in requirements("constraints.txt")}
    for wanted in requirements("requirements.txt", "requirements-dev.txt"):
        if wanted.name == "triton":  # every build of torch for CUDA wants one version of its own
            continue
        assert canonicalize_name(wanted.name) in fixed, (
            f"constraints.txt does not fix {wanted.name}"
        )
        (pin,) = fixed[canonicalize_name(wanted.name)].specifier
        assert pin.operator == "=="
        assert wanted.specifier.contains(pin.version), (
            f"{wanted.name}: {pin} is outside {wanted.specifier}"
        )


def test_the_apex_of_pypi_is_never_required():
    # It is an unrelated package; NVIDIA's cannot be had by name.
    assert not [
        one
        for one in requirements("requirements.txt", "requirements-dev.txt")
        if one.name == "apex"
    ]


def test_ci_runs_lint_and_tests_from_a_clean_state():
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & 0o111, ".ci/run is not executable"
    commands = [
        line for line in script.read_text().splitlines() if line and not line.startswith("#")
    ]
    assert commands == [
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")/.."',
        "make clean",
        "make lint",
        "make test",
    ]
