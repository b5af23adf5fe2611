"""Tasks of lm-evaluation-harness, an optional package, on our checkpoints."""
