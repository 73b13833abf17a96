"""What somebody tries who wants more than they may: other sites' forms, names, options, many addresses."""

import logging
from typing import Any

import pytest
from django.http import HttpResponse
from django.test import Client, RequestFactory

from images.models import Policy
from storage_admin.accounts.addresses import address_of
from storage_admin.accounts.models import AuditEntry
from tests.chance import night
from tests.factories import (
    AuditEntryFactory,
    PolicyFactory,
    PolicyPickFactory,
    PolicyRunFactory,
    SavedViewFactory,
    UserFactory,
    WebhookFactory,
)
from tests.web import test_host_scope as host_scope
from tests.web.conftest import Filled
from tests.web.html import inline_code, tags_of

PAYLOAD = "\"'><img src=x onerror=alert(1)></script><script>alert(1)</script>{{ 7|add:7 }}"
BACKEND = "django.contrib.auth.backends.ModelBackend"


def test_no_form_of_another_site_does_anything_with_or_without_htmx(db: None) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(UserFactory.create(role="admin"), BACKEND)
    before = AuditEntry.objects.count()
    asked = 0
    for address in {host_scope.address(route, {}) for _, route in host_scope.routes()}:
        for headers in ({}, {"HX-Request": "true"}, {"Origin": "https://evil.example"}):
            for method in ("post", "patch", "delete", "put") if night() else ("post", "delete"):
                answer: HttpResponse = getattr(client, method)(address, headers=headers)
                assert answer.status_code in {403, 404, 405} or (
                    address == "/login/" and "HX-Refresh" in answer.headers
                ), (method, address)
                asked += 1
    assert asked > 500
    assert not AuditEntry.objects.exclude(what="forbidden").count() - before


def test_names_of_policies_views_webhooks_and_what_is_recorded_stay_text(admin: Client, filled: Filled) -> None:
    policy = PolicyFactory.create(name="plain", name_pattern="plain")
    run = PolicyRunFactory.create(policy=policy, detail="plain")
    pick = PolicyPickFactory.create(run=run, image=filled.image, state="skipped", code="guest_running", reason="plain")
    view = SavedViewFactory.create(shared=True, name="plain", by="plain", query="search=plain", page="audit")
    hook = WebhookFactory.create(name="plain")
    AuditEntryFactory.create(target="plain", before={"plain": "plain"}, after={"plain": ["plain"]})
    pages = [
        "/policies/", f"/policies/{policy.pk}/", f"/policies/{policy.pk}/change/", f"/policies/{policy.pk}/preview/",
        f"/policies/{policy.pk}/runs/{run.pk}/", f"/policies/{policy.pk}/runs/{run.pk}/?code=x", "/audit/",
        "/webhooks/", f"/webhooks/{hook.pk}/", "/users/", "/alerts/", "/orphans/", "/ledger/",
    ]  # fmt: skip

    def shapes() -> list[list[str]]:
        found = []
        for page in pages:
            text = admin.get(page).content.decode()
            assert inline_code(text) == [], page
            found.append([tag for tag, _ in tags_of(text)])
        return found

    harmless = shapes()
    Policy.objects.update(name=PAYLOAD[:100], name_pattern=PAYLOAD)
    for row, values in (
        (run, {"detail": PAYLOAD, "by": PAYLOAD}), (pick, {"reason": PAYLOAD, "label": PAYLOAD}),
        (view, {"name": PAYLOAD, "by": PAYLOAD, "query": f"search={PAYLOAD}"}), (hook, {"name": PAYLOAD}),
    ):  # fmt: skip
        type(row)._default_manager.filter(pk=row.pk).update(**values)
    AuditEntryFactory.create(target=PAYLOAD, who=PAYLOAD, before={PAYLOAD: PAYLOAD}, after={PAYLOAD: [PAYLOAD]})
    extra = [shape.count("tr") - was.count("tr") for shape, was in zip(shapes(), harmless, strict=True)]
    assert extra == [1 if page == "/audit/" else 0 for page in pages]


@pytest.mark.parametrize(
    "options",
    [
        {"when_running": "shutdown"}, {"start_after": True}, {"force": True},
        {"confirm_name": "x"}, {"down_to": 1}, {"undo_hours": -1},
        {"when_running": "shut_down", "method": "compress"}, {"__class__": "x"},
    ],
)  # fmt: skip
def test_no_policy_takes_an_option_that_shuts_guests_down_or_forces(admin: Client, options: dict[str, Any]) -> None:
    body = {"name": "x", "cron": "0 1 * * *", "options": options}
    assert admin.post("/api/v1/policies/", body, "application/json").status_code == 400
    policy = PolicyFactory.create()
    answer = admin.patch(f"/api/v1/policies/{policy.pk}/", {"options": options}, "application/json")
    assert answer.status_code == 400
    assert Policy.objects.get().options == policy.options


def test_no_policy_accepts_the_lines_that_a_change_of_a_configuration_would_drop(admin: Client) -> None:
    options = {"older_than_days": 30, "accept_hidden_lines": "0" * 40}
    body = {"name": "x", "cron": "0 1 * * *", "kind": "delete_old_snapshots", "options": options}
    assert admin.post("/api/v1/policies/", body, "application/json").status_code == 400
    body["options"] = {"older_than_days": 30}
    assert admin.post("/api/v1/policies/", body, "application/json").status_code == 201
    page = admin.get(f"/policies/{Policy.objects.get().pk}/change/").content.decode()
    assert "option-older_than_days" in page
    assert "accept_hidden_lines" not in page


def tried(client: Client, name: str, address: str, **headers: str) -> int:
    return client.post(
        "/login/", {"username": name, "password": "no"}, REMOTE_ADDR=address, headers=headers
    ).status_code


def test_neither_spelling_nor_a_made_up_header_gives_more_tries(db: None) -> None:
    UserFactory.create(username="ann")
    for spelling in ("ann", " ann", "ann ", "\uff41nn", "ann", "ann"):
        assert tried(Client(), spelling, "192.0.2.7") == 200 or spelling
    for number, spelling in enumerate(("ann", " ann", "\uff41nn")):
        forged = {"X-Forwarded-For": f"198.51.100.{number}", "X-Real-IP": "198.51.100.1", "Forwarded": "for=1.2.3.4"}
        assert tried(Client(), spelling, "192.0.2.7", **forged) == 429


def test_who_has_a_whole_network_of_ipv6_addresses_has_no_more_tries_than_others(db: None) -> None:
    UserFactory.create(username="ann", password="horse-battery-9")
    codes = [tried(Client(), "ann", f"2001:db8:1:2::{number:x}") for number in range(1, 9)]
    assert codes[-1] == 429
    assert tried(Client(), "ann", "2001:db8:1:3::1") == 200  # another network's
    page = Client().post("/login/", {"username": "ann", "password": "horse-battery-9"}, REMOTE_ADDR="2001:db8:1:2::99")
    assert (page.status_code, "Retry-After" in page.headers) == (429, True)
    assert address_of(RequestFactory().get("/", REMOTE_ADDR="2001:db8:1:2::99")) == "2001:db8:1:2::99"


def test_a_password_that_was_typed_as_a_name_stands_in_no_log_and_not_in_the_trail(
    db: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(8):
        tried(Client(), "horse-battery-9", "192.0.2.7")
    assert "horse-battery-9" not in caplog.text
    assert not [entry for entry in AuditEntry.objects.all() if "horse" in f"{entry.target}{entry.after}{entry.who}"]
