"""Many runs from one file: plan (its cells), cost, state (what is done), run, slurm, lock."""
