"""Where the folder of a pool lies, and how much room there is."""

from __future__ import annotations

import os
from typing import Any

from storage_admin.agent.folders import roots
from storage_admin.agent.host.mounts import Mount, Mounts


def place(root: int, mounts: Mounts, machine: str) -> tuple[Mount | None, dict[str, Any]]:
    """What a pool's event says of its folder.

    Args:
        root: the open folder.
        mounts: of this machine; learns that this filesystem is read anyway.
        machine: this machine's id, for the keys of its own filesystems.

    Returns:
        The mount that it lies on, where that is known, and the fields; sizes are in bytes.
    """
    space, mount, found = os.fstatvfs(root), mounts.of_descriptor(root), roots.identity(root)
    mounts.trust(mount)
    told: dict[str, Any] = {
        "dev": os.fstat(root).st_dev,
        "root": None if found is None else vars(found),
        "capacity_bytes": space.f_blocks * space.f_frsize,
        "available_bytes": space.f_bavail * space.f_frsize,
        # Free, but kept for root, as ext4 does: `df` counts it neither as used nor as available.
        "reserved_bytes": max(space.f_bfree - space.f_bavail, 0) * space.f_frsize,
    }
    if mount is not None:
        real = os.readlink(b"/proc/self/fd/%d" % root)
        fs_key, shared_key = mounts.keys(mount, real, machine)
        told.update(
            filesystem=mount.described,
            mount_source=mount.source.decode("utf-8", "backslashreplace"),
            network=mount.is_network,
            shared_key=shared_key,
            fs_key=fs_key,
        )
    return mount, told
