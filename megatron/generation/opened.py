"""A checkpoint with the tokenizer that it learned with."""

from collections.abc import Iterator
from pathlib import Path

from megatron.config import Config
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.errors import UserError
from megatron.evaluation.agreement import check_same_model
from megatron.evaluation.opened import Trained, opened_model


def opened_with_tokenizer(
    config: Config | None, folder: str | Path | None, step: int | None
) -> tuple[Trained, Tokenizer]:
    """A checkpoint and its tokenizer; arguments as for evaluation.opened.opened.

    UserError where there is no checkpoint, it is one of another model, or where its tokenizer is
    not found.
    """
    trained = opened_model(config, folder, step)
    keys = trained.config.model_keys()
    check_same_model(keys, trained.trained.model_keys(), trained.path)
    return trained, tokenizer_of(trained)


def tokenizer_of(trained: Trained) -> Tokenizer:
    """The tokenizer that a checkpoint learned with; UserError where its files are not found."""
    learned_with = trained.record.get("tokenizer") or {}
    expected = learned_with.get("hash")
    places = []
    for kind, vocab_file, merge_file in trained.tokenizer_files(_token_files(trained)):
        try:
            tokenizer = build_tokenizer(kind, vocab_file, merge_file)
        except UserError as fault:
            places.append(str(fault))
            continue
        if expected in (None, tokenizer.hash) and tokenizer.vocab_size <= trained.record["vocab"]:
            return tokenizer
        places.append(f"{vocab_file or kind}: is another tokenizer, {tokenizer.hash}")
    described = f"{learned_with.get('type', 'unknown')} {expected or ''}".strip()
    tried = "".join(f"\n  {place}" for place in places)
    raise UserError(
        f"vocab_file: the tokenizer that {trained.path} learned with ({described}) is not found"
        " - give its files: tokenizer_type=… vocab_file=… and, for GPT2BPETokenizer, merge_file=…"
        f"{tried}"
    )


def _token_files(trained: Trained) -> Iterator[Path]:
    """The token files that the configurations name."""
    for config in (trained.config, trained.trained):
        for prefix in (config.data.data_path, *config.data.train_data_paths):
            if prefix:
                yield Path(prefix)
