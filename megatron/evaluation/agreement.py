"""Checks that checkpoint, configuration and data belong together."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.address import place_of
from megatron.data.parts import Part, name_of
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.evaluation.protocols import Windows

PREPARE = "prepare that text with the checkpoint's tokenizer"
FIT = "give that run's configuration, its folder as load, or --checkpoint DIR and no configuration"


def check_same_model(
    given: Mapping[str, Any], trained: Mapping[str, Any], checkpoint: Path | str
) -> None:
    """UserError where the configuration given is not that of the trained model.

    The message names every differing key with both values.

    given, trained: the keys that describe a model, such as {"num_layers": 12}
    """
    differing = [key for key in trained if key in given and given[key] != trained[key]]
    if not differing:
        return
    lines = [f"{checkpoint}: is a checkpoint of another model - {FIT}"]
    for key in differing:
        lines.append(
            f"{key}: {given[key]!r} is given, the checkpoint was trained with {trained[key]!r}"
        )
    raise UserError("\n  ".join(lines))


def check_finite(model: nn.Module, checkpoint: Path | str) -> None:
    """UserError where a weight is nan or infinite: every loss would be so too."""
    for name, weights in model.named_parameters():
        if not torch.isfinite(weights).all():
            raise UserError(
                f"{checkpoint}: {name} holds numbers that are not finite - the training diverged"
                " before it was saved; give an earlier --step, or train with a lower lr"
            )


def check_same_tokenizer(
    tokens: TokenFile, tokenizer: Mapping[str, Any], checkpoint: Path | str
) -> None:
    """UserError where the data were written by another tokenizer than the checkpoint learned with.

    tokenizer: {type, hash, vocab_size} of the checkpoint
    Where one side has no hash, nothing is checked.
    """
    writer = tokens.meta.get("tokenizer") or {}
    written_with, learned_with = writer.get("hash"), tokenizer.get("hash")
    if written_with and learned_with and written_with != learned_with:
        raise UserError(
            f"data_path: {tokens.prefix} was written by {_described(writer)},"
            f" {checkpoint} learned with {_described(tokenizer)}:"
            f" its perplexity there would mean nothing - {PREPARE}"
        )


def check_distinct(texts: Part) -> None:
    """UserError where rows of two corpora, or their files, would have one name."""
    seen: dict[str, TokenFile] = {}
    for tokens in texts.files:
        for name in {name_of(tokens), tokens.prefix.name}:
            if name in seen:
                raise UserError(
                    f"{texts.name}_data_paths: {seen[name].prefix} and {tokens.prefix} are both"
                    f" called {name} in results - evaluate one at a time"
                )
        seen |= dict.fromkeys((name_of(tokens), tokens.prefix.name), tokens)


def check_held_out(texts: Part, trained_on: Iterable[str], checkpoint: Path | str) -> None:
    """UserError where a part that is held out holds a corpus that is trained on as a whole.

    trained_on: prefixes or addresses of the training's corpora
    """
    places = {place_of(path) for path in trained_on}
    for tokens in texts.files:
        if place_of(tokens.place) in places:
            raise UserError(
                f"eval_part: {tokens.place} as {texts.name} text was trained on by {checkpoint}:"
                " a loss there says nothing of new text - give held-out text as"
                f" {texts.name}_data_paths"
            )


def check_known_tokens(several: Iterable[Windows], vocab: int, checkpoint: Path | str) -> None:
    """UserError where the text holds a token that an embedding of `vocab` rows does not have."""
    highest = 0
    for windows in several:
        for ids in windows.ids:
            highest = max(highest, int(ids.max()))
    if highest >= vocab:
        raise UserError(
            f"data_path: holds token {highest}, {checkpoint} knows the tokens 0 to {vocab - 1}"
            f" - {PREPARE}"
        )


def _described(tokenizer: Mapping[str, Any]) -> str:
    return f"{tokenizer.get('type')} {tokenizer['hash']} ({tokenizer.get('vocab_size')} tokens)"
