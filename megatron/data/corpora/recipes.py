"""Corpora that are known by name: each has a recipe, which is data (configs/corpora/NAME.yml)."""

import itertools
import logging
import shutil
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from megatron.data.corpora.download import DownloadFault, Remote, Source, download, fetch, matching
from megatron.data.corpora.source_code import Environment, Package, Repeats, StandardLibrary
from megatron.data.readers import Corpus, Files, Keep, Limits, files_in, files_of_part
from megatron.errors import UserError, did_you_mean
from megatron.files import ROOT, atomic_write, sha256_of
from megatron.folder_lock import owned_file
from megatron.parallel.machine import in_bytes

log = logging.getLogger(__name__)

RECIPES = ROOT / "configs" / "corpora"
GPT2 = ROOT / "configs" / "tokenizers" / "gpt2.yml"
DOWNLOADS = "download"  # the folder in -d that keeps what was downloaded
WITHOUT_RECIPE = {
    "stdlib": (StandardLibrary, "the standard library of this Python's version"),
    "repeats": (Repeats, "random words again and again, to be mixed into other text"),
}
MADE_HERE = ("environment", "pure_python", *WITHOUT_RECIPE)  # these need no download


class Recipe(BaseModel):
    """The contents of a recipe's file.

    about: what the corpus is; is_not: what it could be taken for, and is not
    size: how large, in words, where that was looked up
    documents, text_bytes: of all text; None if nothing was looked up
    packages: installed packages whose source is the corpus
    sources: places that offer it, the best first
    at_hand: patterns of files that --from-dir takes where it does not have a source's own
    text_key: what holds the text; keep: only entries with this value under this key
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

    @property
    def file_names(self) -> str:
        """Some names of its files."""
        names = [name for source in self.sources for name in source.names]
        return " or ".join(list(dict.fromkeys([*names, *self.at_hand]))[:4])


def recipe_path(name: str) -> Path:
    return RECIPES / f"{name}.yml"


def read_recipe(name: str) -> Recipe:
    """The recipe of a name; UserError for a file that is not one."""
    # Here, because torch comes with it: a second that text without a recipe need not wait.
    from megatron.config.yaml_files import read_file

    path = recipe_path(name)
    try:
        return Recipe.model_validate(read_file(path))
    except ValueError as fault:
        reason = " ".join(str(fault).split())[:300]
        raise UserError(f"{path}: {reason} - mend the recipe") from None


def corpus_names() -> list[str]:
    return sorted({*WITHOUT_RECIPE, *(path.stem for path in RECIPES.glob("*.yml"))})


def named(
    name: str,
    data_dir: Path = Path("data"),
    *,
    from_dir: Path | None = None,
    documents: int | None = None,
    limits: Limits | None = None,
) -> Corpus:
    """The corpus of a name; UserError for one that is not known.

    data_dir: where its downloads are kept
    from_dir: take files from here, and download nothing
    documents: take so many at most, and download no more files than they need
    """
    names = corpus_names()
    if name not in names:
        guess = f"{did_you_mean(name, names)} Known are {', '.join(names)}".strip()
        raise UserError(
            f"{name}: there is no corpus of this name - {guess}; for a data set of the"
            " Hugging Face hub write hf:OWNER/NAME; for"
            f" your own text use --input FILE --name {name}"
        )
    if name in MADE_HERE and (from_dir or documents):
        raise UserError(f"{name}: is made here, whole - leave --from-dir and --documents away")
    if name in WITHOUT_RECIPE:
        make, _ = WITHOUT_RECIPE[name]
        return make()
    recipe = read_recipe(name)
    if recipe.packages:
        return Environment(name, recipe.packages)
    return FromRecipe(name, recipe, data_dir, from_dir, documents, limits)


def listing() -> str:
    """One line for each corpus: its name, size, what it is, sources and whether each was tried."""
    names = corpus_names()
    width = max(map(len, names))
    lines = []
    for name in names:
        if name in WITHOUT_RECIPE:
            about = f"made here | {WITHOUT_RECIPE[name][1]} | no download"
        elif (recipe := read_recipe(name)).packages:
            size = in_bytes(sum(package.bytes for package in recipe.packages.values()))
            about = f"{size} of text, made here | {recipe.about} | no download"
        else:
            what = f"{recipe.about}; not {recipe.is_not}" if recipe.is_not else recipe.about
            sources = ", ".join(f"{source.title} ({source.tried})" for source in recipe.sources)
            about = f"{recipe.size} | {what} | {sources}"
        lines.append(f"{name:{width}} | {about}")
    return "\n".join(lines)


class FromRecipe(Files):
    """The corpus of a recipe with sources.

    data_dir: its folder `download` keeps the files, so that corpora that share them share those too
    Raises UserError: no source can be used, a wrong file, a disk that is too small.
    """

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        data_dir: Path,
        from_dir: Path | None = None,
        documents: int | None = None,
        limits: Limits | None = None,
    ) -> None:
        keep = next((Keep(key, value) for key, value in recipe.keep.items()), None)
        super().__init__(name, [], [recipe.text_key], limits, keep)
        self.recipe = recipe
        self.downloads = data_dir / DOWNLOADS
        self.from_dir = from_dir
        self.limit = documents
        self.is_here = from_dir is not None and documents is None
        self.about["recipe"] = {"name": name, "sha256": sha256_of(recipe_path(name))}
        if documents:
            self.about["documents_limit"] = documents

    def documents(self) -> Iterator[str]:
        """The text of every document; with a limit files are downloaded when they are needed."""
        yield from itertools.islice(super().documents(), self.limit)

    def needed(self) -> Iterator[Path]:
        """The files on this machine; with a limit each is downloaded when it is its turn."""
        if self.from_dir is not None:
            self.paths = self.paths or at_hand(self.name, self.recipe, self.from_dir)
            yield from super().needed()
            return
        source, remotes = self._chosen
        for remote in remotes:
            try:
                yield from download(source, [remote], self.downloads)
            except DownloadFault as fault:
                raise self._no_source([f"{source.title}: {fault}"]) from None

    @cached_property
    def _chosen(self) -> tuple[Source, Sequence[Remote]]:
        """The first source that can be used, and all that it lists.

        All of it is downloaded; with a limit the first file, and no other source is taken later:
        it may have its documents in another order.
        """
        reasons = []
        for source in self.recipe.sources:
            try:
                remotes = files_of_part(source.listing(self.downloads), self.part)
                first = remotes if self.limit is None else remotes[:1]
                download(source, first, self.downloads)
                return source, remotes
            except DownloadFault as fault:
                reasons.append(f"{source.title}: {fault}")
                log.warning("%s: a source cannot be used: %s", self.name, reasons[-1])
        raise self._no_source(reasons)

    def _no_source(self, reasons: Sequence[str]) -> UserError:
        numbered = "; ".join(f"({number}) {reason}" for number, reason in enumerate(reasons, 1))
        return UserError(
            f"{self.name}: no source can be used: {numbered} - start again where there is a network"
            " (what came is kept), or take files at hand: python prepare_data.py"
            f" {self.name} --from-dir DIR, with {self.recipe.file_names} in it"
        )


def at_hand(name: str, recipe: Recipe, folder: Path) -> list[Path]:
    """The files of a corpus in a folder; UserError if they are not there, or not all or others.

    Files under the names of a source go first, then those of `at_hand`.
    """
    files = {path.relative_to(folder).as_posix(): path for path in files_in(folder)}
    for source in recipe.sources:
        names = matching(files, source.names)
        if not names:
            continue
        count = source.count or len(source.names)
        if count != len(names):
            raise UserError(
                f"--from-dir: {folder} has {len(names)} of the {count} files of {name} - get the"
                f" others, or prepare these as what they are: --input {folder} --name {name}-part"
            )
        for path in names:
            if source.sha256 not in (None, sha256_of(files[path])):
                raise UserError(
                    f"--from-dir: {files[path]} has another sha256 than the file of the recipe"
                    f" ({str(source.sha256)[:12]}…) - copy it again"
                )
        return [files[path] for path in names]
    names = matching(files, recipe.at_hand)
    if not names:
        raise UserError(
            f"--from-dir: {folder} has no files of {name}, which are {recipe.file_names} - look for"
            f" them there, or prepare your own text: --input {folder} --name {name}"
        )
    log.warning(
        "%s: takes %d files whose names fit, from %s to %s; the recipe cannot check them",
        *(name, len(names), files[names[0]], files[names[-1]]),
    )
    return [files[path] for path in names]


def gpt2_files(data_dir: Path, from_dir: Path | None = None) -> list[Path]:
    """gpt2-vocab.json and gpt2-merges.txt in the data folder.

    from_dir: where to look instead of downloading, there or in the folder above. A file that is in
    the data folder already is used as it is, with a warning if it is another one. UserError if a
    file cannot be had.
    """
    from megatron.config.yaml_files import read_file  # here, because torch comes with it

    paths = []
    for facts in read_file(GPT2)["files"]:
        file = Remote("", facts["name"], facts["bytes"], facts["sha256"])
        path = data_dir / file.name
        paths.append(path)
        if path.is_file():
            if sha256_of(path) != file.sha256:
                log.warning("%s: is not GPT-2's own file; it is used as it is", path)
            continue
        if from_dir is None:
            reasons = []
            with owned_file(path, "-d"):
                for url in facts["urls"]:
                    try:
                        fetch(file._replace(address=url), path)
                        break
                    except DownloadFault as fault:
                        reasons.append(str(fault))
        else:
            reasons = [f"neither {from_dir} nor the folder above has GPT-2's own file"]
            folders = (from_dir, from_dir.resolve().parent)
            names = (file.name, *facts["names"])
            for copy in (folder / name for folder in folders for name in names):
                if copy.is_file() and sha256_of(copy) == file.sha256:
                    with atomic_write(path) as temporary:
                        shutil.copyfile(copy, temporary)
        if not path.is_file():
            raise UserError(
                f"{path}: cannot be had: {'; '.join(reasons)} - copy GPT-2's"
                f" {' or '.join(facts['names'])} there, give --vocab-file and --merge-file, or"
                " train a tokenizer on the text with --vocab-size"
            )
    return paths
