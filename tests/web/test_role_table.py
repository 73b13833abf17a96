"""Every page and every button, asked by everybody, about things of one's own host, of another and none at all.

A new page without a case fails: what is in no case has to answer 405.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
from axes.models import AccessAttempt
from django.db import transaction
from django.http import StreamingHttpResponse
from django.test import Client

from storage_admin.jobs.models import Job
from tests.chance import night
from tests.factories import DeliveryFactory, HostFactory, SavedViewFactory, TokenFactory, UserFactory, WebhookFactory
from tests.web.test_host_scope import address, everything_on
from tests.web.test_host_scope import routes as every_route
from tests.working import client_as

VIEWER, OPERATOR, ADMIN = "viewer", "operator", "admin"
RANKS = [VIEWER, OPERATOR, ADMIN]
BACKEND = "django.contrib.auth.backends.ModelBackend"
MISSING = 987_654_321
#: For who is not signed in, too; their own tests are elsewhere (sign-in, health, metrics, the API's table).
OPEN = ("api/", "login/", "logout/", "password/", "healthz", "metrics")


@dataclass(frozen=True)
class Page:
    """A method of a page, the role that it needs, and what it answers to who has it (a form without its values: 400,
    302 with a sentence, 409 with the refusals, or the plan).
    """

    method: str
    name: str
    role: str
    answer: int = 200
    #: Concerns no single host: not for people who are limited to some.
    everywhere: bool = False
    #: The role that is asked for before the object is looked for, where that is a lower one.
    first: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    #: What it is about belongs to no host, and is there for everybody.
    of_a_host: bool = True
    #: It shows a plan, and starts the job of it.
    plan: bool = False


def plans(*names: str, role: str = OPERATOR, reads: str = VIEWER, answer: int = 409) -> Iterator[Page]:
    """Pages that show a plan to who may read it, and start its job for who has the role."""
    for name in names:
        yield Page("get", name, reads, plan=True)
        yield Page("post", name, role, answer, first="" if reads == role else reads, plan=True)


def pages(
    methods: str, *names: str, role: str = VIEWER, answer: int = 200, everywhere: bool = False, of_a_host: bool = True
) -> Iterator[Page]:
    """Pages that differ by their names, and by these methods, alone."""
    for name, method in product(names, methods.split()):
        yield Page(method, name, role, answer, everywhere=everywhere, of_a_host=of_a_host)


PAGES = [
    *pages("get", "overview", "images", "images_csv"),
    *pages("post", "images_analyze", "images_reclaim", role=OPERATOR, answer=302),
    Page("get", "image", VIEWER),
    *pages("post", "analyze", "inside", role=OPERATOR, answer=302),
    *pages("post", "image_format", "image_forget", role=ADMIN, answer=302),
    *plans("reclaim", "flatten", "convert", "export"),
    *plans("to_device", role=ADMIN),
    *plans("move", "grow", "shrink", "relink", "rebase", "commit"),
    Page("get", "image_files", ADMIN),
    Page("get", "image_file", ADMIN, 302),
    *plans("bitmaps", "sparsify", "keys"),
    Page("get", "attached", VIEWER),
    *plans("attach", "detach", role=ADMIN, reads=ADMIN),
    *plans("check"),
    *pages("get", "ledger", "ledger_csv", "orphans", "orphans_csv"),
    *plans("set_aside", "restore_aside", "delete_aside", role=ADMIN, reads=ADMIN),
    *pages("get", "jobs", "jobs_csv", "jobs_count", "job", "job_status", "job_log"),
    *pages("post", "job_cancel", "job_retry", "job_secrets", role=OPERATOR, answer=302),
    Page("get", "job_undo", OPERATOR),
    Page("post", "job_undo", OPERATOR, 409),
    Page("post", "job_discard_undo", ADMIN, 400),
    *pages("get", "hosts", "hosts_csv", "pools_csv"),
    Page("get", "host_add", ADMIN, everywhere=True),
    Page("post", "host_add", ADMIN, 400, everywhere=True),
    *pages("get post", "host_connection", role=ADMIN, answer=404, everywhere=True),
    *pages("post", "host_remove", "host_change", role=ADMIN, answer=400),
    Page("post", "host_scan", OPERATOR, 302),
    Page("post", "folder_add", ADMIN, 400),
    Page("get", "pool", VIEWER),
    Page("post", "pool_change", ADMIN, 400),
    Page("post", "pool_confirm_folder", ADMIN, 302),
    *pages("post", "pool_remove", "pool_leftover", role=ADMIN, answer=400),
    *plans("create", "unpack", answer=200),
    *plans("from_device", role=ADMIN, reads=ADMIN, answer=200),
    *plans("upload", answer=200),
    *pages("get", "guests", "guests_csv", "snapshots", "snapshots_csv"),
    *pages("get post", "guest_io", answer=302),
    *pages("get", "guest", "guest_snapshots"),
    *plans("live_flatten", "live_merge", "live_copy", "switch_back", "set_disk", answer=200),
    *plans("snapshot", "delete_snapshot", "delete_old_snapshots", "revert_snapshot", answer=200),
    *plans("move_disk", "resize", "trim", answer=200),
    Page("post", "view_save", VIEWER, 302),
    # Of another's view it changes only whether the page opens with it, for oneself.
    Page("post", "view_change", VIEWER, 302, of_a_host=False),
    Page("post", "view_delete", ADMIN, 302, everywhere=True, first=VIEWER),
    *pages("get", "alerts", "alerts_count", "alerts_csv", "alert"),
    Page("post", "alert_ack", OPERATOR, 302),
    *pages("get", "webhooks", "webhooks_csv", "deliveries_csv", "webhook_deliveries_csv", role=ADMIN, everywhere=True),
    Page("post", "webhooks", ADMIN, 400, everywhere=True),
    Page("post", "mail_test", ADMIN, 302, everywhere=True),
    Page("get", "webhook", ADMIN, everywhere=True),
    Page("post", "webhook_change", ADMIN, 400, everywhere=True),
    Page("post", "webhook_secret", ADMIN, everywhere=True),
    *pages("post", "webhook_test", "webhook_delete", "delivery_resend", role=ADMIN, answer=302, everywhere=True),
    *pages("get", "policies", "policies_csv"),
    Page("get", "policy_add", ADMIN),
    Page("post", "policy_add", ADMIN, 400),
    Page("get", "policy", VIEWER),
    Page("get", "policy_change", ADMIN),
    Page("post", "policy_change", ADMIN, 302),
    Page("get", "policy_preview", OPERATOR),
    Page("post", "policy_run_now", OPERATOR, 302),
    Page("post", "policy_remove", ADMIN, 302),
    *pages("get", "policy_run", "policy_run_csv", "policy_runs_csv"),
    Page("post", "policy_run_stop", OPERATOR, 302),
    Page("post", "automation_switch", ADMIN, 302, everywhere=True),
    *pages("get", "tokens", "tokens_csv", role=ADMIN, everywhere=True),
    Page("post", "tokens", ADMIN, 400, everywhere=True),
    Page("post", "token_delete", ADMIN, 302, everywhere=True),
    *pages("get", "users", "users_csv", role=ADMIN, everywhere=True),
    Page("post", "users", ADMIN, 400, everywhere=True),
    Page("get", "user", ADMIN, everywhere=True),
    Page("post", "user", ADMIN, 400, everywhere=True),
    Page("post", "user_active", ADMIN, 302, everywhere=True),
    Page("post", "user_password", ADMIN, everywhere=True),
    Page("post", "user_sign_out", ADMIN, 302, everywhere=True),
    Page("post", "user_session_end", ADMIN, 404, everywhere=True),
    *pages("post", "lockout_end", "users_second_factor", "user_second_factor", role=ADMIN, answer=302, everywhere=True),
    *pages("get", "account", "mfa_index", "mfa_list_webauthn"),
    # These ask for the password again, or for what there is none of yet.
    *pages("get post", "mfa_activate_totp", answer=302),
    *pages("get post", "mfa_deactivate_totp", answer=404, of_a_host=False),
    *pages("get post", "mfa_add_webauthn", answer=302),
    *pages("get post", "mfa_remove_webauthn", answer=404),
    *pages("get", "mfa_view_recovery_codes", "mfa_download_recovery_codes", answer=404),
    *pages("get post", "mfa_generate_recovery_codes", answer=302),
    *pages("get post", "account_reauthenticate"),
    *pages("get post", "mfa_reauthenticate", answer=302),
    Page("get", "mfa_reauthenticate_webauthn", VIEWER, 302),
    *pages("post", "mfa_reauthenticate_webauthn", "account_zone", "account_sign_out", answer=302),
    Page("post", "account_session_end", VIEWER, 404),
    *pages("get", "audit", "audit_csv", role=ADMIN, everywhere=True),
    *pages("get", "benchmarks", "benchmarks_csv", "benchmark_start"),
    Page("post", "benchmark_start", OPERATOR, 200, first=VIEWER, body={"kind": "dd", "pool": "pool_id"}),
    Page("get", "benchmark_paste", OPERATOR),
    Page("post", "benchmark_paste", OPERATOR, 400, everywhere=True),
    *pages(
        "get",
        "benchmark_compare_csv",
        "benchmark_compare",
        "benchmark",
        "benchmark_status",
        "benchmark_figures",
        "benchmark_csv",
        "benchmark_history",
    ),
    Page("post", "benchmark_watch", OPERATOR, 400),
    Page("post", "benchmark_unwatch", OPERATOR, 302),
]


@dataclass(frozen=True)
class Asker:
    """Who asks: with a role, limited to a host, about things that are there or not."""

    role: str
    host: str = ""
    there: bool = True

    def answer(self, page: Page, *, about_one: bool) -> int:
        """What this one has to get."""
        rank = RANKS.index(self.role)
        seen = self.there and (self.host != "other" or not page.of_a_host)
        limited = page.everywhere and bool(self.host)
        if about_one and not seen and not limited:
            return 404 if rank >= RANKS.index(page.first or page.role) else 403
        return page.answer if rank >= RANKS.index(page.role) and not limited else 403


ASKERS = [*(Asker(role) for role in RANKS), Asker(ADMIN, "alpha"), Asker(OPERATOR, "other"), Asker(VIEWER, there=False)]
AT_NIGHT = [Asker(OPERATOR, "alpha"), Asker(VIEWER, "other"), Asker(ADMIN, "other"), Asker(ADMIN, there=False)]


@pytest.fixture
def ids(db: None) -> dict[str, int]:
    """One of everything on the host ``alpha``, by the names that they have in addresses."""
    HostFactory.create(slug="other")
    hook = WebhookFactory.create()
    attempt = AccessAttempt.objects.create(username="x", ip_address="192.0.2.7", failures_since_start=6)
    return everything_on("alpha") | {
        "token_id": TokenFactory.create().pk, "user_id": UserFactory.create().pk, "webhook_id": hook.pk,
        "delivery_id": DeliveryFactory.create(webhook=hook, state="given_up").pk, "lockout_id": attempt.pk,
        "view_id": SavedViewFactory.create(shared=True).pk,
    }  # fmt: skip


def routes() -> list[tuple[str, str]]:
    """Name and route of every page."""
    return [(name, route) for name, route in every_route() if not route.startswith(OPEN)]


def send(client: Client, method: str, where: str, body: dict[str, Any]) -> int:
    """The status, with all that the request changed taken back."""
    with transaction.atomic():
        jobs = Job.objects.count()
        answer = getattr(client, method)(where, body)
        if isinstance(answer, StreamingHttpResponse):
            list(answer.streaming_content)  # type: ignore[arg-type]
        assert answer.status_code < 400 or Job.objects.count() == jobs, where
        transaction.set_rollback(True)
    return int(answer.status_code)


def body_of(page: Page, ids: dict[str, int]) -> dict[str, Any]:
    return {name: ids.get(value, value) for name, value in page.body.items()}


@pytest.mark.parametrize("asker", [*ASKERS, *(pytest.param(one, marks=pytest.mark.night) for one in AT_NIGHT)], ids=str)
def test_each_answer_of_the_table(ids: dict[str, int], asker: Asker) -> None:
    client = client_as(role=asker.role, hosts=[asker.host] if asker.host else [])
    client.get("/jobs/count/")  # the first request notes where the session is from
    objects = ids if asker.there else dict.fromkeys(ids, MISSING)
    where, wrong = dict(routes()), []
    for page in PAGES if night() else PAGES[(*ASKERS, *AT_NIGHT).index(asker) % 2 :: 2]:
        about_one = "<" in where[page.name] or "pool" in page.body
        if not asker.there and not about_one:
            continue
        expected = asker.answer(page, about_one=about_one)
        answer = send(client, page.method, address(where[page.name], objects), body_of(page, objects))
        if answer != expected:
            wrong.append(f"{page.method} {page.name}: {answer}, expected {expected}")
    assert wrong == []


def test_nobody_and_no_token_opens_a_page_or_presses_a_button(ids: dict[str, int]) -> None:
    TokenFactory.create(role="admin", secret="sa_admin")
    for client in (Client(), Client(headers={"Authorization": "Bearer sa_admin"})):
        for _, route in routes():
            for method in ("get", "post"):
                where = address(route, ids)
                answer = getattr(client, method)(where)
                assert (answer.status_code, answer["Location"].partition("?")[0]) == (302, "/login/"), where


def test_each_page_is_in_the_table_and_other_methods_are_refused(ids: dict[str, int]) -> None:
    listed = {(page.method, page.name) for page in PAGES}
    where = dict(routes())
    assert len(listed) == len(PAGES) > 110
    assert {name for _, name in listed} == set(where)
    client = client_as(role="admin")
    client.get("/jobs/count/")
    others = [(method, name) for name in where for method in ("get", "post") if (method, name) not in listed]
    others += [(method, name) for name in where for method in ("put", "delete")]
    wrong = []
    for method, name in others:
        with transaction.atomic():
            answer = getattr(client, method)(address(where[name], ids))
            transaction.set_rollback(True)
        if answer.status_code != 405:
            wrong.append(f"{method} {name}: {answer.status_code}")
    assert wrong == []
