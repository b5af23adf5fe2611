"""Many runs from one file: its cells, their cost, and how they run."""
