"""The database is locked, full or away: REST answers in its one shape, and pages plainly."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test import Client
from rest_framework.test import APIClient

from tests.factories import HostFactory, ImageFactory, TokenFactory, UserFactory
from tests.harness.patching import raising

pytestmark = [pytest.mark.django_db, pytest.mark.sql]
REASONS = ["database is locked", "database or disk is full", "server closed the connection unexpectedly"]


@contextmanager
def failing(reason: str, *, writes_only: bool = False) -> Iterator[None]:
    """Every statement, or every one that writes, ends like this."""

    def fail(execute: Any, sql: str, params: Any, many: Any, context: Any) -> Any:
        if writes_only and sql.lstrip().upper().startswith(("SELECT", "SAVEPOINT", "RELEASE", "ROLLBACK")):
            return execute(sql, params, many, context)
        raise OperationalError(reason)

    with connection.execute_wrapper(fail):
        yield


@pytest.fixture
def program() -> APIClient:
    TokenFactory.create(secret="sa_test", role="admin")
    client = APIClient(raise_request_exception=False)
    client.credentials(HTTP_AUTHORIZATION="Bearer sa_test")
    return client


@pytest.fixture
def browser() -> Client:
    client = Client(raise_request_exception=False)
    client.force_login(UserFactory.create(role="admin"))
    return client


def assert_unavailable(response: Any, word: str = "") -> None:
    assert (response.status_code, response.headers["Content-Type"]) == (503, "application/json")
    body = response.json()
    assert (set(body), body["code"]) == ({"code", "detail", "fields"}, "database_unavailable")
    assert word in body["detail"]
    assert int(response.headers["Retry-After"]) > 0


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("path", ["images/", "hosts/", "overview/", "jobs/1/", "audit/", "nothing/"])
def test_reading_over_rest_says_that_the_database_is_away(program: APIClient, path: str, reason: str) -> None:
    with failing(reason):
        assert_unavailable(program.get(f"/api/v1/{path}"))


@pytest.mark.parametrize(("reason", "word"), list(zip(REASONS, ["locked", "full", "answer"], strict=True)))
@pytest.mark.parametrize("what", ["image", "host"])
def test_a_job_that_cannot_be_written_is_answered_in_json(
    program: APIClient, what: str, reason: str, word: str
) -> None:
    rows = {"image": ImageFactory.create(), "host": HostFactory.create()}
    body = {"kind": {"image": "analyze", "host": "scan"}[what], what: rows[what].pk}
    with failing(reason, writes_only=True):
        assert_unavailable(program.post("/api/v1/jobs/", body, format="json"), word)


def test_a_change_that_cannot_be_written_is_answered_in_json(program: APIClient) -> None:
    host = HostFactory.create()
    with failing("database is locked", writes_only=True):
        assert_unavailable(program.patch(f"/api/v1/hosts/{host.pk}/", {"max_jobs": 2}, format="json"), "locked")


def test_a_browsers_session_that_cannot_be_read_is_answered_in_json(browser: Client) -> None:
    with failing("database is locked"):
        assert_unavailable(browser.get("/api/v1/images/"))


@pytest.mark.parametrize("path", ["/", "/images/", "/jobs/"])
def test_a_page_is_a_plain_one(browser: Client, path: str) -> None:
    with failing("database is locked"):
        response = browser.get(path)
    assert response.status_code == 503
    assert b"The database is locked by another process" in response.content
    assert b"defect" not in response.content


def test_what_a_form_sends_is_answered_by_a_plain_page(browser: Client) -> None:
    image = ImageFactory.create()
    with failing("database or disk is full", writes_only=True):
        response = browser.post(f"/images/{image.pk}/analyze/")
    assert response.status_code == 503
    assert b"disk of the database is full" in response.content


def test_a_defect_is_no_page_over_rest(program: APIClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage_admin.hosts.api.HostEndpoints.list", raising(ZeroDivisionError()))
    response = program.get("/api/v1/hosts/")
    assert (response.status_code, response.json()["code"]) == (500, "bug")
