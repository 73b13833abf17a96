"""What the dashboard and the agent say to each other: JSON lines, and the codes in them.

The agent greets (:data:`HELLO`), reads one :class:`Request` from standard input and answers with a stream of
events. Both ends import this module, so a word that one of them uses is a word that the other one knows.

Names of files are bytes on a hypervisor and need not be UTF-8: they travel as base64 (fields that end in ``_b64``).

How a verb takes its arguments: by name, with their types, and none that it does not know.

What an error of the host means to an admin, whether a call answered it or a tool printed it.

What both take for granted of a machine: which one it is, and its clocks. That on the wall somebody may set, beside the
one that only runs on.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

VERSION = 1

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Seconds by which the clock on the wall may have been put right without being called a jump.
STEP = 120.0

#: Seconds between two pings of the controller, and how long the agent works on without hearing one.
PING_INTERVAL = 5.0
SILENCE_LIMIT = 30.0

#: Longest line that either end accepts, in bytes. Fingerprints of 100,000 images need about 2.2 MB.
MAX_LINE = 64 * 1024 * 1024

#: The one argument that the agent takes, and the word by which a key that can run nothing else asks for it: be the
#: relay to libvirt's read-only socket (:mod:`storage_admin.agent.relay`).
RELAY = "libvirt-ro"

# Lines that the controller sends.
REQUEST, PING, CANCEL, GO, NO = "request", "ping", "cancel", "go", "no"

# Events that the agent sends.
HELLO, PROGRESS, LOG, COMMAND, READY, RESULT, ERROR = "hello", "progress", "log", "command", "ready", "result", "error"
#: Events of a scan: facts about the host, one pool's space, one image, what LVM, ZFS or Ceph says of its volumes, the
#: files that something holds open.
HOST, POOL, IMAGE, VOLUMES, SEEN = "host", "pool", "image", "volumes", "seen"
#: Of work that changes an image where it stands: what it occupied before, and what it does now, however that ended.
OCCUPIED = "occupied"
#: Of work that makes a new file: the most that it may write, as measured on the spot.
SPACE = "space"
#: A piece of a file that is sent, by either side. Of one that the agent gets: it wants the next one; up to where what
#: it got is on the disk.
DATA, MORE, KEPT = "data", "more", "kept"
#: Of a look at what is on a disk: what a check of each filesystem found.
FILESYSTEMS = "filesystems"
#: Every now and then, where a storage may fall silent: which of the pools that the work needs are (``silent``).
STORAGE = "storage"
#: Events of a benchmark: what its figures depend on, one figure, a tool's words, and what to know of them.
ENVIRONMENT, ENVIRONMENT_AFTER = "environment", "environment_after"
SAMPLE, OUTPUT, NOTE = "sample", "output", "note"

#: The ``lock`` in a guest's configuration while the controller holds it. Of Proxmox VE's own words this one keeps a
#: guest from being started, moved, copied and saved, and neither a node's start nor its HA takes it away.
HELD_LOCK = "create"

#: A guest ended while its block job was at work; of a plan: nobody knows which image it wrote to last.
GUEST_ENDED = "guest_ended"
#: Refusals that an admin can act on (docs/refusals.md says what to do about each).
REFUSALS = frozenset(
    {
        "agent_outdated", "aside_missing", "busy", "chain_broken", "chain_cycle", "chain_too_deep", "clock_unsure",
        "dirty_or_corrupt", "encrypted", "end_in_use", "external_data_file", "foreign_base", "format_mismatch",
        "format_undeclared", "grace_period", "guest_locked", "guest_records_chain", "guest_running", "guests_unknown",
        "hard_linked", "has_internal_snapshots", "has_overlays", "hidden_lines", "host_unreachable", "image_in_use",
        "immutable", "in_snapshot_chain", "inside_off", "locks_missing", "not_confined", "not_enough_memory",
        "not_enough_space", "not_orphan", "nothing_to_free", "outside_pool", "pool_silent", "qemu_bug", "set_aside",
        "shared_base", "shared_pool", "stale_plan", "target_exists", "tool_missing", "undo_kept", "undo_missing",
        "undo_written_to", "unproven", "unsupported_pool", "unsupported_subformat", "folder_not_listed",
        "pool_changed", "merged", "guest_off", "upload_incomplete", "wrong_digest", "wrong_passphrase",
        "unreadable_inside", "unclean_inside", "device_in_use", "filesystem_damaged", "checkpoint_kept",
        "nbd_missing", "nbd_partitions", GUEST_ENDED,
    }
)  # fmt: skip

# How work ends other than by a result or a refusal.
CANCELLED, INTERRUPTED, TOOL_FAILED, NO_GO, INVALID, BUG = (
    "cancelled", "interrupted", "tool_failed", "no_go", "invalid", "bug",
)  # fmt: skip
#: Both files of a swap are kept, as somebody uses both, or it is not known who does: the one that the job made has the
#: image's name, the original waits beside it. And: other files were given that name meanwhile, and all are kept.
BOTH_KEPT, STRANGERS_KEPT = "both_kept", "strangers_kept"


class _CodedError(Exception):
    def __init__(self, code: str, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


class RefusedError(_CodedError):
    """Work that is not done because of something an admin can act on.

    Args:
        code: one of :data:`REFUSALS`, or ``invalid``.
        detail: a sentence that says what is in the way and what to do.
    """


class HostError(_CodedError):
    """Something on the host failed while work was going on: a tool's exit code, an I/O error, a full disk.

    Args:
        detail: what failed, with the tool's own words.
        code: ``tool_failed`` unless something more exact is known.
    """

    def __init__(self, detail: str, code: str = TOOL_FAILED) -> None:
        super().__init__(code, detail)


class StoppedError(_CodedError):
    """The controller cancelled (``cancelled``), went away or fell silent (``interrupted``), or said no (``no_go``)."""


_FULL = {errno.ENOSPC: "the disk was full", errno.EDQUOT: "the quota of the storage is used up"}
_FORBIDDEN = frozenset({errno.EPERM, errno.EACCES, errno.EROFS})


@contextlib.contextmanager
def host_errors() -> Iterator[None]:
    """What the host says becomes a refusal or an error.

    Raises:
        RefusedError: ``not_enough_space``; ``immutable``; ``pool_changed``, where an NFS server does not know a file
            or folder any more that was open a moment ago.
        HostError: an I/O error.
    """
    try:
        yield
    except OSError as error:
        raise refusal_of_errno(error.errno) or HostError(f"the host failed: {error.strerror or error}") from error


def refusal_of_errno(number: int | None) -> RefusedError | None:
    """The refusal that an error's number is; ``None`` where it is none that an admin can act on."""
    if number in _FULL:
        return RefusedError("not_enough_space", f"{_FULL[number]}; free some space and try again")
    if number in _FORBIDDEN:
        told = "a storage of NFS may be exported read-only, without root, or not to this host any more"
        return RefusedError("immutable", f"the host does not allow it: {os.strerror(number)}; {told}")
    if number == errno.ESTALE:
        return RefusedError("pool_changed", STALE)
    return None


