"""What jobs won and lost: columns of their rows, which :mod:`images.rewrite.record` writes."""
