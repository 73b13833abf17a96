"""A host that is removed, and another one that gets its slug later: they have nothing in common."""

import pytest
from rest_framework.test import APIClient

from storage_admin.accounts.models import Actor, AuditEntry, User
from storage_admin.events.models import Alert, Event
from storage_admin.events.selectors import alerts_for
from storage_admin.hosts.registration import remove_host
from tests.factories import AlertFactory, HostFactory, TokenFactory, UserFactory, WebhookFactory
from tests.working import reread

pytestmark = pytest.mark.sql


def test_alerts_of_a_removed_host_are_closed_and_not_those_of_a_later_one(admin: Actor) -> None:
    WebhookFactory.create()
    old = HostFactory.create(slug="web", kind="ssh")
    TokenFactory.create(name="before", secret="sa_before", hosts=["web"])
    alert = AlertFactory.create(key="pool_over_threshold:7", host="web", title="payroll-pool is full")
    AlertFactory.create(key="host_unreachable:7", host="web", closed="2026-01-01T00:00Z")
    other = AlertFactory.create(key="pool_over_threshold:8", host="db")
    remove_host(admin, old)
    assert (reread(alert).host, alert.closed is None) == ("web (removed)", False)
    assert [event.name for event in Event.objects.all()] == ["alert.closed"]
    HostFactory.create(slug="web")
    TokenFactory.create(name="later", secret="sa_later", hosts=["web"])
    for secret in ("sa_later", "sa_before"):
        client = APIClient(HTTP_AUTHORIZATION=f"Bearer {secret}")
        assert client.get("/api/v1/alerts/").json()["count"] == 0
    assert Alert.objects.get(closed=None) == other
    assert alerts_for(admin).count() == 3


def test_who_was_limited_to_a_removed_host_sees_no_alert_of_a_later_one_that_is_removed_too(admin: Actor) -> None:
    old = HostFactory.create(slug="web", kind="ssh")
    bob = UserFactory.create(hosts=["web"])
    remove_host(admin, old)
    later = HostFactory.create(slug="web", kind="ssh")
    AlertFactory.create(host="web", title="payroll-pool is full")
    remove_host(admin, later)
    assert not alerts_for(reread(bob).actor).exists()
    assert alerts_for(admin).count() == 1


def test_what_was_told_under_a_removed_host_is_told_to_who_sees_the_later_one_and_another(admin: Actor) -> None:
    old = HostFactory.create(slug="web", kind="ssh")
    AlertFactory.create(host="db", told_under="web")
    remove_host(admin, old)
    HostFactory.create(slug="web")
    limited = UserFactory.create(hosts=["db", "web"]).actor
    assert alerts_for(limited).count() == 1


def test_alerts_of_a_host_with_the_longest_slug_go_with_it(admin: Actor) -> None:
    host = HostFactory.create(slug="w" * 50, kind="ssh")
    AlertFactory.create(host=host.slug)
    remove_host(admin, host)
    assert Alert.objects.get().host == "w" * 40 + " (removed)"


def test_whose_limits_a_removed_host_has_changed_stands_in_the_trail(admin: Actor) -> None:
    host = HostFactory.create(slug="web", kind="ssh")
    UserFactory.create(username="bob", hosts=["db", "web"])
    UserFactory.create(username="eve", hosts=["db"])
    TokenFactory.create(name="nightly", hosts=["web"])
    remove_host(admin, host)
    entries = AuditEntry.objects.exclude(what="host removed").order_by("what")
    assert list(entries.values_list("who", "what", "target", "before", "after")) == [
        ("root", "token changed", "nightly", {"hosts": ["web"]}, {"hosts": ["web (removed)"]}),
        ("root", "user changed", "bob", {"hosts": ["db", "web"]}, {"hosts": ["db", "web (removed)"]}),
    ]
    assert User.objects.get(username="eve").hosts == ["db"]
