"""The audit trail: append-only in the database itself, not to be flooded, and found again."""

import csv
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from axes.models import AccessAttempt
from django.core.management import call_command
from django.db import DatabaseError, connection, transaction
from django.test import Client, RequestFactory
from django.utils import timezone
from pytest_django import Settings
from rest_framework.test import APIClient

from storage_admin.accounts import lockouts, refusals
from storage_admin.accounts.addresses import address_of
from storage_admin.accounts.models import Actor, AuditEntry, RefusedAttempts
from tests.accounts.signing_in import PASSWORD
from tests.factories import AuditEntryFactory, TokenFactory, UserFactory, an_hour_ago
from tests.working import client_as

pytestmark = pytest.mark.sql


@pytest.mark.parametrize("sql", ["UPDATE accounts_auditentry SET who = 'x'", "DELETE FROM accounts_auditentry"])
def test_the_database_refuses_to_change_or_delete_an_entry(db: None, sql: str) -> None:
    AuditEntryFactory.create(who="ann")
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(sql)
    assert AuditEntry.objects.get().who == "ann"


@pytest.mark.django_db(transaction=True)
def test_a_database_can_be_emptied_and_refuses_again_afterwards() -> None:
    AuditEntryFactory.create()
    call_command("flush", interactive=False, verbosity=0)
    assert not AuditEntry.objects.exists()
    AuditEntryFactory.create()
    with pytest.raises(DatabaseError), connection.cursor() as cursor:
        cursor.execute("DELETE FROM accounts_auditentry")
    assert AuditEntry.objects.count() == 1


def scan(client: Client, times: int) -> None:
    for _ in range(times):
        assert client.post("/hosts/1/scan/").status_code == 403


def test_a_forbidden_attempt_stands_there_once_and_then_with_how_often(db: None) -> None:
    client = Client(REMOTE_ADDR="192.0.2.7")
    client.force_login(UserFactory.create(username="eve"), "django.contrib.auth.backends.ModelBackend")
    scan(client, 50)
    entry = AuditEntry.objects.get(what="forbidden")
    assert (entry.who, entry.target, entry.refused, entry.address) == ("eve", "POST /hosts/1/scan/", True, "192.0.2.7")
    assert entry.after == {"why": "This needs the role operator; eve has the role viewer."}
    assert client.get("/audit/").status_code == 403
    assert AuditEntry.objects.filter(what="forbidden").count() == 2
    refusals.settle(timezone.now() + timedelta(minutes=11))
    again = AuditEntry.objects.get(what="forbidden", after__has_key="times")
    assert again.after is not None
    assert again.after["times"] == 49
    assert not RefusedAttempts.objects.exists()


def test_a_forbidden_request_to_the_api_stands_there_too(db: None) -> None:
    TokenFactory.create(name="nightly", secret="sa_x")
    client = APIClient(HTTP_AUTHORIZATION="Bearer sa_x", REMOTE_ADDR="192.0.2.7")
    assert client.get("/api/v1/audit/").status_code == 403
    entry = AuditEntry.objects.get(what="forbidden")
    assert (entry.who, entry.target, entry.address) == ("token nightly", "GET /api/v1/audit/", "192.0.2.7")


def test_tokens_that_open_nothing_do_not_flood_the_trail(db: None) -> None:
    TokenFactory.create(name="old", secret="sa_old", expires=an_hour_ago())
    for number in range(40):
        for secret in ("sa_old", f"guess-{number}"):
            client = APIClient(HTTP_AUTHORIZATION=f"Bearer {secret}")
            assert client.get(f"/api/v1/images/{number}/").status_code == 401
    entries = AuditEntry.objects.filter(what="token refused")
    assert {(one.who, str(one.after)) for one in entries} == {
        ("token old", "{'why': 'expired'}"),
        ("nobody", "{'why': 'no such token'}"),
    }
    assert entries.count() == 2
    assert "guess" not in str(list(entries.values()))


