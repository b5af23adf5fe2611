"""From text to token ids and back."""

from megatron.data.tokenizers.build import build_tokenizer

__all__ = ["build_tokenizer"]
