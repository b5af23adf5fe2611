"""HFTokenizer: a tokenizer.json, or a folder that holds one."""

import json
import math
import re
from pathlib import Path
from typing import Any

import tokenizers

from megatron.data.tokenizers.files import (
    as_json,
    check_highest,
    hash_of,
    other_kind,
    read_text,
)
from megatron.data.tokenizers.gpt2 import gpt2
from megatron.data.tokenizers.subwords import Subwords, naming_faults
from megatron.data.tokenizers.tokenizer import END_OF_DOCUMENT
from megatron.errors import UserError

NAME = "HFTokenizer"
WHOLE = "tokenizer.json"
PAIR = ("vocab.json", "merges.txt")
OF_GPT2 = ("GPT2Tokenizer", "GPT2TokenizerFast")
CONVERT = (
    "let transformers write tokenizer.json:"
    " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
)
BESIDE = "tokenizer_config.json"  # of Hugging Face, beside tokenizer.json
LONGEST_PATTERN = 1 << 16
UNROLLED = 100_000  # copies of a part of a pattern
REPEATED = re.compile(r"\{([\d,]+)\}")  # the counts of `{2,5}`


def hugging_face(path: Path) -> Subwords:
    """The tokenizer of a tokenizer.json or of a folder of Hugging Face.

    A folder without tokenizer.json may hold GPT-2's vocab.json and merges.txt. UserError for
    anything else, and for damaged files.
    """
    if not path.is_dir():
        return _whole(path)
    if (path / WHOLE).is_file():
        return _whole(path / WHOLE)
    return _slow(path)


def _slow(folder: Path) -> Subwords:
    """A folder that a tokenizer written in Python was saved to: GPT-2's has all that is needed."""
    if (folder / "tokenizer.model").is_file():
        raise UserError(
            f"vocab_file: {folder} has no {WHOLE}, only a tokenizer.model - if that is a"
            f" SentencePiece model, use tokenizer_type: SPMTokenizer with {folder}/tokenizer.model"
            f" as vocab_file; else {CONVERT}"
        )
    files = [folder / name for name in PAIR]
    if not all(file.is_file() for file in files):
        raise UserError(
            f"vocab_file: the folder {folder} has neither {WHOLE} nor {' and '.join(PAIR)}"
            " - give a folder that save_pretrained of a tokenizer wrote"
        )
    settings = _settings(folder)
    kind = settings.get("tokenizer_class") or OF_GPT2[0]
    is_plain = not settings.get("add_prefix_space") and not settings.get("added_tokens_decoder")
    if kind not in OF_GPT2 or not is_plain or (folder / "added_tokens.json").exists():
        raise UserError(
            f"vocab_file: the folder {folder} has no {WHOLE}, and its {kind} needs more than"
            f" {' and '.join(PAIR)} of GPT-2 - {CONVERT}"
        )
    return gpt2(*files, name=NAME)


def _whole(path: Path) -> Subwords:
    text = read_text(path, "vocab_file")
    content = as_json(text)
    if content is None or not isinstance(content.get("model"), dict):
        what = "not one"
        if content is None and (kind := other_kind(path, ".json")):
            what = f"not one; {kind}"
        elif content:
            what = "a bare vocabulary: it needs tokenizer_type: GPT2BPETokenizer and its merge_file"
        raise UserError(f"vocab_file: HFTokenizer reads a tokenizer.json, {path} is {what}")
    check_patterns(content, path)
    inner = _read(text, path)
    ids = inner.get_vocab(with_added_tokens=True).values()
    check_highest(max(ids, default=0), len(ids), path)
    end: str | None = END_OF_DOCUMENT
    fingerprint = hash_of(text)
    if inner.token_to_id(END_OF_DOCUMENT) is None:
        end = _end_of_text(path)
        fingerprint = hash_of(text, end or "")
    eod = inner.token_to_id(end) if end else None
    if eod is None:
        raise UserError(
            f"vocab_file: {path} has no {END_OF_DOCUMENT}, which ends every document, and no "
            f"eos_token of {BESIDE} beside it - add it to its special tokens, or copy that file too"
        )
    added = inner.get_added_tokens_decoder().get(eod)
    if added is not None and not added.special:
        inner = _read(_with_special(content, eod), path)
    built = Subwords(NAME, inner, eod, fingerprint)
    if not built.encode("Hello world"):
        raise UserError(
            f"vocab_file: {path} turns 'Hello world' into nothing, its vocabulary is empty "
            "- copy it again"
        )
    if eod in built.encode(f"one {end} two{end}three"):
        raise UserError(
            f"vocab_file: {path} gives the text '{end}' in a document the number that ends"
            " documents - take it out of the model's vocabulary and into added_tokens, or use its"
            " SentencePiece model (tokenizer_type: SPMTokenizer)"
        )
    return built


def _with_special(content: dict[str, Any], number: int) -> str:
    """The same tokenizer.json with one of its added tokens marked as special.

    Other added tokens are looked for in documents, so each could contain its own end.
    """
    for token in content["added_tokens"]:
        if token["id"] == number:
            token["special"] = True
    return json.dumps(content)


def _read(text: str, path: Path) -> tokenizers.Tokenizer:
    fault = f"vocab_file: {path} cannot be read by tokenizers {tokenizers.__version__}"
    with naming_faults(fault, "copy it again"):
        return tokenizers.Tokenizer.from_str(text)


def _end_of_text(path: Path) -> str | None:
    """The token that ends a text, by the tokenizer_config.json beside a tokenizer.json.

    None where it does not say so.
    """
    end = _settings(path.parent).get("eos_token")
    if isinstance(end, dict):
        end = end.get("content")
    return end if isinstance(end, str) else None


def _settings(folder: Path) -> dict[str, Any]:
    """The contents of tokenizer_config.json, {} where there is none or it is no JSON."""
    file = folder / BESIDE
    settings = as_json(read_text(file, "vocab_file")) if file.is_file() else None
    return settings or {}


def _count(digits: str) -> int:
    return int(digits[:9] or 1)


def check_patterns(content: dict[str, Any], path: Path) -> None:
    """Raise UserError where a pattern of a tokenizer.json alone could fill the memory.

    Repetitions are unrolled when a pattern is read, also those of repetitions.
    """
    waiting: list[Any] = [content.get("normalizer"), content.get("pre_tokenizer")]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, str):
            counts = [max(map(_count, found.split(","))) for found in REPEATED.findall(one)]
            if len(one) > LONGEST_PATTERN or math.prod(counts) > UNROLLED:
                raise UserError(
                    f"vocab_file: {path} has a pattern that is too large ({one[:40]!r}…) - use a"
                    " tokenizer with simpler Split or Replace patterns"
                )