def test_many_addresses_share_an_entry(db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "MOST_AT_ONCE", 5)
    for number in range(60):
        client = APIClient(HTTP_AUTHORIZATION="Bearer x", REMOTE_ADDR=f"192.0.2.{number}")
        assert client.get("/api/v1/images/").status_code == 401
    assert AuditEntry.objects.count() == 6
    assert "too many different ones" in str(AuditEntry.objects.latest("id").after)


def test_wrong_passwords_and_a_lockout_are_recorded_with_no_password_in_them(db: None) -> None:
    UserFactory.create(username="anna")
    client = Client(REMOTE_ADDR="192.0.2.7")
    for _ in range(7):
        answer = client.post("/login/", {"username": "anna", "password": "hunter2-secret"})
    assert answer.status_code == 429
    assert 0 < int(answer["Retry-After"]) <= 900
    assert "15 minutes" in answer.content.decode()
    client.post("/login/", {"username": "my-password-by-mistake", "password": "x"})
    found = set(AuditEntry.objects.values_list("what", "target", "address", "refused"))
    assert found == {
        ("sign-in failed", "anna", "192.0.2.7", True),
        ("locked out", "anna", "192.0.2.7", True),
        ("sign-in failed", "(no such user)", "192.0.2.7", True),
    }
    everything = str(list(AuditEntry.objects.values()))
    assert "hunter2" not in everything
    assert "mistake" not in everything


def test_a_lockout_is_of_a_name_and_an_address_ends_by_itself_and_is_lifted(admin: Actor) -> None:
    client = Client(REMOTE_ADDR="192.0.2.7")
    wrong, right = ({"username": "root", "password": text} for text in ("x", PASSWORD))
    for _ in range(6):
        client.post("/login/", wrong)
    assert client.post("/login/", right).status_code == 429
    assert Client(REMOTE_ADDR="192.0.2.8").post("/login/", right).status_code == 302
    (found,) = lockouts.lockouts()
    assert (found.username, found.address, found.failures) == ("root", "192.0.2.7", 6)
    # Who goes on trying is not locked out for longer than the page said.
    client.post("/login/", wrong)
    assert lockouts.lockouts()[0].until == found.until
    assert lockouts.lockouts(timezone.now() + timedelta(minutes=16)) == []
    lockouts.unlock(admin, found)
    assert client.post("/login/", right).status_code == 302
    assert AuditEntry.objects.filter(what="lockout lifted", target="root").count() == 1


def test_a_name_has_its_tries_together_however_it_is_typed(admin: Actor) -> None:
    client = Client(REMOTE_ADDR="192.0.2.7")
    right = {"username": "root", "password": PASSWORD}

    def locked(*names: str) -> list[bool]:
        return [client.post("/login/", {"username": name, "password": "x"}).status_code == 429 for name in names]

    # With letters of full width, and with an accent: directories take these for the same name, too.
    assert locked("root", "ROOT", "Root", "\uff32oot", "ro\u00f6t") == [False] * 5
    assert locked("rOOT") == [True]
    assert client.post("/login/", right).status_code == 429
    assert locked("another", "\u0130" * 150) == [False, False]
    (found,) = lockouts.lockouts()
    assert (found.username, found.failures) == ("root", 6)
    by_rest = client_as(role="admin")
    (told,) = by_rest.get("/api/v1/lockouts/").json()["results"]
    assert (told["username"], told["failures"]) == ("root", 6)
    assert by_rest.delete(f"/api/v1/lockouts/{told['id']}/").status_code == 204
    assert client.post("/login/", right | {"username": "ROOT"}).status_code == 200, "the name itself is exact"
    assert client.post("/login/", right).status_code == 302
    assert not AccessAttempt.objects.filter(username__iexact="root").exists(), "a right one forgets the wrong ones"


def test_a_right_password_on_its_page_forgets_the_tries_of_every_spelling(db: None) -> None:
    user = UserFactory.create(username="Anna", password=PASSWORD)
    client = Client(REMOTE_ADDR="192.0.2.7")
    client.force_login(user, "django.contrib.auth.backends.ModelBackend")
    for name in ("anna", "Anna"):
        Client(REMOTE_ADDR="192.0.2.7").post("/login/", {"username": name, "password": "x"})
    assert sum(row.failures_since_start for row in AccessAttempt.objects.filter(username="anna")) == 2
    form = {"old_password": PASSWORD, "new_password1": "horse-battery-9-x", "new_password2": "horse-battery-9-x"}
    assert client.post("/password/", form).status_code == 302
    assert not AccessAttempt.objects.exists()


