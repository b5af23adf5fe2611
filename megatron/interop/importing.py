"""Write a checkpoint from elsewhere as an ordinary one of ours."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from filelock import FileLock

from megatron.checkpoints.manifest import TOKENIZER
from megatron.checkpoints.saved import steps_in
from megatron.checkpoints.write import write_checkpoint
from megatron.config import Config
from megatron.config.config import COPY
from megatron.data.tokenizers.build import SentencePieces, build_tokenizer
from megatron.data.tokenizers.hugging_face import BESIDE, WHOLE, Subwords
from megatron.data.tokenizers.tokenizer import description, naming_faults
from megatron.errors import UserError, cannot_write
from megatron.files import sha256_of
from megatron.folder_lock import owned_folder
from megatron.interop import huggingface, reference, trainers
from megatron.interop.open import (
    HUB_NAME,
    PIECES,
    OpenedModel,
    kind_of,
    local_folder,
    open_checkpoint,
)
from megatron.model import GPT, padded_vocab
from megatron.positions import fingerprint

logger = logging.getLogger(__name__)

ON_THE_FLY = Path("runs/imported")
BY_ENDING = {".model": "SPMTokenizer", ".tiktoken": "TiktokenTokenizer"}
PAIR = ("vocab.json", "merges.txt")  # GPT-2's tokenizer
NAMES = {"HFTokenizer": (WHOLE,), "SPMTokenizer": (PIECES,), "GPT2BPETokenizer": PAIR}
"""The files of a tokenizer as transformers looks for them."""
GENERATION = "generation_config.json"
BESIDE_TOKENIZER = (
    huggingface.SETTINGS,
    GENERATION,
    BESIDE,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""What transformers reads beside the files of a tokenizer."""

LENGTH = 256  # tokens of a text that is compared, at most
TEXTS = 2


class Imported(NamedTuple):
    """path: the new global_stepN; notes: sentences for the user.

    compared: `largest_difference` of the logits and what it is beside, or the `reason` for none
    """

    path: Path
    config: Config
    compared: dict[str, Any]
    notes: list[str]


class TokenizerSource(NamedTuple):
    """tokenizer_type and its files: vocab_file and, for GPT-2's, merge_file."""

    kind: str
    vocab: Path
    merges: Path | None = None


def import_checkpoint(
    source: str | Path,
    run: Path,
    *,
    tokenizer: Path | None = None,
    config: Config | None = None,
) -> Imported:
    """Write a checkpoint of another program, as `open_model` takes it, into a run's folder.

    tokenizer: its files, if the source has none; config: of a GPT-NeoX checkpoint
    Raises UserError, and nothing is written, if the source or the tokenizer is not what it should
    be, if the logits differ from the other side's, or if `run` holds a checkpoint already.
    """
    opened = open_checkpoint(source, config)
    model, config, folder = opened.model, opened.config, opened.folder
    if opened.kind == "ours":
        raise UserError(f"{folder}: is a checkpoint of this program already - copy its folder")
    files, described, notes = tokenizer_of(opened, folder, tokenizer)
    architecture = None
    compared: dict[str, Any] = {"reason": "no class of transformers has these weights"}
    if opened.theirs is not None:
        architecture = type(opened.theirs).__name__
        compared = compared_with_transformers(opened.theirs, model)

    # The configuration has the run's own folder and tokenizer, and the source's rows.
    place = run / TOKENIZER
    checkpoint = config.checkpoint.model_copy(update={"save": str(run), "load": None})
    config = replace(config, checkpoint=checkpoint)
    if files is not None:
        keys: dict[str, Any] = {
            "tokenizer_type": files.kind,
            "vocab_file": str(place / files.vocab.name),
            "merge_file": str(place / files.merges.name) if files.merges else None,
        }
        config = replace(config, data=config.data.model_copy(update=keys))
    size = described.get("vocab_size")
    if size and padded_vocab(size, config.model.make_vocab_size_divisible_by) != model.vocab:
        rows = {"make_vocab_size_divisible_by": model.vocab}
        config = replace(config, model=config.model.model_copy(update=rows))

    origin = {
        "source": str(source),
        "kind": opened.kind,
        "architecture": architecture,
        "files": sums_of(opened.kind, folder),
        "compared": compared,
    }
    facts = {**opened.record, "vocab": model.vocab, "tokenizer": described, "origin": origin}
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    with owned_folder(run, "-o"):
        if steps_in(run):
            raise UserError(f"-o: {run} holds a checkpoint already - name another folder")
        try:
            for file in paths_of(files):
                place.mkdir(exist_ok=True)  # an import that was killed leaves it
                copyfile(file, place / file.name)
            path = write_checkpoint(run, opened.step, weights, config, facts)
        except OSError as fault:
            raise cannot_write(run, fault) from None
    return Imported(path, config, compared, notes)


