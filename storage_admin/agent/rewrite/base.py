"""What all rewrites of an image have in common: protocol P around a new file that a recipe makes.

A recipe says how the new file is made from the image and what must be true of it; everything that keeps the image's
bytes safe (who uses it, space, watching, verifying, attributes, the swap) is here, once.

What is asked of every verb that rewrites an image, and the image that it is asked of, opened.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from storage_admin.agent import formats
from storage_admin.agent.folders.pools import held, open_parent
from storage_admin.agent.formats.facts import Facts, UnreadableError
from storage_admin.agent.host import cgroups, locking, space
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs.tools import Finished
from storage_admin.agent.protocol import (
    INVALID,
    SPACE,
    Arguments,
    HostError,
    RefusedError,
    Request,
    display,
    host_errors,
    refusal_of_tool,
)
from storage_admin.agent.qemu import img
from storage_admin.agent.qemu.node import WATCH_INTERVAL, Node
from storage_admin.agent.rewrite import volume_chains
from storage_admin.agent.rewrite.backing_name import leads_to
from storage_admin.agent.rewrite.chain import Chain, Link, Planned, refuse_unsafe
from storage_admin.agent.scan import overlays
from storage_admin.agent.scan.overlays import LookedAt, Wanted
from storage_admin.agent.swap import fence
from storage_admin.agent.swap.journal import file_name
from storage_admin.agent.swap.swap import Looks, NewFile, Replacement, Swapped, clear_earlier

LONGEST_UNDO_HOURS = 24 * 366

_LINK = ("path_b64", "pool_path_b64", "format", "dev", "inode", "file_size", "mtime_ns", "ctime_ns")
#: Arguments that every rewriting verb takes.
COMMON = frozenset(
    (
        *_LINK,
        *("virtual_size", "chain", "children_known", "undo_hours", "bandwidth_bytes_sec", "idle_io", "reserve"),
        *("others_bytes", "predicted_high", "pools"),
        *fence.ARGS,
    )
)


@dataclass(frozen=True)
class Wish:
    """What is asked of every rewrite. Sizes are in bytes; ``predicted_high`` is the most that the result may need.

    ``pools`` are looked through for what needs the image as it is, where that matters (:meth:`Recipe.takes_away`).
    """

    image: Planned
    ancestors: list[Planned]
    virtual_size: int
    children_known: bool
    undo_hours: float
    bandwidth: int | None
    idle_io: bool
    reserve: space.Reserve
    others: space.Others
    predicted_high: int | None
    pools: list[LookedAt] = field(default_factory=list)

    @classmethod
    def parse(cls, fields: dict[str, Any], args: Arguments) -> Wish:
        """The arguments :data:`COMMON`; raises RefusedError(``invalid``)."""
        wish = cls(
            image=Planned.parse(fields),
            ancestors=[Planned.parse(link) for link in args.get("chain", list, [])],
            virtual_size=args.take("virtual_size", int),
            children_known=args.get("children_known", bool, False),
            undo_hours=args.get("undo_hours", float, 24.0),
            bandwidth=args.size("bandwidth_bytes_sec"),
            idle_io=args.get("idle_io", bool, True),
            reserve=space.Reserve.parse(args),
            others=space.Others.parse(args),
            predicted_high=args.size("predicted_high"),
            pools=[LookedAt.parse(pool) for pool in args.get("pools", list, [])],
        )
        if not 0 <= wish.undo_hours <= LONGEST_UNDO_HOURS:
            raise RefusedError(INVALID, f"undo_hours is 0 to {LONGEST_UNDO_HOURS}")
        return wish


@contextlib.contextmanager
def opened(wish: Wish, *, base_lost: bool = False) -> Iterator[Chain]:
    """The image and its ancestors, open; what the host says while they are worked on becomes a refusal or an error.

    Args:
        base_lost: as of :class:`Chain`.

    Raises:
        RefusedError: as :class:`Chain` and :func:`host_errors`.
        HostError: an I/O error.
    """
    with host_errors(), contextlib.closing(Chain(wish.image, wish.ancestors, base_lost=base_lost)) as chain:
        yield chain


def refuse_needed(link: Link, pools: list[LookedAt], io: AgentIO) -> None:
    """Refuse an image that others need, also what was made since the last scan."""
    with link.folder() as folder:
        wanted = Wanted(link.id, locking.file_id(folder), os.path.basename(link.planned.path), link.shown)
    overlays.refuse_needed(pools, wanted, io)


class Recipe(ABC):
    """How a new file is made out of an image, and what must be true of it."""

    #: What stands in the log and in the result.
    method: str
    #: Whether the new file has to be smaller to be worth the swap.
    must_shrink = True
    #: Whether a guest has to read the same bytes from both files.
    must_equal = True
    #: Codes of refusals that do not hold for it, because it keeps what they stand for.
    carries: frozenset[str] = frozenset()
    #: Whether the image's own name leads to the new file afterwards, or to nothing.
    replaces = True

    @property
    def result(self) -> dict[str, Any]:
        """What the verb's result says beside what all rewrites say."""
        return {}

    def place(self, work: Rewrite) -> tuple[int, bytes]:
        """A descriptor of the folder for the new file, which the caller closes, and the name that it will have."""
        return open_parent(work.wish.image.pool_path, work.wish.image.path)

    def folder_path(self, work: Rewrite) -> bytes:
        """The path of that folder, for the log."""
        return os.path.dirname(work.wish.image.path)

    def begin(self, work: Rewrite) -> NewFile:
        """The new file, still empty, and how it gets its place."""
        return Replacement(work.folder, work.name, work.chain.image.fd, work.request, work.wish.undo_hours)

    def format(self, work: Rewrite) -> str:
        """The format of the new file: what takes an image's place is of its format."""
        return work.chain.image.planned.format

    def takes_away(self, work: Rewrite) -> bool:  # noqa: ARG002 (for those where it depends)
        """Whether what needs the image as it is, as an overlay does, would lose its name or what it reads from it."""
        return False

    @abstractmethod
    def refuse(self, work: Rewrite) -> None:
        """Refuse what this recipe cannot do to the image; nothing was made yet."""

    def recheck(self, work: Rewrite) -> None:  # noqa: B027 (not every recipe asks more)
        """Refuse, in the moment of the swap, what has come about since :meth:`refuse`; under the image locks."""

    @abstractmethod
    def needed(self, work: Rewrite) -> int:
        """The most that the new file may take, in bytes; asked where the request does not say it (:class:`Wish`)."""

    @abstractmethod
    def make(self, work: Rewrite, replacement: NewFile) -> None:
        """Fill ``replacement.new``; raises HostError or RefusedError."""

    def verify(self, work: Rewrite, copy: Node) -> None:
        """Have the metadata of the new file checked, and all compared that a guest reads.

        Raises:
            RefusedError, HostError: it is not sound, or not the same.
        """
        if copy.format in img.CHECKED:
            report = img.check(work.io, copy, work.effort("verifying", 0))
            if not report.sound or report.leaks:
                raise HostError(f"the copy has {report.corruptions} corruptions and {report.leaks} leaks")
        if not self.must_equal:
            return
        size = work.chain.image.facts.virtual_size
        if not img.compare(work.io, work.chain.node(), copy, size, work.effort("verifying", size)):
            work.chain.refuse_stale()
            raise HostError("the content of the copy differs from the content of the image")

    @abstractmethod
    def base(self, work: Rewrite) -> Node | None:
        """What the new file stands on."""

    @abstractmethod
    def differences(self, work: Rewrite, made: Facts) -> list[str]:
        """In what the new file's header is not as it should be, by name."""


