"""What every endpoint of the REST API is built from."""
