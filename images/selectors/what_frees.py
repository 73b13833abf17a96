"""What would free most space in a pool: plans that there are already, the one with the most bytes first."""

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime

from django.db.models import F, QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from images.models import Image
from images.orphans.selectors import aside_for, orphans_for
from images.selectors.guests import guests_for
from images.selectors.lists import images_for
from images.selectors.overview import candidates
from images.selectors.snapshots import snapshots_of
from images.selectors.undo_copies import undo_copies
from storage_admin.accounts.models import Actor
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.selectors import pools_for

#: So many plans are told of, of each kind and together.
MOST = 10
#: So many are looked at for that.
LOOKED = 1000
#: Guests that are named although nobody knows what a trim of theirs would free.
TRIMS = 3


@dataclass(frozen=True)
class Frees:
    """A plan that frees space.

    Args:
        kind: of its job.
        target_kind, target_id, label: what the job works on.
        bytes: that it is expected to free; ``None`` where nobody knows.
        at_once: whether they are free when the job ends; else when an undo copy or an image set aside has gone.
    """

    kind: str
    target_kind: str
    target_id: int
    label: str
    bytes: int | None
    at_once: bool = True

    @property
    def word(self) -> str:
        """What is done, in a few words."""
        return {
            "reclaim": _("Reclaim image"),
            "discard_undo": _("Discard undo copy"),
            "set_aside": _("Set unused image aside, then delete it"),
            "delete_aside": _("Delete image that is set aside"),
            "delete_snapshot": _("Delete snapshot"),
            "trim": _("Trim running guest"),
        }[self.kind]


def what_frees(actor: Actor, pool: StoragePool, now: datetime | None = None) -> list[Frees]:
    """The plans for a pool and the others on its filesystem, as far as they exist for ``actor``."""
    same = pools_for(actor).filter(host=pool.host_id)
    pools = list(same.filter(fs_key=pool.fs_key) if pool.fs_key else same.filter(pk=pool.pk))
    ids = [one.pk for one in pools]
    found = [
        Frees("reclaim", "image", one.id, one.name, one.reclaimable_bytes, one.method == "in_place")
        for one in candidates(images_for(actor).filter(pool__in=ids), pools, MOST)
    ]
    for one in pools:
        copies = undo_copies(one).rows[:MOST]
        found += [Frees("discard_undo", "job", row.job.pk, row.job.target_label, row.held_bytes) for row in copies]
    found += _of_images("set_aside", orphans_for(actor).filter(pool__in=ids))
    gone = aside_for(actor).filter(pool__in=ids, aside_until__lte=now or timezone.now())
    found += _of_images("delete_aside", gone.order_by(F("allocated_size").desc(nulls_last=True)))
    found += _of_guests(actor, ids)
    return sorted((one for one in found if one.bytes != 0), key=lambda one: (one.bytes is None, -(one.bytes or 0)))[
        :MOST
    ]


def _of_images(kind: str, images: QuerySet[Image]) -> Iterator[Frees]:
    """Not of what has another name: its space stays taken by that. The largest first, until none can free more."""
    most = list[int]()
    for one in images.exclude(nlink__gt=1).defer(None)[:LOOKED]:
        if len(most) == MOST and (one.allocated_size or 0) <= most[0]:
            return
        yield Frees(kind, "image", one.pk, one.name, one.own_bytes, kind == "delete_aside")
        (heapq.heappush if len(most) < MOST else heapq.heappushpop)(most, one.own_bytes or 0)


def _of_guests(actor: Actor, pools: Collection[int]) -> Iterator[Frees]:
    """Snapshots whose images are all in these pools, and trims of guests that run."""
    elsewhere = Image.objects.exclude(pool__in=pools).values("uses__disk__guest")
    here = Image.objects.filter(pool__in=pools, uses__isnull=False)
    guests = guests_for(actor).filter(pk__in=here.values("uses__disk__guest"))
    whole = guests.exclude(pk__in=elsewhere.filter(uses__isnull=False))
    for one in snapshots_of(whole):
        if one.held_bytes:
            label = f"{one.guest.name}: {one.name}"
            yield Frees("delete_snapshot", "guest", one.guest.pk, label, one.held_bytes)
    running = guests.filter(state="running").values("pk")
    largest = here.filter(uses__disk__guest__in=running, allocated_size__isnull=False).order_by("-allocated_size")
    found = largest.values_list("uses__disk__guest", "uses__disk__guest__name")[: 4 * TRIMS]
    for pk, name in list(dict(found).items())[:TRIMS]:
        yield Frees("trim", "guest", pk, name, None)
