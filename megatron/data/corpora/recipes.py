"""Corpora that are known by name: each has a recipe, which is data (configs/corpora/NAME.yml)."""

import itertools
import logging
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron.data.corpora.download import DownloadFault, Remote, Source, download, fetch, matching
from megatron.data.corpora.source_code import Environment, Package, StandardLibrary
from megatron.data.readers import Corpus, Files, Keep, Limits
from megatron.errors import UserError, did_you_mean
from megatron.files import ROOT, atomic_write, sha256_of
from megatron.folder_lock import owned_file
from megatron.parallel.machine import in_bytes

log = logging.getLogger(__name__)

RECIPES = ROOT / "configs" / "corpora"
GPT2 = ROOT / "configs" / "tokenizers" / "gpt2.yml"
DOWNLOADS = "download"  # the folder in -d that keeps what was downloaded
MADE_HERE = ("stdlib", "environment")  # these need no download


class Sets(BaseModel):
    """Parts of a corpus that `--set` picks: entries with a value under a key of JSON lines."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    values: list[str]


class Recipe(BaseModel):
    """The contents of a recipe's file.

    about: what the corpus is; is_not: what it could be taken for, and is not
    size: how large, in words, where that was looked up
    documents, text_bytes: of all text; None if nothing was looked up
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

    @property
    def wanted(self) -> str:
        """Some names of its files."""
        names = [name for source in self.sources for name in source.names]
        return " or ".join(list(dict.fromkeys([*names, *self.at_hand]))[:4])


class Wishes(NamedTuple):
    """The part of a corpus that the user asks for.

    from_dir: take files from here, and download nothing; part: one of the recipe's sets
    documents: take so many at most, and download no more files than they need
    skip_bad: count damaged entries, which are errors otherwise
    """

    from_dir: Path | None = None
    part: str | None = None
    documents: int | None = None
    skip_bad: bool = False


def recipe_path(name: str) -> Path:
    return RECIPES / f"{name}.yml"


def read_recipe(name: str) -> Recipe:
    """The recipe of a name; UserError for a file that is not one."""
    # Here, because torch comes with it: a second that text without a recipe need not wait.
    from megatron.config.yaml_files import read_file

    path = recipe_path(name)
    try:
        recipe = Recipe.model_validate(read_file(path))
        re.compile(recipe.article or "")
    except ValidationError as fault:
        lines = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in fault.errors()]
        raise UserError(f"{path}: {'; '.join(lines)} - mend the recipe") from None
    except (ValueError, re.error) as fault:
        raise UserError(f"{path}: {fault} - mend the recipe") from None
    return recipe


def corpus_names() -> list[str]:
    return sorted({"stdlib", *(path.stem for path in RECIPES.glob("*.yml"))})


def named(
    name: str,
    data_dir: Path = Path("data"),
    wishes: Wishes | None = None,
    limits: Limits | None = None,
) -> Corpus:
    """The corpus of a name; UserError for one that is not known.

    data_dir: where its downloads are kept; wishes: what is taken of it, and from where
    """
    known = corpus_names()
    if name not in known:
        raise UserError(
            f"{name}: there is no corpus of this name - {did_you_mean(name, known)} Known are"
            f" {', '.join(known)}; for a data set of the Hugging Face hub write hf:OWNER/NAME; for"
            f" your own text use --input FILE --name {name}"
        )
    if name in MADE_HERE and wishes and any(wishes):
        raise UserError(
            f"{name}: is made from what is installed - leave --from-dir, --set, --documents"
            " and --skip-bad away"
        )
    if name == "stdlib":
        return StandardLibrary()
    recipe = read_recipe(name)
    if recipe.packages:
        return Environment(name, recipe.packages)
    return FromRecipe(name, recipe, data_dir, wishes, limits)


