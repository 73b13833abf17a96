"""Writes: what happened, for those who are to be told; alerts that are opened once and closed when they end.

Whoever calls does so in the transaction in which the thing happened: what is rolled back is told to nobody.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from storage_admin.accounts.models import Actor, Role, audit
from storage_admin.events.models import Alert, Delivery, Event, Webhook

JOB_FINISHED = "job.finished"
ALERT_OPENED = "alert.opened"
ALERT_WORSE = "alert.worse"
ALERT_CLOSED = "alert.closed"
#: What a webhook can be told of, with what it means; ``test`` is sent by the button alone, to one webhook.
NAMES = {
    JOB_FINISHED: _("a job has finished, with any result"),
    ALERT_OPENED: _("a new alert was opened"),
    ALERT_WORSE: _("the severity of an alert rose from warning to danger"),
    ALERT_CLOSED: _("an alert was resolved"),
}
#: Of these, mail is sent to ``settings.ALERT_EMAILS``.
MAILED = (ALERT_OPENED, ALERT_WORSE, ALERT_CLOSED)

POOL_OVER_THRESHOLD = "pool_over_threshold"
POOL_DAYS_UNTIL_FULL = "pool_days_until_full"
POOL_OVERCOMMIT = "pool_overcommit"
BROKEN_CHAIN = "broken_chain"
FORMAT_MISMATCH = "format_mismatch"
HOST_UNREACHABLE = "host_unreachable"
POOL_SILENT = "pool_silent"
POOL_CHANGED = "pool_changed"
POLICY_FAILED = "policy_failed"
UNDO_HELD = "undo_held"
UNDO_KEPT = "undo_kept"
CLOCK_JUMPED = "clock_jumped"
BENCHMARK_REGRESSION = "benchmark_regression"
JOB_STALLED = "job_stalled"
SNAPSHOTS_FORGOTTEN = "snapshots_forgotten"
GUEST_IO_ERROR = "guest_io_error"
DELIVERY_GIVEN_UP = "delivery_given_up"
#: Every kind of alert and its words.
KINDS = {
    POOL_OVER_THRESHOLD: _("pool over its threshold"),
    POOL_DAYS_UNTIL_FULL: _("pool forecast to fill up"),
    POOL_OVERCOMMIT: _("pool overcommitted"),
    BROKEN_CHAIN: _("broken chain"),
    FORMAT_MISMATCH: _("format mismatch"),
    HOST_UNREACHABLE: _("host unreachable"),
    POOL_SILENT: _("pool does not answer"),
    POOL_CHANGED: _("pool's folder replaced or not listed"),
    POLICY_FAILED: _("policy failed"),
    UNDO_HELD: _("undo copies hold much space"),
    UNDO_KEPT: _("undo copy may be the last good copy"),
    CLOCK_JUMPED: _("clock was changed"),
    BENCHMARK_REGRESSION: _("benchmark regression"),
    JOB_STALLED: _("job without progress"),
    SNAPSHOTS_FORGOTTEN: _("old or many snapshots"),
    GUEST_IO_ERROR: _("guest paused by an I/O error"),
    DELIVERY_GIVEN_UP: _("notifications not delivered"),
}
#: What of an open alert follows what is found.
_FOLLOWS = ("severity", "title", "detail", "host", "told_under", "target_kind", "target_id", "target_label")


@dataclass(frozen=True)
class Trouble:
    """Something that is wrong.

    Args:
        key: what is wrong with what, as ``pool_over_threshold:12``; its first part is one of ``KINDS``.
        severity: ``danger`` or ``warning``.
        title: one line that needs no other.
        detail: what it rests on, and what to do.
        host: slug of the host that it concerns; empty where it concerns no single one.
        target_kind, target_id, target_label: what the alert leads to, as in a job.
        told_under: slug of the host under which the same is told already; receivers are told of that one alone.
    """

    key: str
    severity: str
    title: str
    detail: str = ""
    host: str = ""
    target_kind: str = ""
    target_id: int | None = None
    target_label: str = ""
    told_under: str = ""

    @property
    def kind(self) -> str:
        return self.key.partition(":")[0]


@dataclass(frozen=True)
class Unjudged:
    """Something that nothing is known of now: an open alert of it stays as it is, and none is opened.

    Args:
        key: as of a trouble.
    """

    key: str


def emit(name: str, *, host: str = "", data: dict[str, Any]) -> None:
    """Puts an event into the outbox of everybody who is to be told of it; nothing where that is nobody.

    Args:
        name: one of ``NAMES``.
        host: slug of the host on which it happened, if it was one.
        data: whatever JSON can carry; no secret.
    """
    hooks, addresses = _receivers(name)
    if not hooks and not addresses:
        return
    with transaction.atomic():
        event = Event.objects.create(name=name, host=host, data=data)
        Delivery.objects.bulk_create(
            [
                *(Delivery(event=event, webhook=hook) for hook in hooks),
                *(Delivery(event=event, recipients=[address]) for address in addresses),
            ]
        )


def is_awaited(name: str) -> bool:
    """Whether anybody is to be told of such events: who would have to look for what to tell need not otherwise."""
    return any(_receivers(name))


def _receivers(name: str) -> tuple[list[Webhook], list[str]]:
    hooks = [hook for hook in Webhook.objects.filter(enabled=True) if not hook.events or name in hook.events]
    return hooks, list(settings.ALERT_EMAILS) if name in MAILED else []


def reconcile(kind: str, found: Iterable[Trouble | Unjudged]) -> None:
    """Makes the open alerts of a kind those that are found: opens what is new, updates, closes what is not there.

    All in one transaction, which is not begun where nothing changes.

    Args:
        kind: one of ``KINDS``.
        found: all trouble of that kind that there is now, and what nobody can judge now.

    Raises:
        ValueError: a trouble is of another kind.
    """
    wanted: dict[str, Trouble] = {}
    unjudged = set()
    for one in found:
        if isinstance(one, Trouble):
            wanted[one.key] = one
        else:
            unjudged.add(one.key)
    if strays := [trouble.key for trouble in wanted.values() if trouble.kind != kind]:
        raise ValueError(f"{strays[0]} is not of the kind {kind}")
    judged = _open(kind).exclude(key__in=unjudged)
    if all(_as_it_is(alert, wanted) for alert in judged.all()) and len(wanted) == judged.count():
        return
    with transaction.atomic():
        known = {alert.key: alert for alert in judged.all()}
        for key, trouble in wanted.items():
            _open_or_update(trouble, known.get(key))
        for key in known.keys() - wanted.keys():
            _close(known[key])


def raise_alert(trouble: Trouble) -> None:
    """Opens an alert; one that is open already is updated."""
    with transaction.atomic():
        _open_or_update(trouble, Alert.objects.filter(key=trouble.key, closed=None).first())


def close_alert(key: str) -> None:
    """Closes the open alert of a key, if there is one."""
    alert = Alert.objects.filter(key=key, closed=None).first()
    if alert is not None:
        with transaction.atomic():
            _close(alert)


def acknowledge(actor: Actor, alert: Alert) -> Alert:
    """Says that somebody knows of an alert and sees to it; who did so first stands there.

    Raises:
        ForbiddenError: the actor is no operator, or limited to other hosts.
    """
    if alert.host:
        actor.require(Role.OPERATOR, alert.host)
    else:
        actor.require_everywhere(Role.OPERATOR)
    with transaction.atomic():
        new = {"acknowledged": timezone.now(), "acknowledged_by": actor.name}
        if Alert.objects.filter(pk=alert.pk, acknowledged=None).update(**new) == 1:
            audit(
                actor, "alert acknowledged", alert.title,
                before={"acknowledged_by": ""}, after={"alert": alert.pk, "acknowledged_by": actor.name},
            )  # fmt: skip
    alert.refresh_from_db()
    return alert


def _open(kind: str) -> Any:
    return Alert.objects.filter(kind=kind, closed=None)


def _as_it_is(alert: Alert, wanted: dict[str, Trouble]) -> bool:
    trouble = wanted.get(alert.key)
    return trouble is not None and not _differences(alert, trouble)


def _differences(alert: Alert, trouble: Trouble) -> dict[str, Any]:
    found = {name: getattr(trouble, name) for name in _FOLLOWS} | {"title": trouble.title[:200]}
    return {name: value for name, value in found.items() if getattr(alert, name) != value}


def _open_or_update(trouble: Trouble, alert: Alert | None) -> None:
    if alert is not None:
        _update(alert, _differences(alert, trouble))
        return
    columns = {name: getattr(trouble, name) for name in _FOLLOWS} | {"title": trouble.title[:200]}
    try:
        with transaction.atomic():
            alert = Alert.objects.create(key=trouble.key, kind=trouble.kind, **columns)
    except IntegrityError:
        return  # somebody else has opened it in this moment
    _tell(ALERT_OPENED, alert)


def _update(alert: Alert, changes: dict[str, Any]) -> None:
    """What lasts follows what is found. That it got worse is told, as whoever saw a warning may have let it be; what
    changes in its words, or gets better, is not.
    """
    was, was_under = alert.severity, alert.told_under
    if not changes or not Alert.objects.filter(pk=alert.pk, closed=None, severity=was, told_under=was_under).update(
        updated=timezone.now(), **changes
    ):
        return
    if "told_under" in changes and not was_under:
        _tell(ALERT_CLOSED, alert)  # it is told under another host from now on
    for name, value in changes.items():
        setattr(alert, name, value)
    if "told_under" in changes:
        _tell(ALERT_OPENED, alert)
    elif (was, alert.severity) == (Alert.Severity.WARNING, Alert.Severity.DANGER):
        _tell(ALERT_WORSE, alert)


def _close(alert: Alert) -> None:
    alert.closed = timezone.now()
    if Alert.objects.filter(pk=alert.pk, closed=None).update(closed=alert.closed) == 1:
        _tell(ALERT_CLOSED, alert)


def _tell(name: str, alert: Alert) -> None:
    if not alert.told_under:
        emit(name, host=alert.host, data=in_short(alert))


def in_short(alert: Alert) -> dict[str, Any]:
    """An alert as receivers are told of it."""
    return {
        "id": alert.pk,
        "kind": alert.kind,
        "severity": alert.severity,
        "title": alert.title,
        "detail": alert.detail,
        "host": alert.host,
        "target": {"kind": alert.target_kind, "id": alert.target_id, "label": alert.target_label},
        "url": f"/alerts/{alert.pk}/",
        "opened": alert.opened.isoformat(),
        "closed": alert.closed.isoformat() if alert.closed else None,
        "acknowledged_by": alert.acknowledged_by,
    }
