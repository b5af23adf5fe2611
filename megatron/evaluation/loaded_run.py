"""A checkpoint with its configuration and its text, checked to belong together."""

import contextlib
import hashlib
import logging
import os
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
from megatron.data.parts import Part, name_of, open_parts
from megatron.data.tasks import TaskText
from megatron.data.tokenizers.build import build_tokenizer, needs_files
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.data.tokens import TokenFile
from megatron.errors import CONTROL, UserError
from megatron.evaluation.methods import MeasuredAttention
from megatron.files import place_of
from megatron.model import GPT
from megatron.positions.layers import name_of_layers
from megatron.protocols import Windows
from megatron.results.row import ATTENTION_INPUTS, EXACT, MEAN, Facts
from megatron.results.statistics import bits_per_byte

logger = logging.getLogger(__name__)

TEXTS = 2048  # targets whose text a row has
BESIDE_TOKENS = "tokenizer.json"  # what prepare_data.py writes beside the tokens
TokenizerFiles = tuple[str, str | None, str | None]  # tokenizer_type, vocab_file, merge_file
PREPARE = "prepare that text with the checkpoint's tokenizer"
FIT = "give that run's configuration, its folder as load, or --checkpoint DIR and no configuration"

PACKAGE = Path(__file__).resolve().parents[1]
# The code that a loss depends on, whole rooms and single files: rows of other code are measured
# again. Figures, pages, tables and commands are not among it.
SHAPES_LOSSES = (
    "attention",
    "checkpoints",
    "config",
    "data",
    "evaluation",
    "model",
    "parallel",
    "positions",
    "protocols.py",
    "results/statistics.py",
    "splits.py",
)


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint that was found to be what its configuration describes.

    model: the trained weights, float32, on the CPU, in eval mode
    trained: the configuration of the training
    config: the configuration of the measurement; `trained` if none was given
    path: folder of the checkpoint, such as runs/mep/global_step2000
    record: its checkpoint.json: step, config_hash, vocab and more
    """

    model: GPT
    trained: Config
    config: Config
    path: Path
    record: dict[str, Any]

    @property
    def tokenizer(self) -> dict[str, Any]:
        """{type, hash, vocab_size} of the tokenizer that it learned with; {} if unknown."""
        return self.record.get("tokenizer") or {}

    @property
    def begin_of_text(self) -> Facts:
        """bos_token of rows, where each text begins with one; else {}."""
        token = self.tokenizer.get("bos_token")
        return {} if token is None else {"bos_token": token}

    @property
    def name(self) -> str:
        """Encoding, seed, step and weights, such as "rotary seed 1 step 500 0123456789ab"."""
        words = [self.trained.label]
        if not imported_class(self.record):
            words.append(f"seed {self.trained.training.seed}")
        return " ".join([*words, f"step {self.record['step']}", weights_of(self.path, self.record)])

    def tokenizer_files(self, prefixes: Iterable[Path]) -> list[TokenizerFiles]:
        """Its tokenizer's files: as given, as in training, in its run, beside token files."""
        places: list[TokenizerFiles] = [(self.tokenizer.get("type") or "", None, None)]
        for data in (self.config.data, self.trained.data):
            places.append((data.tokenizer_type, data.vocab_file, data.merge_file))
            vocab, merges = (
                file and str(self.path.parent / TOKENIZER / Path(file).name)
                for file in (data.vocab_file, data.merge_file)
            )
            if Path(vocab or "").is_file():  # the run may have been moved
                places.append((data.tokenizer_type, vocab, merges))
        places = [place for place in places if place[0] and (place[1] or not needs_files(place[0]))]
        for prefix in prefixes:
            places.append(("HFTokenizer", str(prefix.with_name(BESIDE_TOKENS)), None))
        return list(dict.fromkeys(places))

    def tokenizer_of(self, tokens: TokenFile) -> Tokenizer | None:
        """The tokenizer that wrote a text, or None if it is not at hand."""
        writer = tokens.meta.get("tokenizer") or self.tokenizer
        return _tokenizer(tuple(self.tokenizer_files([tokens.prefix])), writer.get("hash"))

    def check_known_tokens(self, windows: Iterable[np.ndarray]) -> None:
        """Raises UserError if the text holds a token that the embedding does not have."""
        vocab = self.record["vocab"]
        highest = max(int(ids.max()) for ids in windows)
        if highest >= vocab:
            raise UserError(
                f"data_path: holds token {highest}, {self.path} knows the tokens 0 to {vocab - 1}"
                f" - {PREPARE}"
            )

    def facts(self, attention: MeasuredAttention) -> Facts:
        """The keys of every row about the model, as it now is, and about the code."""
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
            "attention_backend": self.model.resolved_backend,
            "commit": commit(),
            "code": code_fingerprint(),
            **variant(attention),
            **self.trained.beside_encoding,
        }
        if origin := imported_class(self.record):
            facts["origin"] = origin
        for key in ("parent", "parent_model"):
            if self.record.get(key):
                facts[key] = self.record[key]
        if self.record.get("corpora") and self.trained.data.train_data_paths:
            facts["trained_on"] = self.record["corpus"]
        return facts


