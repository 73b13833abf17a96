"""Images that are gone: their rows stay until somebody, or time, has them forgotten. Nothing on a host is touched."""

from collections.abc import Collection
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils.translation import gettext as _

from images.models import Image
from images.rewrite import space
from images.scan import bulk_write
from storage_admin.accounts.models import Actor, Role, audit
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job

#: Rows that one round takes away at most: what stands on them is worked out anew.
AT_ONCE = 1000


def forget(actor: Actor, image: Image) -> None:
    """Removes the row of an image that is gone, with its size history; jobs, ledger and audit trail stay.

    Raises:
        ForbiddenError: the actor is no admin.
        InvalidError: it is still there, or set aside.
        RefusedError: ``busy``: a job works on it, or keeps an undo copy that would bring it back.
    """
    actor.require(Role.ADMIN, image.host.slug)
    with transaction.atomic():
        host = Host.objects.select_for_update().get(pk=image.host_id)
        if not _gone().filter(pk=image.pk).exists():
            told = _(
                "{image} still exists. Only images that have vanished or were deleted can be removed from the list."
            )
            raise InvalidError(told.format(image=image.name))
        if _keeping().filter(target_id=image.pk).exists():
            told = _(
                "A job is running on {image}, or keeps an undo copy of it. Wait until the job ends, or discard the "
                "undo copy."
            )
            raise RefusedError("busy", told.format(image=image.name))
        audit(actor, "image forgotten", image.path, before={"missing_since": str(image.missing_since)}, after=None)
        _remove(host, [image.pk])


def forget_old(now: datetime, kept: timedelta) -> int:
    """Forgets images that vanished longer ago than they are kept; those that a job deleted stay.

    Returns:
        How many it forgot.
    """
    old = _gone().filter(state=Image.State.MISSING, missing_since__lt=now - kept, pool__last_scanned__gt=now - kept)
    # Those that stay must not take the places of those that can go.
    old = old.exclude(pk__in=_keeping().values("target_id"))
    found = dict(old.order_by("pk").values_list("pk", "host_id")[:AT_ONCE])
    forgotten = 0
    for host_id in set(found.values()):
        with transaction.atomic():
            host = Host.objects.select_for_update().filter(pk=host_id).first()
            # One that came back meanwhile, or that a job has by now, stays.
            mine = old.filter(pk__in=[number for number in found if found[number] == host_id])
            going = set(mine.values_list("pk", flat=True))
            if host is not None and going:
                _remove(host, going)
                forgotten += len(going)
    return forgotten


def _gone() -> QuerySet[Image]:
    return Image.every.filter(state__in=[Image.State.MISSING, Image.State.DELETED], missing_since__isnull=False)


def _keeping() -> QuerySet[Job]:
    """Jobs that work on an image or were cut off at it, or whose undo copy could bring it back."""
    at_work = Q(state__in=Job.ACTIVE) | Q(needs_recovery=True) | Q(undo_state=Job.UndoState.AVAILABLE)
    return Job.objects.filter(at_work, target_kind="image")


def _remove(host: Host, images: Collection[int]) -> None:
    pools = list(StoragePool.objects.filter(images__in=images).distinct())
    Image.every.filter(pk__in=images).delete()
    bulk_write.resolve_host(host)
    space.write_totals(pools)
