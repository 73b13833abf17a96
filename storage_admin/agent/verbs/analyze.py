"""The verb ``analyze``: what an image would take after each method of reclaim, from a sample of its data or all."""

from __future__ import annotations

import os
import random
import stat
import time
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.folders.pools import held, open_beneath
from storage_admin.agent.formats import Facts, Reader, UnreadableError, probe, read_as
from storage_admin.agent.host import cgroups
from storage_admin.agent.host.priority import idle
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.measure.estimate import analyze_qcow2, analyze_raw
from storage_admin.agent.measure.extents import analyze_other
from storage_admin.agent.measure.hidden import hidden_basis
from storage_admin.agent.measure.prediction import unknown
from storage_admin.agent.measure.sampling import Pace
from storage_admin.agent.protocol import INVALID, Arguments, HostError, RefusedError, Request, display

_PLACE = frozenset({"path_b64", "pool_path_b64", "format", "dev", "inode"})
_WORDS = _PLACE | {"base", "mode", "compression", "samples", "seconds", "seed"}
#: Seconds that a sample may take to find what an overlay hides.
_HIDDEN_SECONDS = 0.5
_MODES = frozenset({"sample", "full"})
_COMPRESSIONS = frozenset({"auto", "all", "zlib", "zstd"})
#: What keeps every method out.
_REASONS = {
    "encrypted": "encrypted data does not compress, and its zeros do not look like zeros",
    "data_file": "the data is in an external data file, which is not rewritten",
    "dirty": "it is marked dirty or corrupt; check it first",
    "corrupt": "it is marked dirty or corrupt; check it first",
}
_SNAPSHOTS = "it has internal snapshots, which a rewrite would drop"


@dataclass(frozen=True)
class Place:
    """An image as it was scanned, its format as declared."""

    path: bytes
    pool_path: bytes
    format: str
    dev: int
    inode: int

    @classmethod
    def parse(cls, args: Arguments) -> Place:
        """The arguments of these names; raises RefusedError(``invalid``)."""
        path, pool_path = args.path("path_b64"), args.path("pool_path_b64")
        return cls(path, pool_path, args.take("format", str), args.take("dev", int), args.take("inode", int))


