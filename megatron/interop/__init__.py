"""Models from elsewhere: those of Hugging Face, checkpoints of GPT-NeoX and its forks."""

from typing import TYPE_CHECKING, Any

from megatron.interop.open import open_model

if TYPE_CHECKING:
    from megatron.interop.in_transformers import use

__all__ = ["open_model", "use"]


def __getattr__(name: str) -> Any:
    if name == "use":  # importing transformers takes seconds
        from megatron.interop.in_transformers import use

        return use
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
