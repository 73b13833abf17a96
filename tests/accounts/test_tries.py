"""Strangers who try many passwords keep neither the cores nor the threads of the web server busy."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.contrib.auth.hashers import PBKDF2PasswordHasher, check_password, make_password
from django.http import HttpResponse
from django.test import Client
from pytest_django import Settings

from storage_admin.accounts import tries
from storage_admin.accounts.models import AuditEntry, User
from tests.accounts.signing_in import PASSWORD
from tests.factories import TokenFactory, UserFactory

pytestmark = pytest.mark.sql

HASHER = "storage_admin.accounts.tries.Hasher"


@pytest.fixture(autouse=True)
def fresh(settings: Settings) -> Iterator[None]:
    settings.SIGN_IN_TRIES_PER_MINUTE = 3
    tries.tries.forget()
    yield
    tries.tries.forget()


@pytest.fixture
def bob(db: None) -> User:
    return UserFactory.create(username="bob")


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passwords that were hashed or compared, in order."""
    found: list[str] = []

    def noted(password: str, *rest: Any, **more: Any) -> bool:
        found.append(password)
        return check_password(password, *rest, **more)

    monkeypatch.setattr("django.contrib.auth.base_user.check_password", noted)
    return found


def sign_in(password: str = PASSWORD, address: str = "192.0.2.7") -> HttpResponse:
    answer: HttpResponse = Client(REMOTE_ADDR=address).post("/login/", {"username": "bob", "password": password})  # type: ignore[assignment]
    return answer


def test_the_fourth_try_from_an_address_in_a_minute_is_stopped_before_anything_is_hashed(
    bob: User, hashed: list[str]
) -> None:
    assert [sign_in().status_code for _ in range(3)] == [302, 302, 302]
    before = len(hashed)
    stopped = sign_in()
    assert (stopped.status_code, len(hashed) - before) == (429, 0)
    assert 1 <= int(stopped["Retry-After"]) <= 20
    assert "Your password was not checked" in stopped.content.decode()
    assert sign_in(address="192.0.2.8").status_code == 302
    entry = AuditEntry.objects.get(what="too many sign-ins")
    assert (entry.address, entry.refused) == ("192.0.2.7", True)
    for _ in range(5):
        sign_in()
    assert AuditEntry.objects.filter(what="too many sign-ins").count() == 1


def test_a_network_of_ipv6_has_its_tries_together(bob: User) -> None:
    answers = [sign_in(address=f"2001:db8::{n}").status_code for n in range(1, 5)]
    assert answers == [302, 302, 302, 429]
    assert sign_in(address="2001:db8:0:1::1").status_code == 302


def test_tries_come_back_with_time(bob: User, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr("storage_admin.accounts.tries.time.monotonic", lambda: now[0])
    wait = int([sign_in() for _ in range(4)][-1]["Retry-After"])
    now[0] += wait
    assert sign_in().status_code == 302
    assert sign_in().status_code == 429


def test_the_page_that_changes_a_password_counts_as_well(bob: User) -> None:
    client = Client(REMOTE_ADDR="192.0.2.7")
    client.force_login(bob, "django.contrib.auth.backends.ModelBackend")
    form = {"old_password": "wrong", "new_password1": "x", "new_password2": "x"}
    assert [client.post("/password/", form).status_code for _ in range(4)] == [200, 200, 200, 429]


def test_addresses_that_are_made_up_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "MOST_ADDRESSES", 10)
    for number in range(50):
        tries.tries.take(f"192.0.2.{number}")
    assert len(tries.tries._buckets) == 10


def test_a_process_hashes_one_password_at_a_time_and_sends_who_would_wait_long_away(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    settings.PASSWORD_HASHERS = [HASHER]
    at_work, most, go_on, sent_away = 0, 0, threading.Event(), threading.Semaphore(0)

    def slow(*_given: Any, **_more: Any) -> str:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        go_on.wait(30)
        at_work -= 1
        return "pbkdf2_sha256$1$salt$hash"

    def one(_number: int) -> bool:
        try:
            make_password("x")
        except tries.TooManyTriesError:
            sent_away.release()
            return False
        return True

    monkeypatch.setattr(PBKDF2PasswordHasher, "encode", slow)
    with ThreadPoolExecutor(20) as pool:
        answers = pool.map(one, range(20))
        for _ in range(20 - tries.ROOM):
            assert sent_away.acquire(timeout=30)
        go_on.set()
        assert sum(answers) == tries.ROOM
    assert most == 1


def test_where_too_many_hash_pages_and_rest_say_when_to_come_back(bob: User, settings: Settings) -> None:
    settings.PASSWORD_HASHERS = [HASHER]
    User.objects.filter(pk=bob.pk).update(password=make_password(PASSWORD))
    TokenFactory.create(role="admin", secret="sa_x")
    for _ in range(tries.ROOM):
        assert tries._room.acquire(timeout=10)
    try:
        page = sign_in()
        assert (page.status_code, page["Retry-After"]) == (429, "3")
        rest = Client(headers={"Authorization": "Bearer sa_x"})
        asked = {"username": "eve", "role": "viewer"}
        answer = rest.post("/api/v1/users/", asked, content_type="application/json")
        assert (answer.status_code, answer.json()["code"], answer["Retry-After"]) == (429, "too_many_requests", "3")
    finally:
        for _ in range(tries.ROOM):
            tries._room.release()
    assert sign_in().status_code == 302


def test_a_password_that_was_hashed_before_still_opens(settings: Settings) -> None:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.PBKDF2PasswordHasher"]
    kept = make_password(PASSWORD)
    settings.PASSWORD_HASHERS = [HASHER]
    assert check_password(PASSWORD, kept)
    assert not check_password("wrong", kept)
