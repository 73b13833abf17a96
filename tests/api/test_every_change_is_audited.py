"""Whatever changes something over REST stands in the audit trail: who did it, from where, and what it was before."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone
from rest_framework.test import APIClient

from storage_admin.accounts.models import AuditEntry, Session
from storage_admin.hosts.models import StoragePool
from tests.api.test_role_table import route
from tests.api.test_roles import CASES, RESULT_LINE, filled
from tests.factories import HostFactory, ImageFactory, JobFactory, PolicyFactory

#: Method, address, body; what the trail calls it, and which of before and after it says.
CHANGES: list[tuple[str, str, dict[str, Any], str, dict[str, Any] | None, dict[str, Any] | None]] = [
    ("patch", "hosts/{host}/", {"max_jobs": 3}, "host changed", {"max_jobs": 5}, {"max_jobs": 3}),
    ("post", "hosts/{host}/scan/", {}, "scan queued", None, {}),
    ("delete", "hosts/{remote}/", {}, "host removed", {}, None),
    ("post", "pools/", {"host": "mine", "path": "{folder}"}, "pool registered", None, {"host": "mine"}),
    ("patch", "pools/{pool}/", {"warn_percent": 70}, "pool changed", {"warn_percent": 85}, {"warn_percent": 70}),
    ("post", "pools/{there}/confirm-folder/", {}, "folder confirmed", None, {"path": "{above}", "listed": False}),
    ("delete", "pools/{spare}/", {}, "pool removed", {"host": "mine"}, None),
    ("patch", "images/{image}/", {"declared_format": "raw"}, "format declared", {"format": ""}, {"format": "raw"}),
    ("post", "jobs/", {"kind": "analyze", "image": "{plain}"}, "analyze queued", None, {}),
    ("post", "jobs/", {"kind": "reclaim", "image": "{used}"}, "reclaim refused", None, {}),
    ("post", "jobs/{active}/cancel/", {}, "job cancelled", None, {}),
    ("post", "jobs/{failed}/retry/", {}, "scan queued", None, {}),
    ("post", "jobs/{job}/undo/", {}, "undo queued", None, {}),
    ("post", "jobs/{job}/discard-undo/", {}, "discard_undo queued", None, {}),
    ("post", "benchmarks/", {"kind": "dd", "pool": "{pool}"}, "benchmark queued", None, {}),
    ("post", "benchmark-watches/", {"kind": "dd", "pool": "{pool}", "every_hours": 24}, "benchmark watch set", None,
     {"kind": "dd", "every_hours": 24}),
    ("post", "benchmark-watches/", {"kind": "fio", "pool": "{pool}", "every_hours": 48}, "benchmark watch set",
     {"kind": "fio", "every_hours": 24}, {"every_hours": 48}),
    ("delete", "benchmark-watches/{watch}/", {}, "benchmark watch ended", {"every_hours": 24}, None),
    ("post", "tokens/", {"name": "new", "role": "viewer"}, "token created", None, {"role": "viewer", "hosts": []}),
    ("delete", "tokens/{token}/", {}, "token deleted", {"role": "viewer"}, None),
    ("post", "users/", {"username": "new", "role": "viewer"}, "user added", None, {"role": "viewer"}),
    ("patch", "users/{user}/", {"role": "operator"}, "user changed", {"role": "viewer"}, {"role": "operator"}),
    ("patch", "users/{user}/", {"is_active": False}, "user deactivated", {"is_active": True}, {"is_active": False}),
    ("post", "users/{user}/reset-second-factor/", {}, "second factor reset", {"second_factor": []},
     {"sessions_ended": 1}),
    ("post", "users/{user}/reset-password/", {}, "password reset", None, {"sessions_ended": 1}),
    ("delete", "users/{user}/sessions/{session}/", {}, "session ended", {"browser": "Firefox on Linux"}, None),
    ("post", "users/{user}/end-sessions/", {}, "sessions ended", {"sessions": 1}, None),
    ("patch", "automation/", {"paused": True, "reason": "move"}, "automation paused", {"paused": False},
     {"paused": True, "reason": "move"}),
    ("post", "policies/", {"name": "new", "cron": "0 1 * * *"}, "policy created", None, {"cron": "0 1 * * *"}),
    ("patch", "policies/{policy}/", {"min_age_hours": 5}, "policy changed", {"min_age_hours": 0}, {"min_age_hours": 5}),
    ("delete", "policies/{policy}/", {}, "policy deleted", {"cron": "0 22 * * *"}, None),
    ("post", "policies/{policy}/run/", {}, "policy run by hand", None, {}),
    ("post", "policies/{nights}/runs/{at_work}/stop/", {}, "policy run stopped", None, {"run": "{at_work}"}),
    ("post", "alerts/{alert}/ack/", {}, "alert acknowledged", {"acknowledged_by": ""},
     {"acknowledged_by": "token nightly"}),
    ("post", "webhooks/", {"name": "new", "url": "https://example.org/?token=abc"}, "webhook created", None,
     {"url": "https://example.org/?token=…"}),
    ("patch", "webhooks/{hook}/", {"url": "http://[2001:db8::1]/"}, "webhook changed",
     {"url": "http://127.0.0.1:9/…"}, {"url": "http://[2001:db8::1]/"}),
    ("delete", "webhooks/{hook}/", {}, "webhook deleted", {"url": "http://127.0.0.1:9/…"}, None),
    ("post", "webhooks/{hook}/rotate-secret/", {}, "webhook secret rotated", None, {}),
    ("post", "webhooks/{hook}/test/", {}, "webhook tested", None, None),
    ("post", "webhooks/{hook}/deliveries/{delivery}/resend/", {}, "delivery sent again", None,
     {"delivery": "{delivery}"}),
    ("post", "webhooks/mail/test/", {}, "mail tested", None, None),
    ("post", "webhooks/mail/deliveries/{mail}/resend/", {}, "delivery sent again", None, {"delivery": "{mail}"}),
    ("post", "images/{orphan}/set-aside/", {"grace_days": 3}, "set_aside queued", None, {}),
    ("post", "images/{aside}/restore/", {}, "restore_aside refused", None, {}),
    ("delete", "images/{vanished}/", {}, "image forgotten", {}, None),
    ("post", "jobs/", {"kind": "delete_aside", "image": "{aside}", "options": {"confirm_name": "left.qcow2"}},
     "delete_aside refused", None, {}),
    ("post", "views/", {"page": "jobs", "name": "new", "query": "state=failed", "shared": True}, "view shared", None,
     {"query": "state=failed"}),
    ("patch", "views/{view}/", {"query": "state=missing"}, "shared view changed", {"query": "state=ok"},
     {"query": "state=missing"}),
    ("delete", "views/{view}/", {}, "shared view deleted", {"query": "state=ok"}, None),
    ("delete", "lockouts/{lockout}/", {}, "lockout lifted", {"address": "192.0.2.7", "failures": 6}, None),
    ("post", "benchmarks/paste/", {"text": RESULT_LINE}, "benchmark pasted", None, {"lines": 1}),
]  # fmt: skip

#: What of the roles' table is not among them, and why.
NOT_HERE = {
    ("post", "hosts/"): "It takes a host that answers: test_hosts_over_rest adds one, and looks for “host added”.",
    (
        "patch",
        "uploads/{upload}/",
    ): "Its job was audited, and so is that one's end: tests/images/test_upload.",
    ("post", "jobs/{job}/secrets/"): "It takes a job that waits for them: tests/images/test_keys looks for its entry.",
    ("post", "policies/preview/"): "It tells what a policy would do, and changes nothing.",
}


def test_each_method_that_may_change_something_has_a_case() -> None:
    table = {(case.method, route(case.path)) for case in CASES if case.method != "get"}
    here = {(change[0], route(change[1])) for change in CHANGES}
    named = {(method, route(path)) for method, path in NOT_HERE}
    assert len(table) > 40
    assert table - here == named
    assert here <= table


@pytest.fixture
def things(world: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The roles' world, with what a change is recorded of."""
    pool, long_ago = StoragePool.objects.get(pk=world["pool"]), timezone.now() - timedelta(days=60)
    Session.objects.filter(uid=world["session"]).update(
        expire_date=timezone.now() + timedelta(days=1), address="192.0.2.9", browser="Firefox on Linux"
    )
    aside = {"aside_since": long_ago, "aside_until": long_ago, "aside_by": "ann"}
    return world | {
        "remote": HostFactory.create(kind="ssh").pk, "above": str(tmp_path),
        "image": ImageFactory.create(pool=pool, declared_format="", declared_by="").pk,
        "used": ImageFactory.create(pool=pool, in_use=True).pk, "plain": ImageFactory.create(pool=pool).pk,
        "active": JobFactory.create(state="queued").pk, "policy": PolicyFactory.create().pk, "hook": world["webhook"],
        "orphan": world["lonely"],
        "aside": ImageFactory.create(pool=pool, name="left.qcow2", state="set_aside", **aside).pk,
    }  # fmt: skip


