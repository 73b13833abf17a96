"""Policies, users, tokens, webhooks and deliveries as CSV: what their pages say, and nothing that opens a door."""

from datetime import UTC, datetime

import pytest
from django.test import Client

from storage_admin.accounts.models import Session, User
from storage_admin.events import addresses
from tests.factories import (
    GIB,
    DeliveryFactory,
    ImageFactory,
    JobFactory,
    PolicyFactory,
    PolicyPickFactory,
    PolicyRunFactory,
    TokenFactory,
    UserFactory,
    WebhookFactory,
)
from tests.web.html import tags_of
from tests.web.test_csv_lists import rows_of
from tests.working import at_most_queries

pytestmark = pytest.mark.sql

FILES = {
    "policies": "/policies/export.csv",
    "users": "/users/export.csv",
    "tokens": "/tokens/export.csv",
    "webhooks": "/webhooks/export.csv",
    "deliveries": "/deliveries/export.csv",
}
AT = datetime(2026, 11, 22, 6, 0, tzinfo=UTC)
URL = "https://hooks.example.org:8443/services/T0PATHSECRET?key=QUERYSECRET"


def cells(row: dict[str, str], names: str) -> list[str]:
    return [row[name] for name in names.split()]


def test_a_policy_has_its_window_and_its_last_run(viewer: Client) -> None:
    policy = PolicyFactory.create(name="=nights", enabled=False)
    run = PolicyRunFactory.create(policy=policy, due=AT, state="finished")
    job = JobFactory.create(target=ImageFactory.create(), freed_bytes=GIB, undo_bytes=0)
    PolicyPickFactory.create(run=run, job=job, state="succeeded", predicted_bytes=2 * GIB)
    PolicyPickFactory.create(run=run, state="failed")
    PolicyFactory.create(name="young")
    old, young = rows_of(viewer, FILES["policies"])
    assert (old["name"], old["enabled"], old["cron"], old["opens_next"]) == ("'=nights", "no", "0 22 * * *", "")
    assert cells(old, "last_run last_run_due last_run_state") == [str(run.pk), "2026-11-22T06:00:00Z", "finished"]
    told = cells(old, "jobs failed predicted_bytes won_bytes held_bytes")
    assert told == ["2", "1", str(2 * GIB), str(GIB), "0"]
    assert young["opens_next"].endswith("T22:00:00Z")
    assert {young[name] for name in ("last_run", "last_run_due", "jobs", "failed", "won_bytes", "held_bytes")} == {""}


def test_users_have_their_rights_and_no_password(admin: Client) -> None:
    UserFactory.create(username="ann", role="operator", hosts=["a", "b"], email="ann@example.org", is_active=False)
    ann, me = rows_of(admin, FILES["users"])
    assert (ann["name"], ann["role"], ann["hosts"], ann["active"]) == ("ann", "operator", "a, b", "no")
    assert (ann["sessions"], ann["last_signed_in"], ann["one_time_password"]) == ("0", "", "no")
    assert (me["name"], me["hosts"], me["sessions"]) == ("the-admin", "all", "1")


def test_tokens_have_their_rights_and_no_secret(admin: Client) -> None:
    TokenFactory.create(name="nightly", role="operator", hosts=["a"], expires=AT.replace(year=2020), last_used=AT)
    TokenFactory.create(name="plain")
    nightly, plain = rows_of(admin, FILES["tokens"])
    assert cells(nightly, "role hosts expired created_by") == ["operator", "a", "yes", "admin"]
    assert cells(nightly, "expires last_used") == ["2020-11-22T06:00:00Z", "2026-11-22T06:00:00Z"]
    assert cells(plain, "hosts expires expired last_used") == ["all", "", "no", ""]


def test_webhooks_have_their_server_and_how_it_goes(admin: Client) -> None:
    hook = WebhookFactory.create(name="chat", url=URL, events=["job.finished"])
    DeliveryFactory.create(webhook=hook, state="sent", sent=AT)
    DeliveryFactory.create(webhook=hook, attempts=2)
    DeliveryFactory.create(webhook=hook, state="given_up")
    WebhookFactory.create(name="quiet", enabled=False)
    chat, quiet = rows_of(admin, FILES["webhooks"])
    assert cells(chat, "server events enabled") == ["https://hooks.example.org:8443", "job.finished", "yes"]
    assert cells(chat, "on_their_way failing given_up last_sent") == ["1", "1", "1", "2026-11-22T06:00:00Z"]
    assert (quiet["events"], quiet["enabled"], quiet["last_sent"]) == ("everything", "no", "")


