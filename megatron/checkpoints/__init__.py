"""Checkpoints on disk: what is in a folder, whether it is complete, and its model."""
