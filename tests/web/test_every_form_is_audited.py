"""Whatever a form of a page changes stands in the audit trail; a new form needs a line here.

Roles and what is refused are told by ``test_role_table``, whose pages these are.
"""

import re
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from pytest_django import Settings

from storage_admin.accounts.models import AuditEntry, Session
from storage_admin.hosts.models import Host
from storage_admin.jobs.models import Job
from tests.benchmarks.factories import WatchFactory
from tests.factories import HostFactory, ImageFactory, PolicyFactory, StoragePoolFactory, UserFactory
from tests.web.confirming import planned
from tests.web.html import tags_of
from tests.web.test_host_scope import address
from tests.web.test_role_table import BACKEND, PAGES, ids, routes

pytestmark = pytest.mark.sql

__all__ = ["ids"]

#: An address has one of nothing, where the table asks for one.
UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
RESULT_LINE = "1.96,1.96,TEST,1,1387339401,4G,,,,374271,39,214541,19,,,392015,17" + "," * 31

#: A page, what the trail calls it, and the form; values that are names of objects stand for their ids.
FORMS: list[tuple[str, str, dict[str, Any]]] = [
    ("images_analyze", "analyze queued", {"image": "image_id"}),
    ("images_reclaim", "reclaim queued", {"image": "plain_id", "confirmed": "1", "undo_hours": "24"}),
    ("analyze", "analyze queued", {}),
    ("image_format", "format declared", {"format": "raw"}),
    ("image_forget", "image forgotten", {"image": "vanished_id"}),
    ("job_cancel", "job cancelled", {"job": "queued_job"}),
    ("job_retry", "scan queued", {"job": "failed_job"}),
    ("host_remove", "host removed", {"host": "spare_host", "confirm": "spare"}),
    ("host_change", "host changed", {"name": "x", "max_jobs": "3"}),
    ("host_scan", "scan queued", {"host": "spare_host"}),
    ("folder_add", "pool registered", {"path": "{folder}"}),
    ("pool_change", "pool changed", {"name": "x", "warn_percent": "70", "warn_days": "14"}),
    ("pool_confirm_folder", "folder confirmed", {"pool": "pool_there"}),
    ("pool_remove", "pool removed", {"pool": "spare_pool", "confirm": "spare-pool"}),
    ("view_save", "view shared", {"page": "jobs", "name": "new", "query": "state=failed", "shared": "on"}),
    ("view_change", "view not shared any more", {}),
    ("view_delete", "shared view deleted", {}),
    ("alert_ack", "alert acknowledged", {}),
    ("webhooks", "webhook created", {"name": "new", "url": "https://example.org/hook"}),
    ("mail_test", "mail tested", {}),
    ("webhook_change", "webhook changed", {"name": "x", "url": "https://example.org/other", "enabled": "on"}),
    ("webhook_secret", "webhook secret rotated", {}),
    ("webhook_test", "webhook tested", {}),
    ("webhook_delete", "webhook deleted", {}),
    ("delivery_resend", "delivery sent again", {}),
    ("policy_change", "policy changed", {}),
    ("policy_run_now", "policy run by hand", {"policy": "idle_policy"}),
    ("policy_remove", "policy deleted", {}),
    ("policy_run_stop", "policy run stopped", {}),
    ("automation_switch", "automation paused", {"paused": "true"}),
    ("tokens", "token created", {"name": "new", "role": "viewer"}),
    ("token_delete", "token deleted", {}),
    ("users", "user added", {"username": "new", "role": "viewer"}),
    ("user", "user changed", {"role": "operator"}),
    ("user_active", "user deactivated", {}),
    ("user_password", "password reset", {}),
    ("users_second_factor", "second factor required", {"roles": "viewer"}),
    ("user_second_factor", "second factor reset", {}),
    ("user_sign_out", "sessions ended", {}),
    ("user_session_end", "session ended", {}),
    ("lockout_end", "lockout lifted", {}),
    ("account_zone", "time zone changed", {"time_zone": "Europe/Berlin"}),
    ("benchmark_paste", "benchmark pasted", {"text": RESULT_LINE}),
    ("benchmark_watch", "benchmark watch set", {"kind": "dd", "every_hours": "24"}),
    ("benchmark_unwatch", "benchmark watch ended", {}),
]

_A_JOB = "It submits a job: the one service for that writes the entry (tests/jobs, test_every_change_is_audited)."
_ONES_OWN = "As an admin's form for others (user_sign_out, user_session_end): one service."
#: What is not among them, and why.
NOT_HERE = {
    **dict.fromkeys((page.name for page in PAGES if page.plan), _A_JOB),
    **dict.fromkeys(("job_undo", "job_discard_undo", "pool_leftover", "guest_io", "benchmark_start", "inside"), _A_JOB),
    "job_secrets": "It takes a job that waits for them: tests/images/test_keys.",
    "host_add": "It takes a host that answers: test_host_add_pages.",
    "host_connection": "It takes a host that answers: tests/hosts/test_proxmox_hosts.",
    "policy_add": "A long form: test_policy_pages; the service is that of REST.",
    **dict.fromkeys(
        (
            "mfa_activate_totp",
            "mfa_deactivate_totp",
            "mfa_add_webauthn",
            "mfa_remove_webauthn",
            "mfa_generate_recovery_codes",
        ),
        "It takes a device: tests/accounts/test_second_factor and test_passkeys.",
    ),
    **dict.fromkeys(
        ("account_reauthenticate", "mfa_reauthenticate", "mfa_reauthenticate_webauthn"), "It changes nothing."
    ),
    "account_sign_out": _ONES_OWN,
    "account_session_end": _ONES_OWN,
}


