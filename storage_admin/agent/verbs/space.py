"""The verb ``space``: how much room there is in pools right now. No image is read, and nothing is activated."""

from __future__ import annotations

import socket
from typing import Any

from storage_admin.agent import protocol
from storage_admin.agent.folders import image_folders
from storage_admin.agent.folders.pools import held, open_root, place
from storage_admin.agent.host import lvm, rbd, special_mounts, zfs
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import Arguments, RefusedError, Request, unb64


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Ask each filesystem once, the kernel once for all thin pools, ZFS once for all datasets, and each Ceph once.

    A folder whose server does not answer is left alone (:func:`special_mounts.trusted`).

    Args:
        request: ``folders_b64``: absolute paths of pools; ``thin``: whether to tell of thin pools; ``zfs``: names of
            datasets; ``rbd``: pools of Ceph; ``etc_pve``: Proxmox VE's folder.
        io: the controller.

    Returns:
        ``folders``, in their order: ``silent``, true where nothing came; else the fields of :func:`place`, or null
        where it is not the folder that root has listed. ``thin``: as of :func:`lvm.thin_pools`. ``zfs``:
        as of :func:`zfs.room`. ``rbd``: as of :func:`rbd.room`.

    Raises:
        RefusedError: ``invalid``.
        StoppedError: the controller stopped the work.
    """
    args = Arguments(request.args, frozenset({"folders_b64", "thin", "zfs", "rbd", "etc_pve"}))
    try:
        paths = [unb64(path) for path in args.get("folders_b64", list, [])]
    except (TypeError, ValueError, AttributeError) as error:
        raise RefusedError(protocol.INVALID, "folders_b64 are no paths") from error
    mounts, machine = Mounts.of_this_machine(), protocol.machine_id() or socket.gethostname()
    away = special_mounts.trusted([path for path in paths if path.startswith(b"/")], mounts, io.check)
    folders = [{"silent": True} if path in away else _folder(path, mounts, machine) for path in paths]
    thin = lvm.thin_pools(io) if args.get("thin", bool, False) else []
    datasets, pools = ([name for name in args.get(of, list, []) if isinstance(name, str)] for of in ("zfs", "rbd"))
    etc_pve = image_folders.refuse_elsewhere(args.get("etc_pve", str, "/etc/pve"), "/etc/pve")
    return {"folders": folders, "thin": thin, "zfs": zfs.room(datasets, io), "rbd": rbd.room(pools, io, etc_pve)}


def _folder(path: bytes, mounts: Mounts, machine: str) -> dict[str, Any] | None:
    try:
        root = open_root(path)
    except (OSError, RefusedError):
        return None
    with held(root):
        return place(root, mounts, machine)[1]
