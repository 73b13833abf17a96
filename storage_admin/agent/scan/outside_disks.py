"""What guests' disks outside of every storage pool stand on: a base in a pool would look as if nobody needed it."""

from __future__ import annotations

import contextlib
import glob
import os
import stat
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from storage_admin.agent.folders import image_folders, roots
from storage_admin.agent.formats import Facts, UnreadableError, guess, read_as
from storage_admin.agent.formats.facts import Reader
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.protocol import RefusedError
from storage_admin.agent.scan.records import Recorder, absolute, b64, backing_unsafe

_LARGEST = 4 * 1024 * 1024
_NOT_READ = "no hypervisor of this host names it, and it is in no folder of images"


def bases(named: Iterable[bytes], files: dict[int, set[int]], mounts: Mounts) -> Iterator[dict[str, Any]]:
    """The disks among these that have a base, or may have one.

    Only the header of the disk itself is read, which the hypervisor names; what that in turn names is not opened.

    Args:
        named: absolute paths that guests name, outside of the pools.
        files: inodes of the pools' images by device.

    Returns:
        For each ``path_b64``; ``base``: device and inode where it is an image of a pool; ``why``: a sentence about
        what cannot be told, else empty. Disks that stand on nothing are left out.
    """
    recorder = Recorder(mounts)
    for path in sorted(named):
        if mounts.may_wait_there(path):
            yield _row(path, "it lies on a filesystem that is not looked at")
            continue
        try:
            facts = _facts(path)
        except FileNotFoundError:
            continue
        except RefusedError:
            yield _row(path, _NOT_READ)
            continue
        except OSError as error:
            yield _row(path, f"it cannot be read: {error.strerror}")
            continue
        if facts is not None and facts.backing_file is not None:
            yield from _base(path, facts.backing_file, files, recorder)


@lru_cache(maxsize=1)
def _definitions() -> bytes:
    """What libvirt and Proxmox VE have written down of their guests, where only root writes."""
    found = []
    for place in ("/etc/libvirt/*/*.xml", "/run/libvirt/*/*.xml", "/etc/pve/nodes/*/*/*.conf"):
        for name in glob.glob(place):
            with contextlib.suppress(OSError), open(name, "rb") as file:
                found.append(file.read(_LARGEST))
    return b"\n".join(found)


def _open(path: bytes) -> int | None:
    """A disk, open; ``None`` where it is neither a file nor a volume: already to open a device may do something.

    Raises:
        RefusedError: it is not read, or as :func:`roots.reach`.
        OSError: it is not there, or cannot be opened.
    """
    folder = roots.reach(os.path.dirname(path))
    try:
        # Only looked at; whatever gets its name from now on is another file.
        seen = os.open(os.path.basename(path), os.O_PATH | os.O_CLOEXEC, dir_fd=folder.fd)
        try:
            status = os.fstat(seen)
            if stat.S_ISREG(status.st_mode):
                _refuse_hidden(path, folder, status)
            elif not stat.S_ISBLK(status.st_mode):
                return None
            return os.open(f"/proc/self/fd/{seen}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        finally:
            os.close(seen)
    finally:
        os.close(folder.fd)


def _refuse_hidden(path: bytes, folder: roots.Reached, status: os.stat_result) -> None:
    """Refuse a file that is in no folder of images, and that no hypervisor here gives a guest.

    What a request calls a guest's disk may be any file of root's.
    """
    if image_folders.is_listed(folder.real) and not image_folders.forbidden(folder.real):
        itself = os.stat(os.path.basename(path), dir_fd=folder.fd, follow_symlinks=False)
        readable = os.path.samestat(itself, status)  # no link led there
    else:
        # As it stands in a definition; the library that knows how loads all of HTTP.
        readable = path.replace(b"&", b"&amp;").replace(b">", b"&gt;").replace(b"<", b"&lt;") in _definitions()
    if not readable:
        raise RefusedError("folder_not_listed", _NOT_READ)


def _base(path: bytes, name: bytes, files: dict[int, set[int]], recorder: Recorder) -> Iterator[dict[str, Any]]:
    if backing_unsafe(name) is not None:
        yield _row(path, "its base is not named as a plain file")
        return
    below = absolute(os.path.dirname(path), name)
    found = recorder.look(below)
    if found is not None and found.st_ino in files.get(found.st_dev, ()):
        yield _row(path, "", [found.st_dev, found.st_ino])
    elif found is not None:
        yield _row(path, "its base lies outside of every pool as well; register the folder of that")


def _row(path: bytes, why: str, base: list[int] | None = None) -> dict[str, Any]:
    return {"path_b64": b64(path), "base": base, "why": why}


def _facts(path: bytes) -> Facts | None:
    """What the header of a disk says; ``None`` for a damaged one, on which no guest could start, or for none."""
    fd = _open(path)
    if fd is None:
        return None
    try:
        reader = Reader(fd, os.lseek(fd, 0, os.SEEK_END))
        return read_as(reader, guess(reader, path))
    except UnreadableError:
        return None
    finally:
        os.close(fd)
