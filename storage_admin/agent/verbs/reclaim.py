"""Win back the space that an image does not need.

Win back space without a copy: where the file of an image holds zeros, it gets holes.

What a guest, an overlay or a snapshot reads does not change: a hole reads as the zeros that were there. So nothing can
be half done: a kill or a power cut at any moment leaves the same image with fewer or more of its holes. There is
nothing to undo and nothing to finish, hence no journal, no file beside the image, no swap, no question whether to go.

What could do harm is a write between the moment when a block is read as zeros and the moment when it goes. While it
digs, the agent is the only one that has the file open, and whoever wants to open it waits at a door (``open_gate.py``).
It looks at the door after each piece, some milliseconds, and while it is throttled at once. Whoever knocks is let in,
with no image lock in his way, so no start of a guest is refused or noticeably late. Then it waits: somebody who only
passes by, a scan, may leave again within seconds, and the work goes on where it was; a guest ends it
(``image_in_use``), as does any change of the file (``stale_plan``). What was dug until then is won. The door holds
nobody on another machine, so nothing of this is done on a filesystem of a network.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import dataclass, field
from typing import Any

from storage_admin.agent import protocol
from storage_admin.agent.folders.pools import held
from storage_admin.agent.host import attributes, cgroups, locking, priority, space
from storage_admin.agent.host.open_gate import Door, holds_everybody, shut_alone
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.measure import holes
from storage_admin.agent.protocol import Arguments, RefusedError, Request
from storage_admin.agent.qemu import img
from storage_admin.agent.rewrite import volume_chains
from storage_admin.agent.rewrite.base import COMMON, Rewrite, Wish, opened
from storage_admin.agent.rewrite.chain import Chain, Link, refuse_content, refuse_protected
from storage_admin.agent.rewrite.copying import Compress, Copy

FORMATS = ("qcow2", "raw")
#: Seconds between two looks at the controller while the work is throttled.
LOOK_INTERVAL = 0.1
#: Seconds after which an image that somebody opens again and again counts as in use.
PATIENCE = 10.0
_MOST_AT_ONCE = 4


def dig(io: AgentIO, chain: Chain, *, children_known: bool, bandwidth: int | None, idle_io: bool) -> dict[str, Any]:
    """Dig holes into the file of a chain's image.

    Its overlays and internal snapshots may stay, and so may further names of the file: all of them read the same bytes
    as before. Preallocated blocks that were never written go as well. The file keeps its size, its attributes and its
    time of last modification, as its content is what it was; that something happened shows in its time of change.

    Args:
        io: the controller.
        chain: the image and its ancestors; the image's descriptor stands for the file opened anew afterwards.
        children_known: whether all guests that could use it are known.
        bandwidth: bytes that are read in a second at most.
        idle_io: read only when nobody else wants the disk.

    Returns:
        Allocated sizes in bytes before and after, what was freed, the image's identity, whether anything changed.
        Blocks that a reflinked copy or a snapshot of the filesystem shares are let go of and not freed.

    Raises:
        RefusedError: ``unsupported_subformat``, ``unsupported_pool``, ``encrypted``, ``external_data_file``,
            ``dirty_or_corrupt``, ``immutable``, ``guests_unknown``, ``image_in_use``, ``stale_plan``.
        StoppedError: the controller stopped the work.
        HostError, OSError: something failed. In any case the image reads as before.
    """
    started = time.monotonic()
    io.progress("checking", 0, None, "checking the image and its users")
    refuse_digging(chain, children_known=children_known)
    chain.refuse_in_use()
    chain.refuse_stale()
    before = space.allocated_on_disk(chain.image.fd)
    owned = space.owned(chain.image.fd)
    # Nothing is put back where it ends before its end, so the controller has to know what it began with.
    io.emit(protocol.OCCUPIED, before_bytes=before)
    work = _Work(io, chain, Pace(bandwidth))
    try:
        with cgroups.limited(io, chain.image.fd, idle=idle_io, bandwidth=bandwidth):
            if chain.image.facts.format == "qcow2":
                # Holes make no image worse, but one whose metadata lies needs its admin before it needs space.
                effort = img.Effort(idle_io, chain.refuse_changes)
                img.refuse_damaged(io, chain.node(), chain.image.shown, effort)
            with priority.idle(idle_io):
                work.run()
                os.fsync(chain.image.fd)
    finally:
        after = work.occupied
        # Holes in blocks that others share free nothing: df tells of those that were the image's own.
        freed = before - after if owned == before else owned - space.owned(chain.image.fd)
        io.emit(protocol.OCCUPIED, before_bytes=before, after_bytes=after, freed_bytes=freed)
    io.log(f"{chain.image.shown} has its holes, as by fallocate --dig-holes: {work.digger.dug} bytes let go of")
    return {
        "before_bytes": before,
        "after_bytes": after,
        "held_bytes": 0,
        "freed_bytes": freed,
        "compression": None,
        "dev": chain.image.stamp.dev,
        "inode": chain.image.stamp.inode,
        "swapped": False,
        "changed": work.digger.dug > 0 or after != before,
        "seconds": round(time.monotonic() - started, 3),
        "undo": None,
    }


def refuse_digging(chain: Chain, *, children_known: bool) -> None:
    """Refuse what this method cannot or should not work on.

    Raises:
        RefusedError: see :func:`dig`.
    """
    image, facts = chain.image, chain.image.facts
    if not holds_everybody(image.fd):
        raise RefusedError(
            "unsupported_pool",
            f"{image.shown} is on a filesystem that other machines may have mounted. They could not be kept from "
            "writing to it while holes are punched; reclaim it with a copy",
        )
    if facts.format not in FORMATS:
        raise RefusedError(
            "unsupported_subformat",
            f"{image.shown} is a {facts.format} image; only qcow2 and raw images can be reclaimed in place. Convert "
            "it instead",
        )
    if facts.encrypted:
        raise RefusedError("encrypted", f"{image.shown} is encrypted, so its zeros cannot be recognised")
    refuse_content(image, {"encrypted"})
    refuse_protected(image.fd, image.shown)
    if attributes.has_capabilities(image.fd):
        raise RefusedError(
            "unsupported_subformat",
            f"{image.shown} has file capabilities (setcap), which punching holes would remove; reclaim it with a copy",
        )
    volume_chains.refuse_rewriting(chain.links, stays=len(chain.ancestors))
    if not children_known:
        raise RefusedError(
            "guests_unknown", f"it is not known which guests could use {image.shown}; scan the host first"
        )


class Pace:
    """Keeps to a number of bytes a second; ``None`` is as fast as it goes."""

    def __init__(self, bandwidth: int | None) -> None:
        self._bandwidth = bandwidth
        self._free_at = 0.0
        # Small enough to come several times a second.
        self.piece_bytes = holes.PIECE_BYTES if bandwidth is None else min(holes.PIECE_BYTES, bandwidth // 4)
        #: Pieces that are read at the same time; at least two, as a disk is quicker when it knows what comes next.
        self.at_once = 1 if bandwidth is not None else min(max(len(os.sched_getaffinity(0)), 2), _MOST_AT_ONCE)

    def took(self, read_bytes: int) -> None:
        """Note what was read just now."""
        if self._bandwidth is not None:
            self._free_at = max(self._free_at, time.monotonic()) + read_bytes / self._bandwidth

    def left(self) -> float:
        """Seconds until the next piece may be read."""
        return max(self._free_at - time.monotonic(), 0.0)


@dataclass
class _Work:
    """The digging, in turns: each one lasts until somebody knocks."""

    io: AgentIO
    chain: Chain
    pace: Pace
    digger: holes.Digger = field(init=False)

    def __post_init__(self) -> None:
        image = self.chain.image
        self._size, self._mtime_ns = image.stamp.file_size, image.stamp.mtime_ns
        #: What the file occupied in bytes when nobody but this work had it last: what a guest adds is not its doing.
        self.occupied = space.allocated(image.fd)
        # As the plan knew it, and later as this work left it.
        self._seen = (self._size, self._mtime_ns, image.stamp.ctime_ns)
        self.digger = holes.Digger(
            self._size, holes.block_size(image.fd), self.pace.piece_bytes, at_once=self.pace.at_once
        )

    def run(self) -> None:
        """Go through the whole file."""
        with contextlib.closing(self.digger):
            # Whether anybody uses it was asked just now.
            door = self._try_to_shut() or self._shut()
            while True:
                try:
                    self._turn(door)
                finally:
                    self._open(door)
                if self.digger.done:
                    return
                door = self._shut()

    def _turn(self, door: Door) -> None:
        while not self.digger.done:
            self.io.check()
            self.pace.took(self.digger.step(self.chain.image.fd))
            self.io.progress("digging", self.digger.position, self._size)
            if self._knocked(door):
                self.digger.finish_run(self.chain.image.fd)
                return

    def _knocked(self, door: Door) -> bool:
        """Whether somebody wants the file; takes as long as the throttle says."""
        while (left := self.pace.left()) > LOOK_INTERVAL:
            if door.knocked(LOOK_INTERVAL):
                return True
            self.io.check()
        return door.knocked(left)

    def _shut(self) -> Door:
        """Be the only one that has the file open, and stay it until :meth:`_open`."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self.io.check()
            # This one knows who it is and has patience with those who only pass by.
            self.chain.refuse_in_use()
            door = self._try_to_shut()
            if door is not None:
                return door
            if time.monotonic() > deadline:
                raise RefusedError(
                    "image_in_use",
                    f"programs open {self.chain.image.shown} again and again, or the kernel of the host is older "
                    "than 5.3; stop them and try again, or reclaim with a copy",
                )
            time.sleep(LOOK_INTERVAL / 2)

    def _try_to_shut(self) -> Door | None:
        image = self.chain.image
        _reopen(image, os.O_RDWR)
        door: Door | None = None
        try:
            door = shut_alone(image.fd)
            if door is not None and self._is_ours(image):
                return door
        except BaseException:
            _let_in(image, door)
            raise
        _let_in(image, door)
        return None

    def _is_ours(self, image: Link) -> bool:
        """Whether nobody uses the image by a way that has no door, and nobody has changed it."""
        # Locks first, then the question, never the other way round.
        locking.keep_writers_away(image.fd)
        if locking.locked_bytes(image.fd):
            return False
        if _content(os.fstat(image.fd)) != self._seen:
            raise RefusedError(
                "stale_plan", f"{image.shown} was changed while the job ran; scan the host and try again"
            )
        return True

    def _open(self, door: Door) -> None:
        """Let others have the file, as it was but for its holes."""
        image = self.chain.image
        self.digger.pause()
        try:
            now = os.fstat(image.fd)
            if now.st_mtime_ns != self._mtime_ns:
                # A hole counts as a modification, but the content is the same: nothing that goes by the time, a
                # backup say, has to read the image again.
                os.utime(image.fd, ns=(now.st_atime_ns, self._mtime_ns))
            self._seen = _content(os.fstat(image.fd))
            self.occupied = space.allocated(image.fd)
        finally:
            _let_in(image, door)