#: Of NFS: what the server has exported anew, or replaced, is another folder, whatever its path.
STALE = (
    "the server of the storage does not know the file or its folder any more (stale file handle): it was exported anew "
    "or replaced there. Export it as before, or mount it again, then scan the host"
)

#: Of NFS with ``all_squash``: a journal of the agent's is only believed where it is the agent's own.
SQUASHED = (
    "the server of the storage gives files that root makes to another user (all_squash), so that a job that is cut off "
    "could not be recovered. Export it with no_root_squash"
)


def refusal_of_tool(stderr: bytes) -> RefusedError | None:
    """The same, of what a tool printed in English."""
    for number in (*_FULL, errno.EROFS, errno.ESTALE):
        if os.strerror(number).encode() in stderr:
            return refusal_of_errno(number)
    return None


@dataclass(frozen=True)
class Request:
    """One piece of work.

    Args:
        verb: which one: ``scan``, ``analyze``, ``reclaim``, ``undo``, ``discard_undo``, ``recover``.
        job: the job's unique id, which names its files on the host (``.sa-<job>.new``); letters and digits only.
        generation: how often the job was claimed; an older generation than one seen on the host is refused.
        args: what the verb needs; each verb documents its own.
        roots: which folder each storage pool's path led to when it was last confirmed, by path as base64
            (:class:`storage_admin.agent.folders.pools.Identity` as it travels).
    """

    verb: str
    job: str
    generation: int
    args: dict[str, Any] = field(default_factory=dict)
    roots: dict[str, Any] = field(default_factory=dict)


