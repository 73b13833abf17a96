"""One process that starts the private Redis, the web server, the worker and the scheduler, and keeps them running.

Knows nothing of models: what is done before the children start is handed in by the command.
"""
