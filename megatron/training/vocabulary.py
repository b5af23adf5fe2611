"""The vocabulary of a run: what the token file says and what the configured tokenizer says must be one thing."""

from typing import Any

from megatron.config import Config
from megatron.data.tokenizer import build_tokenizer
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.model import padded_vocab


def check_vocabulary(config: Config, tokens: TokenFile) -> dict[str, Any]:
    """{vocab: rows of the embedding, tokenizer: {type, hash, vocab_size, eod}, corpus} of data and configuration.

    The tokenizer is read from its files where the configuration names them; otherwise the token file's sidecar speaks.
    UserError where they disagree, or where neither says the vocabulary.
    """
    data = config.data
    if data.vocab_file or data.tokenizer_type == "CharLevelTokenizer":
        with config.naming_places("vocab_file", "merge_file"):
            tokenizer = build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)
        tokens.check_tokenizer(tokenizer)
        found: dict[str, Any] = {
            key: getattr(tokenizer, key) for key in ("hash", "vocab_size", "eod")
        } | {"type": tokenizer.name}
    elif "tokenizer" in tokens.meta:
        found = tokens.meta["tokenizer"]
    else:
        raise UserError(
            f"vocab_file: not set, and {tokens.prefix} has no sidecar {tokens.prefix}.json that names its tokenizer"
            " - set tokenizer_type, vocab_file and merge_file to what the data was prepared with"
        )
    rows = padded_vocab(found["vocab_size"], config.model.make_vocab_size_divisible_by)
    return {"vocab": rows, "tokenizer": found, "corpus": tokens.meta.get("corpus")}