def test_each_form_has_a_line() -> None:
    posts = {page.name for page in PAGES if page.method == "post"}
    here = {name for name, _, _ in FORMS}
    assert len(here) == len(FORMS)
    assert here | set(NOT_HERE) == posts
    assert not here & set(NOT_HERE)


@pytest.fixture
def things(ids: dict[str, int], settings: Settings, tmp_path: Path) -> dict[str, Any]:
    settings.ALERT_EMAILS = ["ann@example.org"]
    (tmp_path / "there").mkdir()
    spare = HostFactory.create(slug="spare", name="spare", kind="ssh")
    others = Session.objects.create(
        session_key="k", session_data="", expire_date=timezone.now() + timedelta(days=1), user_id=ids["user_id"],
        address="192.0.2.9", browser="Firefox on Linux", since=timezone.now(),
    )  # fmt: skip
    pool = StoragePoolFactory.create(host=spare, name="spare-pool", source="admin")
    there = StoragePoolFactory.create(host=Host.objects.get(pk=ids["host_id"]), path=str(tmp_path / "there"))
    return ids | {
        "pool_there": there.pk,
        "spare_host": spare.pk, "spare_pool": pool.pk, "plain_id": ImageFactory.create().pk,
        "vanished_id": ImageFactory.create(state="missing", missing_since=timezone.now()).pk,
        "session_uid": str(others.uid),
        "queued_job": Job.objects.get(state="queued").pk, "idle_policy": PolicyFactory.create(hosts=[spare.pk]).pk,
        "failed_job": Job.objects.create(
            kind="scan", host=spare, target_kind="host", target_id=spare.pk, target_label="spare", state="failed",
            created_by="ann", finished=timezone.now(),
        ).pk,
        "folder": str(tmp_path), "watch_id": WatchFactory.create().pk,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "what", "form"), FORMS, ids=[form[0] for form in FORMS])
def test_what_a_form_changes_is_in_the_trail(
    things: dict[str, Any], client: Client, name: str, what: str, form: dict[str, Any]
) -> None:
    client.force_login(UserFactory.create(username="root-too", role="admin"), BACKEND)
    # Some forms are about another object than the table's.
    objects = things | {
        f"{of}_id": things[form[of]] for of in ("job", "host", "pool", "policy", "image") if form.get(of) in things
    }
    where = UUID.sub(things["session_uid"], address(dict(routes())[name], objects))
    earlier = AuditEntry.objects.count()
    body = {key: things.get(value.strip("{}"), value) for key, value in form.items()}
    if "confirmed" in body:
        body |= planned(client.post(where, body, REMOTE_ADDR="192.0.2.7"))
    answer = client.post(where, body, REMOTE_ADDR="192.0.2.7")
    assert answer.status_code in {200, 302}, answer.content
    made = list(AuditEntry.objects.order_by("id")[earlier:])
    assert what in [entry.what for entry in made], ([entry.what for entry in made], answer.headers)
    for entry in made:
        assert not entry.refused
        assert (entry.who, entry.address) == ("root-too", "192.0.2.7")


#: What nobody means to type, and a program may send.
NASTY = {
    "a zero byte": "a\0b",
    "many digits": "9" * 400,
    "a long text": "x" * 70_000,
    "a sign of direction": "a\u202eb",
}


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, _, form in FORMS if form])
def test_no_text_in_any_field_is_an_error_of_the_server(
    things: dict[str, Any], client: Client, name: str, form: dict[str, Any]
) -> None:
    """The client of the test raises what a view does not handle."""
    client.force_login(UserFactory.create(username="root-too", role="admin"), BACKEND)
    where = UUID.sub(things["session_uid"], address(dict(routes())[name], things))
    for field, (what, text) in product(form, NASTY.items()):
        answer = client.post(where, form | {field: text})
        # A NUL goes no further: PostgreSQL takes none, in no column.
        assert answer.status_code == 400 if "\0" in text else answer.status_code < 500, (field, what)


#: Pages that show the form which they take.
WITH_FORM = sorted({page.name for page in PAGES if page.method == "get"} & set(NOT_HERE))


@pytest.mark.night
@pytest.mark.parametrize("name", WITH_FORM)
def test_no_text_in_a_field_that_a_page_shows_is_an_error_of_the_server(
    things: dict[str, Any], client: Client, name: str
) -> None:
    client.force_login(UserFactory.create(username="root-too", role="admin"), BACKEND)
    where = address(dict(routes())[name], things)
    shown = tags_of(client.get(where, follow=True))
    # Some show no form for the table's objects; what most forms have is tried there as well.
    form = dict.fromkeys(("confirm", "undo_hours", "wait_hours"), "") | {
        tag["name"]: tag.get("value") or ""
        for kind, tag in shown
        if kind in {"input", "select", "textarea"} and tag.get("name") not in {None, "csrfmiddlewaretoken"}
    }
    for field, (what, text) in product(form, NASTY.items()):
        answer = client.post(where, form | {field: text})
        assert answer.status_code < 500, (field, what)
        # A NUL goes no further on any page of ours: PostgreSQL takes none, in no column.
        assert answer.status_code == 400 or "\0" not in text or name.startswith(("account_", "mfa_")), field
