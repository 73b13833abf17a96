"""Alerts and webhooks in the browser's pages."""

from collections.abc import Callable

import pytest
from django.test import Client

from storage_admin.accounts.models import AuditEntry, SavedView
from storage_admin.events.models import Alert, Delivery, Webhook
from tests.factories import AlertFactory, DeliveryFactory, StoragePoolFactory, WebhookFactory
from tests.web.html import tags_of, text_of
from tests.working import reread

pytestmark = pytest.mark.django_db


def shown(client: Client, address: str) -> str:
    return text_of(client.get(address))


def test_what_is_new_comes_first_and_history_last(viewer: Client) -> None:
    AlertFactory.create(title="over and done", closed="2026-01-01T00:00Z")
    AlertFactory.create(title="somebody sees to it", acknowledged="2026-01-01T00:00Z", acknowledged_by="ann")
    AlertFactory.create(title="a warning")
    AlertFactory.create(title="a danger", severity="danger")
    text = shown(viewer, "/alerts/")
    titles = ["a danger", "a warning", "somebody sees to it", "over and done"]
    assert sorted(titles, key=text.index) == titles
    assert "over and done" not in shown(viewer, "/alerts/?state=new")
    assert "a danger" not in shown(viewer, "/alerts/?state=closed")
    assert "a danger" in shown(viewer, "/alerts/?kind=pool_over_threshold&search=danger")
    assert "No alerts match your filters" in shown(viewer, "/alerts/?kind=broken_chain")


def test_an_operator_acknowledges_and_their_name_stands_there(operator: Client, viewer: Client) -> None:
    alert = AlertFactory.create(title="a / images is over its threshold")
    assert viewer.post(f"/alerts/{alert.pk}/acknowledge/").status_code == 403
    answer = operator.post(f"/alerts/{alert.pk}/acknowledge/", {"next": "/alerts/?state=new"})
    assert answer["Location"] == "/alerts/?state=new"
    assert "the-operator" in shown(viewer, "/alerts/")
    assert "by the-operator" in shown(viewer, f"/alerts/{alert.pk}/")
    assert AuditEntry.objects.filter(who="the-operator", what="alert acknowledged").count() == 1
    away = operator.post(f"/alerts/{alert.pk}/acknowledge/", {"next": "https://elsewhere.example/"})
    assert away["Location"] == "/alerts/"


def test_the_sidebar_counts_what_is_new(viewer: Client) -> None:
    alert = AlertFactory.create()
    AlertFactory.create(acknowledged="2026-01-01T00:00Z")
    assert 'title="1 new alert"' in viewer.get("/jobs/").content.decode()
    assert viewer.get("/alerts/count/?n=1").status_code == 204
    Alert.objects.filter(pk=alert.pk).update(closed="2026-01-01T00:00Z")
    answer = viewer.get("/alerts/count/?n=1")
    assert (answer.status_code, "count/?n=0" in answer.content.decode()) == (200, True)


def test_a_secret_is_shown_once(admin: Client) -> None:
    body = {"name": "chat", "url": "https://example.org/hook?token=very-secret", "events": ["alert.opened"]}
    answer = admin.post("/webhooks/", body)
    page = answer.content.decode()
    assert "whsec_" in page
    assert answer["Cache-Control"] == "no-store"
    hook = Webhook.objects.get()
    assert (hook.name, hook.events, hook.enabled) == ("chat", ["alert.opened"], True)
    secret = page.partition("whsec_")[2].partition("<")[0]
    for address in ("/webhooks/", f"/webhooks/{hook.pk}/", "/audit/"):
        again = admin.get(address).content.decode()
        assert secret not in again
        assert "very-secret" not in again
    assert bytes(hook.secret_locked) != b""
    assert secret.encode() not in bytes(hook.secret_locked)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.org/", "example.org/hook", "https://", "https://user:pass@example.org/", "http://169.254.169.254/",
        "http://[fe80::1]/", "http://0.0.0.0/", "https://example.org:99999/", "https://example.org/#part",
        "http://[::ffff:169.254.169.254]/", "http://[fd00:ec2::254]/latest/",
        "http://100.100.100.200/", "https://ex\nample.org/", "https://example.org/" + "x" * 600,
        "http://a..b/", f"https://{'x' * 64}.example.org/", "https://.example.org/", "http://./",
    ],
)  # fmt: skip
def test_an_address_that_cannot_be_one_is_refused_with_a_sentence(admin: Client, url: str) -> None:
    answer = admin.post("/webhooks/", {"name": "chat", "url": url})
    assert (answer.status_code, Webhook.objects.exists()) == (400, False)
    assert 'role="alert"' in answer.content.decode()


