"""What is asked of every verb that rewrites an image, and the image that it is asked of, opened."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.arguments import Arguments
from storage_admin.agent.host import space, space_claims
from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.agent.rewrite.chain import Chain, Planned
from storage_admin.agent.swap import guest_locks

LONGEST_UNDO_HOURS = 24 * 366

_LINK = ("path_b64", "pool_path_b64", "format", "dev", "inode", "file_size", "mtime_ns", "ctime_ns")
#: Arguments that every rewriting verb takes.
COMMON = frozenset(
    (
        *_LINK,
        *("virtual_size", "chain", "children_known", "undo_hours", "bandwidth_bytes_sec", "idle_io", "reserve"),
        *("others_bytes", "predicted_high"),
        *guest_locks.ARGS,
    )
)


@dataclass(frozen=True)
class Wish:
    """What is asked of every rewrite. Sizes are in bytes; ``predicted_high`` is the most that the result may need."""

    image: Planned
    ancestors: list[Planned]
    virtual_size: int
    children_known: bool
    undo_hours: float
    bandwidth: int | None
    idle_io: bool
    reserve: space.Reserve
    others: space_claims.Others
    predicted_high: int | None

    @classmethod
    def parse(cls, fields: dict[str, Any], args: Arguments) -> Wish:
        """The arguments :data:`COMMON`; raises RefusedError(``invalid``)."""
        reserve = Arguments(args.get("reserve", dict, {}), frozenset({"percent", "bytes"}))
        wish = cls(
            image=Planned.parse(fields),
            ancestors=[Planned.parse(link) for link in args.get("chain", list, [])],
            virtual_size=args.take("virtual_size", int),
            children_known=args.get("children_known", bool, False),
            undo_hours=args.get("undo_hours", float, 24.0),
            bandwidth=args.size("bandwidth_bytes_sec"),
            idle_io=args.get("idle_io", bool, True),
            reserve=space.Reserve(reserve.get("percent", float, 5.0), reserve.get("bytes", int, 2 << 30)),
            others=space_claims.Others.parse(args),
            predicted_high=args.size("predicted_high"),
        )
        if not 0 <= wish.undo_hours <= LONGEST_UNDO_HOURS:
            raise RefusedError(INVALID, f"undo_hours is 0 to {LONGEST_UNDO_HOURS}")
        if wish.reserve.minimum_bytes < 0 or not 0 <= wish.reserve.percent <= 100:
            raise RefusedError(INVALID, "a reserve is not negative, and at most 100 percent")
        return wish


@contextlib.contextmanager
def opened(wish: Wish) -> Iterator[Chain]:
    """The image and its ancestors, open; what the host says while they are worked on becomes a refusal or an error.

    Raises:
        RefusedError: as :class:`links.Chain`; ``not_enough_space``; ``immutable``.
        HostError: an I/O error.
    """
    try:
        chain = Chain(wish.image, wish.ancestors)
        try:
            yield chain
        finally:
            chain.close()
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise RefusedError("not_enough_space", "the disk is full; free some space and try again") from error
        if error.errno == errno.EPERM:
            raise RefusedError("immutable", f"the host does not allow it: {error.strerror}") from error
        raise HostError(f"the host failed: {error.strerror or error}") from error
