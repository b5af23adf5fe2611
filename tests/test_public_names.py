"""docs/python.md: its names are called as it says; tests/test_light_install.py runs it."""

import importlib
import inspect
import re

import pytest

from tests.support import blocks

PAGE = "docs/python.md"


def signatures_of_the_page():
    """`path(parameters)` of each public name, or its path alone."""
    (lines,) = blocks(PAGE, "text")
    return lines.splitlines()


def names_of_the_page():
    return [line.partition("(")[0] for line in signatures_of_the_page()]


def object_at(path):
    """A function, a class, one of its methods, or a table."""
    owner, _, name = path.rpartition(".")
    try:
        parent = importlib.import_module(owner)
    except ModuleNotFoundError:
        parent = object_at(owner)
    return getattr(parent, name)


def signature(path):
    """A public name as the page writes it: without annotations, and methods without self."""
    public = object_at(path)
    if not callable(public):
        assert public, f"{path} is empty"
        return path
    parameters = [
        parameter.replace(annotation=parameter.empty)
        for name, parameter in inspect.signature(public).parameters.items()
        if name != "self"
    ]
    return path + str(inspect.Signature(parameters))


@pytest.mark.parametrize("line", signatures_of_the_page())
def test_a_public_name_is_called_as_the_page_says(line):
    name = line.partition("(")[0]
    assert signature(name) == line, "docs/design.md says what a change of a public name needs"


def test_the_page_lists_every_name_once_and_those_that_it_uses():
    names = names_of_the_page()
    assert names == sorted({*names}, key=names.index)
    code = "".join(blocks(PAGE, "python"))
    for module, imported in re.findall(r"^from (megatron\S*) import (.*)$", code, re.MULTILINE):
        for name in imported.split(", "):
            assert f"{module}.{name}" in names


def test_the_bias_of_the_page_is_drawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build_it, draw_it, *_ = blocks(PAGE, "python")
    names = {}
    exec(build_it, names)
    exec(draw_it, names)
    lines = names["plt"].gca().get_lines()
    assert [line.get_ydata().tolist() for line in lines] == names["bias"].tolist()
    assert (tmp_path / "bias.png").read_bytes().startswith(b"\x89PNG")
    names["plt"].close()
