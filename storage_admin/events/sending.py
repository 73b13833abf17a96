"""Sends what is due, at least once: a delivery is claimed by compare-and-set before it is sent, and told of afterwards.

Whoever claims one moves its generation and its next time on. A sender that dies in between leaves it due again after
``LEASE``; a receiver may then get it twice, with the same number in ``X-Storage-Admin-Delivery``.
"""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from time import monotonic

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, QuerySet
from django.utils import timezone

from storage_admin import sealing
from storage_admin.events import mailing, posting, signing
from storage_admin.events.models import Alert, Delivery, Event, Webhook
from storage_admin.events.posting import Outcome
from storage_admin.events.services import DELIVERY_GIVEN_UP, Trouble, close_alert, raise_alert

logger = logging.getLogger(__name__)

#: After each failure the next try waits for so long; after the last one it is given up.
DELAYS = (
    timedelta(seconds=10), timedelta(minutes=1), timedelta(minutes=5), timedelta(minutes=30), timedelta(hours=2),
    timedelta(hours=6),
)  # fmt: skip
#: A claimed delivery is due again then, if nobody has told how it went. It is longer than any try takes.
LEASE = timedelta(minutes=2)
#: Receivers that are served at once, deliveries that one gets in a round, and the seconds after which it is left until
#: the next one.
AT_ONCE, EACH, SECONDS_EACH = 16, 100, 20.0
ALERTS_KEPT = timedelta(days=365)
#: Receivers by their webhook's id; mail has none.
Receiver = int | None


def deliver(now: datetime | None = None) -> int:
    """Sends all deliveries that are due. Each receiver has a thread, so that a slow one holds up nobody else.

    Returns:
        How many were sent.
    """
    moment = now or timezone.now()
    due = _due(moment).order_by("webhook_id").values_list("webhook_id", flat=True).distinct()
    receivers: list[Receiver] = list(due)
    if len(receivers) < 2:
        return sum(_serve(receiver, moment) for receiver in receivers)
    with ThreadPoolExecutor(min(AT_ONCE, len(receivers)), "deliver") as pool:
        return sum(pool.map(lambda receiver: _serve_apart(receiver, moment), receivers))


def _due(moment: datetime) -> QuerySet[Delivery]:
    return Delivery.objects.filter(state=Delivery.State.DUE, next_try__lte=moment)


def _serve_apart(receiver: Receiver, moment: datetime) -> int:
    try:
        return _serve(receiver, moment)
    finally:
        connection.close()


def _serve(receiver: Receiver, moment: datetime) -> int:
    """Sends a receiver what is due, in order, until it does not answer or has taken its time."""
    began, sent = monotonic(), 0
    rows = _due(moment).filter(webhook=receiver).select_related("event", "webhook").order_by("next_try", "pk")
    for delivery in rows[:EACH]:
        if monotonic() - began > SECONDS_EACH:
            break
        if not claim(delivery, moment):
            continue
        if is_for_nobody(delivery):
            _ours(delivery).update(state=Delivery.State.GIVEN_UP, problem="Its address is no longer in ALERT_EMAILS.")
            continue
        outcome = _tried(delivery, moment)
        sent += not outcome.problem
        if outcome.problem and outcome.status_code is None:
            break
    return sent


def is_for_nobody(delivery: Delivery) -> bool:
    """Whether it is a mail to an address that is told of nothing any more."""
    return delivery.webhook_id is None and delivery.recipients[0] not in settings.ALERT_EMAILS


def close_where_nobody_is_told() -> None:
    """Closes alerts about addresses that are told of nothing any more: nothing arrives there that would close them."""
    told = [given_up_key(Delivery(recipients=[address])) for address in settings.ALERT_EMAILS]
    mails = Alert.objects.filter(closed=None, key__startswith=given_up_key(Delivery(recipients=[""])))
    for key in mails.exclude(key__in=told).values_list("key", flat=True):
        close_alert(key)


def _tried(delivery: Delivery, moment: datetime) -> Outcome:
    """Tries once and writes down how it went. What nobody thought of is a failure like any other: it would otherwise
    hold up all that comes after it, and be tried without end.
    """
    try:
        outcome = attempt(delivery, moment)
        record(delivery, outcome, moment)
    except Exception as error:
        logger.exception("delivery %s could not be tried", delivery.pk)
        outcome = Outcome(
            problem=f"The dashboard could not send the event: {type(error).__name__}. See the worker's log."
        )
        record(delivery, outcome, moment)
    return outcome


