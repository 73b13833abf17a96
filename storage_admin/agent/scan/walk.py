"""The folders of a storage pool, one after the other, by descriptors: a symbolic link is never followed.

Files that jobs keep beside images, as a scan meets them: undo copies, images that are set aside, journals.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from storage_admin.agent.folders import scratch
from storage_admin.agent.formats import Reader, UnreadableError, guess, read_as, stands_alone
from storage_admin.agent.host import space
from storage_admin.agent.protocol import b64, display
from storage_admin.agent.scan.records import OPEN_FLAGS
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


#: How many folders deep a pool of kind ``dir`` is walked.
MAX_DEPTH = 8
#: Folders that hold copies of images, or bits of a broken filesystem, and no images in use.
SKIPPED = frozenset({"lost+found", ".snapshot", ".snapshots", ".zfs"})

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Folder:
    """A folder while it is open: ``files`` are the names in it that are no folders, sorted."""

    fd: int
    path: bytes
    files: list[str]


@dataclass
class Walk:
    """A walk, and what it could not enter. Where ``unread`` is not empty, what was not seen has not vanished.

    ``nested`` are the folders of other pools, by device and inode, with their kinds: what such a pool walks itself is
    left to it. ``may_wait`` tells of a folder, by its path alone, that to look at it could take for ever: it is on
    another filesystem, then, and not entered either. A folder that is reached twice, through a bind mount, is walked
    once. Folders of benchmarks are not entered; ``abandoned`` counts those that a killed one left.
    """

    may_wait: Callable[[bytes], bool]
    nested: dict[tuple[int, int], str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    other_filesystems: list[str] = field(default_factory=list)
    too_deep: list[str] = field(default_factory=list)
    abandoned: int = 0
    _entered: set[tuple[int, int]] = field(default_factory=set)

    def folders(self, root: int, path: bytes, kind: str) -> Iterator[Folder]:
        """Every folder that holds images, each open until the next one is asked for; the order is always the same.

        Args:
            root: descriptor of the pool's folder; stays open and the caller's.
            path: the pool's absolute path.
            kind: ``dir`` goes down, ``libvirt`` looks at the top only, ``proxmox`` at ``images/<vmid>``.
        """
        status = os.fstat(root)
        device = status.st_dev
        self._entered.add((device, status.st_ino))
        if kind == "libvirt":
            yield Folder(root, path, self._list(root, path)[0])
        elif kind == "proxmox":
            self._list(root, path)  # for what benchmarks left there
            images = self._open(root, path, "images", device)
            if images is not None:
                try:
                    below = _join(path, "images")
                    guests = [name for name in self._list(images, below)[1] if name.isdigit()]
                    yield from self._each(images, below, guests, device, 1)
                finally:
                    os.close(images)
        else:
            yield from self._tree(root, path, device, MAX_DEPTH)

    def _tree(self, fd: int, path: bytes, device: int, depth: int, owner: str | None = None) -> Iterator[Folder]:
        """``owner`` is the kind of the other pool that this folder is."""
        files, folders = self._list(fd, path)
        yield Folder(fd, path, [] if owner == "libvirt" else files)
        below = [name for name in folders if name not in SKIPPED and not (owner == "proxmox" and name == "images")]
        if depth > 0:
            yield from self._each(fd, path, below, device, depth)
        elif below:
            self.too_deep.append(display(path))

    def _each(self, fd: int, path: bytes, folders: list[str], device: int, depth: int) -> Iterator[Folder]:
        for name in folders:
            folder = self._open(fd, path, name, device)
            if folder is None:
                continue
            try:
                owner = self._owner(folder)
                if owner == "dir":
                    continue
                yield from self._tree(folder, _join(path, name), device, depth - 1, owner)
            finally:
                os.close(folder)

    def _owner(self, folder: int) -> str | None:
        """The kind of the other pool whose folder this is; ``dir`` also where this walk was here already."""
        status = os.fstat(folder)
        here = (status.st_dev, status.st_ino)
        if here in self._entered:
            return "dir"
        self._entered.add(here)
        return self.nested.get(here)

    def _list(self, fd: int, path: bytes) -> tuple[list[str], list[str]]:
        """The names that are no folders, and the folders, each sorted."""
        files: list[str] = []
        folders: list[str] = []
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    (folders if entry.is_dir(follow_symlinks=False) else files).append(entry.name)
        except OSError as error:
            self.unread.append(f"{display(path)}: {error.strerror}")
            return [], []
        ours = {name for name in folders if scratch.job_of(name) is not None}
        self.abandoned += sum(scratch.is_abandoned(fd, name) for name in ours)
        return sorted(files), sorted(name for name in folders if name not in ours)

    def _open(self, fd: int, path: bytes, name: str, device: int) -> int | None:
        if self.may_wait(_join(path, name)):
            self.other_filesystems.append(display(_join(path, name)))
            return None
        try:
            folder = os.open(name, _FOLDER, dir_fd=fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.unread.append(f"{display(_join(path, name))}: {error.strerror}")
            return None
        if os.fstat(folder).st_dev != device:
            os.close(folder)
            self.other_filesystems.append(display(_join(path, name)))
            return None
        return folder


def _join(path: bytes, name: str) -> bytes:
    return path.rstrip(b"/") + b"/" + os.fsencode(name)
