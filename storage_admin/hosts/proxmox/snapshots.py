"""Snapshots of a VM, by the API: listed, made, deleted and gone back to. Each change is a task of Proxmox VE's own."""

import re

from storage_admin.hosts.live_facts import Snapshot, newest_first, since_1970
from storage_admin.hosts.proxmox.actions import started
from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.config import GuestRef

#: Names that Proxmox VE takes (format ``pve-configid``, at most 40 characters), but for those that it keeps for itself.
NAME = re.compile(r"(?!(?:current|(?i:pending))$)[A-Za-z][A-Za-z0-9_-]{1,39}")
#: What the list has for the present.
_PRESENT = "current"


def of(client: Client, guest: GuestRef) -> tuple[Snapshot, ...]:
    """A VM's snapshots, the newest first; raises HostError."""
    rows = client.rows(*guest.path, "snapshot")
    below = {str(row.get("parent")) for row in rows if row.get("name") == _PRESENT}
    return newest_first(
        Snapshot(
            name, since_1970(row.get("snaptime")), str(row.get("description") or ""),
            "running" if row.get("vmstate") else "disk-snapshot", str(row.get("parent") or ""), name in below, (),
        )
        for row in rows
        if (name := str(row.get("name"))) != _PRESENT
    )  # fmt: skip


def can(client: Client, guest: GuestRef) -> bool:
    """Whether all of a VM's disks lie on storages that can keep snapshots; raises HostError."""
    return bool(client.fields(*guest.path, "feature", params={"feature": "snapshot"}).get("hasFeature"))


def create(client: Client, guest: GuestRef, name: str, description: str) -> str:
    """Begins a snapshot of a VM's disks, without its memory; the task's id. Raises RefusedError or HostError."""
    return started(client, client.post(*guest.path, "snapshot", params={"snapname": name, "description": description}))


def delete(client: Client, guest: GuestRef, name: str) -> str:
    """Begins to delete one; the task's id. Raises RefusedError or HostError."""
    return started(client, client.delete(*guest.path, "snapshot", name))


def roll_back(client: Client, guest: GuestRef, name: str) -> str:
    """Begins to give a VM's disks the content of one again; the task's id. Raises RefusedError or HostError."""
    return started(client, client.post(*guest.path, "snapshot", name, "rollback"))
