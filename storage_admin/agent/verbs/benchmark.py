"""The verb ``benchmark``: measure a storage pool with files of the agent's own, and leave nothing behind."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from storage_admin.agent import protocol
from storage_admin.agent.bench import environment
from storage_admin.agent.bench.step import Bench, Step
from storage_admin.agent.folders import scratch
from storage_admin.agent.folders.pools import held, is_absolute, open_root
from storage_admin.agent.host import cgroups, space
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import INVALID, Arguments, HostError, RefusedError, Request, display

#: Each kind's module in :mod:`storage_admin.agent.bench`; one that is not there is not known.
KINDS = {
    "dd": "dd",
    "bonnie": "bonnie",
    "fio": "fio",
    "preallocation": "creation",
    "cluster_size": "creation",
    "formats": "layouts",
    "modes": "modes",
    "boot": "boot",
}
#: What a missing tool is installed with, on Debian and Proxmox VE.
PACKAGES = {
    "dd": "coreutils",
    "stdbuf": "coreutils",
    "qemu-img": "qemu-utils",
    "fio": "fio",
    "bonnie++": "bonnie++",
    "virsh": "libvirt-clients",
}
MOST_STEPS, MOST_REPETITIONS = 400, 20
_KNOWN = frozenset({"pool_path_b64", "kind", "reserve_bytes", "others_bytes", "steps", "repetitions", "idle_io"})


@dataclass(frozen=True)
class Wish:
    """The request's arguments, checked; sizes are in bytes."""

    pool_path: bytes
    kind: str
    steps: list[Step]
    repetitions: int
    reserve: space.Reserve
    others: space.Others
    idle_io: bool


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Do all steps, so many times, in a folder ``.sa-<job>.bench`` of the pool, which is removed whatever happens.

    A repetition does each step once: a disk that becomes slower meanwhile does not speak against the last step.

    Args:
        request: ``args``: ``pool_path_b64``, ``kind`` (of :data:`KINDS`), ``steps`` (objects, each with a ``setting``
            and the fields that its kind's ``parse`` takes), ``repetitions``, ``reserve_bytes`` (to be left free),
            ``others_bytes`` (of other jobs, as :class:`space.Others`), ``idle_io``.
        io: the controller; gets ``environment``, ``sample``, ``output``, ``note`` and ``environment_after``.

    Returns:
        ``steps``: how many measurements were asked for; ``scratch_bytes_at_most``; ``bytes_written`` (null where the
        kernel does not count); ``caches``: ``dropped``, ``direct`` or ``not dropped``.

    Raises:
        RefusedError: ``invalid``, ``tool_missing``, ``not_enough_space``, ``busy``, ``unsupported_pool``.
        HostError: a tool failed, or the host did.
        StoppedError: the controller stopped the work.
    """
    wish = _parse(request.args)
    with _pool(wish.pool_path) as pool:
        scratch.clear_abandoned(pool, wish.pool_path, io)
        io.emit(protocol.ENVIRONMENT, data=environment.before(pool))
        written = _bytes_written()
        limited = cgroups.limited(io, pool, idle=wish.idle_io, bandwidth=None)
        claimed = space.SpaceClaim(request.job, pool)
        with limited, claimed as claim, scratch.made(pool, wish.pool_path, request.job, io) as folder:
            bench = Bench(io, folder, wish.reserve, wish.others, _filesystem(pool), request.job, claim, wish.idle_io)
            bench.direct = folder.direct_works()
            _measure(wish, bench)
        io.emit(protocol.ENVIRONMENT_AFTER, data=environment.now())
    after = _bytes_written()
    return {
        "steps": len(wish.steps) * wish.repetitions,
        "scratch_bytes_at_most": bench.scratch_bytes_at_most,
        "bytes_written": None if written is None or after is None else after - written,
        "caches": bench.caches,
    }


def _measure(wish: Wish, bench: Bench) -> None:
    total = len(wish.steps) * wish.repetitions
    for repetition in range(wish.repetitions):
        bench.repetition = repetition + 1
        for number, step in enumerate(wish.steps):
            named = ", ".join(f"{name} {value}" for name, value in step.setting.items())
            bench.io.progress(wish.kind, repetition * len(wish.steps) + number, total, named)
            bench.do(step)
    bench.io.progress(wish.kind, total, total)


def _parse(fields: dict[str, Any]) -> Wish:
    args = Arguments(fields, _KNOWN)
    kind, given = args.take("kind", str), args.take("steps", list)
    kind_of_step = _load(kind)
    if not 1 <= len(given) <= MOST_STEPS:
        raise RefusedError(INVALID, f"a benchmark has 1 to {MOST_STEPS} steps")
    repetitions, reserve = args.get("repetitions", int, 1), args.take("reserve_bytes", int)
    if not 1 <= repetitions <= MOST_REPETITIONS:
        raise RefusedError(INVALID, f"repetitions is 1 to {MOST_REPETITIONS}")
    if reserve < 0:
        raise RefusedError(INVALID, "a reserve is not negative")
    pool_path = args.path("pool_path_b64")
    if not is_absolute(pool_path):
        raise RefusedError("outside_pool", f"{display(pool_path)} is not an absolute path")
    wish = Wish(
        pool_path=pool_path,
        kind=kind,
        steps=kind_of_step.parse(given),
        repetitions=repetitions,
        reserve=space.Reserve(0.0, reserve),
        others=space.Others.parse(args),
        idle_io=args.get("idle_io", bool, False),
    )
    for tool in kind_of_step.TOOLS:
        _require(tool)
    return wish


def _load(kind: str) -> Any:
    """The module of a kind; raises RefusedError(``invalid``) where this agent has none."""
    module = f"storage_admin.agent.bench.{KINDS.get(kind)}"
    if kind in KINDS and importlib.util.find_spec(module) is not None:
        found = importlib.import_module(module)
        if hasattr(found, "parse"):
            return found
    raise RefusedError(INVALID, f"this agent does not know the benchmark {kind!r}")


def _require(tool: str) -> None:
    try:
        tools.find(tool)
    except RefusedError as error:
        package = PACKAGES.get(tool, tool)
        raise RefusedError(
            error.code, f"{tool} is not installed on this host; install the package {package}"
        ) from error


@contextlib.contextmanager
def _pool(path: bytes) -> Iterator[int]:
    """The pool's folder, open; what the host says while work goes on in it becomes a refusal or an error."""
    try:
        with held(open_root(path)) as pool:
            yield pool
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise RefusedError("not_enough_space", "the disk is full; free some space and try again") from error
        raise HostError(f"the host failed in {display(path)}: {error.strerror or error}") from error


def _filesystem(pool: int) -> str | None:
    mount = Mounts.of_this_machine().of_descriptor(pool)
    return mount.filesystem if mount is not None else None


def _bytes_written() -> int | None:
    """What this process and the tools that it ran have sent to disks (proc_pid_io(5), "write_bytes")."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            counts = dict(line.split(": ") for line in file.read().splitlines())
        return int(counts["write_bytes"])
    except (OSError, KeyError, ValueError):
        return None
