"""An overlay's data is written into its base, where that stands.

There is no copy of the base, and so no way back. Until all is written, the base alone reads as a mixture, but the
overlay hides every block that is written: what a guest reads through it is the same at each moment. A journal beside
the overlay says so; whoever finds it does the same work once more (:func:`repeat`), which ends in the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.folders.pools import held, open_beneath
from storage_admin.agent.host import cgroups, locking, space
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import (
    INVALID,
    OCCUPIED,
    SPACE,
    Arguments,
    HostError,
    RefusedError,
    Request,
    StoppedError,
    b64,
    host_errors,
    refusal_of_tool,
    unb64,
)
from storage_admin.agent.qemu import img
from storage_admin.agent.rewrite import chain as links
from storage_admin.agent.rewrite import volume_chains
from storage_admin.agent.rewrite.base import Wish, refuse_needed
from storage_admin.agent.rewrite.chain import Chain, Link, Planned
from storage_admin.agent.swap import outcome
from storage_admin.agent.swap.journal import Journal, Stamp
from storage_admin.agent.swap.outcome import Settled, stamp_now

#: Formats of bases that qemu writes to and makes larger.
_BASES = frozenset({"qcow2", "raw"})
#: The record, before anything is written, of the overlay and all that it stands on.
_CHAIN = "chain"


class _Deaf:
    """An :class:`AgentIO` that nobody stops: what is half done is less than what is done or was not begun."""

    def __init__(self, io: AgentIO) -> None:
        self._io = io

    def check(self) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Any:
        tell = getattr(self._io, name)

        def told(*args: Any, **fields: Any) -> None:
            # Nobody may listen any more.
            with contextlib.suppress(StoppedError):
                tell(*args, **fields)

        return told


class Commit:
    """One run of the verb: an overlay, and the base that it stands on, each with its chain, for itself."""

    def __init__(self, request: Request, io: AgentIO, wish: Wish, chain: Chain, below: Chain) -> None:
        self.request, self.io, self.wish = request, io, wish
        self.overlay, self.chain, self.below = chain.image, chain, below

    def run(self) -> dict[str, Any]:
        """All steps; returns and raises as the verb."""
        started, base = time.monotonic(), self.below.image
        with host_errors(), self.overlay.folder() as folder, base.folder() as place:
            limited = cgroups.limited(self.io, base.fd, idle=self.wish.idle_io, bandwidth=self.wish.bandwidth)
            with limited, space.SpaceClaim(self.request.job, place) as claim:
                self.io.progress("checking", 0, None, "checking the images and their users")
                self._refuse()
                own = self.chain.node(alone=True)
                needed = img.measure(self.io, own, f"cluster_size={base.facts.cluster_size or 65536}")
                claim.take(needed, self.wish.reserve, self.wish.others)
                self.io.emit(SPACE, needed_bytes=needed)
                before = space.allocated(base.fd)
                self.io.emit(OCCUPIED, before_bytes=before)
                with contextlib.closing(self._journal(folder)) as journal:
                    self._write(journal)
                    self._hold()
                    after = _verify(_Deaf(self.io), self.chain, self.wish.idle_io)
                    journal.remove()
                self.io.emit(OCCUPIED, before_bytes=before, after_bytes=after)
                self.io.progress("swapping", 0, None, "waiting for the go-ahead")
                self._refuse_needed()
                self.io.wait_for_go(self.request.generation, before_bytes=before, made_bytes=after)
        return {
            "method": "commit",
            "before_bytes": before,
            "after_bytes": after,
            "freed_bytes": before - after,
            "virtual_size": self.overlay.facts.virtual_size,
            "seconds": round(time.monotonic() - started, 3),
        }

    def _journal(self, folder: int) -> Journal:
        name = os.path.basename(self.overlay.planned.path)
        try:
            journal = Journal.create(folder, self.request.job, name_b64=b64(name), commit=True)
        except FileExistsError:  # of an earlier run of the job, which did not come to its end
            return Journal.open(folder, self.request.job)
        journal.append(_CHAIN, links=[_told(link) for link in self.chain.links])
        return journal

    def _write(self, journal: Journal) -> None:
        try:
            self._refuse_needed()
            _merge(_Deaf(self.io), self.chain, self.wish.idle_io)
        except (HostError, RefusedError, StoppedError):
            if is_unwritten(self.below.image):
                journal.remove()
                self.chain.refuse_in_use()
                self.below.refuse_in_use()
            raise

    def _refuse_needed(self) -> None:
        """Refuse where another file has the base as its own: also one that was made since the last scan."""
        refuse_needed(self.below.image, self.wish.pools, self.io)

    def _refuse(self) -> None:
        overlay, base = self.overlay, self.below.image
        links.refuse_unsafe(self.chain, children_known=self.wish.children_known)
        links.refuse_unsafe(self.below, children_known=True, carried={"has_internal_snapshots"})
        if base.facts.format not in _BASES:
            raise RefusedError(
                "unsupported_subformat", f"{base.shown} is a {base.facts.format} image; convert it first"
            )
        if overlay.facts.virtual_size < base.facts.virtual_size:
            raise RefusedError(INVALID, f"{overlay.shown} is smaller than {base.shown}; enlarge it first")
        if overlay.facts.bitmaps:
            told = f"{overlay.shown} has persistent bitmaps, which would be lost; delete them first"
            raise RefusedError("unsupported_subformat", told)
        volume_chains.refuse_rewriting(self.chain.links, stays=0)
        volume_chains.refuse_rewriting(self.below.links, stays=len(self.below.ancestors))
        with overlay.folder() as folder:
            volume_chains.refuse_foreign(base, [overlay], folder)
        for one in (self.chain, self.below):
            effort = img.Effort(self.wish.idle_io, one.refuse_changes)
            img.refuse_damaged(self.io, one.node(), one.image.shown, effort)
        self.chain.refuse_in_use()
        self.below.refuse_in_use()
        self.chain.refuse_stale()

    def _hold(self) -> None:
        """Nobody begins to write through the overlay from here on, and nobody has since the work began."""
        locking.keep_writers_away(self.overlay.fd)
        locked = locking.locked_bytes(self.overlay.fd, locking.CHANGES)
        if locked or locking.user(self.overlay.fd) is not None or not is_unwritten(self.overlay):
            raise RefusedError(
                "image_in_use",
                f"{self.overlay.shown} was opened after its data was merged; it stays in use as it is",
            )


def is_unwritten(link: Link) -> bool:
    """Whether nobody has written to an image since it was opened."""
    return outcome.same_content(stamp_now(link.fd), link.stamp)


def _told(link: Link) -> dict[str, Any]:
    planned = link.planned
    return {
        "path_b64": b64(planned.path), "pool_path_b64": b64(planned.pool_path), "format": planned.format,
        "inode": link.stamp.inode,
    }  # fmt: skip


def _merge(io: Any, chain: Chain, idle_io: bool) -> None:
    """Have qemu write what the overlay holds into its base.

    Raises:
        HostError, RefusedError: the base may be a mixture; the overlay reads as before.
    """
    size = chain.image.facts.virtual_size
    done = img.commit(io, chain.node(), img.Effort.telling(io, "merging", size, idle_io))
    try:
        with host_errors():
            os.fsync(chain.links[1].fd)
        failure = refusal_of_tool(done.stderr) if done.exit_code else None
    except RefusedError as error:
        failure = error
    if failure is not None:
        raise RefusedError(failure.code, f"{failure.detail}; the merge is finished by the next recovery")
    if done.exit_code:
        raise HostError(f"qemu-img commit failed, {done.words()}; the merge is finished by the next recovery")


def _verify(io: Any, chain: Chain, idle_io: bool) -> int:
    """Look whether the base reads as the overlay now.

    Returns:
        What the base occupies, in bytes.

    Raises:
        HostError: it does not; the overlay reads as before.
    """
    overlay, base, link = chain.node(), chain.below(1), chain.links[1]
    size = chain.image.facts.virtual_size
    effort = img.Effort.telling(io, "verifying", size, idle_io)
    assert base is not None  # noqa: S101 (it was refused before where there is none)
    if base.format in img.CHECKED and not img.check(io, base, effort).sound:
        raise HostError(f"{link.shown} has errors after the merge; go on with {chain.image.shown} alone")
    if not img.compare(io, overlay, base, size, effort):
        raise HostError(f"{link.shown} does not read as {chain.image.shown} after the merge")
    return space.allocated(link.fd)


@dataclass(frozen=True)
class Merges:
    """Merges that are to be done again, each with the paths of overlay and base, and jobs of which nothing is owed.

    Which files these are the controller says: a journal may be a file of root's that somebody has filled and renamed.
    """

    again: dict[str, list[bytes]]
    over: frozenset[str]

    @classmethod
    def parse(cls, args: Arguments) -> Merges:
        """The arguments ``merges`` and ``merges_over`` of a recovery; raises RefusedError(``invalid``)."""
        again = {}
        for fields in args.get("merges", list, []):
            told = Arguments(fields if isinstance(fields, dict) else {}, frozenset({"job", "overlay_b64", "base_b64"}))
            again[told.take("job", str)] = [told.path("overlay_b64"), told.path("base_b64")]
        return cls(again, frozenset(args.get("merges_over", list, [])))


def repeat(one: Journal, records: list[dict[str, Any]], files: list[bytes], io: AgentIO) -> Settled:
    """Finish what was cut off: the base gets all that the overlay holds.

    Args:
        files: paths of the overlay and the base, as the controller knows them; the journal must name no others.

    Returns:
        ``reverted`` (guests go on with the overlay, and the base reads the same), ``busy``, or ``failed``.
    """
    name = unb64(records[0]["name_b64"])
    told = [record for record in records if record["step"] == _CHAIN]
    if not told:
        one.remove()  # nothing was begun
        return Settled(one.job, outcome.REVERTED, name)
    try:
        if [unb64(link["path_b64"]) for link in told[0]["links"][:2]] != files:
            raise RefusedError("stale_plan", "its journal names other files than the job")
        found = [_now(link, same=place == 0) for place, link in enumerate(told[0]["links"])]
        with (
            contextlib.closing(Chain(found[0], found[1:])) as chain,
            contextlib.closing(Chain(found[1], found[2:])) as below,
        ):
            chain.refuse_in_use()
            below.refuse_in_use()
            _merge(_Deaf(io), chain, idle_io=True)
            _verify(_Deaf(io), chain, idle_io=True)
            detail = f"the merge of {chain.image.shown} into {below.image.shown} was finished; nothing else was changed"
    except RefusedError as error:
        what = outcome.BUSY if error.code == "image_in_use" else outcome.FAILED
        return Settled(one.job, what, name, detail=_half(error.detail))
    except (HostError, KeyError, TypeError, ValueError, AttributeError) as error:
        return Settled(one.job, outcome.FAILED, name, detail=_half(str(error)))
    one.remove()
    return Settled(one.job, outcome.REVERTED, name, detail=detail)


def _half(why: str) -> str:
    return f"a merge was cut off, and its backing file is only whole through the overlay: {why}"


def _now(told: dict[str, Any], *, same: bool) -> Planned:
    """An image of the chain as it is by now.

    Args:
        same: it has to be the same file: another overlay may hold what is to go into no base. Whatever stands below it
            by now, the overlay reads the same before and after.
    """
    path, pool = unb64(told["path_b64"]), unb64(told["pool_path_b64"])
    try:
        with held(open_beneath(pool, path)) as fd:
            status = os.fstat(fd)
    except OSError as error:
        raise RefusedError("stale_plan", f"{os.fsdecode(path)} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode) or (same and status.st_ino != told["inode"]):
        raise RefusedError("stale_plan", f"{os.fsdecode(path)} was replaced by another file")
    stamp = Stamp.of(status)
    return Planned(path, pool, told["format"], stamp.dev, stamp.inode, stamp.file_size, stamp.mtime_ns, stamp.ctime_ns)
