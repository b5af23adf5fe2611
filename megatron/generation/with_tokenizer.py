"""A checkpoint with the tokenizer that it learned with."""

from pathlib import Path

from megatron.config import Config
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.errors import UserError
from megatron.evaluation.loaded_run import LoadedModel, check_same_model, loaded_model


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
