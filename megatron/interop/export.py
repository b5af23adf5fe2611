"""A checkpoint of ours as a folder that transformers loads, compared with our model."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import torch
import yaml
from safetensors import SafetensorError
from tokenizers import Tokenizer, processors
from torch import Tensor

from megatron.checkpoints.manifest import SETTINGS, imported_class, write_record
from megatron.checkpoints.write import synced
from megatron.config import Config
from megatron.config.config import COPY
from megatron.config.schema import INPUTS, KEYS, file_names, plain
from megatron.data.tokenizers.build import SentencePieces
from megatron.data.tokenizers.hugging_face import Subwords
from megatron.errors import UserError, cannot_write
from megatron.evaluation.loaded_run import loaded_model, tokenizer_of
from megatron.files import folder_beside, umask
from megatron.interop import export_code
from megatron.interop.families import FAMILIES, write_weights
from megatron.interop.huggingface import compare_logits
from megatron.interop.open import PIECES, PREFIX
from megatron.model import GPT, Architecture, AttentionSettings, options_of_entry
from megatron.positions.layers import entries_of
from megatron.results.effective_length import effective_lengths
from megatron.results.files import existing_results
from megatron.results.labels import sections
from megatron.results.row import agrees

logger = logging.getLogger(__name__)

OWN = "PositionsGPTForCausalLM"  # our class
NOT_KEPT = ("attention_backend", "attention_self_check")
"""Settings of attention that change no number."""
COMPARED = 64  # last tokens of a text whose logits are compared
SHARD = "5GB"
CARD = "README.md"
TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
PUBLISHED = (
    "step",
    "config_hash",
    "vocab",
    "tokenizer",
    "corpus",
    "windows_per_step",
)
"""Entries of checkpoint.json that the exported one repeats."""
PRIVATE = ("checkpoint", "logging", "launch")  # sections of folders, accounts and machines


class ExportForm(NamedTuple):
    """An export for transformers: its class, config.json, weights by their names, and code.

    sources: text by file name; empty for a class of transformers' own
    longest: tokens of a text beyond which the class computes nothing, or None
    """

    architecture: str
    settings: dict[str, Any]
    weights: dict[str, Tensor]
    sources: Mapping[str, str]
    longest: int | None = None


class Exported(NamedTuple):
    """A folder that was written. notes: what the user should know

    differences: of logits from those of our model, by length of text
    """

    architecture: str
    step: int
    differences: dict[int, float]
    notes: tuple[str, ...]


def export(run: str | Path, folder: str | Path, *, step: int | None = None) -> Exported:
    """Write a checkpoint as a folder for transformers, and compare its logits with ours.

    run: a run's folder or one checkpoint
    Raises UserError if the folder is in use, a file cannot be used, or the logits differ; then
    nothing is left.
    """
    folder = Path(os.path.abspath(folder))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--output: {folder} is in use - name a new folder, or an empty one")
    trained = loaded_model(None, run, step)
    model, config, record = trained.model, trained.trained, trained.record
    # transformers passes no documents: what is exported is the same function of one.
    exported = config.at_step(record["step"])
    model.use_attention(AttentionSettings.of(exported.attention).of_one_document())

    notes = []
    tokenizer = None
    try:
        tokenizer = tokenizer_of(trained)
    except UserError as fault:
        logger.warning("%s", fault)
        notes.append("No tokenizer: its files were not found.")
    if isinstance(tokenizer, SentencePieces):
        notes.append(f"Load {PIECES} by sentencepiece: transformers may give spaces other ids.")
    elif tokenizer is not None and not isinstance(tokenizer, Subwords):
        notes.append(f"No tokenizer: {tokenizer.name} has no tokenizer.json.")
    form = form_of(model, exported)
    end = trained.tokenizer.get("eod")
    ends = {
        "bos_token_id": trained.tokenizer.get("bos", end),
        "eos_token_id": trained.tokenizer.get("eos_token_id", end),
    }
    try:
        with folder_beside(folder) as temporary:
            if isinstance(tokenizer, Subwords):
                transformers_tokenizer(tokenizer, trained.tokenizer).save_pretrained(temporary)
            elif isinstance(tokenizer, SentencePieces):
                (temporary / PIECES).write_bytes(tokenizer.content)
            settings = {**form.settings, **ends, "dtype": "float32"}
            texts = {
                **form.sources,
                CARD: card(form, folder.name, config, record, notes, gain_of(trained.path, record)),
                "config.json": json.dumps(settings, indent=2) + "\n",
                "generation_config.json": json.dumps(ends, indent=2) + "\n",
            }
            if form.sources:  # our own class is read back by these
                texts[SETTINGS] = yaml.safe_dump(published(config), sort_keys=False)
                if config.pos_emb_code is not None:
                    texts[COPY] = config.pos_emb_code
            for name, text in texts.items():
                (temporary / name).write_text(text, encoding="utf-8")
            from huggingface_hub import save_torch_state_dict  # only here: importing it takes long

            kind = {"format": "pt"}
            save_torch_state_dict(form.weights, temporary, max_shard_size=SHARD, metadata=kind)
            differences = compare(temporary, form, model)
            for file in temporary.iterdir():
                file.chmod(0o666 & ~umask())  # safetensors lets only the owner read its file
            sums = synced(sorted(temporary.iterdir()))
            # No import reads the code, and in the card its owner writes the licence.
            for name in (CARD, *form.sources):
                del sums[name]
            facts = {key: record.get(key) for key in PUBLISHED}
            write_record(temporary, {**facts, "files": sums})
    except (OSError, SafetensorError) as fault:
        raise cannot_write(f"--output: {folder}", fault) from None
    return Exported(form.architecture, record["step"], differences, tuple(notes))


def form_of(model: GPT, config: Config) -> ExportForm:
    """The model as the first class of transformers that is exactly it, else as our own class."""
    state, architecture = model.state_dict(), Architecture.of(config.model)
    for family in FAMILIES.values():
        try:
            settings = family.config_of(config, model.vocab)
        except UserError as fault:
            logger.info("%s", fault)
            continue
        modules = {module for module, *_ in family.places(architecture)}
        if {name.removesuffix(".weight").removesuffix(".bias") for name in state} <= modules:
            weights = write_weights(family, state, architecture)
            longest = architecture.seq_length if family.ends else None
            return ExportForm(family.architecture, settings, weights, {}, longest)
    weights = {PREFIX + name: tensor for name, tensor in state.items()}
    code = export_code.sources(model, config)
    return ExportForm(OWN, keys_of(config, model), weights, code)


def keys_of(config: Config, model: GPT) -> dict[str, Any]:
    """config.json for our own class."""
    architecture = Architecture.of(config.model)
    attention = asdict(AttentionSettings.of(config.attention).of_one_document())
    entries = entries_of(config.position)
    encodings = []
    for index in range(len(model.positions)):
        entry = entries[model.position_of_layer.index(index) % len(entries)]
        encodings.append({entry.name: plain(options_of_entry(config, entry))})
    return {
        "architectures": [OWN],
        "model_type": "positions_gpt",
        "auto_map": {
            "AutoConfig": "modeling_positions_gpt.PositionsGPTConfig",
            "AutoModelForCausalLM": f"modeling_positions_gpt.{OWN}",
        },
        "vocab_size": model.vocab,
        "hidden_size": architecture.hidden_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_attention_heads,
        "max_position_embeddings": config.model.max_position_embeddings,
        "architecture": plain(vars(architecture)),
        "attention_settings": {
            name: plain(value) for name, value in attention.items() if name not in NOT_KEPT
        },
        "encodings": encodings,
        "encoding_of_layer": model.position_of_layer,
    }


def published(config: Config) -> dict[str, Any]:
    """config.yml without folders, machines and accounts; its hash is the same."""
    keys = {key: value for key, value in config.flat().items() if KEYS[key] not in PRIVATE}
    named = {key: file_names(keys[key]) for key in INPUTS & keys.keys() if keys[key]}
    return keys | named | {"parent": plain(config.checkpoint.parent) | {"path": None}}


def compare(folder: Path, form: ExportForm, model: GPT) -> dict[int, float]:
    """The largest difference of the folder's logits from our model's, by length of text.

    One random text is short, the other longer than those of the training. A length that the
    encoding cannot compute is left out. UserError if rounding explains no such difference.
    The folder's code is run, so it must have been written here.
    """
    import transformers  # only here: importing it takes seconds

    transformers.utils.logging.disable_progress_bar()
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=bool(form.sources), dtype=torch.float32, local_files_only=True
    )
    differences = {}
    trained = model.train_length
    for length in (min(COMPARED, trained), trained + max(COMPARED, trained // 4)):
        draw = torch.Generator().manual_seed(length)
        ids = torch.randint(model.vocab, (1, length), generator=draw)
        if form.longest is not None and length > form.longest:
            continue
        try:
            model.check_length(length)
        except UserError:
            continue
        differences[length], _ = compare_logits(form.architecture, theirs, model, ids, COMPARED)
    return differences


def transformers_tokenizer(tokenizer: Subwords, record: Mapping[str, Any]) -> Any:
    """transformers' tokenizer, which gives a text the ids that ours gives it.

    record: its entry in checkpoint.json
    """
    from transformers import PreTrainedTokenizerFast  # only here: importing it takes seconds

    begin = record.get("bos_token")
    inner = Tokenizer.from_str(tokenizer.to_json())
    adds_tokens = not isinstance(inner.post_processor, processors.ByteLevel | None)
    if begin is None and adds_tokens:
        inner.post_processor = None
    elif begin is not None and not adds_tokens:
        inner.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"], special_tokens=[(begin, record["bos"])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=begin or tokenizer.end_of_document,
        eos_token=record.get("eos_token", tokenizer.end_of_document),
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        chat_template=record.get("chat_template"),
    )


def gain_of(checkpoint: Path, record: Mapping[str, Any]) -> str:
    """The effective lengths by the rows beside a checkpoint, with their texts."""
    rows = []
    for path in sorted(checkpoint.parent.glob("evaluation/*.jsonl")):
        try:
            rows += existing_results(path)
        except UserError as fault:  # the model can be exported without it
            logger.warning("%s", fault)
    ours = {key: record[key] for key in ("config_hash", "step")}
    gains = []
    for heading, of_text in sections([row for row in rows if agrees(row, ours)]).items():
        for label, effective in effective_lengths(of_text).items():
            gains.append(f"{effective.text} ({label}, {heading})")
    return "; ".join(gains)


def card(
    form: ExportForm,
    name: str,
    config: Config,
    record: Mapping[str, Any],
    notes: list[str],
    effective: str,
) -> str:
    """The text of README.md, without the folders of this machine.

    name: of the folder; record: checkpoint.json; notes: sentences for the reader; effective: as
        `gain_of` gives it
    """
    stages = config.training.seq_length_schedule
    lengths = [stage.seq_length or config.model.seq_length for stage in stages]
    lengths.append(config.model.seq_length)
    environment = jinja2.Environment(keep_trailing_newline=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        architecture=form.architecture,
        name=name,
        own_class=bool(form.sources),
        label=config.label,
        is_imported=imported_class(record) is not None,
        context=f"{' to '.join(dict.fromkeys(map(str, lengths)))} tokens",
        config=config,
        record=record,
        notes=notes,
        effective=effective,
    )