@dataclass
class Rewrite:
    """One run of a rewriting verb, step by step."""

    request: Request
    io: AgentIO
    wish: Wish
    recipe: Recipe
    chain: Chain
    folder: int = -1
    name: bytes = b""
    started: float = field(default_factory=time.monotonic)
    _looked: float = 0.0
    #: What the new file may take at most, as long as it is not written.
    _needed: int = 0
    _made: NewFile | None = None
    #: The base as the new file's header names it.
    _named: bytes | None = None

    def run(self) -> dict[str, Any]:
        """All steps of protocol P.

        Returns:
            Allocated sizes before and after, what the undo copy holds, what was freed, the new image's identity.

        Raises:
            RefusedError, HostError, StoppedError: the image is as it was.
        """
        self.folder, self.name = self.recipe.place(self)
        with held(self.folder):
            image, wish = self.chain.image.fd, self.wish
            limited = cgroups.limited(self.io, image, idle=wish.idle_io, bandwidth=wish.bandwidth)
            with limited, space.SpaceClaim(self.request.job, self.folder) as self._claim:
                return self._run()

    def _run(self) -> dict[str, Any]:
        self.io.progress("checking", 0, None, "checking the image and its users")
        clear_earlier(self.folder, self.request)
        self._refuse()
        self._needed = self.wish.predicted_high or self.recipe.needed(self)
        self._claim.take(self._needed, self.wish.reserve, self.wish.others)
        self.io.emit(SPACE, needed_bytes=self._needed)  # plans that look for space have to count with all of it
        before = space.allocated_on_disk(self.chain.image.fd)
        with self.recipe.begin(self) as replacement:
            replacement.note_left([(link.planned.path, link.stamp) for link in self._left()])
            self._made = replacement
            self.recipe.make(self, replacement)
            os.fsync(replacement.new)
            self._needed = 0
            self._claim.left(0)
            self._verify(replacement)
            self.io.progress("syncing", 0, None, "writing the copy to disk")
            # Filesystems set room aside behind the end of a file that is open; it is not needed any more.
            os.ftruncate(replacement.new, os.fstat(replacement.new).st_size)
            # It was written through the host's page cache, which belongs to the guests.
            os.posix_fadvise(replacement.new, 0, 0, os.POSIX_FADV_DONTNEED)
            after = space.allocated(replacement.new)
            if self.recipe.must_shrink and after >= before:
                self.io.log(f"the copy needs {after} bytes, the image {before}: the image is left unchanged")
                return self._result(before, before, None)
            replacement.note_made(self.recipe.format(self), self.chain.image.planned.format)
            self.io.progress("swapping", 0, None, "waiting for the go-ahead")
            swapped = replacement.swap(self.io, Looks(self._recheck, self._look_again))
        # Its descriptor still leads to the original: this much waits as its undo copy, or has just become free.
        return self._result(space.allocated(self.chain.image.fd), swapped.new.allocated_size, swapped)

    def _left(self) -> list[Link]:
        """The ancestors that the new file will not stand on, and whose content it holds instead."""
        stays, node = set(), self.recipe.base(self)
        while node is not None:
            status, node = os.fstat(node.fd), node.backing
            stays.add((status.st_dev, status.st_ino))
        return [link for link in self.chain.ancestors if link.id not in stays]

    def _refuse(self) -> None:
        image, facts = self.chain.image, self.chain.image.facts
        refuse_unsafe(self.chain, children_known=self.wish.children_known, carried=self.recipe.carries)
        if facts.virtual_size != self.wish.virtual_size:
            raise RefusedError(
                "stale_plan", f"{image.shown} was resized since it was scanned; scan the host and try again"
            )
        if self.recipe.replaces:
            stays = len(self.chain.ancestors) - len(self._left())
            volume_chains.refuse_rewriting(self.chain.links, stays=stays)
        volume_chains.refuse_foreign(image, self._left(), self.folder)
        self.chain.refuse_in_use()
        self._refuse_needed()
        self.recipe.refuse(self)
        self.chain.refuse_in_use()

    def refuse_damaged(self) -> None:
        """Refuse an image that ``qemu-img check`` finds errors in; formats without a check are taken as they are."""
        img.refuse_damaged(self.io, self.chain.node(), self.chain.image.shown, self.effort("checking", 0))

    def shown(self, replacement: NewFile) -> bytes:
        """The new file's path, for the log."""
        return os.path.join(self.recipe.folder_path(self), replacement.new_name)

    def refuse_failed(self, what: str, done: Finished) -> None:
        """Raise what it means where a tool has failed; truer is a guest that has started, or a disk that is full."""
        if done.exit_code:
            self.chain.refuse_changes()
            space.watch(self.folder, self.wish.reserve)
            raise refusal_of_tool(done.stderr) or HostError(f"{what} failed, {done.words()}")

    def _verify(self, replacement: NewFile) -> None:
        """The copy's header says what it should, its metadata is sound, and a guest reads the same bytes from it."""
        target = self.recipe.format(self)
        try:
            size = os.fstat(replacement.new).st_size
            made = formats.read(replacement.new, size, replacement.new_name, target)
        except UnreadableError as error:
            raise HostError(f"the copy cannot be read: {error}") from error
        if different := self.recipe.differences(self, made):
            raise HostError("the copy differs from the image in " + ", ".join(different))
        self._named = made.backing_file
        self._refuse_astray()
        copy = Node(replacement.new, target, self.shown(replacement), self.recipe.base(self))
        self.recipe.verify(self, copy)

    def _refuse_astray(self) -> None:
        """The name in the new header must lead to the base: tools were given descriptors, a guest has only the name."""
        base = self.recipe.base(self)
        if (self._named is None) != (base is None):
            raise HostError("the copy has another backing file than the image")
        if self._named is not None and base is not None and not leads_to(self.folder, self._named, base.fd):
            raise RefusedError(
                "stale_plan",
                f"{display(self._named)} does not lead to {display(base.path)} from the folder of "
                f"{self.chain.image.shown}; scan the host and try again",
            )

    def _recheck(self) -> None:
        """Everything that was true in the beginning must be true in the moment of the swap."""
        self._refuse_needed()
        self.recipe.recheck(self)
        self._look_again()

    def _refuse_needed(self) -> None:
        """Refuse to take away what others need, also what was made since the last scan."""
        if self.recipe.takes_away(self):
            refuse_needed(self.chain.image, self.wish.pools, self.io)

    def _look_again(self) -> None:
        """The same, but for what takes a while or opens the image."""
        self.chain.refuse_in_use()
        self._refuse_astray()
        volume_chains.refuse_foreign(self.chain.image, self._left(), self.folder)
        self.chain.refuse_stale()

    def effort(self, stage: str, total: int) -> img.Effort:
        """How a tool is to work: its progress counts for this stage of ``total`` bytes; 0 tells none."""
        return img.Effort.telling(self.io, stage, total, self.wish.idle_io, self.watch)

    def watch(self) -> None:
        """A guest that starts wins, and so do guests that need the last of the space."""
        if time.monotonic() - self._looked > WATCH_INTERVAL:
            self._looked = time.monotonic()
            self.chain.refuse_changes()
            space.watch(self.folder, self.wish.reserve)
            if self._made is not None:
                self._claim.left(self._needed - space.allocated(self._made.new) - self._made.parts_bytes)

    def _result(self, before: int, after: int, swapped: Swapped | None) -> dict[str, Any]:
        # A copy may wait and occupy nothing, as that of an image without a single block.
        held = swapped.goes_bytes if swapped and swapped.undo_waits else None
        stamp = swapped.new if swapped else self.chain.image.stamp
        undo = {"path": display(file_name(self.request.job, "orig")), "bytes": held}
        return {
            "method": self.recipe.method,
            "before_bytes": before,
            "after_bytes": after,
            "held_bytes": held or 0,
            "made_bytes": swapped.made_bytes if swapped else 0,
            "freed_bytes": swapped.goes_bytes - swapped.made_bytes if swapped and held is None else 0,
            "dev": stamp.dev,
            "inode": stamp.inode,
            "swapped": swapped is not None,
            "seconds": round(time.monotonic() - self.started, 3),
            "undo": undo if held is not None else None,
            **self.recipe.result,
        }
