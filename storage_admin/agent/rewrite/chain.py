"""The links of a backing chain, opened once and held: what is worked on is what was looked at."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from storage_admin.agent import formats
from storage_admin.agent.folders.pools import held, is_ours, open_beneath, open_parent
from storage_admin.agent.formats.facts import Facts, UnreadableError
from storage_admin.agent.host import attributes, locking, special_mounts
from storage_admin.agent.host.in_use import FileId
from storage_admin.agent.protocol import INVALID, RefusedError, display, unb64
from storage_admin.agent.qemu.node import Node
from storage_admin.agent.rewrite import backing_name
from storage_admin.agent.swap.journal import Stamp
from storage_admin.agent.swap.outcome import stamp_now

#: Longest chain that is worked on.
MAX_DEPTH = 64
#: Seconds between two looks at every process's descriptors while work goes on, and how long somebody may have the
#: image open before he counts as a user of it: a scan or ``file`` only passes by.
PROCESS_INTERVAL = 5.0
PASSING_READER = 2.0


@dataclass(frozen=True)
class Planned:
    """A link as the plan knew it: paths are absolute, sizes in bytes, times in nanoseconds."""

    path: bytes
    pool_path: bytes
    format: str
    dev: int
    inode: int
    file_size: int
    mtime_ns: int
    ctime_ns: int
    #: Whether an admin lets the owners of overlays have its content, who may not read it themselves.
    for_all: bool = False

    @classmethod
    def parse(cls, args: Any) -> Planned:
        """A link as it travels; raises RefusedError(``invalid``)."""
        try:
            numbers = {name: args[name] for name in ("dev", "inode", "file_size", "mtime_ns", "ctime_ns")}
            if not all(type(number) is int for number in numbers.values()) or not isinstance(args["format"], str):
                raise TypeError("a number or the format is of the wrong type")
            for_all = args.get("for_all", False) is True
            return cls(
                unb64(args["path_b64"]), unb64(args["pool_path_b64"]), args["format"], **numbers, for_all=for_all
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RefusedError(INVALID, f"a link of the chain is not described completely: {error}") from error

    def is_as_planned(self, now: Stamp) -> bool:
        """Whether nothing was written to the file, and nothing changed about it, since the plan was made."""
        planned = (self.dev, self.inode, self.file_size, self.mtime_ns, self.ctime_ns)
        return planned == (now.dev, now.inode, now.file_size, now.mtime_ns, now.ctime_ns)


@dataclass(frozen=True)
class Link:
    """One opened image of a chain."""

    planned: Planned
    fd: int
    stamp: Stamp
    facts: Facts

    @property
    def shown(self) -> str:
        """Its path for a sentence."""
        return display(self.planned.path)

    @property
    def id(self) -> FileId:
        return FileId(self.stamp.dev, self.stamp.inode)

    @contextlib.contextmanager
    def folder(self) -> Iterator[int]:
        """The folder that it is in, open; raises as :func:`open_parent`."""
        with held(open_parent(self.planned.pool_path, self.planned.path)[0]) as folder:
            yield folder


class Chain:
    """An image and its ancestors, the immediate base first. Close it in the end.

    Args:
        image: the image to work on.
        ancestors: all of them, down to the one without a base.
        base_lost: the image's base is missing, so that it is opened alone.

    Raises:
        RefusedError: ``stale_plan``, ``chain_broken``, ``chain_cycle``, ``chain_too_deep``, ``outside_pool``,
            ``format_mismatch``, ``dirty_or_corrupt``, ``external_data_file``, ``unsupported_subformat`` or ``invalid``.
    """

    def __init__(self, image: Planned, ancestors: Sequence[Planned], *, base_lost: bool = False) -> None:
        if len(ancestors) >= MAX_DEPTH:
            raise RefusedError("chain_too_deep", f"the chain has more than {MAX_DEPTH} images")
        if is_ours(os.path.basename(image.path)):
            # A job that puts its own files back would take the image for one of them.
            raise RefusedError(
                INVALID, f"{display(image.path)} has a name that is reserved for files of jobs; rename it first"
            )
        self.links: list[Link] = []
        self._look_again = time.monotonic() + PROCESS_INTERVAL
        self._seen_since: float | None = None
        self._alone = False
        try:
            for planned in (image, *ancestors):
                self.links.append(_open(planned, "stale_plan" if planned is image else "chain_broken"))
            if not base_lost:
                self._check_connected()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of all links; image locks that were taken on them end."""
        while self.links:
            os.close(self.links.pop().fd)

    @property
    def image(self) -> Link:
        """The image that is worked on."""
        return self.links[0]

    @property
    def ancestors(self) -> list[Link]:
        """What lies below it."""
        return self.links[1:]

    def node(self, *, alone: bool = False) -> Node:
        """The chain as qemu is to open it.

        Args:
            alone: leave the base out, so that only the image's own layer is seen.
        """
        image = self.image.planned
        return Node(self.image.fd, image.format, image.path, None if alone else self.below(1))

    def below(self, place: int) -> Node | None:
        """The chain from its link of that number on (the image is 0) down to its end; ``None`` past the end."""
        node: Node | None = None
        for link in reversed(self.links[place:]):
            node = Node(link.fd, link.planned.format, link.planned.path, node)
        return node

    def _check_connected(self) -> None:
        """What each header names must be the next link, and the last must name none."""
        seen = set()
        for link, below in zip(self.links, [*self.links[1:], None]):
            if link.id in seen:
                raise RefusedError(
                    "chain_cycle", f"{link.shown} occurs twice in its own backing chain; repair the chain"
                )
            seen.add(link.id)
            named = link.facts.backing_file
            if named is None and below is not None:
                raise RefusedError(
                    "stale_plan", f"{link.shown} no longer has a backing file; scan the host and try again"
                )
            if named is not None:
                _check_names(link, named, below)

    # Whether somebody else uses them

    def refuse_in_use(self) -> None:
        """Refuse where anybody uses the image, or writes to what is below it.

        A base that is only read, by other guests whose overlays stand on it, is no hindrance.

        Raises:
            RefusedError: ``image_in_use``, or ``guests_unknown`` where it cannot be seen.
        """
        self._refuse_locked(locking.ANY_USE)
        deadline = time.monotonic() + PASSING_READER
        while (who := locking.user(self.image.fd)) is not None:
            if time.monotonic() > deadline:
                raise _in_use(self.image, who)
            time.sleep(0.2)

    def refuse_changes(self) -> None:
        """As above while our own tools read the image; cheap enough for every half second."""
        self._refuse_locked([byte for byte in locking.ANY_USE if byte != 100])
        if time.monotonic() > self._look_again:
            self._look_at_processes()
        self.refuse_stale(names=False)

    def _look_at_processes(self) -> None:
        who, now = locking.user(self.image.fd), time.monotonic()
        if who is None:
            self._seen_since, self._look_again = None, now + PROCESS_INTERVAL
            return
        if self._seen_since is None:
            self._seen_since = now
        elif now - self._seen_since > PASSING_READER:
            raise _in_use(self.image, who)
        self._look_again = now + 0.5

    def _refuse_locked(self, among: Sequence[int]) -> None:
        if held := locking.locked_bytes(self.image.fd, among):
            writes = "writes to it" if set(held) & set(locking.CHANGES) else "reads it"
            raise _in_use(self.image, f"a guest or a tool of qemu that {writes}")
        self._refuse_locked_for_writing(self.ancestors)

    def refuse_written(self) -> None:
        """Refuse where anybody writes to the image or to what is below it; raises RefusedError(``image_in_use``)."""
        self._refuse_locked_for_writing(self.links)
        for link in self.links:
            if locking.open_for_writing(link.fd):
                raise _in_use(link, "a program that writes to it")

    @staticmethod
    def _refuse_locked_for_writing(links: Sequence[Link]) -> None:
        for link in links:
            if locking.locked_bytes(link.fd, locking.CHANGES):
                raise _in_use(link, "a guest or a tool of qemu that writes to it")

    def refuse_mounted(self) -> None:
        """Refuse, now and in each later :meth:`refuse_stale` with names, where the image's file is mounted by itself.

        Raises:
            RefusedError: ``hard_linked``.
        """
        self._alone = True
        special_mounts.refuse_mounted(self.image.fd, self.image.shown)

    def refuse_stale(self, *, names: bool = True) -> None:
        """Refuse where a file was written to, changed or exchanged since it was opened.

        Args:
            names: also look whether each name still leads to its file.

        Raises:
            RefusedError: ``stale_plan``, or ``hard_linked`` where the image was mounted by itself meanwhile.
        """
        for link in self.links:
            # What another client of NFS wrote may show in a fresh stamp alone; while the work goes on, that can wait.
            if not link.planned.is_as_planned(stamp_now(link.fd) if names else Stamp.of(os.fstat(link.fd))):
                raise RefusedError(
                    "stale_plan", f"{link.shown} was changed while the job ran; scan the host and try again"
                )
            if names and not still_named(link):
                raise RefusedError(
                    "stale_plan", f"{link.shown} was replaced by another file; scan the host and try again"
                )
        # A new name shows in the file's time of change, a mount does not.
        if names and self._alone:
            self.refuse_mounted()


