"""`pip install .` installs what the public rooms need; commands name the extra that they need."""

import ast
import json
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from megatron.errors import OF_TRAIN, missing_package
from tests.checkpoints import checkpoint_of_bytes
from tests.support import ROOT, blocks, run
from tests.test_public_names import PAGE, names_of_the_page
from tests.test_repository import PRODUCT, imports, requirements, tree
from tools.document_commands import make_clone

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LIGHT = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = PROJECT["optional-dependencies"]
IMPORTED_AS = {"pyyaml": "yaml"}
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
    tops = {name.split(".")[0] for name in names} - sys.stdlib_module_names
    return tops - {"megatron"} - {Path(file).stem for file in PRODUCT}


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
    unused = {"tensorboard"}  # by torch itself
    brought = {"markupsafe", "pyarrow"}  # by Jinja2 and datasets
    assert {canonicalize_name(name) for name in OF_TRAIN - brought} == names - unused


def test_encodings_and_attention_load_no_package_but_torch():
    code = (
        "import sys, torch; before = {*sys.modules}; import megatron.positions, megatron.attention;"
        "print(*sorted({name.partition('.')[0] for name in {*sys.modules} - before}))"
    )
    loaded = {*run("-c", code).stdout.split()}
    assert loaded - sys.stdlib_module_names <= {"megatron", "torch"}
    assert "megatron" in loaded


WORKING = {
    *("check_encoding.py", "claims.py", "compare.py", "deepy.py"),
    *("document_commands.py", "generate.py", "import_checkpoint.py", "inspect_checkpoint.py"),
    *("inspect_data.py", "merge_data.py", "migrate_config.py", "train.py"),
}
SOME = {"deepy.py", "document_positions.py", "train.py"}
PATHS = sorted([*ROOT.glob("*.py"), *ROOT.glob("tools/*.py")])
EVERY = os.environ.get("CAMPAIGN") == "1"
HELPED = [str(path) for path in PATHS if EVERY or path.name in SOME]
GENERATE = [str(ROOT / "generate.py"), "--checkpoint", "runs/mep", "--prompt", "Every token"]
GENERATE += ["tokenizer_type=CharLevelTokenizer", "--max-new-tokens", "4"]
TASK = ["train_iters=1", "data_path=task:copy", "save=runs/new"]
STEPS = [
    GENERATE,
    [str(ROOT / "tools/import_checkpoint.py"), "models/neox", "-o", "runs/neox"],
    [str(ROOT / "train.py"), "runs/mep/global_step10/config.yml", *TASK],
]
CHECKS_OF_THE_PAGE = [
    "assert bias.shape == (4, 256)",
    "assert out.shape == (1, 4, 256, 16)",
    "assert logits.shape == (1, 64, 512)",
    "assert table.tolist() == [[-0.5 * distance for distance in range(8)]] * 4",
    "assert nats[64].shape == nats[256].shape == (768,)",
    "assert [*frame.pos_emb.unique()] == ['mep_free', 'rotary']",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of docs/python.md, `--help` of scripts and STEPS, as after `pip install .`."""
    folder = tmp_path_factory.mktemp("light")
    make_clone(folder)
    settings = ["num_layers=1", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
    checkpoint_of_bytes(folder / "runs/mep", *settings, "pos_emb=alibi")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    theirs = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=64, intermediate_size=32, **sizes))
    theirs.save_pretrained(folder / "models/neox")
    examples = blocks(PAGE, "python")
    light = [block for block in examples if not re.search("# .train.$", block, re.M)]
    (folder / "page.py").write_text("\n".join([*light, *CHECKS_OF_THE_PAGE]))
    commands = [["page.py"], *([script, "--help"] for script in HELPED), *STEPS]
    done = run(ROOT / "tests/light_install.py", json.dumps(commands), cwd=folder)
    assert done.returncode == 0, done.stderr
    page, *others = json.loads(done.stdout)
    return page, others[: len(HELPED)], others[len(HELPED) :]


def message(script, package):
    name = Path(script).name
    return f"{name}: {package} is not installed - pip install '.[train]' in the project's folder\n"


def test_the_page_runs_after_a_light_install(results):
    status, output, errors = results[0]
    assert status == 0, errors
    assert "mep_free" in output


def test_a_command_without_its_packages_names_one(results):
    working = set()
    for script, (status, output, errors) in zip(HELPED, results[1], strict=True):
        if status == 0:
            assert "usage:" in output
            assert errors == ""
            working.add(Path(script).name)
        else:
            assert status == 1
            assert "No module named" in errors
    assert working >= (WORKING if EVERY else SOME & WORKING)


def test_a_step_without_its_package_names_the_extra(results):
    others = results[2]
    packages = ["transformers", "transformers", "deepspeed"]
    scripts = ["generate.py", "import_checkpoint.py", "train.py"]
    assert [result[0] for result in others] == [1, 1, 1]
    for (_, _, errors), script, package in zip(others, scripts, packages, strict=True):
        assert errors.endswith(message(script, package))
        assert "Traceback" not in errors


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
        "megatron: the commands are scripts of the project's folder - run pip install -e '.[train]'"
        " there\n"
    )