@pytest.mark.parametrize(
    ("proxies", "told", "seen"),
    [([], "203.0.113.9", "192.0.2.1"), (["192.0.2.1"], "203.0.113.9", "203.0.113.9"),
     (["192.0.2.0/24"], "198.51.100.1, 203.0.113.9, 192.0.2.5", "203.0.113.9"),
     (["192.0.2.1"], "", "192.0.2.1"), (["192.0.2.1"], "<script>", "192.0.2.1"),
     (["192.0.2.1"], "203.0.113.9, ::ffff:198.51.100.4", "198.51.100.4"),
     (["192.0.2.1"], "203.0.113.9:5678", "203.0.113.9"), (["192.0.2.1"], "[2001:db8::1]:443", "2001:db8::1"),
     (["192.0.2.0/24"], "198.51.100.1, 203.0.113.9:80, 192.0.2.5:443", "203.0.113.9"),
     (["192.0.2.1"], "[2001:db8::1]", "2001:db8::1"), (["192.0.2.1"], "2001:db8::1", "2001:db8::1"),
     (["192.0.2.1"], "203.0.113.9:http", "192.0.2.1"), (["192.0.2.1"], ":80", "192.0.2.1")],
)  # fmt: skip
def test_a_proxys_word_for_an_address_is_taken_from_those_that_the_settings_name(
    settings: Settings, proxies: list[str], told: str, seen: str
) -> None:
    settings.TRUSTED_PROXIES = proxies
    request = RequestFactory().get("/", REMOTE_ADDR="192.0.2.1", headers={"X-Forwarded-For": told})
    assert address_of(request) == seen


def test_an_address_that_is_none_is_no_error() -> None:
    assert address_of(RequestFactory().get("/", REMOTE_ADDR="")) is None


def downloaded(client: Client, address: str) -> str:
    answer: Any = client.get(address)
    return b"".join(answer.streaming_content).decode()


Get = Callable[[str], list[str]]


@pytest.fixture
def targets(admin: Actor) -> Get:
    """What a query finds on the page, in the API and in the CSV, which is the same."""
    client = client_as(role="admin")

    def get(query: str) -> list[str]:
        found = [row["target"] for row in client.get(f"/api/v1/audit/?{query}").json()["results"]]
        lines = csv.DictReader(downloaded(client, f"/audit/export.csv?{query}").splitlines())
        assert [line["target"] for line in lines] == found
        page = client.get(f"/audit/?{query}").content.decode()
        assert all(target in page for target in found)
        return found

    return get


def test_the_trail_is_filtered_alike_on_the_page_in_the_api_and_in_the_csv(targets: Get) -> None:
    AuditEntryFactory.create(target="one", who="ann", what="host added", address="192.0.2.7")
    AuditEntryFactory.create(target="two", who="token x", what="forbidden", refused=True)
    assert targets("who=ANN") == ["one"]
    assert targets("what=forb") == ["two"]
    assert targets("target=tw") == ["two"]
    assert targets("refused=true") == ["two"]
    assert targets("refused=false") == ["one"]
    assert targets("address=192.0.2.7") == ["one"]
    assert targets("search=o") == ["two", "one"]
    today = timezone.now().date()
    assert targets(f"from={today}&to={today}") == ["two", "one"]
    assert targets(f"to={today - timedelta(days=1)}") == []


@pytest.mark.parametrize("query", ["refused=perhaps", "from=soon", "address=x", "nothing=1", "who=%00"])
def test_a_filter_that_means_nothing_is_an_error_in_the_api_and_told_on_the_page(admin: Actor, query: str) -> None:
    client = client_as(role="admin")
    assert client.get(f"/api/v1/audit/?{query}").status_code == 400
    assert client.get(f"/audit/?{query}").status_code == 200
