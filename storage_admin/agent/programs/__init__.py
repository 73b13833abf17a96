"""How a program of the host is confined and run."""
