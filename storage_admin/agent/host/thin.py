"""What each volume of a thin pool has alone, by thin_ls(8) on a snapshot of the pool's metadata.

A pool has room for one such snapshot, and grows its metadata while there is one. So it is there for as long as it is
read; a note outlives the agent that is killed meanwhile, and the snapshot of a note without an agent is given up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.host.lvm import NAME, ask, dm_name
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import HostError, RefusedError

#: Where it is noted whose snapshots are ours; as they do, it outlives a restart of the host.
FOLDER = "/var/lib/storage-admin-agent"
#: Nothing is reserved where so much of a pool's metadata is used: a pool whose metadata is full takes no more writes.
MOST_METADATA_PERCENT = 80
#: The metadata of a pool of terabytes is read in minutes.
_LONG = tools.Limits(cpu_seconds=None, wall_seconds=1800.0, output_bytes=32 << 20)
_COLUMNS = "vg_name,lv_name,lv_layout,pool_lv,thin_id,lv_uuid"


@dataclass(frozen=True)
class _Status:
    """A line of ``dmsetup status`` (Linux, Documentation/admin-guide/device-mapper/thin-provisioning.rst).

    Args:
        held: the block of its metadata that a snapshot begins with; empty where there is none.
        mode: ``rw``, ``ro``, ``out_of_data_space``, or ``Fail``.
    """

    metadata_percent: float
    held: str
    mode: str


def measure(io: AgentIO) -> Iterator[dict[str, Any]]:
    """Look at each thin pool of the host that is active, one after the other.

    Yields:
        ``group`` and ``pool``; ``why`` it could not be measured, else empty; ``volumes``: by their names what each has
        alone, in bytes, which deleting it frees.

    Raises:
        RefusedError: ``tool_missing``.
        HostError: LVM or the device mapper do not answer.
        StoppedError: the controller stopped the work; nothing is reserved any more.
    """
    lines = ask("lvs", "lv", _COLUMNS, io, "-a")
    known = [line for line in lines if NAME.match(line["vg_name"]) and NAME.match(line["lv_name"])]
    for line in known:
        if {"thin", "pool"} <= set(line["lv_layout"].split(",")):
            group, pool = line["vg_name"], line["lv_name"]
            names = {
                one["thin_id"]: one["lv_name"]
                for one in known
                if (one["vg_name"], one["pool_lv"]) == (group, pool) and one["thin_id"]
            }
            why, volumes = "", dict[str, int]()
            try:
                volumes = _measured(group, pool, line["lv_uuid"], names, io)
            except (RefusedError, HostError) as error:
                why = error.detail
            yield {"group": group, "pool": pool, "why": why, "volumes": volumes}


def _measured(group: str, pool: str, uuid: str, names: dict[str, str], io: AgentIO) -> dict[str, int]:
    device = dm_name(group, pool) + "-tpool"
    metadata = f"/dev/mapper/{dm_name(group, pool)}_tmeta"
    with _noted(uuid) as note:
        _give_up(device, note, io)
        status = _status(device, io)
        if status.mode != "rw":
            raise RefusedError("busy", f"the pool does not take writes now ({status.mode})")
        if status.held:
            raise RefusedError("busy", "somebody else has a snapshot of its metadata, of which there can be one")
        if status.metadata_percent > MOST_METADATA_PERCENT:
            raise RefusedError(
                "not_enough_space", f"more than {MOST_METADATA_PERCENT} % of its metadata are used; extend it first"
            )
        note.write("ours")
        try:
            _message(device, "reserve_metadata_snap", io)
            note.write(_status(device, io).held)
            report = ["thin_ls", "--metadata-snap", "--no-headers", "-o", "DEV,EXCLUSIVE_BYTES", metadata]
            done = tools.run(report, io, limits=_LONG)
        finally:
            _give_up(device, note, io)
    if done.exit_code:
        raise HostError(f"thin_ls ended with {done.words()}")
    try:
        pairs = [line.split() for line in done.stdout.decode("ascii").splitlines() if line.strip()]
        return {names[number]: int(alone) for number, alone in pairs if number in names}
    except ValueError as error:
        raise HostError(f"the answer of thin_ls is not understood: {error}") from error


def release_left(io: AgentIO) -> None:
    """Give up the snapshots of metadata that agents which were killed have left.

    Raises:
        StoppedError: the controller stopped the work.
    """
    try:
        left = set(os.listdir(FOLDER))
    except FileNotFoundError:
        return
    with contextlib.suppress(RefusedError, HostError):
        for line in ask("lvs", "lv", _COLUMNS, io, "-a"):
            if line["lv_uuid"] in left and NAME.match(line["vg_name"]) and NAME.match(line["lv_name"]):
                with contextlib.suppress(RefusedError, HostError), _noted(line["lv_uuid"]) as note:
                    _give_up(dm_name(line["vg_name"], line["lv_name"]) + "-tpool", note, io)


class _Note:
    """What is noted of a pool: empty, ``ours`` from before the snapshot is made, then the block that it begins with."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self) -> str:
        return os.pread(self._fd, 64, 0).decode("ascii", "replace")

    def write(self, text: str) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode("ascii"), 0)
        os.fsync(self._fd)


@contextlib.contextmanager
def _noted(uuid: str) -> Iterator[_Note]:
    """The note of a pool, for nobody else meanwhile.

    Raises:
        RefusedError: ``busy``.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(FOLDER, 0o700)
    place = os.path.join(FOLDER, uuid)
    fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RefusedError("busy", "another job looks at it now") from None
        yield _Note(fd)
    finally:
        os.close(fd)


def _give_up(device: str, note: _Note, io: AgentIO) -> None:
    """Release the snapshot that is noted, if it is the one that is there."""
    if ours := note.read():
        held = _status(device, io).held
        if held and ours in {"ours", held}:
            _message(device, "release_metadata_snap", io)
            io.log(f"released the snapshot of the metadata of {device}")
        note.write("")


def _status(device: str, io: AgentIO) -> _Status:
    # Without a flush, which would wait for a pool that is full.
    fields = _dmsetup(io, "status", "--noflush", "--target", "thin-pool", device).split()
    if fields[3:4] == ["Fail"]:
        return _Status(0.0, "", "Fail")
    try:
        used, whole = fields[4].split("/")
        return _Status(100 * int(used) / int(whole), "" if fields[6] == "-" else fields[6], fields[7])
    except (IndexError, ValueError, ZeroDivisionError) as error:
        raise HostError("it is not active, so that nobody tells what its volumes have") from error


def _message(device: str, message: str, io: AgentIO) -> None:
    _dmsetup(io, "message", device, "0", message)


def _dmsetup(io: AgentIO, *words: str) -> str:
    done = tools.run_to_end(["dmsetup", *words], io)
    if done.exit_code:
        raise HostError(f"dmsetup ended with {done.words()}")
    return done.stdout.decode("ascii", "replace")
