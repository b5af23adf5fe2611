"""docs/first_encoding.ipynb: its cells run, and its stored outputs are those of these cells."""

import base64
import json
import re
import struct

import pytest

from megatron.errors import UserError
from megatron.results.files import read_results
from tests.support import ROOT
from tools.document_notebook import (
    NOTEBOOK,
    OWN,
    code_cells,
    hash_of,
    make_copy,
    printed,
    read_notebook,
    run_cells,
    sources_of,
    with_outputs,
)

LENGTHS = [64, 256, 1024, 4096]
NAMES = ["rotary", "root"]
CURE = "run `python tools/document_notebook.py --write`"
PNG = b"\x89PNG\r\n\x1a\n"
MOST_BYTES = 150_000


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy")
    make_copy(folder)
    return folder


@pytest.fixture(scope="module")
def outputs(copy):
    """Those of all cells, run in order in a process of their own in a copy of the project."""
    return run_cells(sources_of(read_notebook()), copy)


def pictures(cells_outputs):
    """The PNG files among the outputs of cells."""
    data = [output.get("data", {}) for own in cells_outputs for output in own]
    return [base64.b64decode(one["image/png"]) for one in data if "image/png" in one]


def values_in_table(text):
    """Perplexities by encoding in a printed table, and its lengths."""
    [heading] = re.findall(r"^pos_emb +(.*)$", text, flags=re.MULTILINE)
    lengths = [int(word.strip("*")) for word in heading.split()]
    lines = re.findall(rf"^({'|'.join(NAMES)}) +([\d. ]+)$", text, flags=re.MULTILINE)
    return lengths, {name: [float(word) for word in words.split()] for name, words in lines}


def check_outputs(cells_outputs):
    """What a reader must find in the outputs, stored or of this run."""
    text = "".join(printed(own) for own in cells_outputs)
    assert "0 fail: the encoding keeps what it must" in text
    for name in NAMES:
        assert f"saved runs/first_encoding/{name}/global_step250" in text
    lengths, perplexities = values_in_table(text)
    assert lengths == LENGTHS
    assert [*perplexities] == NAMES
    for values in perplexities.values():
        assert len(values) == len(LENGTHS)
        assert all(1 < value < 200 for value in values), "trained models do not guess among 512"
    assert perplexities["rotary"][-1] > perplexities["rotary"][0], "as the text says"
    assert perplexities["root"][-1] < perplexities["rotary"][-1], "as the text says"
    assert "80 tokens in " in text
    [picture] = pictures(cells_outputs)
    assert picture.startswith(PNG)
    width, height = struct.unpack(">II", picture[16:24])
    assert min(width, height) > 300


def test_all_cells_run_and_produce_what_the_text_describes(copy, outputs):
    check_outputs(outputs)
    written = copy / "runs" / "first_encoding"
    for name in NAMES:
        rows = read_results([written / name / "results.jsonl"])
        assert [row["length"] for row in rows] == LENGTHS
        assert {row["pos_emb"] for row in rows} == {name}
    assert [(written / "perplexity.png").read_bytes()] == pictures(outputs)


def test_the_table_shows_the_measured_rows(copy, outputs):
    written = copy / "runs" / "first_encoding"
    files = [written / name / "results.jsonl" for name in NAMES]
    _, shown = values_in_table("".join(printed(own) for own in outputs))
    for row in read_results(files):
        value = shown[row["pos_emb"]][LENGTHS.index(row["length"])]
        assert value == pytest.approx(row["perplexity"], abs=0.006)


def test_the_encoding_has_at_most_fifteen_lines(outputs, copy):
    text = (copy / "runs/first_encoding/root.py").read_text(encoding="utf-8")
    assert 10 <= sum(bool(line.strip()) for line in text.splitlines()) <= 15


def test_the_stored_outputs_are_of_these_cells():
    notebook = read_notebook()
    assert notebook["metadata"][OWN]["outputs_of"] == hash_of(sources_of(notebook)), CURE
    check_outputs([cell["outputs"] for cell in code_cells(notebook)])
    assert NOTEBOOK.stat().st_size < MOST_BYTES


def test_a_changed_cell_is_noticed():
    notebook = read_notebook()
    code_cells(notebook)[2]["source"].append("\n# changed")
    assert notebook["metadata"][OWN]["outputs_of"] != hash_of(sources_of(notebook))
    written = json.loads(with_outputs(notebook, [[] for _ in code_cells(notebook)]))
    assert written["metadata"][OWN]["outputs_of"] == hash_of(sources_of(notebook))


def test_the_notebook_has_the_form_of_nbformat_4():
    """The required keys of https://nbformat.readthedocs.io/en/latest/format_description.html"""
    notebook = read_notebook()
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    identities = [cell["id"] for cell in notebook["cells"]]
    assert len({*identities}) == len(identities)
    for cell in notebook["cells"]:
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert isinstance(cell["metadata"], dict)
        assert all(isinstance(line, str) for line in cell["source"])
        needed = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            needed |= {"execution_count", "outputs"}
        assert {*cell} == needed
    for number, cell in enumerate(code_cells(notebook), start=1):
        assert cell["execution_count"] == number
        for output in cell["outputs"]:
            streams = {"output_type", "name", "text"}
            results = {"output_type", "execution_count", "metadata", "data"}
            expected = streams if output["output_type"] == "stream" else results
            assert {*output} == expected


def test_cells_are_plain_python_and_links_lead_to_files():
    notebook = read_notebook()
    for source in sources_of(notebook):
        lines = source.splitlines()
        assert not [line for line in lines if line.lstrip().startswith(("%", "!"))]
        compile(source, "cell", "exec")
    texts = ["".join(cell["source"]) for cell in notebook["cells"]]
    links = re.findall(r"\]\(([^)#]+)", "\n".join(texts))
    assert links
    for link in links:
        assert (NOTEBOOK.parent / link).exists(), link
    assert NOTEBOOK.relative_to(ROOT).as_posix() in (ROOT / "README.md").read_text("utf-8")


def test_a_cell_that_fails_is_named_with_its_error(copy):
    with pytest.raises(UserError, match=r"(?s)before.*<cell 2>.*ZeroDivisionError") as fault:
        run_cells(["x = 0", "print('before')\n1 / x", "print('never')"], copy)
    assert "never" not in str(fault.value)


def test_outputs_are_what_jupyter_shows(copy):
    cells = [
        "import sys\nprint('a')\nprint('b', file=sys.stderr)\n2 + 3",
        "x = 1",
        "class P:\n    def _repr_png_(self):\n        return b'picture'\n"
        "    def __repr__(self):\n        return 'P'\nP()",
    ]
    first, second, third = run_cells(cells, copy)
    assert printed(first) == "a\nb\n"
    assert first[1]["data"] == {"text/plain": ["5"]}
    assert second == []
    assert base64.b64decode(third[0]["data"]["image/png"]) == b"picture"
    assert third[0]["data"]["text/plain"] == ["P"]
