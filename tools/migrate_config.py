"""Rewrite published files (KERPLE, MEP, GPT-NeoX) in today's spelling, and show what changes.

python tools/migrate_config.py train.yml exp_configs/ali_tanh_gau_all003_fp32_openwebtext2_1235.yml
python tools/migrate_config.py exp_configs/*.yml -o configs/mine

Where a file of MEP has a pos-emb that hides its mixture, explicit kernels are proposed from the
file's name. Without -o nothing is written, and no file is ever replaced.

400 files of MEP have one and the same pos-emb, 176 another: the authors chose the kernels by
commenting source lines in and out, and noted them in the file's name. docs/published_files.md lists
the words.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron.cli_errors import guarded
from megatron.config.legacy import SPELLINGS, SWITCHED_OFF, complete_recipe, fold, translate
from megatron.config.messages import Report, bad_configuration, shortened
from megatron.config.yaml_files import find_file, read_file
from megatron.errors import UserError
from megatron.files import write_text
from megatron.positions import ALIASES, options_of

EXPERIMENT = re.compile(r"(.+)_(openwebtext2|github|arxiv|pg19)_\d+")
PREFIX = re.compile(r"(len1024_)?(medium_)?(snope_)?")
COUNT = re.compile(r"all00(\d)")  # that many kernels of equal weight
HIDES_MIXTURE = "snope"  # the beginning of such spellings of the MEP fork


class Migrated(NamedTuple):
    """A file, its text, and the text in today's spelling."""

    path: Path
    before: str
    text: str


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="YAML files, each by itself")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="folder for the new files; default: none"
    )
    options = parser.parse_args(argv)
    files = [migrated(name) for name in options.files]
    places = [options.output / file.path.name for file in files if options.output]
    for place in places:
        if place.exists() or places.count(place) > 1:
            raise UserError(
                f"-o: {place} exists or is written twice, and no file is replaced - name another"
                " folder, or migrate files of one name into two"
            )
    for file in files:
        lines = difflib.unified_diff(
            file.before.splitlines(), file.text.splitlines(), str(file.path), "today", lineterm=""
        )
        print("\n".join(lines))
    for file, place in zip(files, places, strict=False):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, file.text)
        print(f"written to {place}")
    return 0


def migrated(name: str | Path) -> Migrated:
    """One file, which stays, spelled as today. Raises UserError if it cannot be read."""
    try:
        path = find_file(name)
        source = read_file(path)
    except ValueError as fault:
        raise UserError(str(fault)) from None
    report = Report()
    given = translate(source, report)
    if given.pop(SWITCHED_OFF, []):
        given.setdefault("precision", "fp32")
    complete_recipe([source], given, report)
    if isinstance(given.get("pos_emb"), str):
        try:
            fold(given, set(options_of(given["pos_emb"])), report)
        except UserError as fault:
            report.fault(str(fault))
    if report.faults:
        raise bad_configuration([str(path)], report.faults)

    comments = list(report.notes)
    published = source.get("pos_emb")
    if isinstance(published, str) and published.startswith(HIDES_MIXTURE) and published in ALIASES:
        comments = [note for note in comments if not note.startswith(f"pos_emb: {published}")]
        comments += _with_mixture(given, path.stem, published)
    lines = [f"# {shortened(path.name)} in today's spelling, by tools/migrate_config.py."]
    lines += [f"# {comment}" for comment in comments]
    lines += [f"{key}: {_flow(value)}" for key, value in given.items()]
    return Migrated(path, path.read_text(encoding="utf-8"), "\n".join(lines) + "\n")


def _with_mixture(given: dict[str, Any], stem: str, published: str) -> list[str]:
    """Set explicit kernels if the file's name tells them; return the comments about it."""
    released = given["pos_emb"]
    default = options_of(released)["kernels"].default
    computes = f"the released code computes kernels: {_flow([*default])} for every {published}"
    named = mixture_named(stem, published)
    if isinstance(named, str):
        return [
            f"pos_emb: the file's name does not say which kernels were meant: {named}",
            f"pos_emb: {released} is kept: {computes}",
        ]
    given["pos_emb"], given["pos_emb_args"] = "mep", named
    agree = sorted(map(str, named["kernels"])) == sorted(map(str, default))
    relation = "which is the same" if agree and len(named) == 1 else "which differs"
    return [
        f"pos_emb: kernels were derived from the file's name {shortened(stem)}; check them",
        f"pos_emb: {computes}, {relation}",
    ]


def mixture_named(stem: str, pos_emb: str) -> dict[str, Any] | str:
    """The options of `mep` that a file's name, without .yml, gives, or why it gives none."""
    match = EXPERIMENT.fullmatch(stem)
    name = match[1] if match else stem
    if name.startswith(pos_emb):
        return "it repeats pos-emb and names no kernels"
    name = PREFIX.sub("", name, count=1).replace("gaussian_def05", "gaussian05")
    words = SPELLINGS["mixtures"]
    with_weights = words["with_weights"].get(name.removesuffix("_fp32"))
    if with_weights:
        return dict(with_weights)
    kernels = []
    expected = 0
    for word in name.split("_"):
        count = COUNT.fullmatch(word)
        if count:
            expected = int(count[1])
        elif word in words["kernels"]:
            kernels.append(deepcopy(words["kernels"][word]))
        elif word and word not in words["silent"]:
            reasons = [why for known, why in words["unknown"].items() if word.startswith(known)]
            return reasons[0] if reasons else f"its word {word!r} is not known"
    if not kernels:
        return "it names no kernels"
    if expected not in (0, len(kernels)):
        return f"it names {len(kernels)} kernels and says that they are {expected}"
    return {"kernels": kernels}


def _flow(value: Any) -> str:
    """A value on one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True
    )
    return text.removesuffix("...\n").strip()


if __name__ == "__main__":
    sys.exit(main())