def _in_use(link: Link, who: str) -> RefusedError:
    return RefusedError("image_in_use", f"{link.shown} is in use by {who}; stop it and try again")


def still_named(link: Link) -> bool:
    """Whether a file still has the name that it was opened by."""
    try:
        with link.folder() as folder:
            now = os.stat(os.path.basename(link.planned.path), dir_fd=folder, follow_symlinks=False)
    except (OSError, RefusedError):
        return False
    return (now.st_dev, now.st_ino) == (link.stamp.dev, link.stamp.inode)


def _open(planned: Planned, if_missing: str) -> Link:
    shown = display(planned.path)
    try:
        fd = open_beneath(planned.pool_path, planned.path)
    except FileNotFoundError as error:
        raise RefusedError(if_missing, f"{shown} no longer exists; scan the host again") from error
    except OSError as error:
        raise RefusedError(if_missing, f"{shown} cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise RefusedError("outside_pool", f"{shown} is not a regular file")
        stamp = Stamp.of(status)
        if not planned.is_as_planned(stamp):
            raise RefusedError("stale_plan", f"{shown} has changed since it was scanned; scan the host and try again")
        facts = _facts(planned, fd, status.st_size)
        _refuse_other_files(shown, facts)
        return Link(planned, fd, stamp, facts)
    except BaseException:
        os.close(fd)
        raise


def _facts(planned: Planned, fd: int, file_size: int) -> Facts:
    """The header, read as the format that it is declared to be; what contradicts it is refused."""
    shown, declared = display(planned.path), planned.format
    reader = formats.Reader(fd, file_size)
    looks_like = formats.probe(reader)
    # A fixed VHD has its mark at the end only, an ISO image is a raw one with a known content.
    plain = looks_like in {"raw", "iso"} and declared in {"raw", "vpc"}
    if looks_like != declared and not plain:
        raise RefusedError(
            "format_mismatch", f"{shown} is declared as {declared}, but its content looks like {looks_like}"
        )
    try:
        return formats.read_as(reader, declared)
    except UnreadableError as error:
        code = "format_mismatch" if plain else "dirty_or_corrupt"
        raise RefusedError(code, f"{shown} cannot be read as {declared}: {error}") from error


def _refuse_other_files(shown: str, facts: Facts) -> None:
    """Refuse an image whose data is in files that its header names: whatever tool opens it would open those as well."""
    if facts.data_file is not None:
        raise RefusedError("external_data_file", f"{shown} keeps its data in a separate data file; convert it first")
    if facts.extents:
        raise RefusedError("unsupported_subformat", f"{shown} consists of several files; convert it to qcow2")


def _check_names(link: Link, named: bytes, below: Link | None) -> None:
    """The backing file as qemu would find it must be the next link's file."""
    if b":" in named.split(b"/", 1)[0]:
        raise RefusedError(
            "outside_pool", f"{link.shown} has the backing file {display(named)}, which is not a file of a storage pool"
        )
    # As a guest will open it: relative to the image's folder, through whatever links lead on.
    with link.folder() as folder:
        found = backing_name.found(folder, named, [] if below is None else [below.fd])
    if found is None:
        raise RefusedError(
            "chain_broken",
            f"{link.shown} has the backing file {display(named)}, which is missing or on a filesystem that is not "
            "scanned",
        )
    if below is None or (found.st_dev, found.st_ino) != (below.stamp.dev, below.stamp.inode):
        raise RefusedError(
            "stale_plan",
            f"{link.shown} has the backing file {display(named)}, not the one in the plan; scan the host and try again",
        )
    declared = link.facts.backing_format
    if declared is not None and declared != below.planned.format:
        raise RefusedError(
            "format_mismatch",
            f"{link.shown} declares its backing file as {declared}, but {below.shown} is known as "
            f"{below.planned.format}",
        )


def refuse_unsafe(chain: Chain, *, children_known: bool, carried: Collection[str] = ()) -> None:
    """Refuse what no replacement can keep whole.

    Args:
        chain: the image with its bases.
        children_known: whether all images that stand on it are known.
        carried: codes of what this one keeps of the image, such as ``has_internal_snapshots``.

    Raises:
        RefusedError: see docs/safety.md and docs/refusals.md, by name of the code.
    """
    image, facts = chain.image, chain.image.facts
    status = os.fstat(image.fd)
    for link in chain.links:
        refuse_content(link, carried if link is image else ())
    if facts.snapshots and "has_internal_snapshots" not in carried:
        raise RefusedError(
            "has_internal_snapshots",
            f"{image.shown} has {len(facts.snapshots)} internal snapshots, which a copy would lose; "
            "delete them, or reclaim in place",
        )
    if status.st_nlink > 1 and "hard_linked" not in carried:
        raise RefusedError(
            "hard_linked",
            f"{image.shown} has {status.st_nlink} names (hard links), and the others would keep the old content",
        )
    if "hard_linked" not in carried:
        chain.refuse_mounted()
    if "immutable" not in carried:
        refuse_protected(image.fd, image.shown)
    if not children_known:
        raise RefusedError("guests_unknown", f"the overlays of {image.shown} are not known; scan the host first")


def refuse_protected(fd: int, shown: str) -> None:
    """Refuse a file that may not be changed (``immutable``)."""
    if attributes.flags(fd) & (attributes.IMMUTABLE | attributes.APPEND_ONLY):
        raise RefusedError("immutable", f"{shown} is protected (chattr +i or +a), as templates are, and is not changed")


def refuse_content(link: Link, carried: Collection[str]) -> None:
    """Refuse what cannot be read, or not be trusted, unless that is ``carried``."""
    facts = link.facts
    if facts.encrypted and "encrypted" not in carried:
        raise RefusedError("encrypted", f"{link.shown} is encrypted and cannot be read without its key")
    if (facts.dirty or facts.corrupt) and "dirty_or_corrupt" not in carried:
        state = "corrupt" if facts.corrupt else "dirty (it was not closed)"
        raise RefusedError("dirty_or_corrupt", f"{link.shown} is marked {state}; check and repair it first")
