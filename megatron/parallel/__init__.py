"""The processes of a run, and the CPU threads of each."""
