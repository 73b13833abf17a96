"""Guests that QEMU has paused because of an I/O error, as when their pool is full: asked for every 30 seconds.

What hypervisors tell becomes the open alerts at once; of a host that does not answer they stay as they are.
"""

from collections.abc import Collection
from contextlib import closing

from images.scan.minutes import ask_at_once
from images.selectors.pools import used_percent
from storage_admin.events import services as events
from storage_admin.events.models import Alert
from storage_admin.events.services import Trouble, Unjudged
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts import transport
from storage_admin.hosts.libvirt import control
from storage_admin.hosts.live_facts import StoppedGuest
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox import reader, registration
from storage_admin.hosts.proxmox.client import Api
from storage_admin.hosts.proxmox.pvesh import Pvesh
from storage_admin.words import size

#: Seconds that a node of Proxmox VE may take.
ANSWER = 15.0


def look(*, but_not: Collection[int] = (), only: int | None = None) -> None:
    """Asks the hypervisors for such guests, and opens and closes alerts.

    Args:
        but_not: ids of hosts that others ask.
        only: id of the one host to ask; ``None`` for all.
    """
    told = dict(ask_at_once(_hosts(but_not, only), stopped_on))
    found: list[Trouble | Unjudged] = [_trouble(host, guest) for host, guests in told.items() for guest in guests]
    slugs = [host.slug for host in told]
    kept = Alert.objects.filter(kind=events.GUEST_IO_ERROR, closed=None).exclude(host__in=slugs)
    # Of a host that was removed, nobody tells any more.
    kept = kept.filter(host__in=Host.objects.values("slug"))
    found += [Unjudged(key) for key in kept.values_list("key", flat=True)]
    events.reconcile(events.GUEST_IO_ERROR, found)


def _hosts(but_not: Collection[int], only: int | None) -> list[Host]:
    """The hosts that have guests which QEMU runs, as far as the last scan knows."""
    hosts = Host.objects.exclude(pk__in=but_not).exclude(status=Host.Status.UNREACHABLE)
    hosts = hosts.filter(pk__in=Guest.objects.exclude(kind=Guest.Kind.CONTAINER).values("host"))
    hosts = hosts.filter(pk=only) if only is not None else hosts
    return [host for host in hosts if transport.is_here(host) or host.kind != Host.Kind.LOCAL]


def stopped_on(host: Host) -> list[StoppedGuest]:
    """The guests on a host that are paused like that.

    Raises:
        HostError, RefusedError: it does not answer.
    """
    if not host.runs_proxmox:
        return control.stopped(host)
    node = host.node or str(host.capabilities.get("hostname", "")).partition(".")[0]
    with closing(_api(host)) as api:
        return reader.read_stopped(api, node)


def _api(host: Host) -> Api:
    if host.token_id:
        return registration.client(host, ANSWER)
    return Pvesh(transport.shell(host), host.name)


def _trouble(host: Host, told: StoppedGuest) -> Trouble:
    guest = Guest.objects.filter(host=host, kind=told.kind, uid=told.uid).first()
    disks = GuestDisk.objects.filter(guest=guest, only_in="", device="disk").select_related("use__image__pool__host")
    if told.disks:
        disks = disks.filter(target__in=told.disks)
    detail = " ".join(_disk(disk, told.disks) for disk in disks) or " ".join(
        f"Disk {target}: {why}." for target, why in told.disks.items()
    )
    return Trouble(
        f"{events.GUEST_IO_ERROR}:{host.pk}:{told.uid}", "danger", f"{told.name} is paused by an I/O error",
        f"QEMU paused the guest because a disk could not be read or written. {detail} Free space or repair the "
        "storage, then resume the guest.",
        host.slug, "guest" if guest else "host", guest.pk if guest else host.pk, told.name,
    )  # fmt: skip


def _disk(disk: GuestDisk, why: dict[str, str]) -> str:
    image = getattr(getattr(disk, "use", None), "image", None)
    reason = f" ({why[disk.target]})" if disk.target in why else ""
    if image is None:
        return f"Disk {disk.target}{reason}: {disk.path or disk.volume}."
    pool = image.pool
    full = used_percent(pool)
    at = f" at {pool.space_at:%H:%M} UTC" if pool.space_at else ""
    room = "" if full is None else f", {full} % used, {size(pool.available_bytes)} free{at}"
    return f"Disk {disk.target}{reason}: {image.name} in pool {pool.name}{room}."
