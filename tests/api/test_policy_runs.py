"""Policies over REST: what is kept, what is refused by its field, who sees which."""

from collections.abc import Callable

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from rest_framework.test import APIClient

from images.models import Policy, PolicyRun
from images.policies import runs
from storage_admin.accounts.models import AuditEntry
from storage_admin.jobs import automation
from storage_admin.jobs.models import Job
from tests.api.policies import NIGHTLY, URL, wins
from tests.api.test_query_budgets import MANY, make_images
from tests.factories import (
    GIB,
    HostFactory,
    JobFactory,
    PolicyFactory,
    PolicyPickFactory,
    PolicyRunFactory,
    StoragePoolFactory,
)
from tests.policies.test_runs import begun, end
from tests.working import at_most_queries

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]


def test_a_run_by_hand_is_listed_with_its_jobs_what_it_won_and_what_it_left_out(operator: APIClient) -> None:
    image = wins(name="a")
    wins(name="b", in_use=None)
    policy = PolicyFactory.create()
    answer = operator.post(f"{URL}{policy.pk}/run/", format="json")
    assert answer.status_code == 202
    assert (answer.json()["state"], answer.json()["by_hand"]) == ("running", True)
    runs.work(timezone.now())
    end(before_bytes=4 * GIB, after_bytes=3 * GIB, freed_bytes=GIB)
    runs.work(timezone.now())
    [run] = operator.get(f"{URL}{policy.pk}/runs/").json()["results"]
    assert (run["state"], run["predicted_bytes"], run["won_bytes"], run["counts"]) == (
        "finished", GIB, GIB, {"succeeded": 1, "skipped": 1},
    )  # fmt: skip
    [job] = run["jobs"]
    assert (job["image"], job["job"], job["freed_bytes"]) == (image.pk, Job.objects.get().pk, GIB)
    assert [(one["code"], one["count"]) for one in run["left_out"]] == [("guests_unknown", 1)]
    picks = operator.get(f"{URL}{policy.pk}/runs/{run['id']}/picks/?state=skipped").json()
    assert [(one["label"], one["code"]) for one in picks["results"]] == [("b", "guests_unknown")]
    assert operator.get(f"{URL}{policy.pk}/").json()["last_run"]["won_bytes"] == GIB


def test_a_second_run_by_hand_waits_for_the_first(operator: APIClient) -> None:
    wins()
    policy = PolicyFactory.create()
    begun(policy)
    answer = operator.post(f"{URL}{policy.pk}/run/", format="json")
    assert (answer.status_code, answer.json()["code"]) == (409, "busy")


def test_a_run_is_stopped_once_and_only_as_one_of_its_policy(operator: APIClient) -> None:
    wins(name="a")
    policy = PolicyFactory.create()
    begun(policy)
    run = PolicyRun.objects.get()
    address = f"{URL}{policy.pk}/runs/{run.pk}/stop/"
    assert operator.post(address, {"now": True}, format="json").status_code == 400
    assert operator.post(f"{URL}{PolicyFactory.create().pk}/runs/{run.pk}/stop/", format="json").status_code == 404
    stopped = operator.post(address, format="json").json()
    assert (stopped["id"], stopped["state"], stopped["finished"]) == (run.pk, "stopped", None)
    assert stopped["detail"].startswith("Stopped by token ")
    assert [(one["code"], one["count"]) for one in stopped["left_out"]] == [("policy_stopped", 1)]
    assert Job.objects.get().state == "cancelled"
    entry = AuditEntry.objects.get(what="policy run stopped")
    assert (entry.target, entry.after) == (policy.name, {"run": run.pk})
    again = operator.post(address, format="json")
    assert (again.status_code, again.json()["code"], again.json()["fields"]) == (409, "ended", {})
    assert "already stopped" in again.json()["detail"]
    assert AuditEntry.objects.filter(what="policy run stopped").count() == 1


def test_nothing_runs_by_hand_while_automation_is_paused(admin: APIClient, operator: APIClient) -> None:
    assert operator.get("/api/v1/automation/").json() == {"paused": False, "by": "", "reason": "", "since": None}
    paused = admin.patch("/api/v1/automation/", {"paused": True, "reason": "a move"}, format="json").json()
    assert (paused["paused"], paused["reason"]) == (True, "a move")
    assert paused["by"].startswith("token ")
    answer = operator.post(f"{URL}{PolicyFactory.create().pk}/run/", format="json")
    assert (answer.status_code, answer.json()["code"]) == (409, "automation_paused")
    assert automation.is_paused()
    entry = AuditEntry.objects.get(what="automation paused")
    assert (entry.before, entry.after) == ({"paused": False}, {"paused": True, "reason": "a move"})


def test_a_policy_exists_only_for_who_sees_all_that_it_reaches(client_of: Callable[..., APIClient]) -> None:
    mine, other = HostFactory.create(slug="mine"), HostFactory.create(slug="other")
    pool = StoragePoolFactory.create(host=mine)
    seen = [PolicyFactory.create(hosts=[mine.pk]), PolicyFactory.create(pools=[pool.pk])]
    unseen = [PolicyFactory.create(), PolicyFactory.create(hosts=[mine.pk, other.pk])]
    client = client_of("admin", hosts=["mine"])
    assert {one["id"] for one in client.get(URL).json()["results"]} == {one.pk for one in seen}
    for one in unseen:
        assert client.get(f"{URL}{one.pk}/").status_code == 404
        assert client.post(f"{URL}{one.pk}/run/", format="json").status_code == 404
    answer = client.post(URL, NIGHTLY, format="json")
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    widened = client.patch(f"{URL}{seen[0].pk}/", {"hosts": []}, format="json")
    assert widened.status_code == 403
    assert Policy.objects.get(pk=seen[0].pk).hosts == [mine.pk]


