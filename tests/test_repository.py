"""The agreed shape of the house (docs/design.md), read from the sources."""

import ast
import graphlib
import re
import sys
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron.positions import ALIASES, REGISTRY

ROOT = Path(__file__).resolve().parent.parent
# Arrows only downward: a file may import from its own part and from parts further up in this list.
LEVELS = [
    {"errors", "commit", "strict_json"},
    {"files", "strict_yaml"},
    {"folder_lock", "cli_errors", "splits", "layer_kinds"},
    {"protocols"},
    {"positions", "attention", "results"},
    {"config", "parallel"},
    {"model", "data"},
    {"hybrids"},
    {"checkpoints"},
    {"evaluation"},
    {"training", "conformance"},
    {"report", "sweeps", "interop"},
    {"generation"},
    {"harness"},
    {"entry"},
    {"__main__", "entries"},  # train.py, tools/ ... at the root
]
TORCH_ONLY = {"positions", "attention"}
TAKES_PLAIN_NUMBERS = {"data", "evaluation", "results"}  # never the configuration, but for
TAKES_THE_CONFIGURATION = {
    "megatron/data/corpora/recipes.py",
    "megatron/data/parts.py",  # its section: ten keys say what a part is
    "megatron/evaluation/evaluate_checkpoint.py",
    "megatron/evaluation/loaded_run.py",
}
MAY_SPEAK_DISTRIBUTED = {"parallel", "training"}
MAY_SPEAK_DISTRIBUTED_FILES = {"deepy.py", "megatron/interop/trainers.py"}  # a format of folders
TRITON_PROGRAMS = "megatron/attention/triton_programs.py"  # imported only where the backend is used
# Names that are also ordinary words count only beside a word for the encoding.
ORDINARY_WORDS = {"none", "learned", "window"}


def sources(*patterns):
    return sorted(
        str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)
    )


PACKAGE = sources("megatron/**/*.py")
PRODUCT = sources("*.py", "tools/**/*.py") + PACKAGE


@cache
def tree(file):
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


@cache
def imports(file):
    """Dotted names of everything that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = Path(file).with_suffix("").parts[: -node.level] if node.level else ()
            base = ".".join([*package, *([node.module] if node.module else [])])
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return frozenset(names)


def part(name):
    """positions, config, ... of a dotted module name or a file."""
    words = name.removesuffix(".py").replace("/", ".").split(".")
    if words[0] != "megatron":
        return "entries"
    return words[1] if len(words) > 1 and words[1] != "__init__" else "errors"


def level(name):
    places = [height for height, parts in enumerate(LEVELS) if part(name) in parts]
    file = Path(__file__).name
    assert places, f"{name}: megatron/{part(name)} has no place in LEVELS of {file}; give it one"
    return places[0]


def test_imports_point_only_downward():
    for file in PRODUCT:
        ours = [name for name in imports(file) if name.split(".")[0] == "megatron"]
        upward = [name for name in ours if part(name) != part(file) and level(name) >= level(file)]
        if part(file) == "entries":  # entries stand side by side
            upward = [name for name in upward if part(name) not in LEVELS[-1]]
        assert not upward, f"{file} (megatron/{part(file)}) may not import {upward}"


def test_no_modules_import_each_other_in_a_circle():
    files = {
        file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file
        for file in PACKAGE
    }
    imported = {}
    for module, file in files.items():
        # `from megatron.a import b` imports the module b, or what megatron.a defines.
        names = {name if name in files else name.rpartition(".")[0] for name in imports(file)}
        imported[module] = names & files.keys() - {module}
    graphlib.TopologicalSorter(imported).prepare()  # CycleError names the circle


def test_positions_and_attention_know_only_torch():
    for file in PACKAGE:
        if part(file) in TORCH_ONLY:
            tops = {name.split(".")[0] for name in imports(file)} - sys.stdlib_module_names
            allowed = {"torch", "megatron"} | ({"triton"} if file == TRITON_PROGRAMS else set())
            assert tops <= allowed, f"{file} imports {tops}"


def test_data_and_evaluation_take_plain_numbers_not_the_configuration():
    for file in PACKAGE:
        if part(file) in TAKES_PLAIN_NUMBERS and file not in TAKES_THE_CONFIGURATION:
            assert not [name for name in imports(file) if name.startswith("megatron.config")], file


def test_only_parallel_and_training_speak_of_processes():
    for file in PRODUCT:
        if part(file) in MAY_SPEAK_DISTRIBUTED or file in MAY_SPEAK_DISTRIBUTED_FILES:
            continue
        text = (ROOT / file).read_text(encoding="utf-8")
        assert "torch.distributed" not in text, f"{file} uses torch.distributed"
        named = [name for name in imports(file) if name.split(".")[0] == "deepspeed"]
        assert not named, f"{file} imports {named}"


def compared_texts(node):
    """The texts that a comparison, a match case or a prefix test holds something against."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
    elif isinstance(node, ast.match_case):
        sides = [node.pattern]
    elif isinstance(node, ast.Call) and re.search(r"\.(starts|ends)with$", ast.unparse(node.func)):
        sides = node.args
    else:
        return set()
    texts = set()
    for side in sides:
        if not isinstance(side, ast.Call | ast.Subscript):
            values = [getattr(leaf, "value", None) for leaf in ast.walk(side)]
            texts.update(value for value in values if isinstance(value, str))
    return texts


def test_no_encoding_is_branched_on_outside_the_registry():
    names = REGISTRY.keys() | ALIASES.keys()
    families = {name.split("_")[0] for name in names if "_" in name}
    for file in PRODUCT:
        if part(file) == "positions":
            continue
        for node in ast.walk(tree(file)):
            compared = compared_texts(node)
            hits = {text for text in compared if text in names or text.rstrip("_") in families}
            if hits and not re.search("pos_emb|position|encoding", ast.unparse(node)):
                hits -= ORDINARY_WORDS
            place = f"{file} branches on {sorted(hits)}"
            assert not hits, f"{place}: a method of Position is missing"


def requirements(*files):
    texts_of_lines = [
        line.split(" #")[0].strip()
        for file in files
        for line in (ROOT / file).read_text().splitlines()
    ]
    return [Requirement(text) for text in texts_of_lines if text and not text.startswith("#")]


def test_constraints_fix_every_requirement_inside_its_tested_range():
    fixed = {canonicalize_name(pin.name): pin for pin in requirements("constraints.txt")}
    for requirement in requirements("requirements.txt", "requirements-dev.txt"):
        assert canonicalize_name(requirement.name) in fixed, (
            f"constraints.txt does not fix {requirement.name}"
        )
        (pin,) = fixed[canonicalize_name(requirement.name)].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), (
            f"{requirement.name}: {pin} is outside {requirement.specifier}"
        )


def test_the_house_names_every_room_and_files_that_exist():
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    rooms = {line[4:] for line in text.splitlines() if line.startswith("### megatron/")}
    packages = {
        "/".join(Path(file).parts[:2]) for file in PRODUCT if re.match(r"megatron/\w+/", file)
    }
    assert rooms == packages
    answers = re.findall(r"`(\w+/\w+\.\w+)`", text[: text.index("## One idea")])
    assert {file for file in answers if not (ROOT / "megatron" / file).exists()} == {
        "positions/NAME.py"
    }
    for room in rooms:
        about = text[text.index(f"### {room}\n") :].split("\n### ")[0]
        for file in re.findall(r"`(\w+\.(?:py|yml))`", about):
            assert (
                (ROOT / room / file).exists()
                or (ROOT / "tools" / file).exists()
                or (ROOT / file).exists()
            ), f"docs/design.md, {room}: there is no {file}"
