"""A checkpoint with its configuration and text, after checking that they belong together."""

import contextlib
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from megatron.checkpoints.manifest import TOKENIZER, imported_class, weights_of
from megatron.checkpoints.read import load_for_evaluation
from megatron.checkpoints.saved import find
from megatron.commit import commit
from megatron.config import Config
from megatron.config.load import DATA_PATHS
from megatron.data.parts import Part, open_parts
from megatron.data.tasks import TaskText
from megatron.data.tokenizers.build import build_tokenizer, needs_files
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.evaluation.methods import MeasuredAttention
from megatron.evaluation.options import DTYPES
from megatron.files import place_of
from megatron.model import GPT
from megatron.parallel.grid import set_matmul_precision
from megatron.positions.layers import name_of_layers
from megatron.protocols import Windows
from megatron.results.row import ATTENTION_INPUTS, EXACT, Facts
from megatron.results.statistics import bits_per_byte

logger = logging.getLogger(__name__)

BESIDE_TOKENS = "tokenizer.json"  # what prepare_data.py writes next to the tokens
TokenizerFiles = tuple[str, str | None, str | None]  # tokenizer_type, vocab_file, merge_file
PREPARE = "prepare that text with the checkpoint's tokenizer"
FIT = "use that run's configuration, set load to its folder, or give only --checkpoint DIR"

