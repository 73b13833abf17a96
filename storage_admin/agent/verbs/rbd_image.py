"""Have Ceph give back the zeros of an image (``rbd sparsify``), or copy to a clone what it reads of its parent.

The content stays the same, whenever either is cut off: an OSD looks at an object and changes it in one step, and a
clone has its parent until all of it was copied. Both are done only while nobody watches the image, which is what Ceph
calls having it open, on whichever host.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.host import rbd
from storage_admin.agent.host.rbd import Named
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import INVALID, OCCUPIED, Arguments, HostError, RefusedError, Request, display

#: From which release on all OSDs of a cluster can do it, by their first letters (``require_osd_release``).
_OLDEST = "nautilus"
#: What of a pool stays free, in percent.
_RESERVE = 5


@dataclass(frozen=True)
class _Image:
    """An image and how its pool is asked; ``size``, in bytes, and ``id``, where it is known, are those of the plan."""

    named: Named
    name: bytes
    size: int
    id: str
    io: AgentIO

    @property
    def shown(self) -> str:
        return f"{self.named.name}/{display(self.name)}"

    def ask(self, *words: str) -> Any:
        """The answer of ``rbd`` about it."""
        return _answer([*_encoded("rbd", *self.named.options, *words), b"--image=" + self.name], self.io)

    def look(self) -> Mapping[str, Any]:
        """What Ceph says of an image that is still that of the plan, and that nobody has open.

        Raises:
            RefusedError: ``stale_plan``, ``image_in_use``.
        """
        info: dict[str, Any] = self.ask("info")
        if info["size"] != self.size or self.id not in {"", info["id"]}:
            raise RefusedError(
                "stale_plan", f"{self.shown} is another image than in the plan, or resized; scan the host"
            )
        if watchers := [str(who["address"]) for who in self.ask("status")["watchers"]]:
            raise RefusedError(
                "image_in_use",
                f"{self.shown} is open by clients of Ceph: {', '.join(watchers)[:200]}. Shut the guest down",
            )
        return info

    def used(self) -> int:
        """What it takes itself, in whole objects, without its snapshots."""
        images = self.ask("du")["images"]
        return sum(int(one["used_size"]) for one in images if "snapshot" not in one)

    def change(self, verb: str) -> None:
        """Run such a command of ``rbd`` to its end; a cancel ends it, and leaves the content as it is."""
        argv = [*_encoded("rbd", *self.named.options, verb, "--no-progress"), b"--image=" + self.name]
        done = tools.run(argv, self.io, limits=None)
        if done.exit_code:
            raise HostError(f"rbd {verb} ended with {done.words()}")


def sparsify(request: Request, io: AgentIO) -> dict[str, Any]:
    """Give back the zeros of an image.

    Args:
        request: ``args``: ``pool`` (with a namespace, as ``vms/tenant``), ``name_b64``, ``size`` (bytes) and
            ``id`` (or empty) as scanned, ``etc_pve``.
        io: the controller.

    Returns:
        As :func:`reclaim.dig`, with ``method``; sizes are in whole objects.

    Raises:
        RefusedError: ``stale_plan``, ``image_in_use``, ``tool_missing``, ``unsupported_pool``.
        HostError, StoppedError: the content is as before.
    """
    image = _image(request, io)
    return _changed(request, image, image.look(), "sparsify")


def flatten(request: Request, io: AgentIO) -> dict[str, Any]:
    """Copy to a clone all that it reads of its parent, so that it has none any more.

    Args:
        request, io: as of :func:`sparsify`.

    Returns:
        As of :func:`sparsify`.

    Raises:
        RefusedError: as of :func:`sparsify`; ``not_enough_space``.
        HostError, StoppedError: the content is as before, and the image has its parent still.
    """
    image = _image(request, io)
    info = image.look()
    if "parent" not in info:
        raise RefusedError("stale_plan", f"{image.shown} has no parent; there is nothing to flatten")
    overlap = int(info["parent"]["overlap"])
    # What it has may all lie behind what it reads of its parent.
    need = overlap - max(image.used() - (int(info["size"]) - overlap), 0)
    stats = next(
        pool["stats"] for pool in _ceph(image, "df")["pools"] if pool["name"] == image.named.pool
    )  # fmt: skip
    available = int(stats["max_avail"]) * (100 - _RESERVE) // 100
    if need > available:
        raise RefusedError(
            "not_enough_space",
            f"{image.shown} reads up to {need:,} bytes of its parent, and its pool has {available:,} for that",
        )
    if int(info.get("snapshot_count", 0)) and "deep-flatten" not in info["features"]:
        io.log(f"snapshots of {image.shown} keep the parent: the image has not the feature deep-flatten", "warning")
    return _changed(request, image, info, "flatten")


def _changed(request: Request, image: _Image, info: Mapping[str, Any], verb: str) -> dict[str, Any]:
    started, io = time.monotonic(), image.io
    release = str(_ceph(image, "osd", "dump").get("require_osd_release") or "")
    if release < _OLDEST:
        raise RefusedError("unsupported_pool", f"the cluster is older than Nautilus ({release or 'unknown'})")
    before = image.used()
    io.progress("swapping", 0, None, "waiting for the go-ahead")
    io.wait_for_go(request.generation)
    if image.look()["id"] != info["id"]:
        raise RefusedError("stale_plan", f"{image.shown} is another image by now; scan the host")
    io.emit(OCCUPIED, before_bytes=before)
    io.progress("discarding" if verb == "sparsify" else "flattening", 0, None)
    image.change(verb)
    after = image.used()
    io.emit(OCCUPIED, before_bytes=before, after_bytes=after)
    now = image.ask("info")
    if verb == "flatten" and "parent" in now:
        raise HostError(f"{image.shown} has a parent still")
    if image.ask("status")["watchers"]:
        io.log(f"{image.shown} was opened meanwhile, which harms nothing", "warning")
    return {
        "method": verb, "before_bytes": before, "after_bytes": after, "held_bytes": 0, "freed_bytes": before - after,
        "swapped": False, "changed": True, "undo": None, "seconds": round(time.monotonic() - started, 3),
    }  # fmt: skip


def _image(request: Request, io: AgentIO) -> _Image:
    args = Arguments(request.args, frozenset({"pool", "name_b64", "size", "id", "etc_pve"}))
    pool, name = args.take("pool", str), args.path("name_b64")
    if not name or set(name) & set(b"/@\0"):
        raise RefusedError(INVALID, "that is no image that rbd can be asked for")
    io.progress("checking", 0, None, "checking the image and who has it open")
    ways = rbd.named(args.get("etc_pve", str, "/etc/pve"))
    ways = [one for one in ways if one.name == pool]
    if not ways:
        raise RefusedError("stale_plan", f"nobody on this host names the pool {pool} of Ceph any more; scan the host")
    image = _Image(ways[0], name, args.take("size", int), args.get("id", str, ""), io)
    clusters = {_answer([*_encoded("ceph", *one.access), b"fsid"], io)["fsid"] for one in ways}
    if len(clusters) > 1:
        raise RefusedError("unsupported_pool", f"the host knows several pools of Ceph that are called {pool}")
    return image


def _ceph(image: _Image, *words: str) -> Any:
    return _answer(_encoded("ceph", *image.named.access, *words), image.io)


def _answer(argv: list[bytes], io: AgentIO) -> Any:
    """What a tool of Ceph says; raises HostError."""
    return rbd.answer_of(tools.run([*argv, b"--format=json"], io, limits=rbd.LIMITS), display(argv[0]))


def _encoded(*words: str) -> list[bytes]:
    return [word.encode("utf-8", "surrogateescape") for word in words]