def _content(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _let_in(image: Link, door: Door | None) -> None:
    """Open the door, no lock behind it, and have the file open only for reading again."""
    locking.let_go(image.fd)
    if door is not None:
        door.open()
    _reopen(image, os.O_RDONLY)


def _reopen(image: Link, mode: int) -> None:
    """Open the very same file another way, under the same number: more than one descriptor would be in our own way."""
    try:
        opened = os.open(f"/proc/self/fd/{image.fd}", mode | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise RefusedError("immutable", f"{image.shown} cannot be written to: {error.strerror}") from error
        raise
    with held(opened):
        os.dup2(opened, image.fd, inheritable=False)


METHODS = frozenset({"compress", "copy", "in_place"})
_COMPRESSIONS = frozenset({"auto", "zlib", "zstd"})


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Make an image smaller.

    Args:
        request: its ``args`` are :data:`base.COMMON`, ``method`` and ``compression`` (for ``compress``).
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`, with ``compression`` where it compressed.

    Raises:
        RefusedError, HostError, StoppedError: the image is as it was.
    """
    args = Arguments(request.args, COMMON | {"method", "compression"})
    method = args.choice("method", METHODS, "compress")
    compression = args.choice("compression", _COMPRESSIONS, "auto")
    wish = Wish.parse(request.args, args)
    with opened(wish) as chain:
        if method == "in_place":
            known = wish.children_known
            dug = dig(io, chain, children_known=known, bandwidth=wish.bandwidth, idle_io=wish.idle_io)
            return {"method": method, **dug}
        return Rewrite(request, io, wish, Compress(compression) if method == "compress" else Copy(), chain).run()