PACKAGE = Path(__file__).resolve().parents[1]
# The code that a loss depends on, as packages and files: if it changes, rows are measured again.
# Figures, pages, tables and commands are not included.
SHAPES_LOSSES = (
    "attention",
    "checkpoints",
    "config",
    "data",
    "evaluation",
    "hybrids",
    "layer_kinds.py",
    "model",
    "parallel",
    "positions",
    "protocols.py",
    "results/statistics.py",
    "splits.py",
)


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint that matches its configuration.

    model: the trained weights, float32, on the CPU, in eval mode
    trained: the configuration of the training
    config: the configuration of the measurement; `trained` if there is none
    path: the checkpoint's folder, such as runs/mep/global_step2000
    record: its checkpoint.json: step, config_hash, vocab and more
    """

    model: GPT
    trained: Config
    config: Config
    path: Path
    record: dict[str, Any]

    @property
    def tokenizer(self) -> dict[str, Any]:
        """{type, hash, vocab_size} of the tokenizer of its training; {} if unknown."""
        return self.record.get("tokenizer") or {}

    @property
    def begin_of_text(self) -> Facts:
        """bos_token for rows, if each text begins with one; else {}."""
        token = self.tokenizer.get("bos_token")
        return {} if token is None else {"bos_token": token}

    def tokenizer_with(self, expected: str | None, prefixes: Iterable[Path]) -> Tokenizer | None:
        """The tokenizer with this hash, or None.

        We look for its files where the configuration says, where the training's configuration says,
        in the run's folder (which may have been moved), and next to token files.
        """
        places: list[TokenizerFiles] = [(self.tokenizer.get("type") or "", None, None)]
        for data in (self.config.data, self.trained.data):
            files = data.vocab_file, data.merge_file
            folder = self.path.parent / TOKENIZER
            vocab, merges = (file and str(folder / Path(file).name) for file in files)
            places.append((data.tokenizer_type, *files))
            places.append((data.tokenizer_type, vocab, merges))
        places = [place for place in places if place[0] and (place[1] or not needs_files(place[0]))]
        for prefix in prefixes:
            places.append(("HFTokenizer", str(prefix.with_name(BESIDE_TOKENS)), None))
        return _tokenizer(tuple(dict.fromkeys(places)), expected, self.record["vocab"])

    def to(self, device: torch.device, dtype: str) -> None:
        """Move the model to its device, in the dtype with this name."""
        self.model.to(device, DTYPES[dtype])
        set_matmul_precision(self.config.precision.float32_matmul_precision, dtype, device)

    def facts(self, attention: MeasuredAttention) -> Facts:
        """The keys of every row about the model (in its current state) and the code."""
        weight = next(self.model.parameters())
        stage = self.trained.at_step(self.record["step"])
        facts = {
            "pos_emb": name_of_layers(stage.position),
            "pos_emb_args": stage.flat()["pos_emb_args"],
            "train_length": self.trained.model.seq_length,
            "step": self.record["step"],
            "windows_per_step": self.record.get("windows_per_step"),
            "config_hash": self.record["config_hash"],
            "seed": self.trained.training.seed,
            "checkpoint": str(self.path),
            "weights": weights_of(self.path, self.record),
            "tokenizer": self.tokenizer.get("hash"),
            "dtype": str(weight.dtype).removeprefix("torch."),
            "device": weight.device.type,
            "attention_backend": self.model.attention_choice.backend,
            "commit": commit(),
            "code": code_fingerprint(),
            **variant(attention),
            **self.trained.beside_encoding,
        }
        if weight.is_cuda:
            facts["float32_matmul_precision"] = torch.get_float32_matmul_precision()
        if origin := imported_class(self.record):
            facts["origin"] = origin
        if stages := self.trained.training.seq_length_schedule:
            current = self.trained.training.stage_of(self.record["step"])
            facts["stage_length"] = (current and current.seq_length) or facts["train_length"]
            facts["stage_ends"] = [stage.until for stage in stages if stage.until]
        for key in ("parent", "parent_model"):
            if self.record.get(key):
                facts[key] = self.record[key]
        if self.record.get("corpora") and self.trained.data.train_data_paths:
            facts["trained_on"] = self.record["corpus"]
        return facts


@dataclass(frozen=True)
class LoadedRun(LoadedModel):
    """A checkpoint that also matches its text.

    texts: the texts to measure, each separately: one corpus, or those of valid_data_paths or
        test_data_paths
    """

    texts: Part

    def bytes_of_text(self, tokens: TokenFile, windows: Windows, loss: float | None) -> Facts:
        """bytes, bytes_from and bits_per_byte of the scored targets; {} without the tokenizer.

        Answers of a task have none, because they are not text.

        loss: mean over the scored targets in nats. The end of a document is a target without bytes,
            so predicting it costs bits but adds no bytes.
        """
        sizes = None
        writer = tokens.meta.get("tokenizer") or self.tokenizer
        if writer.get("hash") and not windows.answers:
            tokenizer = self.tokenizer_with(writer["hash"], [tokens.prefix])
            sizes = tokenizer and tokenizer.token_bytes()
        if sizes is None:
            return {}
        targets = np.concatenate(windows.targets)
        size = int(sizes[targets].sum())
        if not size:  # only ends of documents were scored
            return {}
        bits = None if loss is None else bits_per_byte(loss, len(targets), size)
        return {"bytes": size, "bytes_from": EXACT, "bits_per_byte": bits}


@cache
def _tokenizer(
    places: Sequence[TokenizerFiles], expected: str | None, vocab: int
) -> Tokenizer | None:
    """The first tokenizer with this hash, for a model of `vocab` rows."""
    for place in places:
        with contextlib.suppress(UserError):
            tokenizer = build_tokenizer(*place)
            is_unknown = expected is None and tokenizer.vocab_size <= vocab
            if tokenizer.hash == expected or is_unknown:
                return tokenizer
    logger.info("no existing tokenizer.json or vocab_file has the hash %s", expected)
    return None


def loaded_model(config: Config | None, folder: str | Path | None, step: int | None) -> LoadedModel:
    """Open a checkpoint without a text; UserError if there is none.

    config: the user's configuration; None for that of the training
    folder: of a run or of a checkpoint; None for `load` or `save` of the configuration
    step: which checkpoint of a run; None for the latest
    """
    where = folder or checkpoint_folder(config, step)
    model, trained, record = load_for_evaluation(where, step)
    return measurable(model, trained, config, Path(record["path"]), record)


def measurable(
    model: GPT, trained: Config, config: Config | None, path: Path, record: dict[str, Any]
) -> LoadedModel:
    """A model with the settings of its measurement; see `LoadedModel`.

    config: the user's configuration; None for that of the training
    """
    # Documents are separated as in training, unless the configuration sets it.
    config = config or trained
    values = {}
    for key in ("reset_attention_mask", "reset_position_ids"):
        if key not in config.chosen:
            values[key] = trained[key]
    if "reset_attention_mask" in config.chosen and not config["reset_attention_mask"]:
        values = {"reset_position_ids": False}  # it needs the mask
    stage = trained.at_step(record["step"])
    for keys in (("window", "window_layers"), ("logn_scale",)):
        if all(config[key] == trained[key] for key in keys):
            values |= {key: stage[key] for key in keys}
    attention = config.attention.model_copy(update=values)
    config = replace(config, attention=attention)
    return LoadedModel(model, trained, config, path, record)


def checked_tokenizer(trained: LoadedModel) -> Tokenizer:
    """The tokenizer of a checkpoint's training.

    Raises UserError if it is not found, or if the user's configuration has another model.
    """
    keys = trained.config.model_keys()
    check_same_model(keys, trained.trained.model_keys(), trained.path)
    return tokenizer_of(trained)


def tokenizer_of(trained: LoadedModel) -> Tokenizer:
    """The tokenizer of a checkpoint's training; UserError if it is not found."""
    description = trained.tokenizer
    expected = description.get("hash")
    if description.get("type") == "task":
        raise UserError(
            f"{trained.path}: was trained on a task, which has no tokenizer for text - measure it"
            " with evaluate.py, without --tasks"
        )
    prefixes: list[str] = []
    for data in (trained.config.data, trained.trained.data):
        prefixes += filter(None, (data.data_path, *data.train_data_paths))
    tokenizer = trained.tokenizer_with(expected, map(Path, prefixes))
    if tokenizer is not None:
        return tokenizer
    words = f"{description.get('type', 'unknown')} {expected or ''}".strip()
    raise UserError(
        f"vocab_file: cannot find the tokenizer that {trained.path} was trained with ({words}) -"
        " name its files: tokenizer_type=… vocab_file=… and, for GPT2BPETokenizer, merge_file=…"
    )


