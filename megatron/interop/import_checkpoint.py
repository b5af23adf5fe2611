"""Write a checkpoint from elsewhere as an ordinary one of ours."""

import filecmp
import hashlib
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoints.manifest import SUM, entry_of
from megatron.checkpoints.saved import steps_in, without_record
from megatron.checkpoints.write import write_checkpoint
from megatron.config import Config
from megatron.errors import UserError, cannot_write
from megatron.files import folder_beside, remove
from megatron.folder_lock import owned_folder
from megatron.interop import hub, neox_folder
from megatron.interop.compare import Compared, compared
from megatron.interop.open import Kind, Opened, is_known, is_ours, kind_of, local_folder
from megatron.interop.tokenizer_files import Files, check_fits, description, files_in, named_by
from megatron.model import GPT, padded_vocab

logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer"  # folder of a run
ON_THE_FLY = Path("runs/imported")
# Entries of a record that are about the files, the processes or the watch of its training.
OF_ITS_TRAINING = (
    *("files", SUM, "path", "commit", "step", "config_hash", "vocab", "tokenizer"),
    *("ranks", "threads", "pending_losses", "skipped", "proven", "usual_loss", "last_loss"),
)


class Imported(NamedTuple):
    """path: the new global_stepN; notes: what the user should know."""

    path: Path
    config: Config
    compared: Compared
    notes: list[str]


class Chosen(NamedTuple):
    """A tokenizer for the new run: its files, none where they are not at hand, and what it is."""

    files: Files | None
    description: dict[str, Any]
    notes: list[str]


def import_checkpoint(
    source: str | Path,
    run: Path,
    *,
    tokenizer: Path | None = None,
    config: Config | None = None,
    renamed: Path | None = None,
) -> Imported:
    """Write a checkpoint of any kind that `open_model` takes into a run's folder.

    tokenizer: its files, where the source has none; config: of a GPT-NeoX checkpoint
    renamed: what `run` will be called afterwards
    UserError, and nothing is written, where the source or the tokenizer is not what it should be,
    where the logits differ from the other side's, or where `run` holds a checkpoint already.
    """
    _check_free(run)
    kind, folder = kind_of(local_folder(source))
    opened = kind.open(folder, config)
    _check_finite(folder, opened.model)
    picked = _tokenizer_of(kind, folder, opened, tokenizer)
    agreement = compared(kind.name, folder, opened.model)
    origin = {
        "source": str(source),
        "kind": kind.name,
        "architecture": _architecture(kind, folder),
        "files": sums_of(kind, folder),
        "compared": agreement,
    }
    with owned_folder(run, "-o"):
        _check_free(run)
        path, config = _write(run, renamed or run, opened, picked, origin)
    return Imported(path, config, agreement, picked.notes)


def brought_in(source: str | Path) -> Path:
    """A run or checkpoint of ours with the source's model: itself, or one that is imported now.

    The latter lies in runs/imported under a name that its contents give, so it is imported once.
    A path that holds nothing known is given back: whoever opens it says what is wrong.
    """
    given = Path(source)
    # A name whose first part is a folder here is a path, whether it exists or not.
    may_be_remote = hub.is_name(str(source)) and not given.parent.is_dir()
    if not given.is_dir() and not may_be_remote:
        return given
    may_be_foreign = is_known(given) or bool(neox_folder.steps_in(given))
    if given.is_dir() and (is_ours(given) or not may_be_foreign):
        return given
    kind, folder = kind_of(local_folder(source))
    sums = sums_of(kind, folder)
    tokenizer = files_in(folder)
    if tokenizer is not None:
        sums |= {file.name: entry_of(file)["sha256"] for file in tokenizer.paths()}
    digest = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:12]
    # Of a model of the hub, the folder is called by its revision.
    name = given.resolve().name if given.is_dir() else given.name
    run = ON_THE_FLY / f"{name}-{digest}"
    if steps_in(run):
        return run
    try:
        with folder_beside(run) as temporary:
            _say(import_checkpoint(source, temporary, renamed=run))
    except OSError as fault:
        if not steps_in(run):  # nor did another process import it meanwhile
            raise cannot_write(run, fault) from None
    logger.info("%s: imported into %s", source, run)
    return run


def sums_of(kind: Kind, folder: Path) -> dict[str, str]:
    """SHA-256 of each file of weights and settings, by its path in the folder."""
    return {str(file.relative_to(folder)): entry_of(file)["sha256"] for file in kind.files(folder)}


def _say(imported: Imported) -> None:
    for note in imported.notes:
        logger.warning("%s", note)


def _check_free(run: Path) -> None:
    if steps_in(run) or without_record(run):
        raise UserError(f"-o: {run} holds a checkpoint already - name another folder")


