"""How a run starts: local processes on this machine."""
