"""A checkpoint of ours as a folder that transformers loads, compared with our model."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpoints.read import load_for_evaluation
from megatron.config import Config
from megatron.data.tokenizers.build import build_tokenizer, needs_files
from megatron.data.tokenizers.hugging_face import BESIDE, WHOLE, Subwords
from megatron.errors import UserError, cannot_write
from megatron.files import folder_beside, sync, umask
from megatron.interop import export_code, exported_folder
from megatron.interop.families import FAMILIES, write_weights
from megatron.model import GPT, Architecture, AttentionSettings
from megatron.positions.layers import name_of_layers
from megatron.results.files import read_results
from megatron.results.table import table

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = 1e-5  # of logits up to 1; larger ones may differ by this part of the largest
COMPARED = 64  # last tokens of a text whose logits are compared
SHARD = "5GB"
ENCODING = "positions."  # in the names of an encoding's numbers
NO_LIMIT = 10**9  # of tokens: transformers warns about texts that are longer
CARD = Path(__file__).with_name("model_card.md.jinja")


@dataclass(frozen=True)
class ExportForm:
    """An export for transformers: its class, config.json, weights by their names, and code.

    sources: text by file name; empty for a class of transformers' own
    """

    architecture: str
    settings: dict[str, Any]
    weights: dict[str, Tensor]
    sources: Mapping[str, str]


@dataclass(frozen=True)
class Exported:
    """A folder that was written. differences: of logits from those of our model, by length of text

    rounding: the largest that `dtype` made; notes: what the user should know
    """

    architecture: str
    step: int
    differences: dict[int, float]
    rounding: float
    notes: tuple[str, ...]


def export(
    run: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    dtype: str = "float32",
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
) -> Exported:
    """Write a checkpoint as a folder for transformers, and compare its logits with ours.

    run: a run's folder or one checkpoint; dtype: of the written matrices, a key of DTYPES
    vocab_file, merge_file: the tokenizer's, where they are not where the configuration says
    Raises UserError if the folder is in use, a file cannot be used, or the logits differ; then
    nothing is left.
    """
    folder = Path(os.path.abspath(folder))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--output: {folder} is in use - name a new folder, or an empty one")
    model, config, record = load_for_evaluation(run, step)
    # transformers passes no documents: what is exported is the same function of one.
    model.use_attention(AttentionSettings.of(config.attention).of_one_document())
    learned_with = record.get("tokenizer") or {}
    vocab_file = vocab_file or config.data.vocab_file
    tokenizer, notes = tokenizer_of(config, learned_with, vocab_file, merge_file)
    unrounded = logits_of(model)
    with torch.no_grad():  # the encoding keeps its own numbers
        for name, parameter in model.named_parameters():
            if not name.startswith(ENCODING):
                parameter.copy_(parameter.to(DTYPES[dtype]))
    expected = logits_of(model)
    form = form_of(model, config)
    page = card(form.architecture, folder.name, config, record, dtype, notes)
    end = learned_with.get("eod")
    ends = {"bos_token_id": end, "eos_token_id": end}
    settings = {**form.settings, **ends, "dtype": str(DTYPES[dtype]).removeprefix("torch.")}
    try:
        with folder_beside(folder) as temporary:
            same_tokenizer = True
            if tokenizer is not None and vocab_file is not None:
                same_tokenizer = write_tokenizer(temporary, tokenizer, Path(vocab_file))
            if form.sources:
                training = exported_folder.training_of(config, record, same_tokenizer)
                settings["training"] = training
            texts = {
                **form.sources,
                "README.md": page,
                "config.json": json.dumps(settings, indent=2) + "\n",
                "generation_config.json": json.dumps(ends, indent=2) + "\n",
            }
            for name, text in texts.items():
                (temporary / name).write_text(text, encoding="utf-8")
            save_weights(temporary, form, DTYPES[dtype])
            differences = compare(temporary, form, expected)
            for file in temporary.iterdir():
                file.chmod(0o666 & ~umask())  # safetensors lets only the owner read its file
                sync(file)
    except OSError as fault:
        raise cannot_write(f"--output: {folder}", fault) from None
    changes = [(unrounded[length] - expected[length]).abs().max() for length in expected]
    rounding = float(max(changes))
    return Exported(form.architecture, record["step"], differences, rounding, tuple(notes))


def form_of(model: GPT, config: Config) -> ExportForm:
    """The model as the first class of transformers that is exactly it, else as our own class."""
    state = model.state_dict()
    numbers = sum(tensor.numel() for tensor in state.values())
    for family in FAMILIES.values():
        try:
            settings = family.config_of(config, model.vocab)
        except UserError as fault:
            logger.info("%s", fault)
            continue
        weights = write_weights(family, state, Architecture.of(config.model))
        if sum(tensor.numel() for tensor in weights.values()) == numbers:
            return ExportForm(family.architecture, settings, weights, {})
    settings = exported_folder.keys_of(config, model)
    weights = {exported_folder.PREFIX + name: tensor for name, tensor in state.items()}
    return ExportForm(
        exported_folder.ARCHITECTURE, settings, weights, export_code.sources(model, config)
    )


def save_weights(folder: Path, form: ExportForm, dtype: torch.dtype) -> None:
    """Write the weights in shards; those of an encoding of ours keep their dtype."""
    from huggingface_hub import save_torch_state_dict  # only here: importing it takes long

    weights = {}
    for key, tensor in form.weights.items():
        stays = bool(form.sources) and key.startswith(exported_folder.PREFIX + ENCODING)
        # safetensors refuses a part of a larger tensor.
        is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
        weights[key] = tensor.to(tensor.dtype if stays else dtype, copy=is_part)
    save_torch_state_dict(weights, folder, max_shard_size=SHARD, metadata={"format": "pt"})


def random_text(vocab: int, length: int) -> Tensor:
    """The same tokens each time: [1, length] int64."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocab, (1, length), generator=generator)


