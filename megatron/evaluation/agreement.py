"""Is this the checkpoint, and are these the data, that the user means?"""

from collections.abc import Iterable, Mapping
from typing import Any

from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.evaluation.protocols import Windows

REMEDY = "prepare that text with the checkpoint's tokenizer"


def check_same_model(given: Mapping[str, Any], trained: Mapping[str, Any], where: str) -> None:
    """UserError that names every key with both values, where the configuration given is not of the trained model.

    given, trained: flat keys that describe the model; where: the checkpoint
    """
    other = [key for key in trained if key in given and given[key] != trained[key]]
    if other:
        lines = [
            f"{key}: {given[key]!r} is given, the checkpoint was trained with {trained[key]!r}"
            for key in other
        ]
        fix = "give that run's configuration, its folder as load, or --checkpoint DIR and no configuration"
        raise UserError("\n  ".join([f"{where}: is a checkpoint of another model - {fix}", *lines]))


def check_same_tokenizer(tokens: TokenFile, tokenizer: Mapping[str, Any], where: str) -> None:
    """UserError where the data were written by another tokenizer than the checkpoint learned with.

    tokenizer: {type, hash, vocab_size} of the checkpoint; where one side does not name its own, nothing is known
    """
    written = tokens.meta.get("tokenizer") or {}
    if written.get("hash") and tokenizer.get("hash") and written["hash"] != tokenizer["hash"]:
        raise UserError(
            f"data_path: {tokens.prefix} was written by {_named(written)}, {where} learned with {_named(tokenizer)};"
            f" its perplexity there would mean nothing - {REMEDY}"
        )


def check_known_tokens(windows_of: Iterable[Windows], vocab: int, where: str) -> None:
    """UserError where the text holds a token that the embedding, with `vocab` rows, does not have."""
    highest = max(int(window.max()) for windows in windows_of for window in windows.ids)
    if highest >= vocab:
        raise UserError(
            f"data_path: holds token {highest}, {where} knows the tokens 0 to {vocab - 1} - {REMEDY}"
        )


def _named(tokenizer: Mapping[str, Any]) -> str:
    return f"{tokenizer.get('type')} {tokenizer['hash']} ({tokenizer.get('vocab_size')} tokens)"
