"""Alerts and webhooks over REST."""

from collections.abc import Callable
from typing import Any

import pytest
from rest_framework.test import APIClient

from storage_admin.accounts.models import AuditEntry
from storage_admin.events import sending
from storage_admin.events.models import Delivery, Webhook
from tests.factories import AlertFactory, DeliveryFactory, WebhookFactory
from tests.harness.receiver import receiver
from tests.working import at_most_queries

pytestmark = pytest.mark.django_db


def titles(client: APIClient, query: str = "") -> list[str]:
    answer = client.get(f"/api/v1/alerts/{query}")
    assert answer.status_code == 200, answer.json()
    return [row["title"] for row in answer.json()["results"]]


def test_alerts_are_filtered(viewer: APIClient) -> None:
    AlertFactory.create(title="a", detail="", host="one", severity="danger")
    AlertFactory.create(title="b", detail="", host="two", acknowledged="2026-01-01T00:00Z", acknowledged_by="ann")
    AlertFactory.create(title="c", detail="", key="broken_chain:1", closed="2026-01-01T00:00Z")
    assert titles(viewer) == ["c", "b", "a"]
    for query, found in {
        "state=open": "b a", "state=new": "a", "state=acknowledged": "b", "state=closed": "c", "host=two": "b",
        "kind=broken_chain": "c", "severity=danger": "a", "search=B": "b", "ordering=id": "a b c",
    }.items():  # fmt: skip
        assert titles(viewer, f"?{query}") == found.split(), query
    for query in ("state=nonsense", "kind=x", "nothing=1"):
        assert viewer.get(f"/api/v1/alerts/?{query}").status_code == 400, query


def test_an_alert_says_what_it_is_about_and_who_sees_to_it(operator: APIClient) -> None:
    alert = AlertFactory.create(target_kind="pool", target_id=7, target_label="a / images", host="a")
    row = operator.get(f"/api/v1/alerts/{alert.pk}/").json()
    assert row["target"] == {"kind": "pool", "id": 7, "label": "a / images"}
    assert (row["closed"], row["acknowledged"], row["acknowledged_by"]) == (None, None, None)
    row = operator.post(f"/api/v1/alerts/{alert.pk}/ack/", format="json").json()
    assert row["acknowledged_by"] == AuditEntry.objects.get(what="alert acknowledged").who
    assert row["acknowledged"] is not None


def test_alerts_of_other_hosts_do_not_exist_for_a_limited_token(client_of: Callable[..., APIClient]) -> None:
    client = client_of("operator", hosts=["mine"])
    AlertFactory.create(title="of mine", host="mine")
    others = [AlertFactory.create(host="other"), AlertFactory.create(host="")]
    assert titles(client) == ["of mine"]
    assert titles(client, "?host=other") == []
    for alert in others:
        assert client.get(f"/api/v1/alerts/{alert.pk}/").status_code == 404
        assert client.post(f"/api/v1/alerts/{alert.pk}/ack/", format="json").status_code == 404


