"""Text from a trained model, token by token."""

from megatron.generation.decode import continuation

__all__ = ["continuation"]
