"""Whether what lies on disks is this machine's alone: over what they are reached, where other machines may reach
them, too.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping

from storage_admin.agent.protocol import read_text

SYS = "/sys"


def not_alone(reasons: Mapping[str, object], disks: Iterable[str]) -> str:
    """Why what lies on disks is not for this machine alone to change; empty where nothing says so.

    Args:
        reasons: in words, each with whether it holds.
    """
    far = {f"another host may see {disk} ({way})": way for disk in disks if (way := way_to(disk))}
    return next((why for why, holds in {**reasons, **far}.items() if holds), "")


def way_to(disk: str) -> str:
    """How other machines may reach a disk, in a word (``iscsi``, ``fc``, ``mpath`` ...); empty for this machine's own.

    Args:
        disk: the path of a block device, or of a file that stands for one.
    """
    try:
        status = os.stat(disk)
    except OSError:
        status = None
    if status is not None and stat.S_ISREG(status.st_mode):
        # A filesystem of no block device is a network's, or nobody knows what.
        return _way(f"dev/block/{os.major(status.st_dev)}:{os.minor(status.st_dev)}")
    return _way(f"class/block/{os.path.basename(os.path.realpath(disk))}")


def _way(below: str, depth: int = 0) -> str:
    """By what the kernel says of the device at that place in its tree, and of the devices below it."""
    place = os.path.realpath(os.path.join(SYS, below))
    name = os.path.basename(place)
    if not os.path.isdir(place) or depth > 8:
        return "unknown"
    if (kind := re.match(r"(rbd|nbd|drbd)\d", name)) is not None:
        return kind[1]
    if read_text(f"{place}/dm/uuid").startswith("mpath-"):
        return "mpath"
    # .../host3/session1/target3:0:0/3:0:0:0/block/sdb, .../rport-...
    for way, mark in (("iscsi", r"/session\d+/"), ("fc", r"/rport-")):
        if re.search(mark, place):
            return way
    if (controller := re.search(r"/(nvme\d+)(?:c\d+)?n\d+", place)) is not None:
        transport = read_text(f"{SYS}/class/nvme/{controller[1]}/transport")
        return "" if transport == "pcie" else transport or "unknown"
    below_it = os.listdir(f"{place}/slaves") if os.path.isdir(f"{place}/slaves") else []
    if os.path.exists(f"{place}/partition"):
        below_it.append(os.path.basename(os.path.dirname(place)))
    return next(filter(None, (_way(f"class/block/{one}", depth + 1) for one in below_it)), "")