def import_if_foreign(source: str | Path) -> Path:
    """The source itself, or, for a model of Hugging Face's, a run that is imported now.

    It lies in runs/imported under a name that its contents give, so it is imported once.
    """
    path = trainers.folder_of(Path(source))
    # A name whose first part is a folder here is a path, whether it exists or not.
    is_on_hub = HUB_NAME.fullmatch(str(source)) and not path.parent.is_dir()
    if not path.is_dir() and not is_on_hub:
        return path
    folder = local_folder(source)
    kind = kind_of(folder)
    # An encoding of the user's own is imported by the tool alone, whose --from names its file.
    with_settings = ("huggingface", "exported", trainers.NANOGPT, trainers.LITGPT)
    if kind not in with_settings or (folder / COPY).exists():
        return path
    digest = fingerprint(json.dumps(sums_of(kind, folder), sort_keys=True))[:12]
    # Of a model of the hub, the folder is called by its revision.
    name = path.resolve().name if path.is_dir() else path.name
    run = ON_THE_FLY / f"{name}-{digest}"
    ON_THE_FLY.mkdir(parents=True, exist_ok=True)
    with FileLock(ON_THE_FLY / ".importing"):  # of several ranks one imports
        if not steps_in(run):
            for note in import_checkpoint(source, run).notes:
                logger.warning("%s", note)
            logger.info("%s: imported into %s", source, run)
    return run


def sums_of(kind: str, folder: Path) -> dict[str, str]:
    """SHA-256 of each file that a foreign source is made of, by its name."""
    files = reference.files_of(folder)
    if kind in trainers.TRAINERS:
        names = (trainers.TRAINERS[kind]["file"], trainers.SETTINGS, "*.distcp")
        files = sorted(file for name in names for file in folder.glob(name))
    if kind in ("huggingface", "exported"):
        files = [folder / huggingface.SETTINGS, *huggingface.weight_files(folder)]
        files += paths_of(files_in(folder))
        files += [folder / name for name in BESIDE_TOKENIZER if (folder / name).is_file()]
    return {file.name: sha256_of(file) for file in files}


def tokenizer_of(
    opened: OpenedModel, source_place: Path, place: Path | None
) -> tuple[TokenizerSource | None, dict[str, Any], list[str]]:
    """The tokenizer in `place`, else the source's own: its files, description and notes.

    source_place: where the source's lies
    Raises UserError if it does not fit the model, or if `place` has none.
    """
    folder, rows = opened.folder, opened.model.vocab
    files = files_in(place or source_place)
    notes: list[str] = []
    tokenizer = None
    if place is not None and files is None:
        raise UserError(
            f"--tokenizer: {place} holds none - give {WHOLE}, a SentencePiece model, or"
            f" {' and '.join(PAIR)} in a folder"
        )
    if files is not None:
        try:
            tokenizer = build_tokenizer(*files)
        except UserError as fault:
            if place is not None:
                raise
            notes.append(f"the tokenizer of {folder} cannot be used here ({fault})")
    if tokenizer is None:
        record = opened.record.get("tokenizer") or {}
        if not record:
            notes.append(
                f"{folder} has no tokenizer that is used here: evaluation needs token files of its"
                f" vocabulary, whose ids are below {rows}; --tokenizer names one"
            )
        return None, record, notes
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"tokenizer: it has {tokenizer.vocab_size} tokens, the embedding of {folder} has {rows}"
            " rows - give the tokenizer that it was trained with"
        )
    facts = {}
    if files and opened.kind != "gpt-neox" and isinstance(tokenizer, Subwords | SentencePieces):
        try:
            facts = facts_of_texts(source_place, files, tokenizer)
        except UserError as fault:
            notes.append(str(fault))
    if "bos_token" in facts:
        notes.append(
            f"texts begin with {facts['bos_token']} (bos_token), as the tokenizer of {folder} has"
            " it: in generation, in tasks, and in the place of a window's first token"
        )
    return files, description(tokenizer) | facts, notes


