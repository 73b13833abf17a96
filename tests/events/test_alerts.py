"""Alerts: opened once, updated, closed when they end, acknowledged by name."""

from dataclasses import replace

import pytest

from storage_admin.accounts.models import SYSTEM, Actor, AuditEntry, ForbiddenError, Role
from storage_admin.events import services
from storage_admin.events.models import Alert, Delivery, Event, Webhook
from storage_admin.events.services import Trouble
from tests.jobs.test_claims import at_once

pytestmark = [pytest.mark.django_db, pytest.mark.sql]
KIND = services.POOL_OVER_THRESHOLD
FULL = Trouble(f"{KIND}:1", "warning", "a / images is over its threshold", "86 % used", "a", "pool", 1, "a / images")


def events() -> list[str]:
    return list(Event.objects.order_by("id").values_list("name", flat=True))


def test_what_lasts_is_opened_once_and_follows_what_is_found(hook: Webhook) -> None:
    services.reconcile(KIND, [FULL])
    services.reconcile(KIND, [replace(FULL, detail="91 % used")])
    services.reconcile(KIND, [replace(FULL, detail="91 % used")])
    alert = Alert.objects.get()
    assert (alert.detail, alert.closed, alert.kind, alert.host) == ("91 % used", None, KIND, "a")
    assert alert.updated > alert.opened
    assert events() == ["alert.opened"]
    assert Event.objects.get().data["target"] == {"kind": "pool", "id": 1, "label": "a / images"}


def test_what_is_over_is_closed_and_what_comes_back_is_another_alert(hook: Webhook) -> None:
    other = replace(FULL, key=f"{services.BROKEN_CHAIN}:1")
    services.reconcile(services.BROKEN_CHAIN, [other])
    services.reconcile(KIND, [FULL])
    services.reconcile(KIND, [])
    services.reconcile(KIND, [FULL])
    assert [alert.closed is None for alert in Alert.objects.filter(kind=KIND).order_by("id")] == [False, True]
    assert Alert.objects.get(kind=services.BROKEN_CHAIN).closed is None
    assert events() == ["alert.opened", "alert.opened", "alert.closed", "alert.opened"]
    closed = Event.objects.get(name="alert.closed").data
    assert closed["closed"] is not None


def test_a_look_that_finds_nothing_new_writes_nothing(django_assert_num_queries: object) -> None:
    services.reconcile(KIND, [FULL])
    with django_assert_num_queries(2):  # type: ignore[operator]
        services.reconcile(KIND, [FULL])


def test_trouble_of_another_kind_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="is not of the kind"):
        services.reconcile(services.BROKEN_CHAIN, [FULL])


def test_single_alerts_are_raised_and_closed_by_their_key() -> None:
    services.raise_alert(FULL)
    services.raise_alert(replace(FULL, severity="danger"))
    assert Alert.objects.get().severity == "danger"
    services.close_alert(FULL.key)
    services.close_alert(FULL.key)
    assert Alert.objects.get().closed is not None


def test_a_title_that_is_too_long_is_cut_and_stays_the_same() -> None:
    long = replace(FULL, title="x" * 500)
    services.reconcile(KIND, [long])
    before = Alert.objects.get()
    services.reconcile(KIND, [long])
    assert (len(before.title), Alert.objects.get().updated) == (200, before.updated)


@pytest.mark.django_db(transaction=True)
def test_two_looks_at_once_open_one_alert_and_tell_once(hook: Webhook) -> None:
    both = [FULL, replace(FULL, key=f"{KIND}:2")]
    assert at_once(4, lambda _: services.reconcile(KIND, both)) == [None] * 4
    assert sorted(Alert.objects.values_list("key", flat=True)) == [f"{KIND}:1", f"{KIND}:2"]
    assert (events(), Delivery.objects.count()) == (["alert.opened"] * 2, 2)


def test_who_acknowledges_first_stands_there_and_in_the_audit_trail() -> None:
    services.raise_alert(FULL)
    alert = Alert.objects.get()
    services.acknowledge(Actor("ann", Role.OPERATOR), alert)
    alert = services.acknowledge(Actor("bob", Role.OPERATOR), alert)
    assert (alert.acknowledged_by, alert.closed) == ("ann", None)
    entry = AuditEntry.objects.get()
    assert (entry.who, entry.what, entry.before, entry.after) == (
        "ann", "alert acknowledged", {"acknowledged_by": ""}, {"alert": alert.pk, "acknowledged_by": "ann"},
    )  # fmt: skip


def test_only_operators_of_its_host_acknowledge_an_alert() -> None:
    services.raise_alert(FULL)
    services.raise_alert(replace(FULL, key=f"{KIND}:2", host=""))
    of_a, of_none = Alert.objects.order_by("id")
    elsewhere = Actor("token x", Role.OPERATOR, frozenset({"b"}))
    for actor, alert in ((Actor("v", Role.VIEWER), of_a), (elsewhere, of_a), (elsewhere, of_none)):
        with pytest.raises(ForbiddenError):
            services.acknowledge(actor, alert)
    assert services.acknowledge(Actor("token y", Role.OPERATOR, frozenset({"a"})), of_a).acknowledged_by == "token y"
    assert services.acknowledge(SYSTEM, of_none).acknowledged_by == "system"