def listing() -> str:
    """One line for each corpus: its name, size, what it is, sources and whether each was tried."""
    width = max(map(len, corpus_names()))
    lines = []
    for name in corpus_names():
        if name == "stdlib":
            about = "made here | the source of Python's standard library | no download"
        elif (recipe := read_recipe(name)).packages:
            size = in_bytes(sum(package.bytes for package in recipe.packages.values()))
            about = f"{size} of text, made here | {recipe.about} | no download"
        else:
            sources = [f"{source.title} ({source.tried})" for source in recipe.sources]
            what = recipe.about + (f"; not {recipe.is_not}" if recipe.is_not else "")
            about = f"{recipe.size} | {what} | {', '.join(sources)}"
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
        wishes: Wishes | None = None,
        limits: Limits | None = None,
    ) -> None:
        wishes = wishes or Wishes()
        part = wishes.part
        keep = next((Keep(key, value) for key, value in recipe.keep.items()), None)
        if part is not None:
            sets = recipe.sets
            if sets is None or part not in sets.values:
                known = ", ".join(sets.values) if sets else "none"
                raise UserError(f"--set: {name} has no part {part!r} - its parts: {known}")
            keep = Keep(sets.key, part)
        super().__init__(name, [], recipe.text_key, limits, keep, skip_bad=wishes.skip_bad)
        self.recipe_name = name
        self.recipe = recipe
        self.downloads = data_dir / DOWNLOADS
        self.wishes = wishes
        self.about["recipe"] = {"name": name, "sha256": sha256_of(recipe_path(name))}
        if part is not None:
            self.name = f"{name}-{re.sub(r'[^A-Za-z0-9.]+', '_', part).strip('_')}"
            self.about["set"] = part
        if wishes.skip_bad:
            self.about["skip_bad"] = True
        if wishes.documents:
            self.about["documents_limit"] = wishes.documents

    def documents(self) -> Iterator[str]:
        """The text of every document; with a limit files are downloaded when they are needed."""
        self._read.clear()
        texts = super().documents()
        if self.recipe.article is not None:
            texts = articles(texts, self.recipe.article)
        yield from itertools.islice(texts, self.wishes.documents)

    def sources(self) -> list[dict[str, Any]]:
        """Path, bytes and sha256 of each file that was read."""
        if self.wishes.documents is not None:
            if not self._read:  # which files the limit needs is known afterwards
                for _ in self.documents():
                    pass
            self.paths = list(self._read)
        return super().sources()

    def is_here(self) -> bool:
        """Whether `sources` can be said without a download."""
        if self.wishes.from_dir is not None:
            return True
        for source in self.recipe.sources:
            folder = source.folder(self.downloads)
            remotes = source.listing(self.downloads, ask=False)
            if remotes and all((folder / remote.name).is_file() for remote in remotes):
                return True
        return False

    def identity(self) -> Any:
        """Of all files: their addresses, or their places, sizes and times."""
        return self._chosen[1] if self.wishes.from_dir is None else super().identity()

    def needed(self) -> Iterator[Path]:
        """The files on this machine; with a limit each is downloaded when it is its turn."""
        if self.paths:
            yield from self.paths
        elif self.wishes.from_dir is not None:
            self.paths = at_hand(self.recipe_name, self.recipe, self.wishes.from_dir)
            yield from self._cut(self.paths)
        else:
            source, remotes = self._chosen
            for remote in remotes:
                try:
                    paths = download(self.name, source, [remote], self.downloads)
                except DownloadFault as fault:
                    raise self._no_source([f"{source.title}: {fault}"]) from None
                yield from self._cut(paths)

    def _cut(self, paths: list[Path]) -> list[Path]:
        """The files, or the parts into which the recipe cuts their text."""
        lengths = self.recipe.cut_bytes
        if lengths:
            # Not beside the archive, whose folder may be the user's own.
            self.paths = cut(paths[0], lengths, self.downloads / self.recipe_name)
            return self.paths
        return paths

    @cached_property
    def _chosen(self) -> tuple[Source, list[Remote]]:
        """The first source that can be used, and all that it lists.

        All of it is downloaded; with a limit the first file, and no other source is taken later:
        it may have its documents in another order.
        """
        reasons = []
        for source in self.recipe.sources:
            try:
                remotes = source.listing(self.downloads)
                first = remotes if self.wishes.documents is None else remotes[:1]
                download(self.name, source, first, self.downloads)
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
            f" {self.recipe_name} --from-dir DIR, with {self.recipe.wanted} in it"
        )