def test_a_policy_whose_host_and_pool_were_removed_can_still_be_changed_and_switched_off(admin: APIClient) -> None:
    host, gone, other = (HostFactory.create() for _ in range(3))
    pool = StoragePoolFactory.create(host=gone)
    policies = [PolicyFactory.create(hosts=[host.pk, gone.pk]), PolicyFactory.create(pools=[pool.pk])]
    lost = {"hosts": gone.pk, "pools": pool.pk}
    gone.delete()
    for policy in policies:
        answer = admin.patch(f"{URL}{policy.pk}/", {"enabled": False}, format="json")
        assert (answer.status_code, answer.json()["hosts"]) == (200, policy.hosts), answer.json()
    address = f"{URL}{policies[0].pk}/"
    assert admin.patch(address, {"hosts": [lost["hosts"], other.pk]}, format="json").status_code == 200
    assert admin.patch(address, {"hosts": [other.pk]}, format="json").status_code == 200
    for name, pk in lost.items():
        again = admin.patch(address, {name: [pk]}, format="json").json()
        assert again["fields"][name] == f"This {name.removesuffix('s')} does not exist: {pk}."
    assert admin.post(URL, NIGHTLY | {"hosts": [lost["hosts"]]}, format="json").status_code == 400


def test_what_is_kept_of_its_times_and_names_keeps_nobody_from_switching_a_policy_off(admin: APIClient) -> None:
    policy = PolicyFactory.create(timezone="localtime", name_pattern="! old*", formats=["cow"])
    address = f"{URL}{policy.pk}/"
    assert admin.patch(address, {"enabled": False}, format="json").status_code == 200
    assert "timezone" in admin.patch(address, {"quiet_minutes": 20}, format="json").json()["fields"]
    assert "name_pattern" in admin.patch(address, {"name_pattern": "! older*"}, format="json").json()["fields"]


def test_a_removed_host_hides_a_policy_from_nobody_who_sees_what_is_left_of_it(
    client_of: Callable[..., APIClient],
) -> None:
    mine, other, gone = (HostFactory.create(slug=slug) for slug in ("mine", "other", "gone"))
    own, lost = StoragePoolFactory.create(host=mine), StoragePoolFactory.create(host=gone)
    theirs = StoragePoolFactory.create(host=other)
    seen = [PolicyFactory.create(hosts=[mine.pk, gone.pk]), PolicyFactory.create(pools=[own.pk, lost.pk])]
    unseen = [
        PolicyFactory.create(hosts=[mine.pk, other.pk, gone.pk]),
        PolicyFactory.create(pools=[own.pk, theirs.pk, lost.pk]),
        PolicyFactory.create(hosts=[gone.pk]),
        PolicyFactory.create(pools=[lost.pk]),
        PolicyFactory.create(hosts=[gone.pk], pools=[lost.pk]),
    ]
    removed = gone.pk
    gone.delete()
    client = client_of("admin", hosts=["mine", "gone"])
    assert {one["id"] for one in client.get(URL).json()["results"]} == {one.pk for one in seen}
    for one in seen:
        assert client.patch(f"{URL}{one.pk}/", {"enabled": False}, format="json").status_code == 200
    for one in unseen:
        assert client.patch(f"{URL}{one.pk}/", {"enabled": False}, format="json").status_code == 404
    left = client.patch(f"{URL}{seen[0].pk}/", {"hosts": [removed]}, format="json")
    assert left.status_code == 403
    assert {one["id"] for one in client_of("admin").get(URL).json()["results"]} == {one.pk for one in [*seen, *unseen]}


def test_lists_cost_no_more_queries_for_more_rows(viewer: APIClient) -> None:
    def fill(count: int) -> int:
        for _ in range(count):
            run = PolicyRunFactory.create(policy__name=f"p{Policy.objects.count()}")
            PolicyPickFactory.create(run=run, job=JobFactory.create(), state="succeeded")
            PolicyPickFactory.create(run=PolicyRunFactory.create(policy=policy), state="skipped", code="busy")
        seen = 0
        for address in (URL, f"{URL}{policy.pk}/runs/"):
            viewer.get(address)
            with CaptureQueriesContext(connection) as captured:
                assert viewer.get(address).status_code == 200
            assert len(captured) <= 12
            seen += len(captured)
        return seen

    policy = PolicyFactory.create()
    assert fill(2) == fill(8)


def test_the_preview_keeps_its_budget_at_thousands_of_images(operator: APIClient) -> None:
    count = make_images(MANY[connection.vendor])
    policy = PolicyFactory.create()
    address = f"{URL}{policy.pk}/preview/"
    operator.get(address)
    with at_most_queries(30):
        found = operator.get(address).json()
    assert found["chosen_count"] + found["skipped_count"] == count
    assert PolicyRun.objects.count() == 0


def test_a_policy_whose_windows_cannot_be_told_is_shown_with_all_others(admin: APIClient) -> None:
    PolicyFactory.create(name="good")
    odd = PolicyFactory.create(name="odd", timezone="Gone/Zone")
    listed = admin.get("/api/v1/policies/")
    assert (listed.status_code, len(listed.json()["results"])) == (200, 2)
    assert admin.get(f"/api/v1/policies/{odd.pk}/").json()["next_window"] is None