def logits_of(model: GPT) -> dict[int, Tensor]:
    """Ours of two random texts, for their last tokens, by length: [1, tokens, vocab].

    One text is short, the other longer than those of the training. A length that the encoding
    cannot compute is left out.
    """
    trained = model.train_length
    found = {}
    for length in (min(COMPARED, trained), trained + max(COMPARED, trained // 4)):
        try:
            with torch.no_grad():
                x = model.features(random_text(model.vocab, length))[:, -COMPARED:]
                found[length] = F.linear(x, model.output_matrix)
        except UserError as fault:
            logger.info("not compared at %d tokens: %s", length, fault)
    return found


def compare(folder: Path, form: ExportForm, expected: Mapping[int, Tensor]) -> dict[int, float]:
    """The largest difference of the folder's logits from the expected ones, by length.

    The folder's code is run, so it must have been written here. UserError above the tolerance.
    """
    import transformers  # only here: importing it takes seconds

    transformers.utils.logging.disable_progress_bar()
    try:
        theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            trust_remote_code=bool(form.sources),
            dtype=torch.float32,
            local_files_only=True,
        )
    except OSError as fault:  # also from a user's own file, which may need files beside it
        raise UserError(
            f"{form.architecture}: transformers cannot load it ({fault}) - nothing was written; a"
            " pos_emb_file must not need other files"
        ) from None
    differences = {}
    for length, logits in expected.items():
        ids = random_text(form.settings["vocab_size"], length)
        with torch.no_grad():
            other = theirs(ids, logits_to_keep=COMPARED).logits
        differences[length] = float((other - logits).abs().max())
        allowed = TOLERANCE * max(1.0, float(logits.abs().max()))
        if not differences[length] <= allowed:
            raise UserError(
                f"{form.architecture}: its logits differ by {differences[length]:.1e} from ours at"
                f" {length} tokens, allowed is {allowed:.1e} - nothing was written; please report"
                " it with the run's config.yml"
            )
    return differences


def tokenizer_of(
    config: Config,
    learned_with: Mapping[str, Any],
    vocab_file: str | Path | None,
    merge_file: str | Path | None,
) -> tuple[Subwords | None, list[str]]:
    """The tokenizer that the model learned with, or None with a note why not.

    learned_with: its description; merge_file: instead of the one that the configuration names
    Raises UserError for files that cannot be read or are of another tokenizer.
    """
    kind = learned_with.get("type", config.data.tokenizer_type)
    if not needs_files(kind):
        return None, [f"No tokenizer: {kind} has none in transformers. Ids are bytes of UTF-8."]
    if not vocab_file:
        return None, ["No tokenizer: the run does not say where its files are; see --vocab-file."]
    tokenizer = build_tokenizer(kind, vocab_file, merge_file or config.data.merge_file)
    if tokenizer.hash != learned_with.get("hash", tokenizer.hash):
        raise UserError(
            f"vocab_file: {vocab_file} is tokenizer {tokenizer.hash}, the model learned with"
            f" {learned_with['hash']} - give the files of that one"
        )
    if isinstance(tokenizer, Subwords):
        return tokenizer, []
    return None, [
        f"No tokenizer: {kind} is not written as a tokenizer.json. Users of the model need the"
        f" library of {Path(vocab_file).name}."
    ]


def write_tokenizer(folder: Path, tokenizer: Subwords, file: Path) -> bool:
    """tokenizer.json and tokenizer_config.json, which give a text the ids that ours gives it.

    file: where the tokenizer came from, a file or the folder of a tokenizer.json
    Returns whether tokenizer.json is that file, byte for byte, and so has its hash.
    """
    content = json.loads(tokenizer.to_json())
    processor = content.get("post_processor") or {}
    if processor.get("type") != "ByteLevel":  # others add tokens of their own
        content["post_processor"] = None
    file = file / WHOLE if file.is_dir() else file
    text = file.read_text(encoding="utf-8")
    is_same = file.suffix == ".json" and json.loads(text) == content
    if not is_same:
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    (folder / WHOLE).write_text(text, encoding="utf-8", newline="")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.end_of_document,
        "eos_token": tokenizer.end_of_document,
        "unk_token": None,
        "model_max_length": NO_LIMIT,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / BESIDE).write_text(json.dumps(settings, ensure_ascii=False, indent=1) + "\n")
    return is_same


