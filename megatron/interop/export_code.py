"""The Python files that an exported model carries: sources of ours, with imports made relative.

transformers copies files that lie in one folder and import each other as `from .name import x`. So
megatron/positions/base.py becomes positions_base.py, and nothing is written a second time.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from megatron.config import Config
from megatron.config.user_file import COPY
from megatron.errors import UserError
from megatron.files import ROOT
from megatron.model import GPT
from megatron.positions import REGISTRY, Position, fingerprint

PACKAGE = "megatron"
EXPORTED = "megatron.interop.exported"
MODELING = f"{EXPORTED}.modeling_positions_gpt"
CONFIGURATION = f"{EXPORTED}.configuration_positions_gpt"
POSITIONS = "megatron.positions"
COPIED = (POSITIONS, "megatron.attention", "megatron.model", EXPORTED)
"""Packages whose modules an export may copy, besides megatron.errors."""
ERRORS = "megatron.errors"
USER_MODULE = "pos_emb_file_"  # what the names of the modules of users' files begin with
USER_SOURCE = "user_encoding.py"


def sources(model: GPT, config: Config) -> dict[str, str]:
    """Text by file name of all that the model needs beside torch and transformers.

    UserError for a user's file that imports what cannot be copied.
    """
    encodings = _modules_of(model)
    waiting = [MODELING, *(name for name in encodings if not name.startswith(USER_MODULE))]
    files = {}
    is_users = any(name.startswith(USER_MODULE) for name in encodings)
    if is_users and config.pos_emb_code is not None:
        text = config.pos_emb_code
        files[COPY] = text  # for reading the folder back: naming this file allows to run it
        files[USER_SOURCE] = _relative(text, f"pos_emb_file: {config.position.pos_emb_file}")
        waiting += _imported(text)
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        text = _text(name)
        waiting += _imported(text)
        files[file_of(name)] = _relative(text, name)
    names = [USER_SOURCE if name.startswith(USER_MODULE) else file_of(name) for name in encodings]
    files[file_of(MODELING)] += _registering(names)
    files[file_of(CONFIGURATION)] += _naming(files)
    return files


def file_of(module: str) -> str:
    """megatron.positions.base -> positions_base.py"""
    inner = module.removeprefix(f"{EXPORTED}.").removeprefix(f"{PACKAGE}.")
    return inner.replace(".", "_") + ".py"


def _modules_of(model: GPT) -> list[str]:
    """The modules that define or register the model's encodings, and those inside them."""
    classes = {type(part) for part in model.positions.modules() if isinstance(part, Position)}
    modules = {encoding.__module__ for encoding in classes}
    for file in sorted(ROOT.joinpath(*POSITIONS.split(".")).glob("*.py")):
        registered = _registered_in(file.read_text(encoding="utf-8"))
        if any(REGISTRY.get(name) in classes for name in registered):
            modules.add(f"{POSITIONS}.{file.stem}")
    return sorted(modules)


@cache
def _registered_in(text: str) -> tuple[str, ...]:
    """The names in a source's calls of register("name")."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "register" and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant):
                found.append(str(first.value))
    return tuple(found)


def _registering(files: Iterable[str]) -> str:
    """Lines for the end of the modeling file: an import registers the encodings of a file."""
    lines = ["", "# The encodings of this model register themselves."]
    for file in files:
        name = file.removesuffix(".py")
        lines.append(f"from .{name} import __doc__ as _{name}  # noqa: E402, F401")
    return "\n".join([*lines, ""])


def _naming(files: Mapping[str, str]) -> str:
    """Lines for the end of the configuration's file: they differ where any of the code does.

    transformers remembers one class of models for each class of configurations, and knows these by
    the name of the folder and the text of their file. So of two folders with one name, the second
    would be loaded with the code of the first.
    """
    text = "".join(f"{name}\n{files[name]}" for name in sorted(files))
    return f'\nCODE = "{fingerprint(text)[:12]}"  # of all files\n'


def _text(module: str) -> str:
    """The source of a module of ours."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return path.read_text(encoding="utf-8")


@cache
def _imports(text: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Imports of this package, wherever they stand."""
    found: list[ast.Import | ast.ImportFrom] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            if _is_ours(node.module or ""):
                found.append(node)
        elif isinstance(node, ast.Import) and any(_is_ours(alias.name) for alias in node.names):
            found.append(node)
    return tuple(found)


def _is_ours(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


def _imported(text: str) -> list[str]:
    """Modules of ours that a source imports, those of a package by what they define."""
    found = []
    for node in _imports(text):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [_defining(node.module, alias.name) for alias in node.names]
    return found


@cache
def _defining(module: str, name: str) -> str:
    """The module from which a package takes a name; any other module is itself."""
    package = ROOT.joinpath(*module.split("."), "__init__.py")
    if not package.exists():
        return module
    for node in ast.walk(ast.parse(package.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [alias.asname or alias.name for alias in node.names]
            if name in names:
                return node.module
    return f"{module}.{name}"


def _relative(text: str, described: str) -> str:
    """A source in which imports of this package became relative ones.

    described: for messages; UserError for imports that have no relative form
    """
    lines = text.splitlines(keepends=True)
    nodes = sorted(_imports(text), key=lambda node: node.lineno, reverse=True)
    for node in nodes:
        first, end = node.lineno - 1, node.end_lineno or node.lineno
        lines[first:end] = _relative_import(node, "".join(lines[first:end]), described)
    return "".join(lines)


def _relative_import(node: ast.Import | ast.ImportFrom, text: str, described: str) -> Iterator[str]:
    """The statement again, split where its names come from several files."""
    takes_all = any(alias.name == "*" for alias in node.names)
    if isinstance(node, ast.Import) or node.module is None or takes_all:
        raise UserError(
            f"{described}: line {node.lineno} imports in a way that an exported file cannot -"
            " write `from megatron.positions import NAME`"
        )
    files = {}
    for alias in node.names:
        module = _defining(node.module, alias.name)
        if not _is_copied(module):
            raise UserError(
                f"{described}: line {node.lineno} imports {alias.name} from {node.module}, which an"
                " exported file cannot take along - import from megatron.positions and torch alone"
            )
        files[alias] = file_of(module).removesuffix(".py")
    if len(set(files.values())) == 1:
        name = next(iter(files.values()))
        yield text.replace(f"from {node.module} import", f"from .{name} import", 1)
        return
    for alias, name in files.items():
        renamed = f" as {alias.asname}" if alias.asname else ""
        yield f"{' ' * node.col_offset}from .{name} import {alias.name}{renamed}\n"


def _is_copied(module: str) -> bool:
    """Whether an export may take a module along, and there is one."""
    inside = module.startswith(tuple(f"{package}." for package in COPIED))
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return (module == ERRORS or inside) and path.exists()