@dataclass(frozen=True)
class AnalyzeArgs:
    """The request's arguments, checked; ``seconds`` of processor time for the sample."""

    image: Place
    base: Place | None
    mode: str
    compression: str
    samples: int
    seconds: float
    seed: int


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Estimate what can be won back.

    Args:
        request: ``path_b64``, ``pool_path_b64``, ``format`` (declared), ``dev``, ``inode`` (as scanned), ``mode``
            (``sample``; ``full`` reads everything that is allocated, when nobody else wants the disk), ``compression``
            (which one ``full`` measures on all data: ``auto``, the usual one; ``zlib``, ``zstd`` or ``all``),
            ``samples`` (2000), ``seconds`` (1.0), ``seed`` (by chance); ``base``: of the image right below a qcow2, the
            first five of these: what of it is hidden is told then.
        io: the controller.

    Returns:
        ``mode``, ``allocated_size``, ``methods``: for ``compress``, ``copy`` and ``in_place`` each
        ``predicted_after_bytes`` with ``predicted_low`` and ``_high``, ``reclaimable_bytes`` with ``reclaimable_low``
        and ``_high`` (all in bytes, ``None`` where it cannot be told, with a ``reason``). Of ``compress`` the numbers
        are those of the named ``compression``, but ``predicted_low`` and ``_high`` hold for each, and ``compressions``
        has the numbers of each: one that ``full`` did not measure has a guess from a sample, and as its highest what
        an image takes of which nothing becomes smaller. ``method`` is the best one (:func:`prediction.best`), whose
        numbers stand on top, too. ``basis`` says how they were found: ``leaked_clusters`` and ``leaked_bytes``
        (``None`` with a ``leaked_reason``), ``hidden_bytes`` (of the ``base``, which the image hides; ``None`` with a
        ``hidden_reason``), ``snapshots`` (of each internal one, in the header's order, when it was
        ``created`` and the ``held_bytes`` that it alone holds; ``None`` with a ``snapshots_reason``),
        ``clusters_zero_allocated``, ``compressed_ratio``, ``sampled``, and where other files share blocks of the image
        ``shared_bytes``, which are won by no method. Of qcow2 and raw ``preallocation``, as
        :mod:`storage_admin.agent.measure.preallocation` recognises it. ``seconds``.

        After ``full`` the result of a method is never larger than its ``predicted_high``, as long as the image stays as
        it is.

    Raises:
        RefusedError: ``invalid``, ``outside_pool``, ``stale_plan``, ``format_mismatch``, ``dirty_or_corrupt``.
        StoppedError: the controller stopped the work.
        HostError: the image could not be read.
    """
    started = time.monotonic()
    args = _parse(request.args)
    whole = args.mode == "full"
    with held(_open(args.image)) as fd:
        io.check()
        try:
            with cgroups.limited(io, fd, idle=whole, bandwidth=None), idle(whole):
                result = _analyze(fd, args, io)
        except OSError as error:
            raise HostError(f"{display(args.image.path)} could not be read: {error.strerror}") from error
    return {"mode": args.mode, **result, "seconds": round(time.monotonic() - started, 3)}


def _open(image: Place) -> int:
    try:
        fd = open_beneath(image.pool_path, image.path)
    except FileNotFoundError as error:
        raise RefusedError("stale_plan", f"{display(image.path)} no longer exists; scan the host") from error
    except OSError as error:
        raise HostError(f"{display(image.path)} could not be opened: {error.strerror}") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) != (image.dev, image.inode):
        os.close(fd)
        raise RefusedError("stale_plan", f"{display(image.path)} is not the file that was scanned; scan the host")
    return fd


def _analyze(fd: int, args: AnalyzeArgs, io: AgentIO) -> dict[str, Any]:
    status = os.fstat(fd)
    allocated = status.st_blocks * 512
    reader = Reader(fd, status.st_size)
    chance = random.Random(args.seed)  # noqa: S311
    pace = Pace(io, whole=args.mode == "full", samples=args.samples, seconds=args.seconds, chance=chance)
    image = args.image
    if image.format == "raw":
        # Whatever a guest wrote into it: where zeros stand in a raw file does not depend on what it looks like.
        return analyze_raw(fd, status.st_size, allocated, pace)
    looks_like = probe(reader)
    if looks_like != image.format and not (image.format == "vpc" and looks_like == "raw"):
        raise RefusedError("format_mismatch", f"it is declared as {image.format}, but looks like {looks_like}")
    try:
        facts = read_as(reader, image.format)
    except UnreadableError as error:
        raise RefusedError("dirty_or_corrupt", f"its header cannot be read: {error}") from error
    if reason := _untouchable(facts):
        return unknown(allocated, reason)
    if image.format != "qcow2":
        return analyze_other(fd, facts, image.path, allocated, pace)
    found = analyze_qcow2(reader, facts, allocated, pace, _SNAPSHOTS if facts.snapshots else "", args.compression)
    if args.base is not None:
        found["basis"] |= _hidden(reader, args.base, io, None if pace.whole else time.monotonic() + _HIDDEN_SECONDS)
    return found


def _hidden(overlay: Reader, base: Place, io: AgentIO, deadline: float | None) -> dict[str, Any]:
    """What is hidden of the image below, as far as that one can be opened."""
    try:
        fd = _open(base)
    except (RefusedError, HostError) as error:
        return {"hidden_bytes": None, "hidden_reason": error.detail}
    with held(fd):
        return hidden_basis(overlay, Reader(fd, os.fstat(fd).st_size), base.format, io.check, deadline)


def _untouchable(facts: Facts) -> str | None:
    return next((reason for name, reason in _REASONS.items() if getattr(facts, name)), None)


def _parse(fields: dict[str, Any]) -> AnalyzeArgs:
    args = Arguments(fields, _WORDS)
    base, seed = args.maybe("base", dict), args.maybe("seed", int)
    parsed = AnalyzeArgs(
        image=Place.parse(args),
        base=None if base is None else Place.parse(Arguments(base, _PLACE)),
        mode=args.choice("mode", _MODES, "sample"),
        compression=args.choice("compression", _COMPRESSIONS, "auto"),
        samples=args.get("samples", int, 2000),
        seconds=args.get("seconds", float, 1.0),
        seed=time.time_ns() if seed is None else seed,
    )
    if parsed.base is not None and parsed.base.format not in {"raw", "qcow2"}:
        raise RefusedError(INVALID, "analyze's base is a raw or qcow2 image")
    if not 1 <= parsed.samples <= 1_000_000 or not 0 < parsed.seconds <= 3600:
        raise RefusedError(INVALID, "samples are 1 to 1,000,000, seconds above 0 and up to 3,600")
    return parsed
