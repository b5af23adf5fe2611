"""Corpora of installed source: the same text everywhere, checked against the recipe."""

import importlib.metadata
import itertools
from pathlib import Path

import pytest

from megatron.data.corpora.recipes import named, read_recipe
from megatron.data.corpora.source_code import (
    Environment,
    Package,
    Repeats,
    digest_of,
)
from megatron.errors import UserError
from megatron.files import ROOT

CODE = "def f(x):\n    return x\n" * 30


def test_a_document_of_repeats_is_a_few_random_words_again_and_again():
    periods = set()
    for document in itertools.islice(Repeats().documents(), 300):
        words = document.split()
        [period] = [n for n in (4, 8, 16, 32, 64, 128) if words[n:] == words[:-n]][:1]
        periods.add(period)
        assert len(words) == 200
    assert periods == {4, 8, 16, 32, 64, 128}


@pytest.fixture
def installed(monkeypatch):
    """Write packages as pip does, with a list of their files."""
    monkeypatch.syspath_prepend(".")

    def install(name, version, files):
        for path, content in files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
        about = Path(f"{name}-{version}.dist-info")
        about.mkdir()
        (about / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        (about / "RECORD").write_text("".join(f"{path},,\n" for path in files))

    return install


@pytest.mark.parametrize("recipe", ["environment", "pure_python"])
def test_a_recipe_is_what_constraints_install_on_every_version_of_python(recipe):
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    )
    packages = read_recipe(recipe).packages
    assert {name: fixed.version for name, fixed in packages.items()} == {
        name: pins[name] for name in packages
    }
    different = [
        name
        for name, fixed in packages.items()
        if importlib.metadata.version(name).split("+")[0] != fixed.version
    ]
    if different:
        pytest.skip(f"other versions than those of constraints.txt: {', '.join(different)}")
    corpus = named(recipe)  # which compares the sums of the files with the recipe
    documents = list(corpus.documents())
    assert len(documents) == sum(fixed.documents for fixed in packages.values())
    path = Path(importlib.metadata.distribution("networkx").locate_file("networkx/convert.py"))
    held_out = documents.index(path.read_text(encoding="utf-8"))
    assert corpus.to_train_on is not None
    assert (held_out >= corpus.to_train_on) == (packages["networkx"].part == "held_out")


def test_another_text_than_the_recipes_is_refused(installed):
    installed("ccc", "1.0+local", {"c/code.py": CODE, "c/distutils/of_python_3_11.py": CODE + "\n"})
    digest = digest_of([("c/code.py", CODE.encode())])
    right = Package(version="1.0", part="train", documents=1, bytes=len(CODE), sha256=digest)
    assert list(Environment("mine", {"ccc": right}).documents()) == [CODE]

    changed = right.model_copy(update={"sha256": "0" * 64})
    for name, recipe in (("ccc", changed), ("no_such_package", right)):
        with pytest.raises(UserError, match=f"mine: needs the files of {name} 1.0, but others are"):
            list(Environment("mine", {name: recipe}).documents())
