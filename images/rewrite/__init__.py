"""What all rewrites share: what refuses one, what it takes, who uses the image, and what is recorded of it."""
