"""Models from elsewhere: Hugging Face's folders, checkpoints of GPT-NeoX and its forks."""

from megatron.interop.open import open_model

__all__ = ["open_model"]
