"""Every endpoint with the role that it needs; ``test_role_table`` asks as everybody for everything."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from axes.models import AccessAttempt
from django.utils import timezone
from rest_framework.test import APIClient

from storage_admin.accounts.models import Session, User
from storage_admin.hosts.models import StoragePool
from tests.benchmarks.factories import BenchmarkFactory, WatchFactory
from tests.factories import (
    AlertFactory,
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
    WebhookFactory,
)
from tests.harness.filesystems import new_folder

RESULT_LINE = "1.96,1.96,TEST,1,1387339401,4G,,,,374271,39,214541,19,,,392015,17" + "," * 31
SHARED_VIEW = {"page": "images", "name": "new", "query": "format=raw", "shared": True}
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
    #: Though it takes all hosts, it is about one, which is looked for first.
    of_a_host: bool = False
    #: The role that is asked for before the object is looked for, where that is a lower one.
    first: str = ""


CASES = [
    Case("get", "", VIEWER),
    Case("get", "hosts/", VIEWER),
    Case("get", "hosts/{host}/", VIEWER),
    Case("patch", "hosts/{host}/", ADMIN, body={"name": "x"}),
    # Nothing is connected to, and this machine is not removed: what who may is told.
    Case("patch", "hosts/{host}/", ADMIN, 400, {"address": "192.0.2.7"}, everywhere=True, of_a_host=True),
    Case("post", "hosts/", ADMIN, 400, {"name": "new", "address": "-oProxyCommand=x"}, everywhere=True),
    Case("delete", "hosts/{host}/", ADMIN, 400),
    Case("post", "hosts/{host}/scan/", OPERATOR, 202),
    Case("get", "pools/", VIEWER),
    Case("get", "pools/{pool}/", VIEWER),
    Case("get", "pools/{pool}/frees/", VIEWER),
    Case("post", "pools/", ADMIN, 201, {"host": "{slug}", "path": "{folder}"}),
    Case("patch", "pools/{pool}/", ADMIN, body={"name": "x"}),
    Case("post", "pools/{there}/confirm-folder/", ADMIN),
    Case("delete", "pools/{spare}/", ADMIN, 204),
    Case("get", "guests/", VIEWER),
    Case("get", "snapshots/", VIEWER),
    Case("get", "guests/{guest}/", VIEWER),
    Case("get", "guests/{guest}/snapshots/", VIEWER),
    Case("get", "images/", VIEWER),
    Case("get", "images/{image}/", VIEWER),
    Case("patch", "images/{image}/", ADMIN, body={"declared_format": "qcow2"}),
    Case("delete", "images/{vanished}/", ADMIN, 204),
    Case("get", "images/{image}/chain/", VIEWER),
    Case("get", "images/{image}/candidates/", VIEWER),
    Case("get", "images/{image}/content/", ADMIN, 409),
    Case("get", "images/{image}/files/", ADMIN, 409),
    Case("get", "images/{image}/files/content/?device=/dev/sda1&path=/x", ADMIN, 409),
    Case("post", "images/{lonely}/set-aside/", ADMIN, 202, {"grace_days": 7}),
    Case("post", "images/{parked}/restore/", ADMIN, 202),
    Case("get", "images/{image}/history/", VIEWER),
    Case("get", "job-kinds/", VIEWER),
    Case("get", "jobs/", VIEWER),
    Case("get", "jobs/{job}/", VIEWER),
    Case("get", "jobs/{job}/log/", VIEWER),
    Case("get", "uploads/{upload}/", VIEWER),
    Case("patch", "uploads/{upload}/", OPERATOR, 400),
    Case("post", "jobs/", OPERATOR, 202, {"kind": "analyze", "image": "{image}"}, first=VIEWER),
    Case("post", "jobs/", VIEWER, 200, {"kind": "analyze", "image": "{image}", "dry_run": True}),
    Case("post", "jobs/{active}/cancel/", OPERATOR, 202),
    Case("post", "jobs/{failed}/retry/", OPERATOR, 202),
    Case("post", "jobs/{job}/secrets/", OPERATOR, 409, {"secrets": {}}),
    Case("post", "jobs/{job}/undo/", OPERATOR, 202),
    Case("post", "jobs/{job}/undo/", ADMIN, 202, {"force": True}, first=OPERATOR),
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
    Case("post", "webhooks/mail/test/", ADMIN, 202, everywhere=True),
    Case("get", "webhooks/mail/deliveries/", ADMIN, everywhere=True),
    Case("post", "webhooks/mail/deliveries/{mail}/resend/", ADMIN, 202, everywhere=True),
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
    Case("post", "policies/{nights}/runs/{at_work}/stop/", OPERATOR),
    # Of another policy, or ended.
    Case("post", "policies/{policy}/runs/{at_work}/stop/", OPERATOR, 404),
    Case("post", "policies/{policy}/runs/{run}/stop/", OPERATOR, 409),
    Case("get", "automation/", VIEWER),
    Case("patch", "automation/", ADMIN, body={"paused": True}, everywhere=True),
    Case("get", "ledger/", VIEWER),
    Case("get", "ledger/summary/", VIEWER),
    Case("get", "overview/", VIEWER),
    Case("get", "attached/", VIEWER),
    Case("get", "views/", VIEWER),
    Case("post", "views/", OPERATOR, 201, SHARED_VIEW, everywhere=True),
    Case("patch", "views/{view}/", ADMIN, body={"name": "x"}, everywhere=True, first=VIEWER),
    Case("delete", "views/{view}/", ADMIN, 204, everywhere=True, first=VIEWER),
    Case("get", "tokens/", ADMIN, everywhere=True),
    Case("post", "tokens/", ADMIN, 201, {"name": "new", "role": "viewer"}, everywhere=True),
    Case("delete", "tokens/{token}/", ADMIN, 204, everywhere=True),
    Case("get", "users/", ADMIN, everywhere=True),
    Case("get", "users/{user}/", ADMIN, everywhere=True),
    Case("post", "users/", ADMIN, 201, {"username": "new", "role": "viewer"}, everywhere=True),
    Case("patch", "users/{user}/", ADMIN, body={"role": "operator"}, everywhere=True),
    Case("post", "users/{user}/reset-password/", ADMIN, everywhere=True),
    Case("post", "users/{user}/reset-second-factor/", ADMIN, everywhere=True),
    Case("get", "users/{user}/sessions/", ADMIN, everywhere=True),
    Case("delete", "users/{user}/sessions/{session}/", ADMIN, 204, everywhere=True),
    Case("post", "users/{user}/end-sessions/", ADMIN, everywhere=True),
    Case("get", "lockouts/", ADMIN, everywhere=True),
    Case("delete", "lockouts/{lockout}/", ADMIN, 204, everywhere=True),
    Case("get", "audit/", ADMIN, everywhere=True),
    Case("get", "schema/", ANYBODY),
    Case("get", "docs/", ANYBODY),
]


@pytest.fixture
def world(db: None, tmp_path: Path, settings: Any) -> dict[str, Any]:
    """One of everything, on the host ``mine``."""
    host = HostFactory.create(slug="mine", max_jobs=5)
    pool = StoragePoolFactory.create(host=host)
    image = ImageFactory.create(pool=pool)
    use = ImageUseFactory.create(image=ImageFactory.create(pool=pool))
    folder, now = new_folder(tmp_path / "new"), timezone.now()
    job = JobFactory.create(
        kind="reclaim", target=image, state="succeeded", undo_state="available", undo_expires=now, finished=now
    )
    hook = WebhookFactory.create()
    failed = JobFactory.create(target=host, state="failed", finished=timezone.now())
    run = PolicyRunFactory.create(policy__hosts=[host.pk], state="finished", finished=timezone.now())
    at_work = PolicyRunFactory.create(policy__hosts=[host.pk])
    settings.ALERT_EMAILS = ["ann@example.org"]
    mail = DeliveryFactory.create(webhook=None, recipients=["ann@example.org"], state="given_up", attempts=7)
    user = UserFactory.create()
    upload = JobFactory.create(target=pool, kind="upload", options={"name": "x", "size": 9}, kept={"received": 0})
    return {
        "upload": upload.pk,
        "host": host.pk, "slug": "mine", "pool": pool.pk, "spare": StoragePoolFactory.create(host=host).pk,
        "there": StoragePoolFactory.create(host=host, path=str(tmp_path)).pk,
        "image": image.pk, "guest": use.disk.guest.pk, "job": job.pk, **orphans(pool),
        "failed": failed.pk, "active": JobFactory.create(target=host, state="running").pk, "folder": str(folder),
        "benchmark": BenchmarkFactory.create(pool=pool).pk, "watch": WatchFactory.create(pool=pool).pk,
        "view": SavedViewFactory.create(shared=True).pk,
        "policy": run.policy_id, "run": run.pk, "nights": at_work.policy_id, "at_work": at_work.pk, "mail": mail.pk,
        "token": TokenFactory.create().pk, "user": user.pk, "session": signed_in(user).uid,
        "lockout": locked_out("ann").pk,
        "alert": AlertFactory.create(host="mine").pk, "webhook": hook.pk,
        "delivery": DeliveryFactory.create(webhook=hook, state="given_up", attempts=7).pk,
    }  # fmt: skip


def signed_in(user: User) -> Session:
    now = timezone.now()
    return Session.objects.create(session_key="k", session_data="", expire_date=now, since=now, user=user)


def locked_out(username: str) -> AccessAttempt:
    return AccessAttempt.objects.create(username=username, ip_address="192.0.2.7", failures_since_start=6)


def orphans(pool: StoragePool) -> dict[str, int]:
    """An orphan, and an image that is set aside."""
    orphan = ImageFactory.create(pool=pool, orphan=True)
    aside = ImageFactory.create(pool=pool, orphan=None, state="set_aside", aside_since=timezone.now())
    aside.aside_job = JobFactory.create(kind="set_aside", target=aside, state="succeeded", finished=timezone.now())
    aside.save()
    gone = ImageFactory.create(pool=pool, state="missing", missing_since=timezone.now())
    return {"lonely": orphan.pk, "parked": aside.pk, "vanished": gone.pk}


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
