"""Making the new image: checks, chain, copy, and its name."""
