"""Perplexity beyond the training length: what is measured (perplexity), and how it is shown (report)."""
