"""A checkpoint together with the configuration and the text to measure it with."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.checkpoints.manifest import weights_of
from megatron.checkpoints.read import load_for_evaluation
from megatron.checkpoints.saved import find
from megatron.commit import commit
from megatron.config import Config
from megatron.config.load import DATA_PATHS
from megatron.data.parts import Part, name_of, open_parts
from megatron.data.tokenizers.build import needs_files
from megatron.data.tokens import TokenFile
from megatron.errors import CONTROL, UserError
from megatron.evaluation.agreement import (
    check_distinct,
    check_finite,
    check_held_out,
    check_same_model,
    check_same_tokenizer,
)
from megatron.evaluation.resume import code_fingerprint
from megatron.evaluation.text_bytes import ByteCounts, TokenizerFiles, byte_counts, existing
from megatron.model import GPT, AttentionSettings
from megatron.positions.layers import name_of_layers
from megatron.results.row import ATTENTION_INPUTS, Facts

BESIDE_TOKENS = "tokenizer.json"  # what prepare_data.py writes beside the tokens


@dataclass(frozen=True)
class Trained:
    """A checkpoint that was found to be what its configuration describes.

    model: the trained weights, float32, on the CPU, in eval mode
    trained: the configuration of the training
    config: the configuration of the measurement; `trained` where none was given
    path: folder of the checkpoint, such as runs/mep/global_step2000
    record: its checkpoint.json: step, config_hash, vocab and more
    """

    model: GPT
    trained: Config
    config: Config
    path: Path
    record: dict[str, Any]

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return self.record["vocab"]

    @property
    def default_folder(self) -> Path:
        """Where results go unless the user names a place."""
        return self.path.parent / "evaluation"

    def tokenizer_files(self, prefixes: Iterable[Path]) -> list[TokenizerFiles]:
        """Where its tokenizer's files may be: as given, as in training, beside token files."""
        found: list[TokenizerFiles] = []
        described = (self.record.get("tokenizer") or {}).get("type")
        if described and not needs_files(described):
            found.append((described, None, None))
        for data in (self.config.data, self.trained.data):
            if data.vocab_file or not needs_files(data.tokenizer_type):
                found.append((data.tokenizer_type, data.vocab_file, data.merge_file))
        for prefix in prefixes:
            found.append(("HFTokenizer", str(prefix.with_name(BESIDE_TOKENS)), None))
        return list(dict.fromkeys(found))

    def facts(self) -> Facts:
        """What every row says about the model, where it now is, and about the code."""
        weight = next(self.model.parameters())
        tokenizer = self.record.get("tokenizer") or {}
        return {
            "pos_emb": name_of_layers(self.trained.position),
            "pos_emb_args": self.trained.flat()["pos_emb_args"],
            "train_length": self.trained.model.seq_length,
            "step": self.record["step"],
            "windows_per_step": self.record.get("windows_per_step"),
            "config_hash": self.record["config_hash"],
            "seed": self.trained.training.seed,
            "checkpoint": str(self.path),
            "weights": weights_of(self.path, self.record),
            "tokenizer": tokenizer.get("hash"),
            "dtype": str(weight.dtype).removeprefix("torch."),
            "device": weight.device.type,
            "commit": commit(),
            "code": code_fingerprint(),
            **self._ancestry(),
            **self._blend(),
        }

    def _ancestry(self) -> Facts:
        """The parent that the model was fine-tuned from; nothing for one trained from scratch."""
        keys = ("parent", "parent_model")
        return {key: self.record[key] for key in keys if self.record.get(key)}

    def _blend(self) -> Facts:
        """The corpora that the model was trained on; nothing where it was one."""
        return {"trained_on": self.record["corpus"]} if self.record.get("corpora") else {}

    def facts_of_attention(self, attention: AttentionSettings) -> Facts:
        """What every row says about attention, after the model was made to use it."""
        return {"attention_backend": self.model.resolved_backend, **variant(attention)}


@dataclass(frozen=True)
class Opened(Trained):
    """A checkpoint that was found to fit its text too.

    texts: what the part is measured on, each by itself: one corpus, or those of
        valid_data_paths or a key like it
    """

    texts: Part

    def facts_of_text(self, protocol: str, tokens: TokenFile) -> Facts:
        """What every row says about the text."""
        return {
            "corpus": name_of(tokens),
            "part": self.texts.name,
            "split": self.texts.split,
            "protocol": protocol,
        }

    @cached_property
    def byte_counts(self) -> dict[Path, ByteCounts]:
        """What counts the bytes of each text, by its prefix."""
        return {tokens.prefix: self._byte_counts_of(tokens) for tokens in self.texts.files}

    def _byte_counts_of(self, tokens: TokenFile) -> ByteCounts:
        """The tokenizer where its files exist, else the card."""
        files = self.tokenizer_files([tokens.prefix])
        learned_with = self.record.get("tokenizer") or {}
        return byte_counts(tokens, learned_with, existing(files))


