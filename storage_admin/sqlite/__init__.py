"""Django's SQLite backend, for many threads that write."""