@dataclass(frozen=True)
class LoadedRun(LoadedModel):
    """A checkpoint that was found to fit its text too.

    texts: what the part is measured on, each by itself: one corpus, or those of
        valid_data_paths or a key like it
    """

    texts: Part

    def default_output(
        self, tokens: TokenFile, attention: MeasuredAttention, words: Iterable[str]
    ) -> Path:
        """A file in the run's folder, named by what is measured.

        So another corpus, part or variant replaces nothing. The window stands there as it was
        asked for: a name must not change when the code does, or no measurement could go on.
        """
        name = [tokens.prefix.name, self.texts.name, self.path.name, *words]
        for key, value in variant(attention).items():
            name.append(key if value is True else f"{key}={value}")
        return self.path.parent / "evaluation" / ("-".join(name) + ".jsonl")

    def facts_of_text(self, protocol: str, tokens: TokenFile) -> Facts:
        """The keys of every row about the text."""
        return {
            "corpus": name_of(tokens),
            "part": self.texts.name,
            "split": self.texts.split,
            "protocol": protocol,
        }

    def bytes_of_text(self, tokens: TokenFile, windows: Windows, loss: float | None) -> Facts:
        """bytes, bytes_from and bits_per_byte of the scored targets; {} if nothing is known.

        Answers of a task have none, because they are no text.

        They are counted by the tokenizer if its files exist, else by the mean on the corpus's card.
        loss: mean over the scored targets in nats. The end of a document is a target without
        bytes: what it costs to say that a document ends counts.
        """
        if windows.answers:
            return {}
        count = int(windows.counts.sum())
        size, way = 0, EXACT
        tokenizer = self.tokenizer_of(tokens)
        sizes = None if tokenizer is None else tokenizer.token_bytes()
        if sizes is not None:
            for targets in windows.targets:
                tokens_with_text = targets[targets < len(sizes)]  # rows may be padded
                size += int(sizes[tokens_with_text].sum())
        elif tokens.text_bytes:
            size, way = tokens.text_bytes / tokens.tokens * count, MEAN
        if not size:  # nothing is known, or only ends of documents were scored
            return {}
        bits = None if loss is None else bits_per_byte(loss, count, size)
        return {"bytes": size, "bytes_from": way, "bits_per_byte": bits}

    def texts_of_targets(self, tokens: TokenFile, windows: Windows, count: int) -> Facts:
        """token_texts of the first targets, as far as they read on a page; {} without tokenizer.

        A control character is shown by its picture, such as ␊ for a line break.
        """
        tokenizer = self.tokenizer_of(tokens)
        if tokenizer is None:
            return {}
        texts = []
        for ids, places in zip(windows.ids, windows.scored, strict=True):
            for place in places[: min(count, TEXTS) - len(texts)].tolist():
                # Some tokenizers lose the space before a token that stands alone.
                before, both = ids[place : place + 1].tolist(), ids[place : place + 2].tolist()
                text = tokenizer.decode(both)[len(tokenizer.decode(before)) :]
                texts.append(CONTROL.sub(lambda match: chr(0x2400 + ord(match[0]) % 0x40), text))
        return {"token_texts": texts}


@cache
def _tokenizer(places: Sequence[TokenizerFiles], expected: str | None) -> Tokenizer | None:
    """The tokenizer of that hash, or None if it is not at hand.

    An evaluation needs no tokenizer, so a file that cannot be used is a warning.
    """
    faults = []
    for place in places:
        _, file, _ = place
        try:
            tokenizer = build_tokenizer(*place)
        except UserError as fault:
            if file and os.path.exists(file):
                faults.append(str(fault))
            continue
        if tokenizer.hash == expected:
            return tokenizer
        if file:
            faults.append(f"{file}: has the hash {tokenizer.hash}, the text's tokenizer {expected}")
    for fault in faults:
        logger.warning("%s - without the tokenizer bytes are estimated by the corpus's card", fault)
    return None


