"""Run the cells of a notebook in this process, without Jupyter.

python tools/notebook_cells.py < sources.json > outputs.json

Reads the sources of code cells as a JSON list and writes a list with the outputs of each, in the
form of nbformat 4. A cell that fails ends it: its traceback goes to standard error, status 1.
"""

import ast
import base64
import json
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

from megatron.cli_errors import guarded


def run_cell(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """What a cell prints, and the value of its last line where that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    place = f"<cell {number}>"
    printed = StringIO()
    value = None
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            exec(compile(tree, place, "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), place, "eval"), names)
    except Exception:
        sys.stderr.write(printed.getvalue())
        raise
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    if value is not None:
        shown = {"output_type": "execute_result", "execution_count": number, "metadata": {}}
        outputs.append(shown | {"data": data_of(value)})
    return outputs


def data_of(value: Any) -> dict[str, Any]:
    """What Jupyter shows of a value: its text, and its picture if it has one."""
    data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    picture = getattr(value, "_repr_png_", None)
    if picture is not None:
        data["image/png"] = base64.b64encode(picture()).decode("ascii")
    return data


@guarded
def main() -> int:
    sources = json.load(sys.stdin)
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for number, source in enumerate(sources, start=1):
        try:
            outputs.append(run_cell(source, names, number))
        except Exception:
            traceback.print_exc()
            return 1
    json.dump(outputs, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
