"""docs/python.md: what it shows runs after `pip install .`, and its names are called as it says."""

import importlib
import inspect
import json
import re

import pytest

from tests.checkpoints import checkpoint_of_bytes
from tests.support import ROOT, blocks, run
from tools.document_commands import make_clone

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


def test_the_page_runs_after_a_light_install(tmp_path):
    make_clone(tmp_path)
    shape = ["num_layers=1", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
    checkpoint_of_bytes(tmp_path / "runs/mep", *shape, "pos_emb=alibi")
    checks = [
        "assert bias.shape == (4, 256)",
        "assert out.shape == (1, 4, 256, 16)",
        "assert logits.shape == (1, 64, 512)",
        "assert table.tolist() == [[-0.5 * distance for distance in range(8)]] * 4",
        "assert nats[64].shape == nats[256].shape == (768,)",
        "assert [*frame.pos_emb.unique()] == ['mep_free', 'rotary']",
    ]
    light = [block for block in blocks(PAGE, "python") if not re.search("# .train.$", block, re.M)]
    (tmp_path / "page.py").write_text("\n".join([*light, *checks]))
    done = run(ROOT / "tests/light_install.py", json.dumps([["page.py"]]), cwd=tmp_path)
    ((status, output, errors),) = json.loads(done.stdout)
    assert status == 0, errors
    assert "mep_free" in output


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
