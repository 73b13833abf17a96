"""What jobs won and lost: columns of their rows, written in one place (:mod:`lines`), read by the others."""
