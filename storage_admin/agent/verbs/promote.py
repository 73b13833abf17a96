"""Have a clone of ZFS and what it is a clone of exchange their parts (``zfs promote``).

ZFS does it in one step, and nothing that is read changes: the snapshot on which the clone stands, and those before it,
belong to the clone from then on, and the other one becomes its clone. Nothing is copied and nothing is freed.
"""

from __future__ import annotations

import re
import time
from typing import Any

from storage_admin.agent.host import zfs
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import INVALID, Arguments, HostError, RefusedError, Request

#: What Proxmox VE calls volumes, and finds snapshots, templates and replications below.
_OF_PROXMOX = re.compile(r"(.*/)?(vm|base|basevol|subvol)-\d+-[^/]+", re.ASCII)
_SECONDS = 120.0


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Promote a clone.

    Args:
        request: ``args``: ``dataset`` and ``origin``: the clone, and the volume whose snapshot it stands on.
        io: the controller.

    Returns:
        As :func:`reclaim.dig`, with ``method``; the clone's sizes are those of before.

    Raises:
        RefusedError: ``stale_plan``; ``in_snapshot_chain``: Proxmox VE would not find a snapshot or template any more;
            ``target_exists``: both have a snapshot of one name; ``tool_missing``.
        HostError, StoppedError: nothing has changed.
    """
    started = time.monotonic()
    args = Arguments(request.args, frozenset({"dataset", "origin"}))
    dataset, origin = args.take("dataset", str), args.take("origin", str)
    if not (zfs.is_name(dataset) and zfs.is_name(origin)) or dataset.startswith("-") or origin.startswith("-"):
        raise RefusedError(INVALID, "that is no volume of ZFS")
    io.progress("checking", 0, None, "checking the clone and the snapshots that would move")
    used = _look(dataset, origin, io)
    io.progress("swapping", 0, None, "waiting for the go-ahead")
    io.wait_for_go(request.generation)
    _look(dataset, origin, io)
    done = tools.run_to_end(["zfs", "promote", dataset], io, _SECONDS)
    if done.exit_code:
        raise HostError(f"zfs promote ended with {done.words()}")
    return {
        "method": "promote", "before_bytes": used, "after_bytes": used, "held_bytes": 0, "freed_bytes": 0,
        "swapped": False, "changed": True, "undo": None, "seconds": round(time.monotonic() - started, 3),
    }  # fmt: skip


def _look(dataset: str, origin: str, io: AgentIO) -> int:
    """Refuse a clone that is not as planned, or whose promotion would take something from somebody; gives its size."""
    lines = zfs.ask(["zfs", "list", "-d", "0"], ("name", "origin", "usedbydataset"), io, dataset)
    base, _, snapshot = lines[0]["origin"].partition("@")
    if base != origin or not snapshot:
        raise RefusedError("stale_plan", f"{dataset} is no clone of {origin} any more; scan the host")
    if _OF_PROXMOX.fullmatch(origin):
        raise RefusedError(
            "in_snapshot_chain",
            f"{origin} is named as a volume of Proxmox VE, which would not find its snapshots, its replication or its "
            "linked clones any more. Move the disk to another storage instead, which makes a full copy",
        )
    columns = ("name", "createtxg")
    of_both = zfs.ask(["zfs", "list", "-t", "snapshot", "-d", "1"], columns, io, origin, dataset)
    made = {line["name"]: int(line["createtxg"]) for line in of_both}
    until = made.get(lines[0]["origin"])
    if until is None:
        raise HostError(f"zfs tells nothing of {lines[0]['origin']}")
    moves = [name.partition("@")[2] for name, at in made.items() if name.startswith(f"{origin}@") and at <= until]
    if there := sorted(name for name in moves if f"{dataset}@{name}" in made):
        raise RefusedError(
            "target_exists", f"{dataset} has a snapshot {there[0]} as {origin} has; rename or delete one of them"
        )
    io.log(f"snapshots that move from {origin} to {dataset}: {', '.join(moves)[:500]}")
    return int(lines[0]["usedbydataset"])
