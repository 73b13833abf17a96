"""Every endpoint against everybody who may knock: who gets what."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from axes.models import AccessAttempt
from django.urls import get_resolver
from django.utils import timezone
from rest_framework.test import APIClient

from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.models import Job
from tests.factories import (
    AlertFactory,
    BenchmarkFactory,
    DeliveryFactory,
    HostFactory,
    ImageFactory,
    ImageUseFactory,
    JobFactory,
    PolicyRunFactory,
    SavedViewFactory,
    StoragePoolFactory,
    TokenFactory,
    UserFactory,
    WatchFactory,
    WebhookFactory,
    an_hour_ago,
)

RESULT_LINE = "1.96,1.96,TEST,1,1387339401,4G,,,,374271,39,214541,19,,,392015,17" + "," * 31
ANYBODY, VIEWER, OPERATOR, ADMIN = "anybody", "viewer", "operator", "admin"
RANKS = [ANYBODY, VIEWER, OPERATOR, ADMIN]


@dataclass(frozen=True)
class Case:
    """A request, the role that it needs, and what it answers to whoever has it."""

    method: str
    path: str
    role: str
    answer: int = 200
    body: dict[str, Any] = field(default_factory=dict)
    #: Concerns no single host: not for a token that is limited to some.
    everywhere: bool = False


CASES = [
    Case("get", "", VIEWER),
    Case("get", "hosts/", VIEWER),
    Case("get", "hosts/{host}/", VIEWER),
    Case("patch", "hosts/{host}/", ADMIN, body={"name": "x"}),
    Case("post", "hosts/{host}/scan/", OPERATOR, 202),
    Case("get", "pools/", VIEWER),
    Case("get", "pools/{pool}/", VIEWER),
    Case("post", "pools/", ADMIN, 201, {"host": "{slug}", "path": "{folder}"}),
    Case("patch", "pools/{pool}/", ADMIN, body={"name": "x"}),
    Case("delete", "pools/{spare}/", ADMIN, 204),
    Case("get", "guests/", VIEWER),
    Case("get", "guests/{guest}/", VIEWER),
    Case("get", "images/", VIEWER),
    Case("get", "images/{image}/", VIEWER),
    Case("patch", "images/{image}/", ADMIN, body={"declared_format": "qcow2"}),
    Case("get", "images/{image}/chain/", VIEWER),
    Case("post", "images/{lonely}/set-aside/", ADMIN, 202, {"grace_days": 7}),
    Case("post", "images/{parked}/restore/", ADMIN, 202),
    Case("get", "images/{image}/history/", VIEWER),
    Case("get", "job-kinds/", VIEWER),
    Case("get", "jobs/", VIEWER),
    Case("get", "jobs/{job}/", VIEWER),
    Case("get", "jobs/{job}/log/", VIEWER),
    Case("post", "jobs/", OPERATOR, 202, {"kind": "analyze", "image": "{image}"}),
    Case("post", "jobs/", VIEWER, 200, {"kind": "analyze", "image": "{image}", "dry_run": True}),
    Case("post", "jobs/{active}/cancel/", OPERATOR, 202),
    Case("post", "jobs/{failed}/retry/", OPERATOR, 202),
    Case("post", "jobs/{job}/undo/", OPERATOR, 202),
    Case("post", "jobs/{job}/undo/", ADMIN, 202, {"force": True}),
    Case("post", "jobs/{job}/discard-undo/", ADMIN, 202),
    Case("get", "benchmarks/", VIEWER),
    Case("get", "benchmarks/{benchmark}/", VIEWER),
    Case("get", "benchmarks/{benchmark}/results/", VIEWER),
    Case("get", "benchmarks/compare/?ids={benchmark}", VIEWER),
    Case("get", "benchmarks/profiles/?pool={pool}", VIEWER),
    Case("post", "benchmarks/", OPERATOR, 202, {"kind": "dd", "pool": "{pool}"}),
    Case("post", "benchmarks/paste/", OPERATOR, 201, {"text": RESULT_LINE}, everywhere=True),
    Case("get", "benchmark-watches/", VIEWER),
    Case("post", "benchmark-watches/", OPERATOR, 201, {"kind": "dd", "pool": "{pool}", "every_hours": 24}),
    Case("delete", "benchmark-watches/{watch}/", OPERATOR, 204),
    Case("get", "alerts/", VIEWER),
    Case("get", "alerts/{alert}/", VIEWER),
    Case("post", "alerts/{alert}/ack/", OPERATOR),
    Case("get", "webhooks/", ADMIN, everywhere=True),
    Case("post", "webhooks/", ADMIN, 201, {"name": "new", "url": "https://example.org/hook"}, everywhere=True),
    Case("get", "webhooks/{webhook}/", ADMIN, everywhere=True),
    Case("patch", "webhooks/{webhook}/", ADMIN, body={"name": "x"}, everywhere=True),
    Case("delete", "webhooks/{webhook}/", ADMIN, 204, everywhere=True),
    Case("post", "webhooks/{webhook}/rotate-secret/", ADMIN, everywhere=True),
    Case("post", "webhooks/{webhook}/test/", ADMIN, 202, everywhere=True),
    Case("get", "webhooks/{webhook}/deliveries/", ADMIN, everywhere=True),
    Case("post", "webhooks/{webhook}/deliveries/{delivery}/resend/", ADMIN, 202, everywhere=True),
    Case("get", "policies/", VIEWER),
    Case("post", "policies/", ADMIN, 201, {"name": "new", "cron": "0 22 * * *", "hosts": ["{host}"]}),
    Case("get", "policies/{policy}/", VIEWER),
    Case("patch", "policies/{policy}/", ADMIN, body={"max_jobs_per_host": 2}),
    Case("delete", "policies/{policy}/", ADMIN, 204),
    Case("get", "policies/{policy}/preview/", OPERATOR),
    Case("post", "policies/preview/", OPERATOR, 200, {"name": "new", "cron": "0 22 * * *", "hosts": ["{host}"]}),
    Case("post", "policies/{policy}/run/", OPERATOR, 202),
    Case("get", "policies/{policy}/runs/", VIEWER),
    Case("get", "policies/{policy}/runs/{run}/picks/", VIEWER),
    Case("get", "automation/", VIEWER),
    Case("patch", "automation/", ADMIN, body={"paused": True}, everywhere=True),
    Case("get", "overview/", VIEWER),
    Case("get", "views/", VIEWER),
    Case(
        "post",
        "views/",
        OPERATOR,
        201,
        {"page": "images", "name": "new", "query": "format=raw", "shared": True},
        everywhere=True,
    ),
    Case("patch", "views/{view}/", ADMIN, body={"name": "x"}, everywhere=True),
    Case("delete", "views/{view}/", ADMIN, 204, everywhere=True),
    Case("get", "tokens/", ADMIN, everywhere=True),
    Case("post", "tokens/", ADMIN, 201, {"name": "new", "role": "viewer"}, everywhere=True),
    Case("delete", "tokens/{token}/", ADMIN, 204, everywhere=True),
    Case("get", "users/", ADMIN, everywhere=True),
    Case("get", "users/{user}/", ADMIN, everywhere=True),
    Case("post", "users/", ADMIN, 201, {"username": "new", "role": "viewer"}, everywhere=True),
    Case("patch", "users/{user}/", ADMIN, body={"role": "operator"}, everywhere=True),
    Case("post", "users/{user}/reset-password/", ADMIN, everywhere=True),
    Case("get", "users/{user}/sessions/", ADMIN, everywhere=True),
    Case("post", "users/{user}/end-sessions/", ADMIN, everywhere=True),
    Case("get", "lockouts/", ADMIN, everywhere=True),
    Case("delete", "lockouts/{lockout}/", ADMIN, 204, everywhere=True),
    Case("get", "audit/", ADMIN, everywhere=True),
    Case("get", "schema/", ANYBODY),
    Case("get", "docs/", ANYBODY),
]


@pytest.fixture
def world(db: None, tmp_path: Path) -> dict[str, Any]:
    """One of everything, on the host ``mine``."""
    host = HostFactory.create(slug="mine", max_jobs=5)
    pool = StoragePoolFactory.create(host=host)
    image = ImageFactory.create(pool=pool)
    use = ImageUseFactory.create(image=ImageFactory.create(pool=pool))
    folder = tmp_path / "new"
    folder.mkdir()
    ended = {"kind": "reclaim", "finished": timezone.now()}
    job = JobFactory.create(
        target=image, state="succeeded", undo_state="available", undo_expires=timezone.now(), **ended
    )
    hook = WebhookFactory.create()
    failed = JobFactory.create(target=host, state="failed", finished=timezone.now())
    run = PolicyRunFactory.create(policy__hosts=[host.pk], state="finished", finished=timezone.now())
    return {
        "host": host.pk, "slug": "mine", "pool": pool.pk, "spare": StoragePoolFactory.create(host=host).pk,
        "image": image.pk, "guest": use.disk.guest.pk, "job": job.pk, **orphans(pool),
        "failed": failed.pk, "active": JobFactory.create(target=host, state="running").pk, "folder": str(folder),
        "benchmark": BenchmarkFactory.create(pool=pool).pk, "watch": WatchFactory.create(pool=pool).pk,
        "view": SavedViewFactory.create(shared=True).pk,
        "policy": run.policy_id, "run": run.pk,
        "token": TokenFactory.create().pk, "user": UserFactory.create().pk, "lockout": locked_out("ann").pk,
        "alert": AlertFactory.create(host="mine").pk, "webhook": hook.pk,
        "delivery": DeliveryFactory.create(webhook=hook, state="given_up", attempts=7).pk,
    }  # fmt: skip


def locked_out(username: str) -> AccessAttempt:
    return AccessAttempt.objects.create(username=username, ip_address="192.0.2.7", failures_since_start=6)


def orphans(pool: StoragePool) -> dict[str, int]:
    """An orphan, and an image that is set aside."""
    orphan = ImageFactory.create(pool=pool, orphan=True)
    aside = ImageFactory.create(pool=pool, orphan=None, state="set_aside", aside_since=timezone.now())
    aside.aside_job = JobFactory.create(kind="set_aside", target=aside, state="succeeded", finished=timezone.now())
    aside.save()
    return {"lonely": orphan.pk, "parked": aside.pk}


def send(client: APIClient, case: Case, world: dict[str, Any]) -> int:
    body = {name: filled(value, world) for name, value in case.body.items()}
    path = f"/api/v1/{case.path.format(**world)}"
    arguments = {} if case.method == "get" else {"data": body, "format": "json"}
    return int(getattr(client, case.method)(path, **arguments).status_code)


def filled(value: Any, world: dict[str, Any]) -> Any:
    """What a body names in braces, as it is in this world."""
    if isinstance(value, list):
        return [filled(one, world) for one in value]
    return world[value[1:-1]] if isinstance(value, str) and value.startswith("{") else value


def ids(case: Case) -> str:
    return f"{case.method} {case.path} {case.body or ''}"


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_nobody_without_a_name_gets_anything(world: dict[str, Any], case: Case) -> None:
    assert send(APIClient(), case, world) == (200 if case.role == ANYBODY else 401)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_an_expired_token_opens_nothing(world: dict[str, Any], client_of: Callable[..., APIClient], case: Case) -> None:
    assert send(client_of("admin", expires=an_hour_ago()), case, world) == 401


@pytest.mark.parametrize("role", [VIEWER, OPERATOR, ADMIN])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_each_role_may_do_its_part(
    world: dict[str, Any], client_of: Callable[..., APIClient], case: Case, role: str
) -> None:
    jobs = Job.objects.count()
    allowed = RANKS.index(role) >= RANKS.index(case.role)
    assert send(client_of(role), case, world) == (case.answer if allowed else 403)
    assert allowed or Job.objects.count() == jobs


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_token_of_another_host_reaches_nothing_here(
    world: dict[str, Any], client_of: Callable[..., APIClient], case: Case
) -> None:
    HostFactory.create(slug="other")
    answer = send(client_of("admin", hosts=["other"]), case, world)
    if case.everywhere:
        assert answer == 403
    elif "{" in case.path or case.body.get("kind"):
        assert answer == 404
    elif case.method == "post":
        assert answer == 400
    else:
        assert answer == 200


@pytest.mark.parametrize("case", [case for case in CASES if not case.everywhere], ids=ids)
def test_a_token_of_this_host_does_its_part_here(
    world: dict[str, Any], client_of: Callable[..., APIClient], case: Case
) -> None:
    assert send(client_of("admin", hosts=["mine"]), case, world) == case.answer


def test_every_endpoint_is_among_the_cases() -> None:
    listed = {case.path.partition("?")[0].replace("{", "").replace("}", "") for case in CASES}
    found = set()
    for pattern in _routes(get_resolver("storage_admin.api.urls").url_patterns):
        path = pattern
        path = path.replace("benchmark-watches/<int:pk>", "benchmark-watches/watch")
        path = path.replace("policies/<int:pk>", "policies/policy").replace("runs/<int:run>", "runs/run")
        path = path.replace("deliveries/<int:delivery>", "deliveries/delivery")
        for name in (
            "lockouts",
            "alerts",
            "webhooks",
            "hosts",
            "pools",
            "guests",
            "images",
            "jobs",
            "benchmarks",
            "views",
            "tokens",
            "users",
        ):
            path = path.replace(f"{name}/<int:pk>", f"{name}/{name.removesuffix('s')}")
        found.add(path)
    stand_ins = {"active": "job", "failed": "job", "lonely": "image", "parked": "image"}
    shown = {"/".join(stand_ins.get(part, part) for part in path.split("/")) for path in listed}
    assert found - shown == set()


def _routes(patterns: list[Any], prefix: str = "") -> list[str]:
    found = []
    for pattern in patterns:
        if hasattr(pattern, "url_patterns"):
            found += _routes(pattern.url_patterns, prefix + str(pattern.pattern))
        elif not str(pattern.pattern).startswith("^"):
            found.append(prefix + str(pattern.pattern))
    return found
