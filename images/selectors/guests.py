"""Guests, with the image that each of their disks is."""

import os

from django.db.models import Prefetch, QuerySet
from django.utils.translation import gettext as _

from images.models import ImageUse
from storage_admin.accounts.models import Actor
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.selectors import in_scope


def why_no_image(disk: GuestDisk) -> str:
    """Why no image is known that a disk is, in a few words; empty where it has no file at all.

    That a pool does not have it says only one that was listed, to its end and here.
    """
    if not disk.path and not disk.volume:
        return ""
    storage, path = disk.volume.partition(":")[0], os.fsencode(disk.path)
    pools = [
        pool
        for pool in disk.guest.host.pools.all()
        if (pool.source == pool.Source.PROXMOX and pool.name == storage)
        or path.startswith(bytes(pool.path_bytes).rstrip(b"/") + b"/")
    ]
    if not pools:
        return _("not in any registered pool")
    pool = max(pools, key=lambda pool: len(bytes(pool.path_bytes)))
    if pool.last_scanned is None:
        return _("unknown: {pool} has not been listed yet").format(pool=pool.name)
    if pool.state != "ok" or pool.state_detail:
        return _("unknown: {pool} could not be listed").format(pool=pool.name)
    return _("not among the images of {pool}").format(pool=pool.name)


def guests_for(actor: Actor) -> QuerySet[Guest]:
    """The guests that exist for ``actor``, with host, pools, disks and images: four queries, however many there are."""
    disks = GuestDisk.objects.defer("path_bytes").order_by("target")
    pools = StoragePool.objects.only("host", "name", "source", "path_bytes", "state", "state_detail", "last_scanned")
    if actor.hosts is None:
        disks = disks.select_related("use")
    else:
        # On a storage that hosts share, a disk may be an image that another host lists.
        uses = in_scope(ImageUse.objects.all(), actor, "image__host")
        disks = disks.prefetch_related(Prefetch("use", uses))
    return in_scope(
        Guest.objects.select_related("host")
        .defer("host__capabilities")
        .prefetch_related(Prefetch("disks", disks), Prefetch("host__pools", pools)),
        actor,
    )
