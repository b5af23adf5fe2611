"""`pip install .` installs what the public rooms need; commands name the extra that they need."""

import ast
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron.errors import OF_TRAIN, missing_package
from megatron.report.document import make_clone
from tests.checkpoints import checkpoint_of_bytes
from tests.support import ROOT, blocks, run
from tests.test_public_names import PAGE, names_of_the_page
from tests.test_repository import PRODUCT, imports, requirements, tree

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LIGHT = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = PROJECT["optional-dependencies"]
IMPORTED_AS = {"pyyaml": "yaml", "backports-zstd": "backports"}
STANDARD = sys.stdlib_module_names | {"compression"}  # Python 3.14 has it
BY_PYDANTIC = {"pydantic_core", "typing_extensions"}
OPTIONAL = {
    "accelerate",
    "lm_eval",
    "packaging",
    "ray",
    "submitit",
    "triton",
}  # own messages
LIGHT_NAMES = {IMPORTED_AS.get(entry.name.lower(), entry.name.lower()) for entry in LIGHT}


def test_the_extras_have_the_ranges_of_the_requirements_files():
    train = [Requirement(text) for text in EXTRAS["train"]]
    everything = requirements("requirements.txt")
    assert sorted(map(str, LIGHT + train)) == sorted(map(str, everything))


def third_party(names):
    tops = {name.split(".")[0] for name in names} - STANDARD
    return (
        tops - {"megatron", "tests"} - {Path(file).stem for file in PRODUCT}
    )  # bench has a test's model


def imports_at_once(file):
    """Dotted names of what a file imports when it is imported, not inside functions."""
    names = set()
    for node in tree(file).body:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def files_of(name):
    """The files that are run when a dotted name of ours is imported."""
    words = name.split(".")
    places = [Path(*words[: count + 1]) for count in range(len(words))]
    candidates = [str(file) for place in places for file in (place / "__init__.py", f"{place}.py")]
    return {file for file in candidates if file in PRODUCT}


def test_the_public_rooms_import_what_is_declared_and_all_of_it():
    files, waiting = set(), set().union(*map(files_of, names_of_the_page()))
    while waiting:
        file = waiting.pop()
        files.add(file)
        ours = [name for name in imports_at_once(file) if name.startswith("megatron")]
        waiting |= set().union(*map(files_of, ours)) - files
    assert {"megatron/interop/open.py", "megatron/checkpoints/read.py"} <= files
    imported = third_party(set().union(*map(imports_at_once, files)))
    assert not imported & OF_TRAIN
    in_functions = third_party(
        imports("megatron/results/__init__.py") | imports("megatron/files.py")
    )
    assert (imported | in_functions) - BY_PYDANTIC == LIGHT_NAMES


def test_every_other_package_is_one_of_the_extra():
    imported = third_party(set().union(*map(imports, PRODUCT)))
    assert imported - LIGHT_NAMES - BY_PYDANTIC - OPTIONAL == OF_TRAIN
    names = {canonicalize_name(Requirement(text).name) for text in EXTRAS["train"]}
    names = {IMPORTED_AS.get(name, name) for name in names}
    unused = {"tensorboard"}  # by torch itself
    brought = {"pyarrow"}  # by datasets
    assert {canonicalize_name(name) for name in OF_TRAIN - brought} == names - unused


CHECKS_OF_THE_PAGE = [
    "assert bias.shape == (4, 256)",
    "assert out.shape == (1, 4, 256, 16)",
    "assert logits.shape == (1, 64, 512)",
    "assert table.tolist() == [[-0.5 * distance for distance in range(8)]] * 4",
    "assert nats[64].shape == nats[256].shape == (768,)",
    "assert [*frame.pos_emb.unique()] == ['mep_free', 'rotary']",
]


def test_the_page_and_then_a_training_run_after_a_light_install(tmp_path):
    make_clone(tmp_path)
    settings = ["num_layers=1", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
    checkpoint_of_bytes(tmp_path / "runs/mep", *settings, "pos_emb=alibi")
    examples = blocks(PAGE, "python")
    light = [block for block in examples if not re.search("# .train.$", block, re.M)]
    (tmp_path / "page.py").write_text("\n".join([*light, *CHECKS_OF_THE_PAGE]))
    step = [*settings, "train_iters=1", "data_path=task:copy", "save=runs/new"]
    done = run(ROOT / "tests/light_install.py", "page.py", ROOT / "train.py", *step, cwd=tmp_path)
    assert "mep_free" in done.stdout, done.stderr
    assert done.returncode == 1
    message = (
        "train.py: deepspeed is not installed - pip install '.[train]' in the project's folder"
    )
    assert done.stderr.endswith(f"{message}\n")
    assert "Traceback" not in done.stderr


def test_only_packages_of_the_extra_are_named():
    fault = ModuleNotFoundError("No module named 'deepspeed.ops'", name="deepspeed.ops")
    assert missing_package(fault).startswith("deepspeed is not installed - pip install '.[train]'")
    assert missing_package(ModuleNotFoundError("No module named 'mine'", name="mine")) is None
    assert missing_package(ValueError("deepspeed")) is None


def test_an_installation_without_the_projects_folder_says_where_its_commands_are(tmp_path):
    (tmp_path / "megatron").mkdir()
    script = Path(shutil.copy(ROOT / "megatron/__main__.py", tmp_path / "megatron"))
    done = run(script, "compare")
    assert done.returncode == 1
    assert done.stderr == (
        "megatron: the commands are scripts in the project's folder - run pip install -e '.[train]'"
        " there\n"
    )


def test_the_package_stands_beside_megatron_core_whichever_is_found_first(tmp_path):
    """megatron-core and clones of Megatron-LM have a folder `megatron` without __init__.py."""
    core = tmp_path / "other/megatron/core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("__version__ = '0'\n")
    folders = [str(ROOT), str(core.parents[1])]
    for order in (folders, folders[::-1]):
        for names in ("megatron.core, megatron.errors", "megatron.errors, megatron.core"):
            code = f"import {names}; print(megatron.core.__version__, megatron.errors.__file__)"
            done = run("-c", code, cwd=tmp_path, env={"PYTHONPATH": os.pathsep.join(order)})
            assert done.stdout.split() == ["0", str(ROOT / "megatron/errors.py")]