def card(
    architecture: str,
    name: str,
    config: Config,
    record: Mapping[str, Any],
    dtype: str,
    notes: Sequence[str],
) -> str:
    """The text of README.md, without the folders of this machine.

    architecture: class of transformers or ours; name: of the folder; record: checkpoint.json with
    `path`; notes: sentences for the reader
    Raises UserError if a file of the run's evaluations cannot be read.
    """
    origin = record.get("origin")
    if origin:
        source = str(origin.get("source"))
        source = Path(source).name if Path(source).is_absolute() else source
        origin = f"{source} ({origin.get('architecture') or origin.get('kind')})"
    files = sorted((Path(record["path"]).parent / "evaluation").glob("*.jsonl"))
    beside = [file for file in files if not file.name.endswith("-probes.jsonl")]
    own = (record["config_hash"], record["step"])
    rows = read_results(beside)
    rows = [row for row in rows if (row["config_hash"], row["step"]) == own]
    settings = sorted({f"{row.get('corpus')}, protocol {row.get('protocol')}" for row in rows})
    environment = jinja2.Environment(keep_trailing_newline=True)
    return environment.from_string(CARD.read_text(encoding="utf-8")).render(
        architecture=architecture,
        name=name,
        own_class=architecture == exported_folder.ARCHITECTURE,
        encoding=name_of_layers(config.position),
        config=config,
        record=record,
        dtype=dtype,
        notes=notes,
        origin=origin,
        settings="; ".join(settings),
        table=table(rows, markdown=True) if rows else "",
    )