def facts_of_texts(
    source: Path, files: TokenizerSource, tokenizer: Subwords | SentencePieces
) -> dict[str, Any]:
    """What transformers' own tokenizer of a source says of texts, for checkpoint.json.

    bos, bos_token: what it puts before each text
    eos_token, eos_token_id: where turns of a chat end otherwise than documents; chat_template
    Raises UserError if transformers cannot read it.
    """
    import transformers  # only here: importing it takes seconds

    transformers.logging.set_verbosity_error()
    read = {
        name: folder / name
        for folder in (source, files.vocab.parent)
        for name in BESIDE_TOKENIZER
        if (folder / name).is_file()
    }
    read |= dict(zip(NAMES[files.kind], (files.vocab, files.merges), strict=False))
    settings = huggingface.read_json(read[BESIDE]) if BESIDE in read else {}
    options = {}
    if files.kind == "SPMTokenizer":
        # Where nothing is said, Llama and Mistral were trained with <s>. transformers 5 forgets it.
        options["add_bos_token"] = settings.get("add_bos_token", True)
    fault = f"{source}: transformers cannot read its tokenizer"
    consequence = "whether a token stands before each text is not known, and none is put there"
    with TemporaryDirectory() as place, naming_faults(fault, consequence):
        for name, file in read.items():
            Path(place, name).symlink_to(file.absolute())
        theirs = transformers.AutoTokenizer.from_pretrained(
            place, local_files_only=True, trust_remote_code=False, **options
        )
        text = theirs("a", return_special_tokens_mask=True)
    generation = read.get(GENERATION) or read.get(huggingface.SETTINGS)
    usual = (None, tokenizer.eod, tokenizer.end_of_document)
    texts = {
        "eos_token": theirs.eos_token,
        "eos_token_id": generation and huggingface.read_json(generation).get("eos_token_id"),
        "chat_template": theirs.chat_template,
    }
    facts = {key: value for key, value in texts.items() if value not in usual}
    if text["special_tokens_mask"][:1] == [1]:
        [first, *_] = text["input_ids"]
        facts |= {"bos": first, "bos_token": theirs.convert_ids_to_tokens(first)}
    return facts


def paths_of(files: TokenizerSource | None) -> list[Path]:
    """The files themselves, and the one beside them that names the end of a text."""
    if files is None:
        return []
    named = (files.vocab, files.merges, files.vocab.with_name(BESIDE))
    return [file for file in named if file is not None and file.is_file()]


def files_in(place: Path) -> TokenizerSource | None:
    """The tokenizer that a folder holds or a file is, or None."""
    if place.is_file():
        return TokenizerSource(BY_ENDING.get(place.suffix, "HFTokenizer"), place)
    for kind, names in NAMES.items():
        paths = [place / name for name in names]
        if all(path.is_file() for path in paths):
            return TokenizerSource(kind, *paths)
    return None


def compared_with_transformers(theirs: Any, model: GPT) -> dict[str, Any]:
    """The logits of transformers' class for random tokens beside those of `model`, read from it.

    Raises UserError if they differ by more than rounding explains.
    """
    import transformers  # only here: importing it takes seconds

    program = f"transformers {transformers.__version__} {type(theirs).__name__}"
    draw = torch.Generator().manual_seed(0)
    length = min(LENGTH, model.train_length)
    ids = torch.randint(model.vocab, (TEXTS, length), generator=draw)
    difference, largest = huggingface.compare_logits(program, theirs, model, ids)
    return {
        "with": program,
        "tokens": ids.numel(),
        "largest_difference": difference,
        "largest_logit": largest,
    }