def on_text(loaded: LoadedModel) -> LoadedRun:
    """A model with its text; UserError if there is none or they don't belong together."""
    trained, config, path = loaded.trained, loaded.config, loaded.path
    names_data = config if any(config[key] for key in DATA_PATHS) else trained
    part = config.evaluation.eval_part
    texts = open_parts(names_data.data, [part])[part]
    if names_data is trained:  # the data of the training, with the split of the user
        texts = replace(texts, split=texts.split if texts.weights else config.data.split)

    # On the training data the split must agree too, or we would measure text that was trained on.
    # pos_emb_file is not compared: its text was compared when the checkpoint was read.
    model_keys, trained_keys = config.model_keys(), trained.model_keys()
    measured_on, trained_on = names_data.data.data_path, trained.data.data_path
    if measured_on and trained_on and Path(measured_on).resolve() == Path(trained_on).resolve():
        model_keys["split"] = config.data.split
        trained_keys["split"] = trained.data.split
    check_same_model(model_keys, trained_keys, path)

    trained_whole = trained.data.train_data_paths
    if texts.weights and trained_on:  # as a whole, it includes the training's share
        trained_whole = (trained_on,)
    trained_places = {place_of(corpus) for corpus in trained_whole}
    for tokens in texts.files:
        writer = tokens.meta.get("tokenizer") or {}
        hashes = writer.get("hash"), loaded.tokenizer.get("hash")
        if all(hashes) and hashes[0] != hashes[1]:
            raise UserError(
                f"data_path: {tokens.prefix} was written by {writer.get('type')} {hashes[0]}, but"
                f" {path} was trained with {loaded.tokenizer.get('type')} {hashes[1]}, so the"
                f" perplexity would be meaningless - {PREPARE}"
            )
        if config.attention.reset_attention_mask:
            tokens.check_ends("reset_attention_mask", loaded.model.end_of_document)
        if place_of(str(tokens.prefix)) in trained_places:
            raise UserError(
                f"eval_part: {path} was trained on {tokens.prefix}, which is now the {texts.name}"
                " text, so its loss says nothing about new text - give held-out text as"
                f" {texts.name}_data_paths"
            )
    task, *_ = texts.files
    if isinstance(task, TaskText) and task.filler:
        writer = task.filler.meta.get("tokenizer") or loaded.tokenizer
        tokenizer = loaded.tokenizer_with(writer.get("hash"), [task.filler.prefix])
        in_words = replace(task, tokenizer=tokenizer)
        texts = replace(texts, files=(cast(TokenFile, in_words),))
    return LoadedRun(**vars(loaded), texts=texts)


def check_same_model(
    settings: Mapping[str, Any], trained: Mapping[str, Any], checkpoint: Path | str
) -> None:
    """Raises UserError if the user's configuration is not that of the trained model.

    The message lists every differing key with both values.

    settings, trained: keys that describe a model, such as {"num_layers": 12}
    """
    lines = [f"{checkpoint}: is a checkpoint of a different model - {FIT}"]
    for key, value in trained.items():
        if key in settings and settings[key] != value:
            lines.append(
                f"{key}: {settings[key]!r} is set, but the checkpoint was trained with {value!r}"
            )
    if len(lines) > 1:
        raise UserError("\n  ".join(lines))


def variant(attention: MeasuredAttention) -> Facts:
    """The settings that change which keys a query sees, or how; only those that are on.

    They may come from the training or from this measurement.
    """
    values = {key: getattr(attention, key) for key in ATTENTION_INPUTS}
    if attention.window_layers:
        values["window"] = ",".join(str(window or "none") for window in attention.window_layers)
    return {key: value for key, value in values.items() if value}


def checkpoint_folder(config: Config | None, step: int | None) -> str:
    """The folder of the checkpoint that a configuration means.

    It is the checkpoint whose config.yml was given, or else load or save, whichever has a
    checkpoint.
    Raises UserError if both have different checkpoints, or if neither is set.
    """
    named: list[str | None] = []
    if config:
        folder = Path(config.sources[0]).parent if config.sources else None
        if folder and step is None and (folder / "checkpoint.json").exists():
            return str(folder)
        load, save = config.checkpoint.load, config.checkpoint.save
        named = [save] if config.checkpoint.finetune and save else [load, save]
    folders = list(dict.fromkeys(folder for folder in named if folder))
    if not folders:
        raise UserError(
            "checkpoint: is not set - give the configuration of a run, or --checkpoint DIR"
        )
    holding = []
    for folder in folders:
        with contextlib.suppress(UserError):
            find(folder, step)
            holding.append(folder)
    if len(holding) == 2:
        raise UserError(
            f"checkpoint: load ({folders[0]}) and save ({folders[1]}) both have one - choose one"
            " with --checkpoint"
        )
    return holding[0] if holding else folders[0]


def code_fingerprint() -> str:
    """12 hex digits that identify the code that a loss depends on, committed or not."""
    digest = hashlib.sha256()
    for name in SHAPES_LOSSES:
        path = PACKAGE / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
