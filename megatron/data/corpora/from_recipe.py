"""A corpus whose text is downloaded as its recipe says, or found in a folder."""

import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megatron.data.corpora.corpus import Followed
from megatron.data.corpora.download import DownloadFault, Patience, Remote
from megatron.data.corpora.recipe import Recipe, identity
from megatron.data.corpora.shape import articles, cut
from megatron.data.corpora.sources import Local, Source, matching
from megatron.data.readers.files import Files, Keep
from megatron.data.readers.unpack import Limits
from megatron.errors import UserError, did_you_mean
from megatron.files import sha256_of

log = logging.getLogger(__name__)

DOWNLOADS = "download"  # the folder in -d that keeps what was downloaded


class Wishes(NamedTuple):
    """What the user asks for.

    from_dir: take files from here, and download nothing; part: one of the recipe's sets
    documents: take so many at most, and download no more files than they need
    skip_bad: count damaged entries, which are errors otherwise
    """

    from_dir: Path | None = None
    part: str | None = None
    documents: int | None = None
    skip_bad: bool = False


class FromRecipe:
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
        patience: Patience | None = None,
    ) -> None:
        self.recipe_name = name
        self.recipe = recipe
        self.downloads = data_dir / DOWNLOADS
        self.wishes = wishes or Wishes()
        self.limits = limits
        self.patience = patience
        self.name = name
        self.keep = _keep(name, recipe, self.wishes.part)
        self.to_train_on: int | None = None
        self.about: dict[str, Any] = {"recipe": identity(name)}
        if self.wishes.part:
            self.name = f"{name}-{re.sub(r'[^A-Za-z0-9.]+', '_', self.wishes.part).strip('_')}"
            self.about["set"] = self.wishes.part
        if self.wishes.skip_bad:
            self.about["skip_bad"] = True
        if self.wishes.documents:
            self.about["documents_limit"] = self.wishes.documents
        self._files: list[Path] | None = None  # all that are read
        self._readers: list[Files] = []
        self._taken = 0  # documents

    @property
    def skipped(self) -> int:
        """Damaged entries that the readers left out."""
        return sum(reader.skipped for reader in self._readers)

    def documents(self) -> Iterator[str]:
        """The text of every document; files are downloaded before they are read."""
        self._readers = []
        self._taken = 0
        for text in itertools.islice(self._shaped(self._texts()), self.wishes.documents):
            self._taken += 1
            yield text

    def sources(self) -> list[dict[str, Any]]:
        """Path, bytes and sha256 of each file that was read."""
        if not self._readers and self.wishes.documents is not None:
            for _ in self.documents():  # which files the limit needs is known afterwards
                pass
        readers = self._readers or [self._reader(self._paths())]
        return [entry for reader in readers for entry in reader.sources()]

    def is_here(self) -> bool:
        """Whether `sources` can be said without a download."""
        if self.wishes.from_dir is not None:
            return True
        return any(Local(source, self.downloads).is_whole() for source in self.recipe.sources)

    def identity(self) -> Any:
        """Of all files: their addresses, or their places, sizes and times."""
        if self._is_limited:
            _, remotes = self._chosen
            return [[one.address, one.bytes, one.sha256] for one in remotes]
        facts = [(path, path.stat()) for path in self._paths()]
        return [[str(path), fact.st_size, fact.st_mtime_ns] for path, fact in facts]

    def fraction(self) -> float | None:
        """The share of the documents, or of the files, that was read."""
        if self.wishes.documents:
            return self._taken / self.wishes.documents
        reader = self._readers[-1] if self._readers else None
        return reader.fraction() if isinstance(reader, Followed) else None

    @property
    def skips(self) -> dict[str, int]:
        """What the readers left out, by reason."""
        found: Counter[str] = Counter()
        for reader in self._readers:
            found.update(reader.skips if isinstance(reader, Followed) else {})
        return dict(found)

    @property
    def _is_limited(self) -> bool:
        """Whether files are downloaded one by one."""
        folder = self.wishes.from_dir
        return self.wishes.documents is not None and folder is None and not self.recipe.cut_bytes

    def _texts(self) -> Iterator[str]:
        found = False
        for paths in self._groups():
            reader = self._reader(paths)
            self._readers.append(reader)
            for text in reader.documents():
                found = True
                yield text
        if self.keep and not found:
            raise UserError(
                f"{self.name}: no entry has {self.keep.value} under {self.keep.key} - these are"
                " other files than the recipe's; prepare files that hold this corpus alone with"
                f" --input FILES --name {self.name}"
            )

    def _groups(self) -> Iterator[list[Path]]:
        """Files that are read together; with a limit one by one: most are not needed."""
        if self._is_limited:
            yield from self._one_by_one()
        elif self.wishes.documents is not None:
            yield from ([path] for path in self._paths())
        else:
            yield self._paths()

    def _reader(self, paths: Sequence[Path]) -> Files:
        return Files(
            self.name,
            paths,
            self.recipe.text_key,
            self.limits,
            self.keep,
            skip_bad=self.wishes.skip_bad,
        )

    def _shaped(self, texts: Iterator[str]) -> Iterator[str]:
        if self.recipe.article is None:
            return texts
        return articles(texts, self.recipe.article)

    def _paths(self) -> list[Path]:
        """All files of the corpus, on this machine."""
        if self._files is None:
            folder = self.wishes.from_dir
            paths = at_hand(self.recipe_name, self.recipe, folder) if folder else self._download()
            if self.recipe.cut_bytes:
                # Not beside the archive, whose folder may be the user's own.
                paths = cut(paths[0], self.recipe.cut_bytes, self.downloads / self.recipe_name)
            self._files = paths
        return self._files

    def _download(self) -> list[Path]:
        """The files of the first source that can be used."""
        reasons = []
        for source in self.recipe.sources:
            try:
                return Local(source, self.downloads, self.patience).all_files(self.name)
            except DownloadFault as fault:
                reasons.append(self._next(source, fault))
        raise self._none_left(reasons)

    @cached_property
    def _chosen(self) -> tuple[Local, list[Remote]]:
        """The first source whose first file can be had, and all that it lists.

        It stays the only one: another may have its documents in another order.
        """
        reasons = []
        for source in self.recipe.sources:
            local = Local(source, self.downloads, self.patience)
            try:
                remotes = local.listing()
                local.one_file(self.name, remotes[0])
                return local, remotes
            except DownloadFault as fault:
                reasons.append(self._next(source, fault))
        raise self._none_left(reasons)

    def _one_by_one(self) -> Iterator[list[Path]]:
        """The files of the chosen source, each downloaded when it is asked for."""
        local, remotes = self._chosen
        for remote in remotes:
            try:
                path = local.one_file(self.name, remote)
            except DownloadFault as fault:
                raise self._none_left([f"{local.source.title}: {fault}"]) from None
            yield [path]

    def _next(self, source: Source, fault: DownloadFault) -> str:
        """Why a source cannot be used; the log says it where another source follows."""
        reason = str(fault)
        if source.title not in reason:
            reason = f"{source.title}: {reason}"
        if source != self.recipe.sources[-1]:
            log.warning("%s: the next source is taken: %s", self.name, reason)
        return reason

    def _none_left(self, reasons: Sequence[str]) -> UserError:
        numbered = "; ".join(f"({number}) {reason}" for number, reason in enumerate(reasons, 1))
        return UserError(
            f"{self.name}: no source can be used: {numbered} - start again where there is a network"
            " (what came is kept), or take files at hand: python prepare_data.py"
            f" {self.recipe_name} --from-dir DIR, with {_wanted(self.recipe)} in it"
        )


