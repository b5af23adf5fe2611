"""Other formats: checkpoints of the reference forks."""
