"""Files that jobs keep beside images, as a scan meets them: undo copies, images that are set aside, journals."""

from __future__ import annotations

import os
import stat
from typing import Any

from storage_admin.agent.formats import UnreadableError, guess, read_as, stands_alone
from storage_admin.agent.formats.reader import Reader
from storage_admin.agent.host import space
from storage_admin.agent.scan.records import OPEN_FLAGS, b64
from storage_admin.agent.swap.journal import image_name, parse_name

#: Undo copies whose headers cannot be read, and jobs, that are told.
_MAX_BLIND, _MAX_JOBS = 20, 1000


class OwnFiles:
    """What one pass over a pool found of them."""

    def __init__(self) -> None:
        self.leftovers = 0
        self._undo_copies = self._undo_bytes = self._asides = self._aside_bytes = 0
        self._blind: list[bytes] = []
        self._jobs: dict[tuple[bytes, str], dict[str, Any]] = {}

    def look(self, fd: int, name: str, path: bytes) -> None:
        """Count a file.

        Args:
            fd: descriptor of its folder.
            name: of the file, which begins with ``.sa-``.
            path: absolute.
        """
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return
        self._tell(fd, name, path, status)
        if name.endswith(".journal"):
            self.leftovers += 1
        elif name.endswith(".orig"):
            self._undo_copies += 1
            if is_blind(fd, name):
                self._blind.append(path)
            if status.st_nlink == 1:  # else the image itself still has these bytes
                self._undo_bytes += _owned(fd, name, status)
        elif name.endswith(".aside"):
            self._asides += 1
            self._aside_bytes += _owned(fd, name, status)

    def _tell(self, fd: int, name: str, path: bytes, status: os.stat_result) -> None:
        """Whose it is: the controller knows whether the job is its own, or of a dashboard that is gone."""
        ours = parse_name(os.fsencode(name))
        if ours is None or not stat.S_ISREG(status.st_mode):
            return
        job, kind = ours
        folder = path[: path.rindex(b"/")]
        told: dict[str, Any] = {"job": job, "folder_b64": b64(folder), "kinds": [], "bytes": 0, "name_b64": None}
        told = self._jobs.setdefault((folder, job), told)
        told["kinds"].append(kind)
        if kind != "journal":
            told["bytes"] += _owned(fd, name, status) if status.st_nlink == 1 else 0
        else:
            told["name_b64"] = image_name(fd, os.fsencode(name))

    def facts(self) -> dict[str, Any]:
        """The fields of the ``pool`` event."""
        return {
            "undo_bytes": self._undo_bytes,
            "undo_copies": self._undo_copies,
            "asides": self._asides,
            "aside_bytes": self._aside_bytes,
            "leftovers": self.leftovers,
            "own_files": list(self._jobs.values())[:_MAX_JOBS],
            "blind_b64": [b64(path) for path in self._blind[:_MAX_BLIND]],
        }


def _owned(folder: int, name: str, status: os.stat_result) -> int:
    """What the filesystem gets back when a file goes, in bytes."""
    try:
        fd = os.open(name, OPEN_FLAGS, dir_fd=folder)
    except OSError:
        return status.st_blocks * 512
    try:
        return space.owned(fd)
    except OSError:
        return status.st_blocks * 512
    finally:
        os.close(fd)


def is_blind(folder: int, name: str) -> bool:
    """Whether a file's header cannot be read and may name another file: no conversion takes an image away then.

    Args:
        folder: descriptor of the folder that the file is in.
    """
    try:
        fd = os.open(name, OPEN_FLAGS, dir_fd=folder)
    except OSError:
        return False
    try:
        reader = Reader(fd, os.fstat(fd).st_size)
        looks_like = guess(reader, os.fsencode(name))
        read_as(reader, looks_like)
    except UnreadableError:
        return not stands_alone(reader, looks_like)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