def claim(delivery: Delivery, moment: datetime) -> bool:
    """Takes a delivery that is due; of two senders one gets it."""
    taken = _due(moment).filter(pk=delivery.pk, generation=delivery.generation).update(
        generation=F("generation") + 1, attempts=F("attempts") + 1, tried=moment, next_try=moment + LEASE
    )  # fmt: skip
    if taken:
        delivery.generation += 1
        delivery.attempts += 1
    return bool(taken)


def attempt(delivery: Delivery, moment: datetime) -> Outcome:
    """Tries once; nothing is written down."""
    if delivery.webhook is None:
        return mailing.send(delivery)
    body = payload(delivery.event)
    try:
        keys = keys_of(delivery.webhook, moment)
    except sealing.SealError as error:
        return Outcome(problem=f"{error} Rotate this webhook's secret.")
    headers = {
        "X-Storage-Admin-Event": delivery.event.name,
        "X-Storage-Admin-Delivery": str(delivery.pk),
        "X-Storage-Admin-Signature": signing.signature(keys, int(timezone.now().timestamp()), body),
    }
    return posting.post(delivery.webhook.url, body, headers)


def keys_of(webhook: Webhook, moment: datetime) -> list[str]:
    """The secret, and the one before it as long as that holds.

    Raises:
        SealError: it cannot be read.
    """
    keys = [sealing.unlock(webhook.secret_locked)]
    if webhook.old_secret_locked and webhook.old_secret_until and moment < webhook.old_secret_until:
        keys.append(sealing.unlock(webhook.old_secret_locked))
    return keys


def payload(event: Event) -> bytes:
    """What a webhook is sent: JSON, the same bytes at each try."""
    said = {"id": event.pk, "event": event.name, "at": event.at.isoformat(), "host": event.host, "data": event.data}
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


def record(delivery: Delivery, outcome: Outcome, moment: datetime) -> None:
    """Writes down how a try went, unless the delivery has been claimed by somebody else since."""
    ours = _ours(delivery)
    told = {"status_code": outcome.status_code, "problem": outcome.problem[:500]}
    key = given_up_key(delivery)
    if not outcome.problem:
        with transaction.atomic():
            if ours.update(state=Delivery.State.SENT, sent=timezone.now(), **told):
                close_alert(key)
    elif delivery.attempts <= len(DELAYS):
        ours.update(next_try=moment + DELAYS[delivery.attempts - 1], **told)
    else:
        with transaction.atomic():
            if ours.update(state=Delivery.State.GIVEN_UP, **told):
                raise_alert(_given_up(delivery, key, outcome))


def _ours(delivery: Delivery) -> QuerySet[Delivery]:
    return Delivery.objects.filter(pk=delivery.pk, generation=delivery.generation, state=Delivery.State.DUE)


def given_up_key(delivery: Delivery) -> str:
    """The key of the alert that is open while a receiver cannot be told."""
    who = f"webhook:{delivery.webhook_id}" if delivery.webhook_id else f"mail:{delivery.recipients[0]}"
    return f"{DELIVERY_GIVEN_UP}:{who}"[:200]


def _given_up(delivery: Delivery, key: str, outcome: Outcome) -> Trouble:
    who = f"The webhook {delivery.webhook.name}" if delivery.webhook else f"{delivery.recipients[0]}"
    return Trouble(
        key,
        "warning",
        f"{who} does not receive events",
        f"{delivery.attempts} attempts over {_span()} failed. {outcome.problem} Fix the cause, then resend it on the "
        "webhooks page. The alert is resolved when a delivery succeeds.",
        target_kind="webhook" if delivery.webhook_id else "",
        target_id=delivery.webhook_id,
        target_label=delivery.webhook.name if delivery.webhook else "",
    )


def _span() -> str:
    hours = sum(DELAYS, timedelta()).total_seconds() / 3600
    return f"{hours:.1f} hours"


def forget(now: datetime, keep: timedelta) -> int:
    """Deletes events older than that which are on their way to nobody any more, with the history of their deliveries,
    and alerts that have been over for longer than ``ALERTS_KEPT``.

    Returns:
        How many events went.
    """
    Alert.objects.filter(closed__lt=now - ALERTS_KEPT).delete()
    old = Event.objects.filter(at__lt=now - keep).exclude(deliveries__state=Delivery.State.DUE)
    gone = 0
    while ids := list(old.order_by("pk").values_list("pk", flat=True)[:1000]):
        Event.objects.filter(pk__in=ids).delete()
        gone += len(ids)
    return gone


def put_again(deliveries: QuerySet[Delivery], now: datetime) -> int:
    """Makes deliveries due now, as if they had never been tried.

    Returns:
        How many.
    """
    return deliveries.update(
        state=Delivery.State.DUE, attempts=0, next_try=now, generation=F("generation") + 1, problem="",
        status_code=None, sent=None,
    )  # fmt: skip
