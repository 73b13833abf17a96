"""How a program of the host is found, confined and run."""