def opened_model(config: Config | None, folder: str | Path | None, step: int | None) -> Trained:
    """Open a checkpoint without a text; arguments and errors as for `opened`."""
    folder = folder or checkpoint_folder(config, step)
    model, trained, record = load_for_evaluation(folder, step)
    path = Path(record["path"])
    if CONTROL.search(str(path)):  # every row repeats it
        raise UserError(f"checkpoint: {path} has a control character in its name - rename it")
    check_finite(model, path)
    config = _apart_as_trained(config or trained, trained)
    return Trained(model, trained, config, path, record)


def opened(config: Config | None, folder: str | Path | None, step: int | None) -> Opened:
    """Open a checkpoint and its text, and check that they agree.

    config: the configuration given; None for that of the training
    folder: of a run or of one checkpoint; None for `load` or `save` of the configuration
    step: which checkpoint of a run; None for the latest
    UserError where there is no checkpoint or no text, or where they do not belong together.
    """
    of_model = opened_model(config, folder, step)
    model, trained, config = of_model.model, of_model.trained, of_model.config
    path, record = of_model.path, of_model.record
    names_data = config if _names_text(config) else trained
    part = config.evaluation.eval_part
    with names_data.naming_places(*DATA_PATHS):
        texts = open_parts(names_data.data, [part])[part]
    if names_data is trained:  # the data of the training, with the split that is given
        texts = replace(texts, split=texts.split if texts.weights else config.data.split)

    wanted = what_must_agree(config, trained)
    of_training = what_must_agree(trained, trained)
    check_same_model(wanted, of_training, path)
    check_distinct(texts)
    for tokens in texts.files:
        check_same_tokenizer(tokens, record.get("tokenizer") or {}, path)
    if config.attention.reset_attention_mask:
        for tokens in texts.files:
            tokens.check_ends("reset_attention_mask", model.end_of_document)
    trained_on = trained.data.train_data_paths
    if texts.weights and trained.data.data_path:  # as a whole, it holds the training's share
        trained_on = (trained.data.data_path,)
    check_held_out(texts, trained_on, path)
    return Opened(model, trained, config, path, record, texts)


def _apart_as_trained(config: Config, trained: Config) -> Config:
    """The configuration with what keeps documents apart in training, unless it says that itself."""
    keys = ("reset_attention_mask", "reset_position_ids")
    values = {key: trained[key] for key in keys if key not in config.given}
    if "reset_attention_mask" in config.given and not config["reset_attention_mask"]:
        values = {"reset_position_ids": False}  # which needs the mask
    attention = config.attention.model_copy(update=values)
    return replace(config, attention=attention)


def variant(attention: AttentionSettings) -> Facts:
    """The keys that change which keys a query sees or how; only those that are on.

    They may have been set in training or for this measurement.
    """
    values = {key: getattr(attention, key) for key in ATTENTION_INPUTS}
    if attention.window_layers:
        values["window"] = ",".join(str(one or "none") for one in attention.window_layers)
    return {key: value for key, value in values.items() if value}


def _names_text(config: Config) -> bool:
    """Whether a configuration names corpora."""
    return any(config[key] for key in DATA_PATHS)


def data_path(given: Config, trained: Config) -> str:
    """The prefix that data_path names: the one given, else that of the training; "" for none."""
    names_data = given if _names_text(given) else trained
    return names_data.data.data_path or ""


def what_must_agree(config: Config, trained: Config) -> Facts:
    """Keys of a configuration that must be those of the training.

    They are the keys that make the model. On the data of the training the split is one too:
    with another split, text of the training would be measured. The path of pos_emb_file is none:
    its text was compared when the checkpoint's configuration was read.
    """
    keys = config.model_keys()
    own, of_training = data_path(config, trained), trained.data.data_path
    if own and of_training and Path(own).resolve() == Path(of_training).resolve():
        keys["split"] = config.data.split
    return keys


def checkpoint_folder(config: Config | None, step: int | None) -> str:
    """The folder of the checkpoint that a configuration means.

    That is the one whose own config.yml is given; else load or save, whichever holds a checkpoint.
    UserError where both hold different ones, or none is named.
    """
    if config and config.sources and step is None:
        own = Path(config.sources[0]).parent
        if (own / "checkpoint.json").exists():
            return str(own)
    named = [config.checkpoint.load, config.checkpoint.save] if config else []
    if config and config.checkpoint.finetune and config.checkpoint.save:
        named = [config.checkpoint.save]  # load is the parent
    folders = list(dict.fromkeys(folder for folder in named if folder))
    if not folders:
        raise UserError(
            "checkpoint: none is named - give the configuration of a run, or --checkpoint DIR"
        )
    holding = [folder for folder in folders if holds_checkpoint(folder, step)]
    if len(holding) == 2:
        raise UserError(
            f"checkpoint: load ({folders[0]}) and save ({folders[1]}) both hold one"
            " - say which with --checkpoint"
        )
    return holding[0] if holding else folders[0]


def holds_checkpoint(folder: str, step: int | None) -> bool:
    """Whether a folder is or has a checkpoint, of that step where one is given."""
    try:
        return find(folder, step).is_dir()
    except UserError:
        return False
