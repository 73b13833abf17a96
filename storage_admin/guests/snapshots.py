"""The snapshots of a guest, whoever keeps them, as they are at this moment."""

from storage_admin.guests import proxmox_vms
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt import snapshots as of_libvirt
from storage_admin.hosts.live_facts import Snapshot
from storage_admin.hosts.proxmox import snapshots as of_proxmox


def of(guest: Guest) -> tuple[Snapshot, ...]:
    """The newest first.

    Raises:
        RefusedError: ``guest_locked``; ``tool_missing``: libvirt there can only be read.
        HostError: its manager does not answer, or knows no such guest.
    """
    if guest.kind == Guest.Kind.DOMAIN:
        return of_libvirt.of(guest.host, guest.uid).found
    with proxmox_vms.opened(guest, proxmox_vms.PLAN_SECONDS) as vm:
        return of_proxmox.of(vm.client, vm.ref)
