"""When guests ran, as far as anybody looked: what speaks for a change of an image being its guest's own."""

from collections.abc import Collection, Mapping

from django.db import transaction
from django.db.models import Max

from storage_admin.guests.models import OFF_STATES, Guest, GuestSpan
from storage_admin.hosts.models import Host
from storage_admin.jobs import elapsed

#: Seconds between two looks that saw the same, in which it counts as so: more than between two scans.
SAME, CHANGED = 20 * 60.0, 90.0
#: Words for a state of which nothing is known, as that of a guest of another node.
UNKNOWN = frozenset({"", "unknown"})
#: Seconds for which a span is kept: longer than any undo copy may be.
KEPT = 400 * 24 * 3600.0


def saw(host: Host, kinds: Collection[str], states: Mapping[tuple[str, str], str], ago: float = 0.0) -> None:
    """Writes down a look at a host's guests.

    Between a look that saw a guest run and one that saw it off it counts as running, where they are seconds apart.

    Args:
        kinds: of guests that were asked for: one of these that was not told is gone.
        states: by kind and uid.
        ago: seconds since that was so.
    """
    with transaction.atomic():
        Host.objects.select_for_update().filter(pk=host.pk).first()  # one look after the other
        at = elapsed.now() - ago
        own = GuestSpan.objects.filter(host=host, kind__in=kinds)
        own.filter(until__lt=at - KEPT).delete()
        last = own.order_by().values("kind", "uid").annotate(last=Max("pk")).values("last")
        known = {(span.kind, span.uid): span for span in own.filter(pk__in=last)}
        same, before = [], []
        for key, state in states.items():
            ran, span = state not in OFF_STATES, known.get(key)
            if state in UNKNOWN or (span is not None and span.until > at):
                continue  # nobody knows, or somebody has looked since
            if span is not None and span.ran == ran and at - span.until <= SAME:
                same.append(span.pk)
                continue
            near = span is not None and span.ran != ran and at - span.until <= CHANGED
            since = span.until if span is not None and near and ran else at
            if span is not None and span.ran and near:
                GuestSpan.objects.filter(pk=span.pk).update(until=at)
            elif span is not None and not span.ran:
                before.append(span.pk)
            GuestSpan.objects.create(host=host, kind=key[0], uid=key[1], ran=ran, since=since, until=at)
        own.filter(pk__in=same).update(until=at)
        own.filter(pk__in=before).delete()


def of(guests: Collection[Guest]) -> list[tuple[float, float]]:
    """From and until when these guests ran, as far as anybody looked, in the seconds of :func:`elapsed.now`."""
    found: list[tuple[float, float]] = []
    for guest in guests:
        spans = GuestSpan.objects.filter(host=guest.host_id, kind=guest.kind, uid=guest.uid, ran=True)
        found += spans.values_list("since", "until")
    return found
