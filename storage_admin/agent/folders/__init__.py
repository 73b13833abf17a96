"""Which folders the agent may work in, and how a path in one is opened."""
