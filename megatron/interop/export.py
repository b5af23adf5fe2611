"""A checkpoint of ours as a folder that transformers loads, compared with our model."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpoints.read import load_for_evaluation
from megatron.config import Config
from megatron.errors import UserError, cannot_write
from megatron.files import folder_beside, sync, umask
from megatron.interop import export_code, exported_folder
from megatron.interop.export_card import card
from megatron.interop.export_tokenizer import tokenizer_of, write_tokenizer
from megatron.interop.families import FAMILIES
from megatron.interop.weights import write_weights
from megatron.model import GPT, Architecture, AttentionSettings

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = 1e-5  # of logits up to 1; larger ones may differ by this part of the largest
COMPARED = 64  # last tokens of a text whose logits are compared
SHARD = "5GB"
ENCODING = "positions."  # what the names of an encoding's numbers begin with


@dataclass(frozen=True)
class Form:
    """What transformers is given: its class, config.json, weights by their names, and code.

    sources: text by file name; empty for a class of transformers' own
    """

    architecture: str
    settings: dict[str, Any]
    weights: dict[str, Tensor]
    sources: Mapping[str, str]


@dataclass(frozen=True)
class Exported:
    """What was written. differences: largest one of logits by length of the text, from our model.

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
    results: Sequence[Path] = (),
) -> Exported:
    """Write a checkpoint as a folder for transformers, and compare its logits with ours.

    run: a run's folder or one checkpoint; dtype: of the written matrices, a key of DTYPES
    vocab_file, merge_file: the tokenizer's, where they are not where the configuration says
    results: files of evaluations for the model card, besides those in the run's folder
    UserError where the folder is in use, the model cannot be said, or the logits differ; then
    nothing is left.
    """
    folder = Path(os.path.abspath(folder))
    _check_free(folder)
    model, config, record = load_for_evaluation(run, step)
    # transformers passes no documents: what is exported is the same function of one.
    model.use_attention(AttentionSettings.of(config.attention).of_one_document())
    _check_offered(model, config)
    tokenizer, notes = tokenizer_of(config, record, vocab_file, merge_file)
    unrounded = _logits(model)
    _round(model, dtype)
    expected = _logits(model)
    form = form_of(model, config)
    page = card(form.architecture, folder.name, config, record, dtype, notes, results)
    try:
        with folder_beside(folder) as temporary:
            same_tokenizer = tokenizer is None or write_tokenizer(temporary, *tokenizer)
            if form.sources:
                training = exported_folder.training_of(config, record, same_tokenizer)
                form.settings["training"] = training
            _write(temporary, form, record, dtype)
            (temporary / "README.md").write_text(page, encoding="utf-8")
            differences = compare(temporary, form, expected)
            for file in temporary.iterdir():
                file.chmod(0o666 & ~umask())  # safetensors lets only the owner read its file
                sync(file)
    except OSError as fault:
        raise cannot_write(f"--output: {folder}", fault) from None
    rounding = _largest(unrounded, expected)
    return Exported(form.architecture, record["step"], differences, rounding, tuple(notes))


def form_of(model: GPT, config: Config) -> Form:
    """The model as the first class of transformers that is exactly it, else as our own class."""
    state = model.state_dict()
    numbers = sum(tensor.numel() for tensor in state.values())
    paper_precision = config.attention.paper_precision  # no class of theirs rounds as the papers
    for family in FAMILIES.values():
        try:
            settings = family.config_of(config, model.vocab)
        except UserError as fault:
            logger.info("%s", fault)
            continue
        weights = write_weights(family, state, Architecture.of(config.model))
        written = sum(tensor.numel() for tensor in weights.values())
        windows = family.windows(settings)
        windows = [windows[layer % len(windows)] for layer in range(len(model.layers))]
        same_attention = windows == model.windows and not paper_precision
        if written == numbers and same_attention:
            return Form(family.architecture, settings, weights, {})
    settings = exported_folder.keys_of(config, model)
    sources = export_code.sources(model, config)
    return Form(exported_folder.ARCHITECTURE, settings, state, sources)


BY_CONTENT = ("on_scores", "score_bias", "on_queries_keys_by_content")