def _of(things: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    return {name: filled(value, things) for name, value in body.items()}


@pytest.mark.parametrize(
    ("method", "path", "body", "what", "before", "after"), CHANGES, ids=lambda value: str(value)[:40]
)
def test_a_change_is_recorded_by_whom_from_where_and_with_what_it_was_before(
    things: dict[str, Any],
    client_of: Callable[..., APIClient],
    method: str,
    path: str,
    body: dict[str, Any],
    what: str,
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
) -> None:
    client = client_of("admin", name="nightly")
    earlier = AuditEntry.objects.count()
    answer = getattr(client, method)(
        f"/api/v1/{path.format(**things)}", _of(things, body), format="json", REMOTE_ADDR="192.0.2.7"
    )
    assert answer.status_code in {200, 201, 202, 204, 409}, answer.content
    entry = AuditEntry.objects.order_by("id")[earlier]
    assert AuditEntry.objects.count() == earlier + 1
    assert (entry.who, entry.what, entry.address) == ("token nightly", what, "192.0.2.7")
    assert entry.refused == (answer.status_code == 409)
    assert (before or {}).items() <= (entry.before or {}).items()
    assert _of(things, after or {}).items() <= (entry.after or {}).items()
    assert (entry.before is None) == (before is None)


@pytest.mark.parametrize(("method", "path", "body"), [change[:3] for change in CHANGES], ids=str)
def test_what_is_not_allowed_changes_nothing_and_is_recorded_as_refused(
    things: dict[str, Any], client_of: Callable[..., APIClient], method: str, path: str, body: dict[str, Any]
) -> None:
    client = client_of("viewer", name="nightly")
    address = f"/api/v1/{path.format(**things)}"
    assert getattr(client, method)(address, _of(things, body), format="json").status_code == 403
    entry = AuditEntry.objects.get()
    assert (entry.who, entry.what, entry.refused) == ("token nightly", "forbidden", True)
    assert entry.target == f"{method.upper()} {address}"
