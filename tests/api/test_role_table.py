"""Everybody, every endpoint, an object that is there, one that is not, one of another host: each answer, exactly.

The cases are those of ``test_roles``; whatever the API gets in the future needs one there.
"""

from collections.abc import Callable, Iterator
from datetime import datetime
from string import Formatter
from typing import Any
from uuid import UUID

import pytest
from django.db import transaction
from django.urls import get_resolver, resolve
from rest_framework.test import APIClient

from storage_admin.jobs.models import Job
from tests.api.test_roles import ADMIN, ANYBODY, CASES, OPERATOR, RANKS, VIEWER, Case, ids, send
from tests.chance import night
from tests.factories import HostFactory, TokenFactory, UserFactory, an_hour_ago

MISSING = 987_654_321
BACKEND = "django.contrib.auth.backends.ModelBackend"


def session(role: str, hosts: list[str] | None = None) -> APIClient:
    client = APIClient()
    client.force_login(UserFactory.create(role=role, hosts=hosts or []), BACKEND)
    return client


def token(role: str, hosts: list[str] | None = None, expires: datetime | None = None) -> APIClient:
    client, secret = APIClient(), f"sa_{role}-{'-'.join(hosts or ['all'])}-{expires is None}"
    TokenFactory.create(role=role, secret=secret, hosts=hosts or [], expires=expires)
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
    return client


def missing(world: dict[str, Any]) -> dict[str, Any]:
    """The same world, in which nothing is there."""
    nothing = {int: MISSING, UUID: UUID(int=MISSING)}
    return {name: nothing.get(type(value), "nowhere") for name, value in world.items()}


def gone(case: Case) -> int:
    """The answer where the object does not exist for who asks: 404; 400 where the body names a host; else as ever."""
    if "{" in case.path or case.body.get("kind"):
        return 404
    named = any(str(value).strip("[]'").startswith("{") for value in case.body.values())
    return 400 if named else case.answer


def answer_for(case: Case, role: str, answer: int) -> int:
    """The answer for that role, where whoever may do everything gets ``answer``."""
    needed = (case.first or case.role) if answer == 404 else case.role
    return answer if RANKS.index(role) >= RANKS.index(needed) else 403


def cells(case: Case) -> Iterator[tuple[str, APIClient, bool, int]]:
    """Who asks, whether the object is there, and the answer."""
    for there in (True, False):
        yield "nobody", APIClient(), there, 200 if case.role == ANYBODY else 401
    yield "who has an expired token", token(ADMIN, expires=an_hour_ago()), True, 401
    kinds: dict[str, Callable[..., APIClient]] = {"token": token}
    if night():
        kinds["session"] = session
    for name, make in kinds.items():
        for role in (VIEWER, OPERATOR, ADMIN):
            client, who = make(role), f"{name} {role}"
            yield who, client, True, answer_for(case, role, case.answer)
            yield who, client, False, answer_for(case, role, gone(case))
            # What concerns all hosts is not for who is limited to some.
            own, others = (403, 403) if case.everywhere else (case.answer, gone(case))
            if case.of_a_host:
                others = gone(case)
            yield f"{who} of this host", make(role, ["mine"]), True, answer_for(case, role, own)
            yield f"{who} of another host", make(role, ["other"]), True, answer_for(case, role, others)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_each_answer_of_the_table(world: dict[str, Any], case: Case) -> None:
    HostFactory.create(slug="other")
    nothing, wrong = missing(world), []
    for who, client, there, expected in cells(case):
        with transaction.atomic():
            jobs = Job.objects.count()
            answer = send(client, case, world if there else nothing)
            if answer >= 400 and Job.objects.count() != jobs:
                wrong.append(f"{who}: {answer}, and yet there is a job")
            transaction.set_rollback(True)
        if answer != expected:
            wrong.append(f"{who}, {'there' if there else 'missing'}: {answer}, expected {expected}")
    assert wrong == []


def route(path: str) -> str:
    """The pattern that a case's path is for, whatever its objects are called."""
    names = [name for _, name, _, _ in Formatter().parse(path) if name is not None]
    ones: dict[str, Any] = dict.fromkeys(names, 1) | {"session": UUID(int=1)}
    return resolve(f"/api/v1/{path.partition('?')[0].format(**ones)}").route


def test_each_method_of_each_address_has_a_case() -> None:
    asked = {(case.method, route(case.path)) for case in CASES}
    there = set(methods(get_resolver("storage_admin.api.urls").url_patterns, "api/v1/"))
    assert len(there) > 70
    assert there == asked


def methods(patterns: list[Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Each address with each method that its view has a handler for."""
    for pattern in patterns:
        route = prefix + str(pattern.pattern)
        if hasattr(pattern, "url_patterns"):
            yield from methods(pattern.url_patterns, route)
        elif "^" not in route:
            view = pattern.callback
            handlers = getattr(view, "actions", None) or {
                method: method for method in ("get", "post", "put", "patch", "delete") if hasattr(view.cls, method)
            }
            yield from ((method, route) for method in handlers if method not in {"head", "options"})
