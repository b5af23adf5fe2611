"""Perplexity beyond the training length, and probes of what a model does with far context."""
