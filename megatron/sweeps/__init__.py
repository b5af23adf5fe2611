"""Sweeps: many runs from one file (plan), their price (cost), what is done (state), doing the rest (run, slurm)."""
