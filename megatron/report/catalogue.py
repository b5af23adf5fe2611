"""docs/positions.md, the pages of its families and the atlas, made from the registry and rows.

An encoding's docstring begins with a phrase for the table, a colon and the formula. Its last lines,
`option: meaning`, explain the options that no class before it explains.
"""

import inspect
import math
import re
import sys
from contextlib import suppress
from pathlib import Path

import pandas as pd
import torch
from jinja2 import Environment, FileSystemLoader

from megatron.config import document
from megatron.config.yaml_files import read_file
from megatron.errors import UserError
from megatron.files import ROOT, write_text
from megatron.positions import ALIASES, REGISTRY, Position, Shape, build, options_of
from megatron.report.curves import write
from megatron.report.encoding_figures import Panel, draw, panels
from megatron.results.atlas import atlas_rows, standings
from megatron.results.papers import published

PAGE = ROOT / "docs" / "positions.md"
FOLDER = ROOT / "docs" / "positions"
ATLAS = {".md": ROOT / "docs" / "atlas.md", ".html": ROOT / "docs" / "atlas_table.html"}
COSTS = ROOT / "docs" / "performance" / "encodings.csv"
SHAPE = Shape(heads=12, head_dim=64, hidden=768, train_length=512)
LENGTH = 16384
PAPER = re.compile(r"(arXiv\s+|(?<=\())(\d{4}\.\d{5})\b")
MEANING = re.compile(r"^(\w+(?:, \w+)*): (.*(?:\n    .*)*)\n?", re.MULTILINE)
"""The names of options in a docstring, and what they mean: it may go on in indented lines."""

FAMILIES = {
    "rotary": ("Rotary and its relatives", "rotary rope_pp xpos fope pope"),
    "distance": (
        "Biases by distance",
        "alibi ape_decay bam fire sandwich scale_invariant scaled_distance t5",
    ),
    "kerple": ("KERPLE's kernels", "kerple"),
    "mep": ("MEP's mixtures", "mep"),
    "absolute": ("Positions added to the embeddings, or none", "absolute abacus"),
    "content": (
        "Positions that depend on the text",
        "cable carope cope dape fox grape path repo selective_rope stick_breaking wall",
    ),
    "other": ("Combinations, and scores by the number of keys", "randomized ssmax sum"),
}
"""Title of each family, and its files in megatron/positions."""

GENERATED = (
    "<!-- From here on `make docs` writes this page, from the docstrings in megatron/positions. -->"
)


def page() -> str:
    """The whole text of docs/positions.md: what people wrote, then a table for each family."""
    written, _, _ = PAGE.read_text(encoding="utf-8").partition(GENERATED)
    return f"{written}{GENERATED}\n{rendered('positions.jinja')}"


def family_page(family: str) -> str:
    """The page of a family, with everything about each of its encodings."""
    return PAPER.sub(
        r"[arXiv \2](https://arxiv.org/abs/\2)",
        rendered("family.jinja", family=family, aliases=ALIASES),
    )


def configured(name: str) -> Position | None:
    """The encoding with the options of its file in configs/pos_emb; None for another name."""
    if name not in REGISTRY:
        return None
    options = read_file(ROOT / "configs" / "pos_emb" / f"{name}.yml").get("pos_emb_args") or {}
    return build(name, SHAPE, **options)


def atlas() -> dict[str, str]:
    """The text of the atlas's page in each form, by the file's ending."""
    costs = pd.read_csv(COSTS, index_col="pos_emb", dtype=str, keep_default_na=False)
    values = {
        "atlas": standings(atlas_rows()),
        "costs": costs.to_dict("index"),
        "published": published,
        "log": math.log,
    }
    return {ending: rendered(f"atlas{ending}.jinja", **values) for ending in ATLAS}


def shares_texts(position: Position) -> bool:
    """Whether ranks can share a text."""
    with suppress(UserError):
        position.check_parts()
        return True
    return False


def rendered(template: str, **values: object) -> str:
    """A template of this folder, which calls the functions of this module."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True)
    return environment.get_template(template).render(globals() | values)


def members(family: str) -> list[str]:
    _, files = FAMILIES[family]
    return [name for name in sorted(REGISTRY) if file_of(name) in files.split()]


def family_of(name: str) -> str:
    return next(family for family in FAMILIES if name in members(family))


def file_of(name: str) -> str:
    """The file in megatron/positions that defines an encoding, without its ending."""
    return REGISTRY[name].__module__.split(".")[-1]


def phrase_of(name: str) -> str:
    """What the docstring says before the formula and the paper."""
    phrase, *_ = re.split(r"[:.;]\s| \(", text_of(name))
    return phrase


def source(name: str) -> str:
    """A link to the paper that the class names first, else to that of its file; or nothing."""
    encoding = REGISTRY[name]
    paper = PAPER.search(f"{encoding.__doc__} {sys.modules[encoding.__module__].__doc__}")
    return paper.expand(r"[\2](https://arxiv.org/abs/\2)") if paper else ""


def text_of(name: str) -> str:
    """The docstring of an encoding without the lines about its options."""
    return MEANING.sub("", inspect.cleandoc(REGISTRY[name].__doc__ or "")).strip()


def learned(position: Position) -> str:
    """How many numbers an encoding learns."""
    return f"{sum(parameter.numel() for parameter in position.parameters()):,}"


def meanings_of_options(name: str) -> dict[str, str]:
    """What each option means, by the docstring of the class or of one that it extends."""
    meanings: dict[str, str] = {}
    for part in reversed(REGISTRY[name].__mro__):
        for names, text in MEANING.findall(inspect.cleandoc(part.__doc__ or "")):
            meanings |= dict.fromkeys(names.split(", "), document.one_line(text))
    return meanings


def example(name: str) -> Position | None:
    """The encoding with its defaults and the first values of seed 0, if options have defaults."""
    if any(option.default is option.empty for option in options_of(name).values()):
        return None
    torch.manual_seed(0)
    return build(name, SHAPE).eval()


def drawn(name: str, length: int) -> list[Panel]:
    """What the picture of an encoding shows; empty if it has no picture."""
    position = example(name)
    return panels(position, length) if position else []


def renew() -> None:
    """Write the pages and the pictures; delete pictures of encodings that no longer exist."""
    write_text(PAGE, page())
    for ending, text in atlas().items():
        write_text(ATLAS[ending], text)
    for family in FAMILIES:
        write_text(FOLDER / f"{family}.md", family_page(family))
    for path in FOLDER.glob("*.svg"):
        path.unlink()
    for name in REGISTRY:
        if shown_panels := drawn(name, LENGTH):
            write(draw(shown_panels, name), FOLDER / f"{name}.svg")