def at_hand(name: str, recipe: Recipe, folder: Path) -> list[Path]:
    """The files of a corpus in a folder; UserError if they are not there, or not all or others.

    Files under the names of a source go first, then those of `at_hand`.
    """
    files = {one.relative_to(folder).as_posix(): one for one in folder.rglob("*") if one.is_file()}
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
    others = matching(files, recipe.at_hand)
    if not others:
        raise UserError(
            f"--from-dir: {folder} has no files of {name}, which are {recipe.wanted} - look for"
            f" them there, or prepare your own text: --input {folder} --name {name}"
        )
    log.warning(
        "%s: takes %d files whose names fit, from %s to %s; the recipe cannot check them",
        *(name, len(others), files[others[0]], files[others[-1]]),
    )
    return [files[path] for path in others]


def articles(rows: Iterable[str], beginning: str) -> Iterator[str]:
    """Rows joined to articles; a row that fits the expression `beginning` begins one."""
    begins = re.compile(beginning)
    article: list[str] = []
    for row in rows:
        if begins.fullmatch(row) and any(part.strip() for part in article):
            yield "".join(article)
            article = []
        article.append(row)
    if article:
        yield "".join(article)


def cut(path: Path, lengths: Sequence[int], folder: Path) -> list[Path]:
    """The one file of a zip archive, cut into text files of these bytes in a folder.

    A cut inside a character of UTF-8 moves behind it. Raises UserError for another archive.
    """
    pieces = [folder / f"{path.stem}.{number}.txt" for number in range(len(lengths))]
    sizes = [piece.stat().st_size for piece in pieces if piece.is_file()]
    if len(sizes) == len(pieces) and sum(sizes) == sum(lengths):
        return pieces
    try:
        with zipfile.ZipFile(path) as archive:
            [member] = archive.infolist()
            text = archive.read(member) if member.file_size == sum(lengths) else b""
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, zlib.error) as fault:
        raise UserError(
            f"{path}: is not a zip archive of one file ({fault}) - get it again"
        ) from None
    if len(text) != sum(lengths):
        raise UserError(
            f"{path}: does not hold {sum(lengths):,} bytes of text - it is another file than the"
            " recipe's: get it again"
        )
    start = 0
    for piece, end in zip(pieces, accumulate(lengths), strict=True):
        while end < len(text) and text[end] & 0b1100_0000 == 0b1000_0000:  # inside a character
            end += 1
        with atomic_write(piece) as temporary:
            temporary.write_bytes(text[start:end])
        start = end
    return pieces


def gpt2_files(data_dir: Path, from_dir: Path | None = None) -> list[Path]:
    """gpt2-vocab.json and gpt2-merges.txt in the data folder.

    from_dir: where to look instead of downloading, there or in the folder above. A file that is in
    the data folder already is used as it is, with a warning if it is another one. UserError if a
    file cannot be had.
    """
    from megatron.config.yaml_files import read_file  # here, because torch comes with it

    paths = []
    for known in read_file(GPT2)["files"]:
        path = data_dir / known["name"]
        paths.append(path)
        if path.is_file():
            if sha256_of(path) != known["sha256"]:
                log.warning("%s: is not GPT-2's own file; it is used as it is", path)
            continue
        reasons = []
        with owned_file(path, "-d"):
            if from_dir is None:
                for url in known["urls"]:
                    remote = Remote(url, path.name, known["bytes"], known["sha256"])
                    try:
                        fetch(remote, path)
                        break
                    except DownloadFault as fault:
                        reasons.append(str(fault))
            else:
                for folder in (from_dir, from_dir.resolve().parent):
                    for name in (known["name"], *known["names"]):
                        if (folder / name).is_file() and sha256_of(folder / name) == known[
                            "sha256"
                        ]:
                            with atomic_write(path) as temporary:
                                shutil.copyfile(folder / name, temporary)
                reasons = [f"neither {from_dir} nor the folder above has GPT-2's own file"]
        if not path.is_file():
            raise UserError(
                f"{path}: cannot be had: {'; '.join(reasons)} - copy GPT-2's"
                f" {' or '.join(known['names'])} there, give --vocab-file and --merge-file, or"
                " train a tokenizer on the text with --vocab-size"
            )
    return paths