def test_a_webhook_is_changed_and_the_address_as_it_is_shown_changes_nothing(admin: Client) -> None:
    hook = WebhookFactory.create(name="old", url="https://example.org/hook?token=very-secret")
    form = {"name": "new", "url": "https://example.org/hook?token=…", "events": ["alert.closed"], "enabled": "on"}
    admin.post(f"/webhooks/{hook.pk}/change/", form)
    hook.refresh_from_db()
    assert (hook.name, hook.url, hook.events) == ("new", "https://example.org/hook?token=very-secret", ["alert.closed"])
    entry = AuditEntry.objects.get(what="webhook changed")
    assert (entry.before or {})["name"] == "old"
    assert (entry.after or {})["name"] == "new"
    assert "very-secret" not in str([entry.before, entry.after])


def test_what_is_due_to_a_webhook_that_is_switched_off_is_given_up(admin: Client) -> None:
    hook = WebhookFactory.create()
    delivery = DeliveryFactory.create(webhook=hook)
    admin.post(f"/webhooks/{hook.pk}/change/", {"name": "x", "url": hook.url})
    words = "The webhook was disabled before the delivery succeeded."
    assert (reread(delivery).state, delivery.problem) == ("given_up", words)
    assert "is disabled" in text_of(admin.post(f"/webhooks/{hook.pk}/test/", follow=True))


def test_a_test_is_sent_and_what_was_given_up_is_sent_again(admin: Client) -> None:
    hook = WebhookFactory.create()
    given_up = DeliveryFactory.create(webhook=hook, state="given_up", attempts=7, problem="The server answered 500.")
    assert "The server answered 500." in shown(admin, f"/webhooks/{hook.pk}/")
    admin.post(f"/deliveries/{given_up.pk}/resend/")
    admin.post(f"/webhooks/{hook.pk}/test/")
    assert list(hook.deliveries.order_by("pk").values_list("state", "attempts", "event__name")) == [
        ("due", 0, "job.finished"), ("due", 0, "test"),
    ]  # fmt: skip
    assert Delivery.objects.count() == 2
    assert set(AuditEntry.objects.values_list("what", flat=True)) >= {"delivery sent again", "webhook tested"}


def test_a_new_secret_is_shown_once_and_the_old_one_holds_for_a_day(admin: Client) -> None:
    hook = WebhookFactory.create()
    before = bytes(hook.secret_locked)
    assert "whsec_" in admin.post(f"/webhooks/{hook.pk}/secret/").content.decode()
    assert bytes(reread(hook).old_secret_locked) == before
    assert hook.old_secret_until is not None
    assert "whsec_" not in admin.get(f"/webhooks/{hook.pk}/").content.decode()


def test_a_deleted_webhook_takes_its_history_and_its_alert_along(admin: Client) -> None:
    hook = WebhookFactory.create()
    DeliveryFactory.create(webhook=hook)
    AlertFactory.create(key=f"delivery_given_up:webhook:{hook.pk}")
    admin.post(f"/webhooks/{hook.pk}/delete/")
    assert (Webhook.objects.exists(), Delivery.objects.exists()) == (False, False)
    assert Alert.objects.get().closed is not None


def test_the_thresholds_of_a_pool_are_set_and_ended_on_its_page(admin: Client) -> None:
    pool = StoragePoolFactory.create()
    form = {"name": "a", "warn_percent": "70", "warn_days": "", "warn_overcommit": "1.5", "warn_undo_percent": "10"}
    admin.post(f"/pools/{pool.pk}/change/", form)
    pool.refresh_from_db()
    assert (pool.warn_percent, pool.warn_days, pool.warn_overcommit, pool.warn_undo_percent) == (70, None, 1.5, 10)
    assert (AuditEntry.objects.get(what="pool changed").before or {})["warn_days"] == 14
    wrong = {"warn_percent": ("0", "x"), "warn_overcommit": ("nan", "much"), "warn_undo_percent": ("101",)}
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        admin.post(f"/pools/{pool.pk}/change/", form | {name: value})
    assert (reread(pool).warn_percent, pool.warn_overcommit, pool.warn_undo_percent) == (70, 1.5, 10)


def test_a_filter_that_means_nothing_is_named_and_stays_with_the_others(viewer: Client) -> None:
    AlertFactory.create(title="a danger", severity="danger")
    page = viewer.get("/alerts/?severity=danger&kind=nonsense&host=local&ordering=-opened")
    assert "Ignored invalid filters: kind." in text_of(page)
    kept = [found["name"] for tag, found in tags_of(page) if found.get("type") == "hidden"]
    assert {"severity", "host", "ordering"} <= set(kept)


def test_who_may_not_open_the_trail_is_shown_no_view_of_it_and_saves_none(browser_of: Callable[[str], Client]) -> None:
    admin, operator = browser_of("admin"), browser_of("operator")
    admin.post("/views/", {"page": "audit", "name": "of-root", "query": "who=root", "shared": "on"})
    view = SavedView.objects.get()
    assert "of-root" in admin.get("/audit/").content.decode()
    assert operator.post("/views/", {"page": "audit", "name": "x", "query": ""}).status_code == 403
    for address in (f"/views/{view.pk}/", f"/views/{view.pk}/delete/"):
        assert operator.post(address, {"name": "x"}).status_code == 404
    assert SavedView.objects.get().name == "of-root"