def loaded_model(config: Config | None, folder: str | Path | None, step: int | None) -> LoadedModel:
    """Open a checkpoint without a text; arguments and errors as for `loaded_run`."""
    where = folder or checkpoint_folder(config, step)
    model, trained, record = load_for_evaluation(where, step)
    path = Path(record["path"])
    if CONTROL.search(str(path)):  # every row repeats it
        raise UserError(f"checkpoint: {path} has a control character in its name - rename it")
    return measurable(model, trained, config, path, record)


def measurable(
    model: GPT, trained: Config, config: Config | None, path: Path, record: dict[str, Any]
) -> LoadedModel:
    """A model with the settings of its measurement; see `LoadedModel`.

    config: the configuration given; None for that of the training
    Raises UserError for weights that are not finite.
    """
    for name, weights in model.named_parameters():
        if not torch.isfinite(weights).all():
            raise UserError(
                f"{path}: {name} holds numbers that are not finite - the training diverged"
                " before it was saved; give an earlier --step, or train with a lower lr"
            )

    # Unless the configuration says so itself, documents are kept apart as in training.
    config = config or trained
    values = {}
    for key in ("reset_attention_mask", "reset_position_ids"):
        if key not in config.chosen:
            values[key] = trained[key]
    if "reset_attention_mask" in config.chosen and not config["reset_attention_mask"]:
        values = {"reset_position_ids": False}  # which needs the mask
    stage = trained.at_step(record["step"])
    for keys in (("window", "window_layers"), ("logn_scale",)):
        if all(config[key] == trained[key] for key in keys):
            values |= {key: stage[key] for key in keys}
    attention = config.attention.model_copy(update=values)
    config = replace(config, attention=attention)
    return LoadedModel(model, trained, config, path, record)


def opened_with_tokenizer(
    config: Config | None, folder: str | Path | None, step: int | None
) -> tuple[LoadedModel, Tokenizer]:
    """A checkpoint and its tokenizer; arguments as for evaluation.loaded_run.loaded_run.

    Raises UserError if there is no checkpoint, if it is one of another model, or if its tokenizer
    is not found.
    """
    trained = loaded_model(config, folder, step)
    keys = trained.config.model_keys()
    check_same_model(keys, trained.trained.model_keys(), trained.path)
    return trained, tokenizer_of(trained)


def tokenizer_of(trained: LoadedModel) -> Tokenizer:
    """The tokenizer that a checkpoint learned with; UserError if it is not found."""
    description = trained.tokenizer
    expected = description.get("hash")
    if description.get("type") == "task":
        raise UserError(
            f"{trained.path}: learned a task, which has no tokenizer for texts - evaluate.py"
            " without --tasks measures it"
        )
    prefixes = []
    for data in (trained.config.data, trained.trained.data):
        prefixes += filter(None, (data.data_path, *data.train_data_paths))
    faults = []
    for kind, vocab_file, merge_file in trained.tokenizer_files(map(Path, prefixes)):
        try:
            tokenizer = build_tokenizer(kind, vocab_file, merge_file)
        except UserError as fault:
            faults.append(str(fault))
            continue
        if expected in (None, tokenizer.hash) and tokenizer.vocab_size <= trained.record["vocab"]:
            return tokenizer
        faults.append(f"{vocab_file or kind}: is another tokenizer, {tokenizer.hash}")
    words = f"{description.get('type', 'unknown')} {expected or ''}".strip()
    message = (
        f"vocab_file: the tokenizer that {trained.path} learned with ({words}) is not found"
        " - give its files: tokenizer_type=… vocab_file=… and, for GPT2BPETokenizer, merge_file=…"
    )
    raise UserError("\n  ".join([message, *faults]))


def loaded_run(config: Config | None, folder: str | Path | None, step: int | None) -> LoadedRun:
    """Open a checkpoint and its text, and check that they agree.

    config: the configuration given; None for that of the training
    folder: of a run or of one checkpoint; None for `load` or `save` of the configuration
    step: which checkpoint of a run; None for the latest
    Raises UserError if there is no checkpoint or no text, or if they do not belong together.
    """
    return on_text(loaded_model(config, folder, step))


