"""The Python files that an exported model carries: sources of ours, with imports made relative.

transformers copies files that lie in one folder and import each other as `from .name import x`. So
megatron/positions/base.py becomes positions_base.py, and nothing is written a second time.
"""

import re
from pathlib import Path

from megatron.config import Config
from megatron.errors import UserError
from megatron.files import ROOT
from megatron.layer_kinds import Layer
from megatron.model import GPT
from megatron.positions import Position, fingerprint

MODELING = "megatron.interop.modeling_positions_gpt"
COPIED = re.compile(
    r"megatron\.(positions|attention|model|hybrids|layer_kinds|errors|interop\.modeling_\w+)(\.|$)"
)
"""Packages and modules that an export may copy."""
USER_MODULE = "pos_emb_file_"  # the beginning of the names of users' modules
USER_SOURCE = "user_encoding.py"
IMPORT = re.compile(r"^( *)from (megatron[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)
NAME = re.compile(r"(\w+)(?: as \w+)?")
# transformers asks for all packages that are imported outside a try.
ASKED_FOR = re.compile(r"^import triton.*$", re.MULTILINE)
IF_INSTALLED = "try:\n    \\g<0>\nexcept ImportError:\n    raise"


def sources(model: GPT, config: Config) -> dict[str, str]:
    """Text by file name of all that the model needs beside torch and transformers.

    Raises UserError if a user's file imports what cannot be copied.
    """
    kinds = (Position, Layer)
    encodings = {type(part).__module__ for part in model.modules() if isinstance(part, kinds)}
    ours = {name for name in encodings if not name.startswith(USER_MODULE)}
    for name in ours:
        if not name.startswith("megatron."):
            raise UserError(f"{name}: is an installed package, which an exported file cannot take")
    registering = {file_of(name) for name in ours}
    files = {}
    waiting = [MODELING, *ours]
    if ours != encodings and config.pos_emb_code is not None:
        registering.add(USER_SOURCE)
        where = f"pos_emb_file: {config.position.pos_emb_file}"
        files[USER_SOURCE], imported = relative(config.pos_emb_code, where)
        waiting += imported
    while waiting:
        name = waiting.pop()
        if file_of(name) not in files:
            files[file_of(name)], imported = relative(path_of(name).read_text("utf-8"), name)
            waiting += imported

    lines = ["", "# The encodings and layers of this model register themselves."]
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


def defining(module: str, name: str) -> str:
    """The module that a name comes from, which a package may take from elsewhere."""
    path = path_of(module)
    if path.name != "__init__.py":
        return module
    for _, source, names in IMPORT.findall(path.read_text(encoding="utf-8")):
        if name in re.findall(r"\w+", names):
            return source
    return f"{module}.{name}" if path.with_name(f"{name}.py").exists() else module


def relative(text: str, described: str) -> tuple[str, list[str]]:
    """A source in which imports of this package became relative ones, and the modules it imports.

    described: for messages; raises UserError for imports that have no relative form
    """
    imported: list[str] = []

    def made_relative(statement: re.Match[str]) -> str:
        indent, module, names = statement.groups()
        lines = []
        without_comment, _, _ = names.partition("#")
        for name in NAME.finditer(without_comment):
            source = defining(module, name[1])
            is_ours = COPIED.match(source) and path_of(source).exists()
            if not is_ours:
                raise UserError(
                    f"{described}: imports {name[1]} from {module}, which an exported file cannot"
                    " take along - import from megatron.positions and torch alone"
                )
            imported.append(source)
            stem = file_of(source).removesuffix(".py")
            lines.append(f"{indent}from .{stem} import {name[0]}")
        return "\n".join(lines)

    text = ASKED_FOR.sub(IF_INSTALLED, IMPORT.sub(made_relative, text))
    if re.search(r"^\s*import megatron", text, re.MULTILINE):
        raise UserError(
            f"{described}: imports in a way that an exported file cannot - write"
            " `from megatron.positions import NAME`"
        )
    return text, imported
