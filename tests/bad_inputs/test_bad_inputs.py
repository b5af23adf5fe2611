"""The table of bad inputs: each ends in its message with its status, and loses nothing."""

import importlib
import os
import shutil
from pathlib import Path

import pytest

from tests.bad_inputs.case import MODEL, Case
from tests.support import call

MODULES = (
    "configuration",
    "data",
    "token_files",
    "checkpoints",
    "engines",
    "generation",
    "results",
    "launcher",
    "training",
)


def cases() -> list:
    """Every case of the table, named module-case; two of one name are a fault."""
    found = {}
    for module in MODULES:
        for case in importlib.import_module(f"tests.bad_inputs.{module}").CASES:
            name = f"{module}-{case.name}"
            assert name not in found, f"two cases are called {name}"
            found[name] = pytest.param(case, id=name)
    return list(found.values())


@pytest.fixture(scope="session")
def trained(forks, corpus, tmp_path_factory) -> Path:
    """The folder of a run of four steps; cases work on copies of it."""
    folder = tmp_path_factory.mktemp("bad_inputs") / "trained"
    settings = [*MODEL, "train_iters=4", "eval_interval=0"]
    done = forks.run("train.py", *settings, f"data_path={corpus}", f"save={folder}")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("case", cases())
def test_a_bad_input_is_one_message_and_loses_nothing(
    case: Case, corpus, trained, tmp_path, monkeypatch
):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    places = {"{corpus}": str(corpus), "{trained}": str(trained), "{here}": str(here)}
    for name, content in case.files.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            content = _filled(content, places).encode()
        path.write_bytes(content)
    if case.copies_run:
        shutil.copytree(trained, here / "copy")
    if case.prepare is not None:
        case.prepare(here)
    before = _contents(here)

    script, *words = [_filled(word, places) for word in case.words]
    done = call(script, *words)

    assert _filled(case.message, places).strip() in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == case.status
    assert _contents(here) == before


def _filled(text: str, places: dict[str, str]) -> str:
    for name, value in places.items():
        text = text.replace(name, value)
    return text


def _contents(folder: Path) -> dict[str, bytes | None]:
    """Every file of a folder with its bytes; links, pipes and folders as names alone."""
    contents: dict[str, bytes | None] = {}
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(root) / name
            is_plain = path.is_file() and not path.is_symlink()
            contents[str(path.relative_to(folder))] = path.read_bytes() if is_plain else None
    return contents
