"""Training through the DeepSpeed engine: trainer, optimizer, schedule, checkpoints, metrics."""
