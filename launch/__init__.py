"""How a run starts: local processes on this machine, or jobs of a SLURM cluster."""
