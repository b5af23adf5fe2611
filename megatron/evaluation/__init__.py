"""Perplexity beyond the training length."""

from megatron.evaluation.perplexity import losses

__all__ = ["losses"]
