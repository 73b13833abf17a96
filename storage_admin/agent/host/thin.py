"""What each volume of a thin pool has, alone (thin_ls(8)) and where (thin_dump(8)), by a snapshot of its metadata.

A pool has room for one such snapshot, and grows its metadata while there is one. So it is there for as long as it is
read; a note outlives the agent that is killed meanwhile, and the snapshot of a note without an agent is given up.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

from storage_admin.agent.host import locking
from storage_admin.agent.host.lvm import NAME, ask, dm_name, thin_pools
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import HostError, RefusedError

#: Where it is noted whose snapshots are ours; as they do, it outlives a restart of the host.
FOLDER = "/var/lib/storage-admin-agent"
#: Nothing is reserved where so much of a pool's metadata is used: a pool whose metadata is full takes no more writes.
MOST_METADATA_PERCENT = 80
#: The metadata of a pool of terabytes is read in minutes.
_LONG = tools.Limits(cpu_seconds=None, wall_seconds=1800.0, output_bytes=32 << 20)
#: A line of thin_dump: one chunk, or several that lie one after the other.
_MAPPING = re.compile(
    rb'<(?:single_mapping origin_block="(\d+)"|range_mapping origin_begin="(\d+)"[^>]* length="(\d+)")'
)
_COLUMNS = "vg_name,lv_name,lv_layout,pool_lv,thin_id,lv_uuid"


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
    with _metadata(group, pool, uuid, io) as metadata:
        report = ["thin_ls", "--metadata-snap", "--no-headers", "-o", "DEV,EXCLUSIVE_BYTES", metadata]
        done = tools.run(report, io, limits=_LONG).or_fail("thin_ls ended with")
    try:
        pairs = [line.split() for line in done.stdout.decode("ascii").splitlines() if line.strip()]
        return {names[number]: int(alone) for number, alone in pairs if number in names}
    except ValueError as error:
        raise HostError(f"the answer of thin_ls is not understood: {error}") from error


def mapped(group: str, pool: str, uuid: str, thin_id: int, io: AgentIO) -> list[tuple[int, int]]:
    """What a thin volume has of its pool: from and to which of its chunks, in order.

    Args:
        uuid: LVM's id of the pool.
        thin_id: the volume's number in it.

    Raises:
        RefusedError: ``busy``, ``not_enough_space``, ``tool_missing``.
        HostError: the pool is not active, or a tool fails.
        StoppedError: the controller stopped the work; nothing is reserved any more.
    """
    found: list[tuple[int, int]] = []
    rest = bytearray()

    def take(chunk: bytes) -> None:
        rest.extend(chunk)
        whole, _, after = bytes(rest).rpartition(b"\n")
        rest[:] = after
        for single, start, length in _MAPPING.findall(whole):
            begin, end = (int(single), int(single) + 1) if single else (int(start), int(start) + int(length))
            if found and found[-1][1] == begin:
                begin = found.pop()[0]
            found.append((begin, end))

    with _metadata(group, pool, uuid, io) as metadata:
        report = ["thin_dump", "--metadata-snap", "--dev-id", str(thin_id), metadata]
        tools.run(report, io, limits=None, on_output=take).or_fail("thin_dump ended with")
    return found


def mapped_bytes(device: str, io: AgentIO) -> int:
    """What a thin volume has of its pool, by the kernel.

    Args:
        device: what the device mapper calls it.
    """
    done = tools.run_to_end(["dmsetup", "status", "--noflush", device], io)
    words = done.stdout.split()
    if done.exit_code or len(words) < 4 or words[2] != b"thin" or not words[3].isdigit():
        raise HostError(f"dmsetup tells nothing of {device}: {done.words()}")
    return int(words[3]) * 512


@contextlib.contextmanager
def _metadata(group: str, pool: str, uuid: str, io: AgentIO) -> Iterator[str]:
    """The path of a pool's metadata, which has a snapshot for as long as this lasts."""
    with _noted(uuid) as note:
        _give_up(group, pool, note, io)
        now = _state(group, pool, io)
        if now["mode"] not in {"rw", "out_of_data_space"}:
            raise RefusedError("busy", f"the pool does not take writes now ({now['mode']})")
        if now["held"]:
            raise RefusedError("busy", "somebody else has a snapshot of its metadata, of which there can be one")
        if 100 * now["metadata_used"] > MOST_METADATA_PERCENT * now["metadata_size"]:
            raise RefusedError(
                "not_enough_space", f"more than {MOST_METADATA_PERCENT} % of its metadata are used; extend it first"
            )
        note.write("ours")
        try:
            _message(group, pool, "reserve_metadata_snap", io)
            note.write(_state(group, pool, io)["held"])
            yield f"/dev/mapper/{dm_name(group, pool)}_tmeta"
        finally:
            _give_up(group, pool, note, io)


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
                    _give_up(line["vg_name"], line["lv_name"], note, io)


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
    with locking.alone(FOLDER, uuid, "another job looks at it now") as fd:
        yield _Note(fd)


def _give_up(group: str, pool: str, note: _Note, io: AgentIO) -> None:
    """Release the snapshot that is noted, if it is the one that is there."""
    if ours := note.read():
        held = _state(group, pool, io)["held"]
        if held and ours in {"ours", held}:
            _message(group, pool, "release_metadata_snap", io)
            io.log(f"released the snapshot of the metadata of {group}/{pool}")
        note.write("")


def _state(group: str, pool: str, io: AgentIO) -> dict[str, Any]:
    """As of :func:`lvm.thin_pools`."""
    for one in thin_pools(io):
        if (one["group"], one["name"]) == (group, pool):
            return one
    raise HostError("it is not active, so that nobody tells what its volumes have")


def _message(group: str, pool: str, message: str, io: AgentIO) -> None:
    command = ["dmsetup", "message", f"{dm_name(group, pool)}-tpool", "0", message]
    tools.run_to_end(command, io).or_fail("dmsetup ended with")