def encode(kind: str, /, **fields: Any) -> bytes:
    """One event or line, ready to be written."""
    return json.dumps({"event": kind, **fields}, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The fields of one line.

    Raises:
        ValueError: it is no JSON object with an ``event``.
    """
    fields = json.loads(line)
    if not _is_event(fields):
        raise ValueError("not an event: " + line[:80].decode("ascii", "replace"))
    event: dict[str, Any] = fields
    return event


def decode_all(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """The fields of many lines, in one go where they are as they should be.

    Raises:
        ValueError: at the first line that is no event; those before it were given.
    """
    try:
        # A list around each line: no line can then be two events, nor two lines one.
        found = json.loads(b"[[" + b"],\n[".join(lines) + b"]]")
    except ValueError:
        found = []
    if len(found) == len(lines) and all(len(one) == 1 and _is_event(one[0]) for one in found):
        for one in found:
            yield one[0]
    else:
        yield from map(decode, lines)


def _is_event(fields: Any) -> bool:
    return isinstance(fields, dict) and isinstance(fields.get("event"), str)


def display(path: bytes) -> str:
    """A path for a sentence: what is not UTF-8 or is a control character stands as ``\\x..``."""
    text = path.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def b64(raw: bytes) -> str:
    """Bytes as they travel."""
    return base64.b64encode(raw).decode("ascii")


def unb64(text: str) -> bytes:
    """Bytes as they were before they travelled."""
    return base64.b64decode(text.encode("ascii"), validate=True)


T = TypeVar("T")


class Arguments:
    """The arguments of one request.

    Args:
        fields: as they came.
        known: the names that the verb takes.

    Raises:
        RefusedError: ``invalid``, for a name that is not known. So do all methods, for a value of another type.
    """

    def __init__(self, fields: dict[str, Any], known: frozenset[str]) -> None:
        if unknown := sorted(fields.keys() - known):
            raise RefusedError(INVALID, "unknown option: " + ", ".join(unknown))
        self._fields = fields

    def take(self, name: str, kind: type[T]) -> T:
        """A required value; a boolean is no integer, an integer is a float."""
        if name not in self._fields:
            raise RefusedError(INVALID, f"{name} is missing")
        value = self._fields[name]
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise RefusedError(INVALID, f"{name} is no {kind.__name__}")
        return value

    def get(self, name: str, kind: type[T], default: T) -> T:
        """A value that may be missing."""
        return default if name not in self._fields else self.take(name, kind)

    def maybe(self, name: str, kind: type[T]) -> T | None:
        """A value that may be missing or null."""
        return None if self._fields.get(name) is None else self.take(name, kind)

    def path(self, name: str) -> bytes:
        """A required path, from base64."""
        try:
            return unb64(self.take(name, str))
        except ValueError as error:
            raise RefusedError(INVALID, f"{name} is no base64") from error

    def choice(self, name: str, among: frozenset[str], default: str) -> str:
        """One of several words."""
        value = self.get(name, str, default)
        if value not in among:
            raise RefusedError(INVALID, f"{name} is one of " + ", ".join(sorted(among)))
        return value

    def size(self, name: str) -> int | None:
        """A number of bytes, at least 1, or ``None``."""
        value = self.maybe(name, int)
        if value is not None and value < 1:
            raise RefusedError(INVALID, f"{name} is at least 1")
        return value


def read_text(path: str) -> str:
    """What a small file says, as those of the kernel in /proc and /sys; empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="backslashreplace") as file:
            return file.read().strip()
    except OSError:
        return ""


def machine_id() -> str | None:
    """The id of this installation (machine-id(5)); ``None`` where it has none."""
    return read_text("/etc/machine-id") or read_text("/var/lib/dbus/machine-id") or None


@dataclass(frozen=True)
class Moment:
    """A point in time.

    Args:
        boot_id: of the boot of the machine in which it was.
        boottime: seconds since that boot, with those in which the machine slept.
        wall: seconds since 1970, by the clock on the wall.
    """

    boot_id: str
    boottime: float
    wall: float

    @classmethod
    def now(cls) -> Moment:
        """This moment."""
        return cls(_BOOT_ID.read_text("ascii").strip(), time.clock_gettime(time.CLOCK_BOOTTIME), time.time())

    @classmethod
    def parse(cls, fields: Any) -> Moment:
        """The moment that :meth:`fields` took apart; raises KeyError, TypeError or ValueError."""
        return cls(str(fields["boot_id"]), float(fields["boottime"]), float(fields["wall"]))

    def fields(self) -> dict[str, Any]:
        """As a journal has it."""
        return asdict(self)

    def passed(self, before: Moment) -> float | None:
        """Seconds since an earlier moment; ``None`` where the machine was booted since, so that nothing can tell."""
        return self.boottime - before.boottime if self.boot_id == before.boot_id else None

    def jumped(self, before: Moment) -> float:
        """Seconds by which the clock on the wall was set since an earlier moment; 0 where that cannot be told."""
        passed = self.passed(before)
        step = 0.0 if passed is None else self.wall - before.wall - passed
        return step if abs(step) > STEP else 0.0