def test_deliveries_are_those_of_all_webhooks_and_mail_or_of_one(admin: Client) -> None:
    chat = WebhookFactory.create(name="chat")
    sent = DeliveryFactory.create(webhook=chat, state="sent", sent=AT, attempts=1, status_code=204, next_try=AT)
    due = DeliveryFactory.create(webhook=chat, next_try=AT)
    mail = DeliveryFactory.create(webhook=None, recipients=["a@example.org", "b@example.org"])
    other = DeliveryFactory.create()
    rows = {int(row["id"]): row for row in rows_of(admin, FILES["deliveries"])}
    assert list(rows) == [other.pk, mail.pk, due.pk, sent.pk]
    assert (rows[mail.pk]["webhook"], rows[mail.pk]["mail_to"]) == ("", "a@example.org, b@example.org")
    assert cells(rows[due.pk], "webhook next_try status_code") == ["chat", "2026-11-22T06:00:00Z", ""]
    assert cells(rows[sent.pk], "next_try status_code event") == ["", "204", "job.finished"]
    assert [int(row["id"]) for row in rows_of(admin, f"/webhooks/{chat.pk}/deliveries.csv")] == [due.pk, sent.pk]


def test_no_file_has_a_secret_a_digest_or_a_key(admin: Client) -> None:
    token = TokenFactory.create(secret="sa_topsecret")
    hook = WebhookFactory.create(url=URL, old_secret_locked=b"OLDLOCKED")
    DeliveryFactory.create(
        webhook=hook, problem="The server answered 404: Cannot POST /services/T0PATHSECRET?key=QUERYSECRET"
    )
    hidden = [token.digest, "sa_topsecret", "PATHSECRET", "QUERYSECRET", "OLDLOCKED", "whsec_", "pbkdf2", "argon2"]
    hidden += [user.password for user in User.objects.all()] + [row.session_key for row in Session.objects.all()]
    hidden += [str(bytes(hook.secret_locked))]
    for address in [*FILES.values(), f"/webhooks/{hook.pk}/deliveries.csv", "/audit/export.csv"]:
        text = admin.get(address).getvalue().decode()
        assert text.count("\r\n") >= 1
        assert [secret for secret in hidden if secret in text] == [], address


@pytest.mark.parametrize(
    ("url", "server"),
    [(URL, "https://hooks.example.org:8443"), ("http://[::1]:9/x", "http://[::1]:9"), ("http://a", "http://a")],
)
def test_of_an_address_its_server_is_told(url: str, server: str) -> None:
    assert addresses.server(url) == server
    assert addresses.without("http://a/", "GET / was 404") == "GET / was 404"


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_its_name_its_heading_and_no_query_for_each_row(admin: Client, name: str) -> None:
    for _ in range(20):
        DeliveryFactory.create()
        TokenFactory.create()
        UserFactory.create()
        PolicyRunFactory.create()
    with at_most_queries(9):
        answer = admin.get(FILES[name])
        assert answer["Content-Disposition"].startswith(f'attachment; filename="{name}-20')
        text = answer.getvalue().decode()
    assert text.startswith("id,")
    assert text.count("\r\n") >= 21


def test_each_link_to_a_file_has_a_name_of_its_own(admin: Client) -> None:
    hook = WebhookFactory.create()
    for page in ("/policies/", "/users/", "/tokens/", "/webhooks/", f"/webhooks/{hook.pk}/"):
        text = admin.get(page).content.decode()
        links = [found["href"] for tag, found in tags_of(text) if tag == "a" and ".csv" in (found.get("href") or "")]
        names = [text.partition(f'href="{link}"')[2].partition("</svg>")[2].partition("</a>")[0] for link in links]
        assert links, page
        assert all(name.strip() for name in names), page
        assert len(set(names)) == len(names), page
