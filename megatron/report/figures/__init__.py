"""Figures of results, encodings, attention and probes."""
