"""Run docs/first_encoding.ipynb in a copy of the project and keep its outputs (`make docs`).

python tools/document_notebook.py            what its cells print
python tools/document_notebook.py --write    the outputs in the notebook
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.cli_errors import guarded
from megatron.errors import UserError
from megatron.files import ROOT, write_text
from tools.document_commands import environment_of_child

NOTEBOOK = ROOT / "docs" / "first_encoding.ipynb"
IN_COPY = ("megatron", "tools", "configs")  # folders that its cells need, beside the scripts
OWN = "megatron-positions"  # our part of the notebook's metadata

Notebook = dict[str, Any]
Outputs = list[dict[str, Any]]


def read_notebook() -> Notebook:
    """The notebook as it is stored."""
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def code_cells(notebook: Notebook) -> list[dict[str, Any]]:
    """Its code cells in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def sources_of(notebook: Notebook) -> list[str]:
    """The text of each code cell."""
    return ["".join(cell["source"]) for cell in code_cells(notebook)]


def hash_of(sources: Sequence[str]) -> str:
    """Says which sources the stored outputs are from."""
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def make_copy(folder: Path) -> None:
    """Put into a folder what the notebook finds in a clone: real files, and an empty docs."""
    for script in ROOT.glob("*.py"):
        shutil.copy2(script, folder)
    for name in IN_COPY:
        shutil.copytree(ROOT / name, folder / name)
    (folder / NOTEBOOK.parent.name).mkdir()


def run_cells(sources: Sequence[str], folder: Path) -> list[Outputs]:
    """Run cells in a new process in docs of a copy; the outputs of each.

    UserError with the traceback of the first cell that fails.
    """
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/notebook_cells.py")],
        input=json.dumps(sources),
        cwd=folder / NOTEBOOK.parent.name,
        env=environment_of_child(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise UserError(f"{NOTEBOOK}: a cell fails\n{done.stderr}")
    return json.loads(done.stdout)


def with_outputs(notebook: Notebook, outputs: Sequence[Outputs]) -> str:
    """The notebook's text with these outputs, and the hash of the sources that they are from."""
    for number, (cell, own) in enumerate(zip(code_cells(notebook), outputs, strict=True), start=1):
        cell["execution_count"] = number
        cell["outputs"] = own
    notebook["metadata"][OWN] = {"outputs_of": hash_of(sources_of(notebook))}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def printed(outputs: Outputs) -> str:
    """What a cell printed."""
    streams = [output for output in outputs if output["output_type"] == "stream"]
    return "".join(line for stream in streams for line in stream["text"])


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="store the outputs in the notebook")
    given = parser.parse_args(argv)
    notebook = read_notebook()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_copy(folder)
        outputs = run_cells(sources_of(notebook), folder)
    if given.write:
        write_text(NOTEBOOK, with_outputs(notebook, outputs))
        return 0
    for own in outputs:
        print(printed(own))
    return 0


if __name__ == "__main__":
    sys.exit(main())