def on_text(loaded: LoadedModel) -> LoadedRun:
    """A model with its text; UserError if there is none, or they do not belong together."""
    trained, config, path = loaded.trained, loaded.config, loaded.path
    names_data = config if any(config[key] for key in DATA_PATHS) else trained
    part = config.evaluation.eval_part
    texts = open_parts(names_data.data, [part])[part]
    if names_data is trained:  # the data of the training, with the split that is given
        texts = replace(texts, split=texts.split if texts.weights else config.data.split)

    # On the data of the training the split must agree too: else text of the training is measured.
    # pos_emb_file is no such key: its text was compared when the checkpoint was read.
    model_keys, trained_keys = config.model_keys(), trained.model_keys()
    measured_on, trained_on = names_data.data.data_path, trained.data.data_path
    if measured_on and trained_on and Path(measured_on).resolve() == Path(trained_on).resolve():
        model_keys["split"] = config.data.split
        trained_keys["split"] = trained.data.split
    check_same_model(model_keys, trained_keys, path)

    trained_whole = trained.data.train_data_paths
    if texts.weights and trained_on:  # as a whole, it holds the training's share
        trained_whole = (trained_on,)
    trained_places = {place_of(corpus) for corpus in trained_whole}
    same_name: dict[str, TokenFile] = {}
    for tokens in texts.files:
        for name in {name_of(tokens), tokens.prefix.name}:
            other = same_name.setdefault(name, tokens)
            if other is not tokens:
                raise UserError(
                    f"{texts.name}_data_paths: {other.prefix} and {tokens.prefix} are both"
                    f" called {name} in results - evaluate one at a time"
                )
        writer = tokens.meta.get("tokenizer") or {}
        hashes = writer.get("hash"), loaded.tokenizer.get("hash")
        if all(hashes) and hashes[0] != hashes[1]:
            raise UserError(
                f"data_path: {tokens.prefix} was written by {writer.get('type')} {hashes[0]},"
                f" {path} learned with {loaded.tokenizer.get('type')} {hashes[1]}:"
                f" its perplexity there would mean nothing - {PREPARE}"
            )
        if config.attention.reset_attention_mask:
            tokens.check_ends("reset_attention_mask", loaded.model.end_of_document)
        if place_of(str(tokens.prefix)) in trained_places:
            raise UserError(
                f"eval_part: {tokens.prefix} as {texts.name} text was trained on by {path}:"
                " a loss there says nothing of new text - give held-out text as"
                f" {texts.name}_data_paths"
            )
    task, *_ = texts.files
    if isinstance(task, TaskText) and task.filler:
        in_words = replace(task, tokenizer=loaded.tokenizer_of(task.filler))
        texts = replace(texts, files=(cast(TokenFile, in_words),))
    return LoadedRun(loaded.model, trained, config, path, loaded.record, texts)


def check_same_model(
    settings: Mapping[str, Any], trained: Mapping[str, Any], checkpoint: Path | str
) -> None:
    """Raises UserError if the configuration given is not that of the trained model.

    The message names every differing key with both values.

    settings, trained: the keys that describe a model, such as {"num_layers": 12}
    """
    lines = [f"{checkpoint}: is a checkpoint of another model - {FIT}"]
    for key, value in trained.items():
        if key in settings and settings[key] != value:
            lines.append(
                f"{key}: {settings[key]!r} is given, the checkpoint was trained with {value!r}"
            )
    if len(lines) > 1:
        raise UserError("\n  ".join(lines))


def variant(attention: MeasuredAttention) -> Facts:
    """The keys that change which keys a query sees or how; only those that are on.

    They may have been set in training or for this measurement.
    """
    values = {key: getattr(attention, key) for key in ATTENTION_INPUTS}
    if attention.window_layers:
        values["window"] = ",".join(str(window or "none") for window in attention.window_layers)
    return {key: value for key, value in values.items() if value}


def checkpoint_folder(config: Config | None, step: int | None) -> str:
    """The folder of the checkpoint that a configuration means.

    That is the one whose own config.yml is given; else load or save, whichever holds a checkpoint.
    Raises UserError if both hold different ones, or none is named.
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
            "checkpoint: none is named - give the configuration of a run, or --checkpoint DIR"
        )
    holding = []
    for folder in folders:
        with contextlib.suppress(UserError):
            find(folder, step)
            holding.append(folder)
    if len(holding) == 2:
        raise UserError(
            f"checkpoint: load ({folders[0]}) and save ({folders[1]}) both hold one"
            " - say which with --checkpoint"
        )
    return holding[0] if holding else folders[0]


def code_fingerprint() -> str:
    """12 hex digits of the code that shapes a loss, committed or not."""
    digest = hashlib.sha256()
    for name in SHAPES_LOSSES:
        path = PACKAGE / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
