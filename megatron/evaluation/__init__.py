"""Perplexity beyond the training length, and probes of what a model does with far context."""

from megatron.evaluation.perplexity import losses

__all__ = ["losses"]
