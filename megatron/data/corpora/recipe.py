"""A recipe: what a corpus is and where its text comes from, as configs/corpora/NAME.yml says it."""

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from megatron.data.corpora.environment import Environment, Package
from megatron.data.corpora.sources import Source
from megatron.errors import UserError
from megatron.files import ROOT, sha256_of

RECIPES = ROOT / "configs" / "corpora"


class Sets(BaseModel):
    """Parts of a corpus that `--set` picks: entries with a value under a key of JSON lines."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    values: list[str]


class Recipe(BaseModel):
    """The contents of a recipe's file.

    about: what the corpus is; is_not: what it could be taken for, and is not
    size: how large, in words, where that was looked up
    documents, text_bytes: of all text; None where nothing was looked up
    packages: installed packages whose source is the corpus
    sources: places that offer it, the best first
    at_hand: patterns of files that --from-dir takes where it does not have a source's own
    text_key: what holds the text; keep: only entries with this value under this key
    sets: parts that can be picked; article: a row that begins a document, where rows are lines
    cut_bytes: the lengths of the documents into which the one text is cut
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str
    is_not: str = ""
    licence: str
    size: str = "not looked up"
    documents: int | None = None
    text_bytes: int | None = None
    packages: dict[str, Package] = {}
    sources: list[Source] = []
    at_hand: list[str] = []
    text_key: str = "text"
    keep: dict[str, str] = {}
    sets: Sets | None = None
    article: str | None = None
    cut_bytes: list[int] = []

    @field_validator("article")
    @classmethod
    def _is_an_expression(cls, text: str | None) -> str | None:
        try:
            re.compile(text or "")
        except re.error as fault:
            raise ValueError(f"is no regular expression ({fault})") from None
        return text


def recipe_path(name: str) -> Path:
    return RECIPES / f"{name}.yml"


def recipe_names() -> list[str]:
    """The corpora that have a recipe."""
    return sorted(path.stem for path in RECIPES.glob("*.yml"))


def read_recipe(name: str) -> Recipe:
    """The recipe of a name; UserError for a file that is none."""
    # Here, because torch comes with them: a second that text without a recipe need not wait.
    from megatron.config.messages import lines
    from megatron.config.yaml_files import read_file

    path = recipe_path(name)
    try:
        recipe = Recipe.model_validate(read_file(path))
        if bool(recipe.packages) == bool(recipe.sources):
            raise ValueError(f"{path}: needs packages or sources")
        if len(recipe.keep) > 1:
            raise ValueError(f"{path}: keep takes one key")
    except ValueError as fault:
        reason = str(fault)
        if isinstance(fault, ValidationError):
            reason = f"{path}: " + "; ".join(line for _, _, line in lines(Recipe, fault))
        raise UserError(f"{reason} - mend the recipe") from None
    return recipe


def identity(name: str) -> dict[str, str]:
    """What PREFIX.json says of a recipe: its name and the sha256 of its file."""
    return {"name": name, "sha256": sha256_of(recipe_path(name))}


def corpus_of(name: str) -> Environment:
    """The corpus of installed packages that a recipe describes."""
    return Environment(name, read_recipe(name).packages)
