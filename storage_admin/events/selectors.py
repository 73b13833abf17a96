"""Reads: alerts, webhooks and deliveries, as far as they exist for the actor."""

from django.db.models import Case, Count, Max, Q, QuerySet, Value, When

from storage_admin.accounts.models import Actor
from storage_admin.accounts.scopes import GONE
from storage_admin.events.models import Alert, Delivery, Webhook


def alerts_for(actor: Actor) -> QuerySet[Alert]:
    """The alerts of hosts that exist for ``actor``; what concerns no single host is for those who see all.

    What several hosts share is told once: under the first of them, or under those that alone exist for the actor.
    """
    if actor.hosts is None:
        return Alert.objects.filter(told_under="")
    # Of removed hosts only those who see all are told: several may have had the same slug, and different people.
    hosts = [slug for slug in actor.hosts if not slug.endswith(GONE)]
    return Alert.objects.filter(host__in=hosts).exclude(told_under__in=hosts)


def open_first(rows: QuerySet[Alert]) -> QuerySet[Alert]:
    """What is open and nobody has acknowledged, then what is open, then what is over; the newest of each first."""
    first = Case(
        When(closed=None, acknowledged=None, severity=Alert.Severity.DANGER, then=Value(0)),
        When(closed=None, acknowledged=None, then=Value(1)),
        When(closed=None, then=Value(2)),
        default=Value(3),
    )
    return rows.order_by(first, "-id")


def open_alerts(actor: Actor) -> int:
    """How many alerts are open and not acknowledged."""
    return alerts_for(actor).filter(closed=None, acknowledged=None).count()


def webhooks() -> QuerySet[Webhook]:
    """All webhooks, each with how many of its deliveries are on their way or given up, and when one arrived last."""
    due = Q(deliveries__state=Delivery.State.DUE)
    return Webhook.objects.annotate(
        on_their_way=Count("deliveries", filter=due),
        failing=Count("deliveries", filter=due & Q(deliveries__attempts__gt=0)),
        given_up=Count("deliveries", filter=Q(deliveries__state=Delivery.State.GIVEN_UP)),
        last_sent=Max("deliveries__sent"),
    )


def deliveries() -> QuerySet[Delivery]:
    """All deliveries with what they tell, the newest first."""
    return Delivery.objects.select_related("event", "webhook").order_by("-pk")
