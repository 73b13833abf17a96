"""Whether the base that a header names is found under that name, on the way that a guest will go there."""

from __future__ import annotations

import os


def leads_to(folder: int, name: bytes, base: int) -> bool:
    """Whether a name in the header of an image leads to that base.

    The kernel is asked: it follows a symbolic link before the ``..`` behind it, so that a path which was worked out by
    its text may lead elsewhere.

    Args:
        folder: descriptor of the folder that the image is in.
        name: of the base, as it stands in the header: relative to that folder, or absolute.
        base: descriptor of the base.
    """
    if b":" in name.split(b"/", 1)[0]:  # qemu would take it for a protocol
        return False
    try:
        found = os.stat(name, dir_fd=folder)
    except (OSError, ValueError):
        return False
    meant = os.fstat(base)
    return (found.st_dev, found.st_ino) == (meant.st_dev, meant.st_ino)
