"""Bodies, methods and parameters that no endpoint wants: each of them says so, in one shape, and changes nothing."""

from typing import Any

import pytest
from django.db import transaction
from rest_framework.test import APIClient

from storage_admin.accounts.models import AuditEntry
from storage_admin.jobs.models import Job
from tests.api.test_roles import ANYBODY, CASES, Case
from tests.factories import TokenFactory

pytestmark = pytest.mark.sql

# Where an object is not there, nobody reads the body.
CHANGING = [case for case in CASES if case.method in {"post", "patch"} and case.answer != 404]
#: The schema and its page answer in other formats, and in their own way.
JSON = [case for case in CASES if case.role != ANYBODY]


@pytest.fixture
def client(db: None) -> APIClient:
    TokenFactory.create(role="admin", secret="sa_admin")
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION="Bearer sa_admin")
    return client


def wrong_answers(
    client: APIClient,
    cases: list[Case],
    world: dict[str, Any],
    expected: int,
    *,
    method: str = "",
    query: str = "",
    body: str = "",
    kind: str = "application/json",
) -> list[str]:
    """The addresses that answered otherwise than with that status, a code and a sentence, or that changed something."""
    wrong = []
    for case in cases:
        path = f"/api/v1/{(case.path.partition('?')[0] if method else case.path).format(**world)}"
        path += f"{'&' if '?' in path else '?'}{query}" if query else ""
        with transaction.atomic():
            before = (Job.objects.count(), AuditEntry.objects.count())
            answer = client.generic((method or case.method).upper(), path, body, content_type=kind)
            changed = (Job.objects.count(), AuditEntry.objects.count()) != before
            transaction.set_rollback(True)
        told = set(answer.json()) if answer.content else set()
        if answer.status_code != expected or changed or told != {"code", "detail", "fields"}:
            wrong.append(f"{method or case.method} {path}: {answer.status_code} {answer.content[:80]!r} {changed=}")
    return wrong  # fmt: skip


def test_a_body_of_two_mebibytes_is_refused_everywhere(world: dict[str, Any], client: APIClient) -> None:
    body = '{"x": "' + "y" * (2 << 20) + '"}'
    assert wrong_answers(client, CHANGING, world, 400, body=body) == []


def test_json_that_is_nested_without_end_is_refused_everywhere(world: dict[str, Any], client: APIClient) -> None:
    for body in ('{"options": ' + "[" * 100_000 + "]" * 100_000 + "}", '{"a":' * 50_000 + "1" + "}" * 50_000):
        assert wrong_answers(client, CHANGING, world, 400, body=body) == []


@pytest.mark.parametrize("kind", ["text/plain", "application/xml", "application/x-www-form-urlencoded"])
def test_another_content_type_is_refused_everywhere(world: dict[str, Any], client: APIClient, kind: str) -> None:
    assert wrong_answers(client, CHANGING, world, 400, body='{"kind": "scan"}', kind=kind) == []


def test_a_field_that_is_not_known_is_named_everywhere(world: dict[str, Any], client: APIClient) -> None:
    assert wrong_answers(client, CHANGING, world, 400, body='{"colour": "red"}') == []


def test_a_parameter_that_is_not_known_is_refused_everywhere(world: dict[str, Any], client: APIClient) -> None:
    assert wrong_answers(client, JSON, world, 400, query="colour=red") == []


def test_methods_that_do_not_work_are_refused_everywhere(world: dict[str, Any], client: APIClient) -> None:
    for method in ("put", "options", "trace"):
        assert wrong_answers(client, JSON, world, 405, method=method, body="{}") == []


def test_head_answers_as_get_without_a_body(world: dict[str, Any], client: APIClient) -> None:
    for case in JSON:
        if case.method == "get":
            path = f"/api/v1/{case.path.format(**world)}"
            head, get = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (get.status_code, b""), path
            assert head["Content-Type"] == get["Content-Type"], path