def at_hand(name: str, recipe: Recipe, folder: Path) -> list[Path]:
    """The files of a corpus in a folder; UserError where they are not there, or not all or others.

    Files under the names of a source go first, then those of `at_hand`.
    """
    if not folder.is_dir():
        raise UserError(f"--from-dir: {folder} is no folder - give the one with the files")
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    files = {relative: path for relative, path in files.items() if path.is_file()}
    for source in recipe.sources:
        found = _of_source(source, files)
        if not found:
            continue
        count = source.files_expected
        if count not in (None, len(found)):
            raise UserError(
                f"--from-dir: {folder} has {len(found)} of the {count} files of {name} - get the"
                f" others, or prepare these as what they are: --input {folder} --name {name}-part"
            )
        for relative in found:
            _check_sum(files[relative], source)
        return [files[relative] for relative in found]
    others = matching(files, recipe.at_hand)
    if not others:
        raise UserError(
            f"--from-dir: {folder} has no files of {name}, which are {_wanted(recipe)} - look for"
            f" them there, or prepare your own text: --input {folder} --name {name}"
        )
    log.warning(
        "%s: takes %d files whose names fit, from %s to %s; the recipe cannot check them",
        *(name, len(others), files[others[0]], files[others[-1]]),
    )
    return [files[relative] for relative in others]


def _of_source(source: Source, files: Iterable[str]) -> list[str]:
    """The files of a folder that a source would have brought, with its folders or without."""
    names = [url.rpartition("/")[2] for url in source.urls] or source.files
    return matching(files, names)


def _check_sum(path: Path, source: Source) -> None:
    known = source.sha256
    if known and sha256_of(path) != known:
        raise UserError(
            f"--from-dir: {path} has another sha256 than the file of the recipe ({known[:12]}…) -"
            " copy it again"
        )


def _wanted(recipe: Recipe) -> str:
    names: list[str] = []
    for source in recipe.sources:
        names += [url.rpartition("/")[2] for url in source.urls] or source.files
    shown = list(dict.fromkeys([*names, *recipe.at_hand]))
    return " or ".join(shown[:4])


def _keep(name: str, recipe: Recipe, part: str | None) -> Keep | None:
    """Which entries belong to the corpus, or to a part of it."""
    if part is None:
        return next((Keep(key, value) for key, value in recipe.keep.items()), None)
    if recipe.sets is None:
        raise UserError(f"--set: {name} has no parts to pick - leave it away")
    if part not in recipe.sets.values:
        hint = did_you_mean(part, recipe.sets.values)
        raise UserError(
            f"--set: {name} has no part {part!r} - {hint + ' ' if hint else ''}Known are"
            f" {', '.join(recipe.sets.values)}"
        )
    return Keep(recipe.sets.key, part)
