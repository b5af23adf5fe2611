"""Who the processes are and how they reach each other."""
