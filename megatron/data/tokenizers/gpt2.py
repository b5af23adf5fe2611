"""GPT2BPETokenizer: vocab.json and merges.txt, as OpenAI wrote them."""

from pathlib import Path
from typing import Any

from tokenizers import ByteLevelBPETokenizer, pre_tokenizers

from megatron.data.tokenizers.files import as_json, check_highest, hash_of, read_text
from megatron.data.tokenizers.subwords import Subwords, naming_faults
from megatron.data.tokenizers.tokenizer import END_OF_DOCUMENT
from megatron.errors import UserError

NAME = "GPT2BPETokenizer"


def gpt2(vocab_path: Path, merge_path: Path, name: str = NAME) -> Subwords:
    """The tokenizer of both files; UserError where they are damaged, swapped or of another kind.

    name: the tokenizer_type that reads them
    """
    vocab_text = read_text(vocab_path, "vocab_file")
    merges_text = read_text(merge_path, "merge_file")
    vocab = as_json(vocab_text)
    if vocab is None:
        fix = "give GPT-2's vocab.json (gpt2-vocab.json)"
        if isinstance(as_json(merges_text), dict):
            fix = "vocab_file and merge_file are swapped"
        raise UserError(f"vocab_file: {vocab_path} is not JSON - {fix}")
    if isinstance(vocab.get("model"), dict):  # "model" is also a word of GPT-2's vocabulary
        raise UserError(
            f"vocab_file: {vocab_path} is a whole tokenizer.json - use tokenizer_type: HFTokenizer "
            "for it"
        )
    if as_json(merges_text) is not None:
        raise UserError(
            f"merge_file: {merge_path} is JSON, not a list of merges - give GPT-2's merges.txt "
            "(gpt2-merges.txt)"
        )
    _check_vocab(vocab, vocab_path)
    fault = f"merge_file: {merge_path} does not belong to {vocab_path}"
    with naming_faults(fault, "give the pair that came together"):
        bpe = ByteLevelBPETokenizer.from_file(str(vocab_path), str(merge_path))
    fingerprint = hash_of(vocab_text, merges_text)
    return Subwords(name, bpe._tokenizer, vocab[END_OF_DOCUMENT], fingerprint)


def _check_vocab(vocab: dict[str, Any], path: Path) -> None:
    if not vocab:
        raise UserError(f"vocab_file: {path} has no entries - copy it again")
    are_numbers = all(type(number) is int and number >= 0 for number in vocab.values())
    if not are_numbers or len(set(vocab.values())) < len(vocab):
        raise UserError(
            f"vocab_file: {path} does not give every token its own number - it is not a GPT-2 "
            "vocabulary, copy it again"
        )
    check_highest(max(vocab.values()), len(vocab), path)
    if END_OF_DOCUMENT not in vocab:
        raise UserError(
            f"vocab_file: {path} has no {END_OF_DOCUMENT}, which ends every document - add it to "
            "the vocabulary"
        )
    # The library drops letters that it does not know without a word.
    missing = set(pre_tokenizers.ByteLevel.alphabet()) - vocab.keys()
    if missing:
        raise UserError(
            f"vocab_file: {path} lacks {len(missing)} of the 256 bytes - it is not a byte-level "
            "GPT-2 vocabulary, copy it again"
        )
