"""Checkpoints on the disk: what a folder holds and whether it is whole; their models."""
