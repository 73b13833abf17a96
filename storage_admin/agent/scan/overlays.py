"""Which files of the storage pools need one file: overlays, VMDK descriptors, qcow2 headers with a data file elsewhere.

The controller knows that from its last scan. What was unchanged since then is not opened again: it is known by its
fingerprint, as in a scan. Undo copies and images that are set aside are read as well. A file whose header cannot be
read may stand on the image, unless a VMDK's descriptor says that it is one of its extents: such a file is data.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from storage_admin.agent.folders.pools import open_root
from storage_admin.agent.formats import Reader, UnreadableError, guess, read_as, stands_alone
from storage_admin.agent.host import special_mounts
from storage_admin.agent.host.in_use import FileId
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, display
from storage_admin.agent.scan.records import (
    FINGERPRINT_SIZE,
    OPEN_FLAGS,
    Recorder,
    absolute,
    backing_unsafe,
    described_names,
    fingerprint,
)
from storage_admin.agent.scan.walk import Folder, Walk
from storage_admin.agent.swap.journal import parse_name

#: Files between two looks at the lifeline.
_CHECK_EVERY = 200


@dataclass(frozen=True)
class LookedAt:
    """A storage pool that is looked through; ``known`` are fingerprints of files that need nothing of what is asked."""

    path: bytes
    kind: str
    known: frozenset[bytes] = field(repr=False)

    @classmethod
    def parse(cls, fields: Any) -> LookedAt:
        """A pool as it travels; raises RefusedError(``invalid``)."""
        if not isinstance(fields, dict):
            raise RefusedError(INVALID, "a pool has a path, a kind and fingerprints")
        args = Arguments(fields, frozenset({"path_b64", "kind", "known_b64"}))
        known = args.path("known_b64") if "known_b64" in fields else b""
        size = FINGERPRINT_SIZE
        prints = frozenset(known[start : start + size] for start in range(0, len(known), size))
        return cls(args.path("path_b64"), args.choice("kind", frozenset({"dir", "libvirt", "proxmox"}), "dir"), prints)


@dataclass(frozen=True)
class Wanted:
    """The image that files may need.

    Args:
        id: its device and inode.
        folder: those of the folder of its own name.
        name: its own name, whether it has that now or not.
        shown: its path for a sentence.
    """

    id: FileId
    folder: FileId
    name: bytes
    shown: str


def refuse_needed(pools: Sequence[LookedAt], image: Wanted, io: AgentIO, but: frozenset[FileId] = frozenset()) -> None:
    """Refuse where a file of these pools needs the image, other than those of ``but``.

    Raises:
        RefusedError: ``has_overlays``; ``guests_unknown``, where a pool cannot be looked through.
        StoppedError: the controller stopped the work.
    """
    mounts = Mounts.of_this_machine()
    for path in sorted(special_mounts.trusted([pool.path for pool in pools], mounts, io.check)):
        raise _unreadable(display(path), "it does not answer")
    known = frozenset().union(*(pool.known for pool in pools))  # one pool may lie in another
    look, seen = _Look(image, known, Recorder(mounts), but | {image.id}), 0
    for pool in pools:
        for folder in _folders(pool, mounts):
            for name in folder.files:
                seen += 1
                if seen % _CHECK_EVERY == 0:
                    io.check()
                path = folder.path.rstrip(b"/") + b"/" + os.fsencode(name)
                if look.finds_need(folder, name, path):
                    raise RefusedError(
                        "has_overlays",
                        f"{display(path)} uses {image.shown} as its backing file or data file; scan the host",
                    )
    look.refuse_doubtful()


def _folders(pool: LookedAt, mounts: Mounts) -> Iterator[Folder]:
    try:
        root = open_root(pool.path)
    except FileNotFoundError:
        return  # not mounted now: the controller knows its images from when it was
    except OSError as error:
        raise _unreadable(display(pool.path), error.strerror) from error
    walk = Walk(mounts.may_wait)
    try:
        yield from walk.folders(root, pool.path, pool.kind)
    finally:
        os.close(root)
    if walk.unread:
        raise _unreadable(walk.unread[0], None)


def _unreadable(what: str, why: str | None) -> RefusedError:
    because = f": {why}" if why else ""
    sentence = (
        f"the overlays of the image are not known, because {what} cannot be read{because}; fix that and scan the host"
    )
    return RefusedError("guests_unknown", sentence)


@dataclass
class _Look:
    """One look at many files for what needs the image."""

    image: Wanted
    known: frozenset[bytes]
    recorder: Recorder
    passed_over: frozenset[FileId]
    #: Files whose headers cannot be read, with what is said of each, and those that are extents of VMDKs.
    _doubtful: dict[FileId, RefusedError] = field(default_factory=dict)
    _extents: set[FileId] = field(default_factory=set)

    def finds_need(self, folder: Folder, name: str, path: bytes) -> bool:
        """Whether a file of the folder needs the image; raises RefusedError where it cannot be looked at."""
        try:
            status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or FileId(status.st_dev, status.st_ino) in self.passed_over:
                return False
            if fingerprint(path, status) in self.known:
                return False
            fd = os.open(name, OPEN_FLAGS, dir_fd=folder.fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _unreadable(display(path), error.strerror) from error
        try:
            reader = Reader(fd, os.fstat(fd).st_size)
            looks_like = guess(reader, path)
            facts = read_as(reader, looks_like)
        except UnreadableError as error:
            ours = parse_name(os.fsencode(name))
            # It names no file; or a job at work has only begun to write it.
            if not stands_alone(reader, looks_like) and (ours is None or ours[1] != "new"):
                self._doubtful[FileId(status.st_dev, status.st_ino)] = _unreadable(display(path), str(error))
            return False
        except OSError as error:
            raise _unreadable(display(path), error.strerror) from error
        finally:
            os.close(fd)
        inside = os.path.dirname(path) or b"/"
        for one in facts.extents:
            found = self.recorder.look(absolute(inside, one)) if backing_unsafe(one) is None else None
            if found is not None:
                self._extents.add(FileId(found.st_dev, found.st_ino))
        named = [one for one in (facts.backing_file, facts.data_file, *facts.extents) if one is not None]
        return any(_means(one, inside, self.image, self.recorder) for one in named)

    def refuse_doubtful(self) -> None:
        """Refuse where a file that was found may stand on the image, once all descriptors were read."""
        for place, error in self._doubtful.items():
            if place not in self._extents:
                raise error


def _means(name: bytes, inside: bytes, image: Wanted, recorder: Recorder) -> bool:
    """Whether a name in the header of a file of this folder is the image's, or may be."""
    if backing_unsafe(name) is None:
        return _leads_to(absolute(inside, name), image, recorder)
    # What qemu would make of a description is not worked out: the same last name is enough.
    described = [os.fsencode(one) for one in described_names(os.fsdecode(name)) if "\0" not in one]
    return any(
        os.path.basename(one) == image.name or _leads_to(absolute(inside, one), image, recorder) for one in described
    )


def _leads_to(path: bytes, image: Wanted, recorder: Recorder) -> bool:
    found = recorder.look(path)
    if found is not None:
        return FileId(found.st_dev, found.st_ino) == image.id
    # It has lost its own name already, and misses it.
    if os.path.basename(path) != image.name:
        return False
    folder = recorder.look(os.path.dirname(path) or b"/")
    return folder is not None and FileId(folder.st_dev, folder.st_ino) == image.folder