@pytest.mark.django_db(transaction=True)
def test_a_webhook_from_its_making_to_its_end(admin: APIClient) -> None:
    with receiver() as there:
        made = admin.post("/api/v1/webhooks/", {"name": "ops", "url": f"{there.url}?token=t0p"}, format="json")
        assert made.status_code == 201
        hook = made.json()
        assert hook["secret"].startswith("whsec_")
        assert (hook["url"], hook["events"], hook["enabled"]) == (
            f"{there.url.removesuffix('hook')}…?token=…",
            [],
            True,
        )
        path = f"/api/v1/webhooks/{hook['id']}/"
        sent = admin.post(f"{path}test/", format="json")
        assert (sent.status_code, sent.json()["state"], sent.json()["event"]) == (202, "due", "test")
        sending.deliver()
        assert [got.path for got in there.got] == ["/hook?token=t0p"]
    [delivery] = admin.get(f"{path}deliveries/?state=sent").json()["results"]
    assert (delivery["status_code"], delivery["attempts"], delivery["next_try"]) == (200, 1, None)
    assert admin.post(f"{path}deliveries/{delivery['id']}/resend/", format="json").json()["state"] == "due"
    again = admin.post(f"{path}rotate-secret/", format="json").json()
    assert again["secret"] != hook["secret"]
    changed = admin.patch(path, {"events": ["job.finished"], "enabled": False}, format="json").json()
    assert (changed["events"], changed["enabled"], changed["given_up"]) == (["job.finished"], False, 1)
    assert admin.delete(path).status_code == 204
    trail = str(list(AuditEntry.objects.values("what", "target", "before", "after")))
    assert not any(word in trail for word in ("t0p", hook["secret"], again["secret"]))
    whats = set(AuditEntry.objects.values_list("what", flat=True))
    assert whats == {
        "webhook created", "webhook tested", "delivery sent again", "webhook secret rotated", "webhook changed",
        "webhook deleted",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "", "url": "https://example.org/"}, "name"),
        ({"name": "taken", "url": "https://example.org/"}, "name"),
        ({"name": "x", "url": "file:///etc/passwd"}, "url"),
        ({"name": "x", "url": "https://a:b@example.org/"}, "url"),
        ({"name": "x", "url": "https://example.org/", "events": ["no.such"]}, "events.0"),
        ({"name": "x", "url": "https://example.org/", "secret": "mine"}, "secret"),
    ],
)
def test_what_cannot_be_taken_is_named(admin: APIClient, body: dict[str, object], field: str) -> None:
    WebhookFactory.create(name="taken")
    answer = admin.post("/api/v1/webhooks/", body, format="json")
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid")
    assert field in answer.json()["fields"]
    assert Webhook.objects.count() == 1


def test_a_delivery_of_another_webhook_is_not_found(admin: APIClient) -> None:
    one, other = WebhookFactory.create(), WebhookFactory.create()
    delivery = DeliveryFactory.create(webhook=other, state="given_up")
    assert admin.post(f"/api/v1/webhooks/{one.pk}/deliveries/{delivery.pk}/resend/", format="json").status_code == 404


def test_a_test_mail_is_sent_followed_and_sent_once_more(admin: APIClient, settings: Any) -> None:
    settings.ALERT_EMAILS = []
    none = admin.post("/api/v1/webhooks/mail/test/", format="json")
    assert (none.status_code, none.json()["code"]) == (400, "invalid")
    assert "ALERT_EMAILS" in none.json()["detail"]
    settings.ALERT_EMAILS = ["ann@example.org", "bob@example.org"]
    sent = admin.post("/api/v1/webhooks/mail/test/", format="json")
    assert sent.status_code == 202
    assert [(one["event"], one["to"], one["state"]) for one in sent.json()] == [
        ("test", ["ann@example.org"], "due"), ("test", ["bob@example.org"], "due"),
    ]  # fmt: skip
    DeliveryFactory.create(webhook=WebhookFactory.create())
    listed = admin.get("/api/v1/webhooks/mail/deliveries/?event=test&limit=1").json()
    assert (listed["count"], listed["results"][0]["to"]) == (2, ["bob@example.org"])
    mail = listed["results"][0]["id"]
    Delivery.objects.filter(pk=mail).update(state="given_up", attempts=7)
    again = admin.post(f"/api/v1/webhooks/mail/deliveries/{mail}/resend/", format="json")
    assert (again.status_code, again.json()["state"]) == (202, "due")


def test_lists_stay_within_their_budget(admin: APIClient) -> None:
    for _ in range(20):
        AlertFactory.create()
        hook = WebhookFactory.create()
        DeliveryFactory.create(webhook=hook)
    for address in ("alerts/", "webhooks/", f"webhooks/{hook.pk}/deliveries/", "webhooks/mail/deliveries/"):
        with at_most_queries(5):
            assert admin.get(f"/api/v1/{address}").status_code == 200
