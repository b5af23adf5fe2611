"""Named corpora: each one has a recipe, a YAML file (configs/corpora/NAME.yml)."""

import itertools
import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel

from megatron.data.corpora.hub import asking
from megatron.data.corpora.source_code import Environment, Package, Repeats
from megatron.data.readers import Corpus, Files, files_in
from megatron.errors import UserError, did_you_mean
from megatron.files import ROOT, atomic_write, sha256_of

log = logging.getLogger(__name__)

RECIPES = ROOT / "configs" / "corpora"
MADE_HERE = ("environment", "pure_python", "repeats")  # these need no download
GPT2 = "openai-community/gpt2"
GPT2_FILES = {
    "gpt2-vocab.json": (
        "vocab.json",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
    "gpt2-merges.txt": (
        "merges.txt",
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
}
"""For GPT-NeoX's names of OpenAI's files: their names on the hub, and their sha256."""


class Recipe(BaseModel, extra="forbid", frozen=True):
    """The contents of a recipe's file.

    about: what the corpus is; is_not: what it might be confused with
    size: how large it is, in words, if we know
    packages: installed packages whose source is the corpus
    hub, files: a data set of the hub, and the patterns of its files; count: how many these are
    by_hand: a command that downloads the files into DIR, if they are not on the hub
    at_hand: patterns of files that --from-dir accepts if there are no `files`
    text_key: the key of the text; keep: use only entries with this value under this key
    """

    about: str
    is_not: str = ""
    licence: str
    size: str = "not looked up"
    packages: dict[str, Package] = {}
    hub: str | None = None
    files: list[str] = []
    count: int | None = None
    by_hand: str = ""
    at_hand: list[str] = []
    text_key: str = "text"
    keep: dict[str, str] = {}


def read_recipe(name: str) -> Recipe:
    """The recipe with a name; UserError for a file that is not a recipe."""
    # Imported here because it imports torch: text without a recipe need not wait a second.
    from megatron.config.yaml_files import read_file

    path = RECIPES / f"{name}.yml"
    try:
        return Recipe.model_validate(read_file(path))
    except ValueError as fault:
        reason = " ".join(str(fault).split())[:300]
        raise UserError(f"{path}: {reason} - fix the recipe") from None


def corpus_names() -> list[str]:
    return sorted(["repeats", *(path.stem for path in RECIPES.glob("*.yml"))])


def named(
    name: str,
    data_dir: Path = Path("data"),
    *,
    from_dir: Path | None = None,
    documents: int | None = None,
) -> Corpus:
    """The corpus with a name; UserError if there is none.

    data_dir: where its downloads are kept
    from_dir: use the files in this folder, and download nothing
    documents: use at most this many, and download no more files than they need
    """
    names = corpus_names()
    if name not in names:
        guess = f"{did_you_mean(name, names)} The corpora are {', '.join(names)}".strip()
        raise UserError(
            f"{name}: there is no corpus with this name - {guess}; for a data set on the Hugging"
            f" Face hub write hf:OWNER/NAME; for your own text use --input FILE --name {name}"
        )
    if name in MADE_HERE and (from_dir or documents):
        raise UserError(
            f"{name}: is always generated as a whole - remove --from-dir and --documents"
        )
    if name == "repeats":
        return Repeats()
    recipe = read_recipe(name)
    if recipe.packages:
        return Environment(name, recipe.packages)
    return FromRecipe(name, recipe, data_dir, from_dir, documents)


def listing() -> str:
    """One line for each corpus: its name, its size, what it is and where it comes from."""
    names = corpus_names()
    width = max(map(len, names))
    lines = []
    for name in names:
        about = "generated | random words that repeat, to be mixed into other text"
        if name != "repeats":
            recipe = read_recipe(name)
            what = f"{recipe.about}; not {recipe.is_not}" if recipe.is_not else recipe.about
            size = "made here" if recipe.packages else recipe.size
            about = f"{size} | {what}"
            if not recipe.packages:
                about += f" | {recipe.hub or 'download it yourself'}"
        lines.append(f"{name:{width}} | {about}")
    return "\n".join(lines)


class FromRecipe(Files):
    """The corpus of a recipe with files, which are downloaded unless `from_dir` has them.

    data_dir: its folder `download` keeps the files, so corpora can share them
    Raises UserError if the hub doesn't answer, or if its files differ from the recipe's.
    """

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        data_dir: Path,
        from_dir: Path | None = None,
        documents: int | None = None,
    ) -> None:
        super().__init__(name, [], [recipe.text_key], recipe.keep)
        self.recipe = recipe
        self.downloads = data_dir / "download" / (recipe.hub or name).replace("/", "--")
        self.from_dir = from_dir
        self.limit = documents
        self.is_here = from_dir is not None and documents is None
        self.about["recipe"] = {"name": name, "sha256": sha256_of(RECIPES / f"{name}.yml")}
        if documents:
            self.about["documents_limit"] = documents

    def documents(self) -> Iterator[str]:
        """The text of every document; if there is a limit, files are downloaded when they are
        needed."""
        yield from itertools.islice(super().documents(), self.limit)

    def needed(self) -> Iterable[Path]:
        """The files on this machine; if there is a limit, each is downloaded when it is needed."""
        if self.from_dir is not None:
            self.paths = self.paths or at_hand(self.name, self.recipe, self.from_dir)
            return super().needed()
        commit, names = self._listed
        paths = (self._download(name, commit) for name in names)
        return paths if self.limit else list(paths)

    @cached_property
    def _listed(self) -> tuple[str | None, Sequence[str]]:
        """The newest commit of the data set, and the names of the files."""
        recipe = self.recipe
        fix = (
            "try again with a network connection (finished downloads are kept), or use files that"
            f" you have: --from-dir DIR, with {' or '.join([*recipe.files, *recipe.at_hand][:4])}"
            " in it"
        )
        if recipe.hub is None:
            raise UserError(f"{self.name}: is not on the hub - {recipe.by_hand}; then {fix}")
        from huggingface_hub import HfApi  # here, because importing it takes long

        with asking(recipe.hub, fix):
            dataset = HfApi().dataset_info(recipe.hub)
            names = matching([file.rfilename for file in dataset.siblings or ()], recipe.files)
            check_count(names, recipe, f"hf:{recipe.hub}", fix)
        return dataset.sha, names

    def _download(self, name: str, commit: str | None) -> Path:
        """A file of the data set; an existing copy is only compared with the hub's."""
        from huggingface_hub import hf_hub_download

        hub = str(self.recipe.hub)
        with asking(hub, "run the same command again to continue, or use --from-dir"):
            path = hf_hub_download(
                hub, name, repo_type="dataset", revision=commit, local_dir=self.downloads
            )
        return Path(path)


def check_count(names: Sequence[str], recipe: Recipe, place: str, fix: str) -> None:
    """Raise UserError unless the number of files is the recipe's."""
    if not names or recipe.count not in (None, len(names)):
        raise UserError(f"{place}: has {len(names)} of the {recipe.count} files - {fix}")


def at_hand(name: str, recipe: Recipe, folder: Path) -> list[Path]:
    """The files of a corpus in a folder; UserError if some or all are missing.

    Files with the data set's own names come first, then those of `at_hand`.
    """
    files = {path.relative_to(folder).as_posix(): path for path in files_in(folder)}
    names = matching(files, recipe.files)
    if names:
        fix = f"get the other files, or prepare these as --input {folder} --name {name}-part"
        check_count(names, recipe, f"--from-dir: {folder}", fix)
        return [files[path] for path in names]
    names = matching(files, recipe.at_hand)
    if not names:
        raise UserError(
            f"--from-dir: {folder} has no files of {name}"
            f" ({' or '.join([*recipe.files, *recipe.at_hand])}) - check the folder, or prepare"
            f" your own text: --input {folder} --name {name}"
        )
    log.warning(
        "%s: using %d files with matching names, from %s to %s; the recipe cannot verify them",
        *(name, len(names), files[names[0]], files[names[-1]]),
    )
    return [files[path] for path in names]


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that match a pattern, sorted by their first matching pattern, then by name.

    A pattern matches the end of a path. If nothing matches, folders in patterns are ignored,
    because files may have been copied anywhere. If something matches, a file in another folder is
    another file.
    """
    names = sorted(names)
    without_folders = [pattern.rpartition("/")[2] for pattern in patterns]
    for ends in (patterns, without_folders):
        matches = [name for end in ends for name in names if fnmatchcase(f"/{name}", f"*/{end}")]
        if matches:
            return list(dict.fromkeys(matches))
    return []


def gpt2_files(data_dir: Path) -> list[Path]:
    """gpt2-vocab.json and gpt2-merges.txt in the data folder; existing files are kept.

    UserError if one is not available.
    """
    paths = []
    for local_name, (name, sha256) in GPT2_FILES.items():
        path = data_dir / local_name
        paths.append(path)
        if path.is_file():
            continue
        from huggingface_hub import hf_hub_download

        fix = (
            f"copy GPT-2's {name} to {path}, give --vocab-file and --merge-file, or train a"
            " tokenizer on the text with --vocab-size"
        )
        with asking(GPT2, fix):
            copy = Path(hf_hub_download(GPT2, name))
        if sha256_of(copy) != sha256:
            raise UserError(f"hf:{GPT2}: its {name} is not OpenAI's file - {fix}")
        with atomic_write(path) as temporary:
            shutil.copyfile(copy, temporary)
    return paths
