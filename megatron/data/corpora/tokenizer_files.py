"""GPT-2's two tokenizer files: found in the data folder or in another one, else downloaded."""

import logging
import shutil
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

from megatron.data.corpora.download import DownloadFault, Patience, Remote, fetch
from megatron.errors import UserError
from megatron.files import ROOT, atomic_write, sha256_of
from megatron.folder_lock import owned_file

log = logging.getLogger(__name__)

GPT2 = ROOT / "configs" / "tokenizers" / "gpt2.yml"


class TokenizerFile(BaseModel):
    """What is known of a file.

    name: what it is called here; names: and elsewhere; urls: where it may be had, the best first
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    bytes: int
    sha256: str
    names: list[str]
    urls: list[str]


def gpt2_files(
    data_dir: Path, from_dir: Path | None = None, patience: Patience | None = None
) -> list[Path]:
    """gpt2-vocab.json and gpt2-merges.txt in the data folder.

    from_dir: where to look instead of downloading. A file that is in the data folder already is
    used as it is, with a warning where it is another one. UserError where a file cannot be had.
    """
    if from_dir is not None and not from_dir.is_dir():
        raise UserError(f"--from-dir: {from_dir} is no folder - give the one with the files")
    paths = []
    for known in described():
        path = data_dir / known.name
        paths.append(path)
        if not path.is_file():
            with owned_file(path, "-d"):
                _bring(path, known, from_dir, patience)
        elif sha256_of(path) != known.sha256:
            log.warning("%s: is not GPT-2's own file; it is used as it is", path)
    return paths


def described() -> list[TokenizerFile]:
    """The vocabulary and the merges."""
    from megatron.config.yaml_files import read_file  # here, because torch comes with it

    try:
        return TypeAdapter(list[TokenizerFile]).validate_python(read_file(GPT2).get("files"))
    except ValueError as fault:
        reason = str(fault).splitlines()[0]
        raise UserError(f"{GPT2}: cannot be read ({reason}) - mend the file") from None


def _bring(
    path: Path, known: TokenizerFile, from_dir: Path | None, patience: Patience | None
) -> None:
    if from_dir is not None:
        with atomic_write(path) as temporary:
            shutil.copyfile(_local(path, known, from_dir), temporary)
        return
    reasons = []
    for url in known.urls:
        try:
            fetch(Remote(url, path.name, known.bytes, known.sha256), path, patience)
            return
        except DownloadFault as fault:
            reasons.append(str(fault))
    raise UserError(f"{path}: cannot be downloaded: {'; '.join(reasons)} - {_instead(known)}")


def _local(path: Path, known: TokenizerFile, folder: Path) -> Path:
    """The file in a folder of the user's, or in the one above; its checksum must be right.

    UserError where it is in neither.
    """
    places = [folder, folder.resolve().parent]
    candidates = [place / name for place in places for name in (known.name, *known.names)]
    for candidate in candidates:
        if candidate.is_file() and sha256_of(candidate) == known.sha256:
            return candidate
    raise UserError(
        f"{path}: is not here, nor is GPT-2's own file in {folder} or the folder above, and with"
        f" --from-dir nothing is downloaded - {_instead(known)}"
    )


def _instead(known: TokenizerFile) -> str:
    """What a user can do without the file."""
    return (
        f"copy GPT-2's {' or '.join(known.names)} there, give --vocab-file and --merge-file, or"
        " train a tokenizer on the text with --vocab-size"
    )