def _check_free(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise UserError(f"--output: {folder} is in use - name a new folder, or an empty one")


def _check_offered(model: GPT, config: Config) -> None:
    for placed in model.placed:
        hook = next((hook for hook in BY_CONTENT if placed.position.has(hook)), None)
        if hook is not None:
            raise UserError(
                f"pos_emb: {placed.name or config.position.pos_emb} changes scores by the content"
                f" of the text ({hook}), which an exported model does not compute - export a model"
                " whose encoding is a table, a rotation or an embedding"
            )


def _round(model: GPT, dtype: str) -> None:
    """Give the matrices the values that `dtype` can hold; the encoding keeps its own."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith(ENCODING):
                parameter.copy_(parameter.to(DTYPES[dtype]))


def _write(folder: Path, form: Form, record: Mapping[str, Any], dtype: str) -> None:
    """config.json, generation_config.json, weights and code."""
    from huggingface_hub import save_torch_state_dict  # only here: importing it takes long

    end = (record.get("tokenizer") or {}).get("eod")
    ends = {"bos_token_id": end, "eos_token_id": end}
    name = str(DTYPES[dtype]).removeprefix("torch.")
    settings = {**form.settings, **ends, "dtype": name}
    _write_json(folder / "config.json", settings)
    _write_json(folder / "generation_config.json", ends)
    for file, text in form.sources.items():
        (folder / file).write_text(text, encoding="utf-8")
    weights = {}
    for key, tensor in form.weights.items():
        stays = bool(form.sources) and key.startswith(ENCODING)
        kind = tensor.dtype if stays else DTYPES[dtype]
        # safetensors refuses a part of a larger tensor.
        is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
        weights[key] = tensor.to(kind, copy=is_part)
    save_torch_state_dict(weights, folder, max_shard_size=SHARD, metadata={"format": "pt"})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def lengths_of(model: GPT) -> list[int]:
    """A short length and one beyond the training's."""
    trained = model.train_length
    return [min(COMPARED, trained), trained + max(COMPARED, trained // 4)]


def _logits(model: GPT) -> dict[int, Tensor]:
    """Ours of a random text, for its last tokens, by its length: [1, tokens, vocab].

    A length that the encoding cannot compute is left out.
    """
    found = {}
    for length in lengths_of(model):
        try:
            with torch.no_grad():
                x = model.features(_text(model.vocab, length))[:, -COMPARED:]
                found[length] = F.linear(x, model.output_matrix)
        except UserError as fault:
            logger.info("not compared at %d tokens: %s", length, fault)
    return found


def _text(vocab: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocab, (1, length), generator=generator)


def compare(folder: Path, form: Form, expected: Mapping[int, Tensor]) -> dict[int, float]:
    """The largest difference of the folder's logits from the expected ones, by length.

    The folder's code is run, so it must have been written here. UserError above the tolerance.
    """
    import transformers  # only here: importing it takes seconds

    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            trust_remote_code=bool(form.sources),
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    except OSError as fault:  # also from a user's own file, which may need files beside it
        raise UserError(
            f"{form.architecture}: transformers cannot load it ({fault}) - nothing was written; a"
            " pos_emb_file must not need other files"
        ) from None
    if shown:
        transformers.utils.logging.enable_progress_bar()
    theirs, found = loaded
    faults = [f"{kind}: {names}" for kind, names in found.items() if names]
    if faults:
        raise UserError(
            f"{form.architecture}: does not take the weights ({'; '.join(faults)}) - nothing was"
            " written; please report it with the run's config.yml"
        )
    differences = {}
    vocab = form.settings["vocab_size"]
    for length, logits in expected.items():
        with torch.no_grad():
            other = theirs(_text(vocab, length), logits_to_keep=COMPARED).logits
        differences[length] = float((other - logits).abs().max())
        allowed = TOLERANCE * max(1.0, float(logits.abs().max()))
        if not differences[length] <= allowed:
            raise UserError(
                f"{form.architecture}: its logits differ by {differences[length]:.1e} from ours at"
                f" {length} tokens, allowed is {allowed:.1e} - nothing was written; please report"
                " it with the run's config.yml"
            )
    return differences


def _largest(one: Mapping[int, Tensor], other: Mapping[int, Tensor]) -> float:
    return max(float((one[length] - other[length]).abs().max()) for length in one)
