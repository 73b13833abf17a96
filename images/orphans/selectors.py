"""Reads: orphans with their evidence, what is set aside, and what cannot be known."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Count, F, OrderBy, QuerySet, Sum
from django.utils import timezone
from django.utils.translation import gettext as _

from images.models import Image
from images.orphans.host_facts import could_have_guests
from images.orphans.refusals import changed_at
from images.selectors.chains import whole
from images.selectors.lists import images_for
from images.selectors.totals import each_file_once, image_sums
from storage_admin.accounts.models import Actor
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.selectors import hosts_for

#: Reasons that are named; the rest are counted together.
REASONS = 8


@dataclass(frozen=True)
class Amount:
    """How many images, and what they occupy, in bytes; ``None`` where of one of them nobody tells."""

    count: int
    allocated: int | None


@dataclass(frozen=True)
class Unknown:
    """A reason why it is not known whether images are orphans, how many that concerns, and what they occupy."""

    why: str
    count: int
    allocated: int | None


def orphans_for(actor: Actor, *, everywhere: bool = False) -> QuerySet[Image]:
    """Images that nobody needs, the largest first.

    Args:
        everywhere: also on hosts without a hypervisor, where nobody could need any.
    """
    rows = images_for(actor).filter(orphan=True).exclude(state__in=Image.NOT_THERE)
    if not everywhere:
        rows = rows.filter(host__in=hosts_with_guests(actor))
    return rows.order_by(OrderBy(F("allocated_size"), descending=True, nulls_last=True), "id")


def unchanged_for(rows: QuerySet[Image], days: int) -> QuerySet[Image]:
    """Of these, the images whose content was not changed for so many days."""
    return rows.filter(mtime_ns__lte=int((timezone.now() - timedelta(days=days)).timestamp() * 1e9))


def hosts_with_guests(actor: Actor) -> list[int]:
    """Ids of the hosts that could have guests."""
    return [host.pk for host in hosts_for(actor).only("pk", "capabilities") if could_have_guests(host)]


def summed(rows: QuerySet[Image]) -> Amount:
    """How many that are there, and what they occupy together: each file once, whichever hosts show it."""
    sums = image_sums(each_file_once(rows, list(StoragePool.objects.filter(pk__in=rows.order_by().values("pool")))))
    return Amount(sums["count"] or 0, sums["allocated_size"] or 0 if sums["count"] == sums["measured"] else None)


def aside_for(actor: Actor) -> QuerySet[Image]:
    """Images that are set aside, those that may be deleted first."""
    return images_for(actor).filter(aside_since__isnull=False).order_by("aside_until", "id")


def unknown_for(actor: Actor) -> list[Unknown]:
    """Why it is not known of some images whether anybody needs them, what concerns most of them first."""
    rows = images_for(actor).filter(orphan=None).exclude(state__in=Image.NOT_THERE)
    grouped = rows.order_by().values_list("orphan_evidence", "host__owners_unknown", "host__name")
    counted = grouped.annotate(Count("id"), Count("allocated_size"), Sum("allocated_size"))
    found = defaultdict[str, list[Amount | Unknown]](list)
    for evidence, host, name, count, measured, size in counted:
        why = f"{name}: {' '.join(map(str, evidence)) or host or 'It has not been scanned yet.'}"
        found[why].append(Amount(count, size if measured == count else None))
    reasons = sorted((_together(*one) for one in found.items()), key=lambda one: (-one.count, one.why))
    rest = reasons[REASONS:]
    if not rest:
        return reasons
    return [*reasons[:REASONS], _together(_("{count} other reasons.").format(count=len(rest)), rest)]


def _together(why: str, parts: Sequence[Amount | Unknown]) -> Unknown:
    return Unknown(why, sum(part.count for part in parts), whole([part.allocated for part in parts]))


def evidence(image: Image) -> list[str]:
    """The sentences that say why an image is an orphan, or is none, or why that is not known.

    When the hypervisors were asked is when the host was last scanned, whichever scan it was that changed the row.
    """
    told = [str(sentence) for sentence in image.orphan_evidence]
    if image.orphan:
        told += [sentence for sentence in (_changed(changed_at(image)), _asked(image.host)) if sentence]
    return told


def _changed(at: datetime | None) -> str:
    return _("Its content was last changed at {at:%Y-%m-%d %H:%M} UTC.").format(at=at) if at else ""


def _asked(host: Host) -> str:
    return _("These facts are from {at:%Y-%m-%d %H:%M} UTC.").format(at=host.last_seen) if host.last_seen else ""
