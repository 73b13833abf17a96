"""Whether the base that a header names is found under that name, on the way that a guest will go there."""

from __future__ import annotations

import os
from collections.abc import Iterable

from storage_admin.agent.host.mounts import Mounts


def found(folder: int, name: bytes, known: Iterable[int]) -> os.stat_result | None:
    """What a name in the header of an image leads to; ``None`` where there is nothing, or to look could hang.

    The kernel is asked: it follows a symbolic link before the ``..`` behind it, so that a path which was worked out by
    its text may lead elsewhere.

    Args:
        folder: descriptor of the folder that the image is in.
        name: relative to that folder, or absolute.
        known: descriptors of files whose filesystems are read anyway, beside that of the folder.
    """
    mounts = Mounts.of_this_machine()
    for fd in (folder, *known):
        mounts.trust(mounts.of_descriptor(fd))
    if mounts.may_wait_there(os.path.join(os.readlink(b"/proc/self/fd/%d" % folder), name)):
        return None
    try:
        return os.stat(name, dir_fd=folder)
    except (OSError, ValueError):
        return None


def leads_to(folder: int, name: bytes, base: int) -> bool:
    """Whether a name in the header of an image leads to that base.

    Args:
        folder, name: as for :func:`found`.
        base: descriptor of the base.
    """
    if b":" in name.split(b"/", 1)[0]:  # qemu would take it for a protocol
        return False
    there = found(folder, name, [base])
    return there is not None and os.path.samestat(there, os.fstat(base))


def near(image: bytes, base: bytes) -> bytes:
    """A base's path as the header of an image names it: the name alone where both are in one folder."""
    folder, name = os.path.split(base)
    return no_protocol(name) if folder == os.path.dirname(image) else base


def no_protocol(name: bytes) -> bytes:
    """The same file's name where qemu takes what stands before a colon for no protocol: a slash comes first."""
    return b"./" + name if b":" in name.split(b"/", 1)[0] else name
