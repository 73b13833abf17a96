"""Guests, with the image that each of their disks is."""

from django.db.models import Prefetch, QuerySet

from images.models import ImageUse
from storage_admin.accounts.roles import Actor
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.selectors import in_scope


def guests_for(actor: Actor) -> QuerySet[Guest]:
    """The guests that exist for ``actor``, with host, disks and images: three queries, however many there are."""
    disks = GuestDisk.objects.defer("path_bytes").order_by("target")
    if actor.hosts is None:
        disks = disks.select_related("use")
    else:
        # On a storage that hosts share, a disk may be an image that another host lists.
        uses = in_scope(ImageUse.objects.all(), actor, "image__host")
        disks = disks.prefetch_related(Prefetch("use", uses))
    return in_scope(
        Guest.objects.select_related("host").defer("host__capabilities").prefetch_related(Prefetch("disks", disks)),
        actor,
    )