def _check_finite(folder: Path, model: GPT) -> None:
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise UserError(
                f"{folder}: {name} has values that are not finite - copy it again, or take another"
                " checkpoint"
            )


def _architecture(kind: Kind, folder: Path) -> str | None:
    if kind.name != "huggingface":
        return None
    settings = json.loads(kind.files(folder)[0].read_bytes())
    return settings["architectures"][0]


def _tokenizer_of(kind: Kind, folder: Path, opened: Opened, given: Path | None) -> Chosen:
    """The tokenizer that is given, else the source's own.

    UserError where it does not fit the model, or where the one that is given is none.
    """
    rows = opened.model.vocab
    own = opened.record.get("tokenizer") or {}
    files = files_in(folder) or _named_in(opened.config)
    notes = []
    if files is not None:
        try:
            found = description(files.built())
            own = own or found
        except UserError as fault:
            found = {}
            notes.append(f"the tokenizer of {folder} cannot be used here ({fault})")
        if found.get("hash") != own.get("hash") or not found:
            files = None
    if given is not None:
        files, notes = named_by(given), []
    if files is not None:
        tokenizer = files.built()
        check_fits(tokenizer, rows, own, folder)
        return Chosen(files, description(tokenizer), notes)
    if not own:
        notes.append(
            f"{folder} has no tokenizer that is used here: evaluation needs token files of its"
            f" vocabulary, whose ids are below {rows}; --tokenizer names one"
        )
    return Chosen(None, own, notes)


def _named_in(config: Config) -> Files | None:
    """The tokenizer's files that a configuration names, where they are on this machine."""
    data = config.data
    names = [name for name in (data.vocab_file, data.merge_file) if name]
    if not data.vocab_file or not all(Path(name).is_file() for name in names):
        return None
    merges = Path(data.merge_file) if data.merge_file else None
    return Files(data.tokenizer_type, Path(data.vocab_file), merges)


def _write(
    run: Path, name: Path, opened: Opened, chosen: Chosen, origin: dict[str, Any]
) -> tuple[Path, Config]:
    """The new checkpoint's folder and configuration; nothing is left where it cannot be written.

    name: what its configuration calls the run
    """
    rows = opened.model.vocab
    config = _with_files(opened.config, name, chosen, rows)
    kept = {key: value for key, value in opened.record.items() if key not in OF_ITS_TRAINING}
    facts = {**kept, "vocab": rows, "tokenizer": chosen.description, "origin": origin}
    weights = {name: one.contiguous() for name, one in opened.model.state_dict().items()}
    copied = False
    try:
        copied = _copy_tokenizer(run / TOKENIZER, chosen.files)
        return write_checkpoint(run, opened.step, weights, config, facts), config
    except (OSError, UserError) as fault:
        if copied:
            remove(run / TOKENIZER)
        if isinstance(fault, OSError):
            raise cannot_write(run, fault) from None
        raise


def _copy_tokenizer(place: Path, files: Files | None) -> bool:
    """Copy the tokenizer's files into a folder; False where they are there, or there are none.

    An import that was killed leaves them. UserError where the folder holds others.
    """
    paths = [] if files is None else files.paths()
    if place.exists():
        copies = [place / file.name for file in paths]
        if sorted(copies) == sorted(place.iterdir()) and all(map(_are_equal, paths, copies)):
            return False
        raise UserError(f"-o: {place} exists and is not replaced - name another folder")
    if not paths:
        return False
    with folder_beside(place) as temporary:
        for file in paths:
            shutil.copyfile(file, temporary / file.name)
    return True


def _are_equal(file: Path, copy: Path) -> bool:
    return filecmp.cmp(file, copy, shallow=False)


def _with_files(config: Config, run: Path, chosen: Chosen, rows: int) -> Config:
    """The configuration with the run's own folder and tokenizer, and with these rows."""
    checkpoint = config.checkpoint.model_copy(update={"save": str(run), "load": None})
    data, model = config.data, config.model
    files = chosen.files
    if files is not None:
        names: dict[str, Any] = {
            "tokenizer_type": files.kind,
            "vocab_file": str(run / TOKENIZER / files.vocab.name),
            "merge_file": None
            if files.merges is None
            else str(run / TOKENIZER / files.merges.name),
        }
        data = data.model_copy(update=names)
    size = chosen.description.get("vocab_size")
    if size and padded_vocab(size, model.make_vocab_size_divisible_by) != rows:
        model = model.model_copy(update={"make_vocab_size_divisible_by": rows})
    return replace(config, checkpoint=checkpoint, data=data, model=model)
