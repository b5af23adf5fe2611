"""The Python files that an exported model carries: sources of ours, with imports made relative.

transformers copies files that lie in one folder and import each other as `from .name import x`. So
megatron/positions/base.py becomes positions_base.py, and nothing is written a second time.
"""

import ast
import sys
from functools import cache
from pathlib import Path

from megatron.config import Config
from megatron.config.config import COPY
from megatron.errors import UserError
from megatron.files import ROOT
from megatron.model import GPT
from megatron.positions import REGISTRY, Position, fingerprint

MODELING = "megatron.interop.modeling_positions_gpt"
POSITIONS = "megatron.positions"
COPIED = (POSITIONS, "megatron.attention", "megatron.model", "megatron.errors", MODELING)
"""Packages and modules that an export may copy."""
KNOWN = {"torch", "transformers"} | sys.stdlib_module_names
USER_MODULE = "pos_emb_file_"  # what the names of the modules of users' files begin with
USER_SOURCE = "user_encoding.py"


def sources(model: GPT, config: Config) -> dict[str, str]:
    """Text by file name of all that the model needs beside torch and transformers.

    Raises UserError if a user's file imports what cannot be copied.
    """
    # The modules that define or register the model's encodings, and those inside them.
    classes = {type(part) for part in model.positions.modules() if isinstance(part, Position)}
    encodings = {encoding.__module__ for encoding in classes}
    for file in sorted(path_of(POSITIONS).parent.glob("*.py")):
        registered = registered_in(file.read_text(encoding="utf-8"))
        if any(REGISTRY.get(name) in classes for name in registered):
            encodings.add(f"{POSITIONS}.{file.stem}")
    ours = {name for name in encodings if not name.startswith(USER_MODULE)}
    registering = {file_of(name) for name in ours}

    files = {}
    waiting = [MODELING, *ours]
    if ours != encodings and config.pos_emb_code is not None:
        registering.add(USER_SOURCE)
        text = config.pos_emb_code
        files[COPY] = text  # for reading the folder back: naming this file allows to run it
        files[USER_SOURCE], imported = relative(
            text, f"pos_emb_file: {config.position.pos_emb_file}"
        )
        waiting += imported
    while waiting:
        name = waiting.pop()
        if file_of(name) not in files:
            text = path_of(name).read_text(encoding="utf-8")
            files[file_of(name)], imported = relative(text, name)
            waiting += imported

    lines = ["", "# The encodings of this model register themselves."]
    for file in sorted(registering):
        name = file.removesuffix(".py")
        lines.append(f"from .{name} import __doc__ as _{name}  # noqa: E402, F401")
    # transformers remembers one class of models for each class of configurations, and knows these
    # by the name of the folder and the text of their file. So of two folders with one name, the
    # second would be loaded with the code of the first, if the text were the same.
    everything = "".join(f"{name}\n{files[name]}" for name in sorted(files))
    lines.append(f'CODE = "{fingerprint(everything)[:12]}"  # of all files')
    files[file_of(MODELING)] += "\n".join([*lines, ""])
    return files


def file_of(module: str) -> str:
    """megatron.positions.base -> positions_base.py"""
    inner = module.removeprefix("megatron.").removeprefix("interop.")
    return inner.replace(".", "_") + ".py"


def path_of(module: str) -> Path:
    """The file of a module of ours, or of a package's own code."""
    place = ROOT.joinpath(*module.split("."))
    package = place / "__init__.py"
    return package if package.exists() else place.with_suffix(".py")


@cache
def registered_in(text: str) -> tuple[str, ...]:
    """The names in a source's calls of register("name")."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "register" and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant):
                found.append(str(first.value))
    return tuple(found)


@cache
def defining(module: str, name: str) -> str:
    """The module that a name comes from, which a package may take from elsewhere."""
    path = path_of(module)
    if path.name != "__init__.py":
        return module
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [alias.asname or alias.name for alias in node.names]
            if name in names:
                return node.module
    is_module = path.with_name(f"{name}.py").exists()
    return f"{module}.{name}" if is_module else module


@cache
def relative(text: str, described: str) -> tuple[str, tuple[str, ...]]:
    """A source in which imports of this package became relative ones, and the modules it imports.

    described: for messages; raises UserError for imports that have no relative form
    """
    lines = text.splitlines(keepends=True)
    imported: list[str] = []
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    for node in sorted(nodes, key=lambda node: -node.lineno):
        indent = " " * node.col_offset
        place = slice(node.lineno - 1, node.end_lineno)
        named = [alias.name for alias in node.names]
        module = node.module or "" if isinstance(node, ast.ImportFrom) else named[0]
        top = module.split(".")[0]
        if top != "megatron":
            if isinstance(node, ast.Import) and top not in KNOWN:
                # transformers asks for all packages that are imported outside a try.
                statement = "".join(lines[place]).strip()
                lines[place] = [f"try:\n    {statement}\n", "except ImportError:\n    raise\n"]
            continue
        if isinstance(node, ast.Import) or "*" in named:
            raise UserError(
                f"{described}: line {node.lineno} imports in a way that an exported file cannot -"
                " write `from megatron.positions import NAME`"
            )
        statements: dict[str, list[str]] = {}
        for alias in node.names:
            source = defining(module, alias.name)
            inside = source in COPIED or source.startswith(tuple(f"{one}." for one in COPIED))
            if not inside or not path_of(source).exists():
                raise UserError(
                    f"{described}: line {node.lineno} imports {alias.name} from {module}, which an"
                    " exported file cannot take along - import from megatron.positions and torch"
                    " alone"
                )
            imported.append(source)
            renamed = f" as {alias.asname}" if alias.asname else ""
            name = file_of(source).removesuffix(".py")
            statements.setdefault(name, []).append(alias.name + renamed)
        lines[place] = [
            f"{indent}from .{name} import {', '.join(names)}\n"
            for name, names in statements.items()
        ]
    return "".join(lines), tuple(imported)
