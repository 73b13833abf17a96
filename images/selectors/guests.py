"""Guests, with the image that each of their disks is."""

from django.db.models import Prefetch, QuerySet

from storage_admin.accounts.roles import Actor
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.selectors import in_scope


def guests_for(actor: Actor) -> QuerySet[Guest]:
    """The guests that exist for ``actor``, with host, disks and images: three queries, however many there are."""
    disks = GuestDisk.objects.select_related("use").defer("path_bytes").order_by("target")
    return in_scope(
        Guest.objects.select_related("host").defer("host__capabilities").prefetch_related(Prefetch("disks", disks)),
        actor,
    )
