"""What is in an image without rewriting it: clusters, zeros, estimates."""
