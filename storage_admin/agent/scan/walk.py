"""The folders of a storage pool, one after the other, by descriptors: a symbolic link is never followed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from storage_admin.agent.folders import scratch
from storage_admin.agent.protocol import display

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


def _never(_path: bytes) -> bool:
    return False


@dataclass
class Walk:
    """A walk, and what it could not enter. Where ``unread`` is not empty, what was not seen has not vanished.

    ``nested`` are the folders of other pools, by device and inode, with their kinds: what such a pool walks itself is
    left to it. ``may_wait`` tells of a folder, by its path alone, that to look at it could take for ever: it is on
    another filesystem, then, and not entered either. A folder that is reached twice, through a bind mount, is walked
    once. Folders of benchmarks are not entered; ``abandoned`` counts those that a killed one left.
    """

    nested: dict[tuple[int, int], str] = field(default_factory=dict)
    may_wait: Callable[[bytes], bool] = field(default=_never)
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
