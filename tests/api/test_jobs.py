"""Jobs over REST: submit, plan, watch, cancel, retry, undo, log."""

from typing import Any

import pytest
from django.utils import timezone
from rest_framework.test import APIClient

from storage_admin.accounts.models import AuditEntry
from storage_admin.jobs.models import Job
from tests.factories import GIB, GuestFactory, HostFactory, ImageFactory, JobFactory, JobLogFactory

pytestmark = pytest.mark.sql


def post(client: APIClient, path: str = "jobs/", body: Any = None, **headers: str) -> Any:
    return client.post(f"/api/v1/{path}", {} if body is None else body, format="json", headers=headers)


def test_a_submission_is_accepted_and_its_job_is_queued(operator: APIClient) -> None:
    host = HostFactory.create()
    response = post(operator, body={"kind": "scan", "host": host.pk})
    assert response.status_code == 202
    job = response.json()
    assert (job["kind"], job["state"], job["host"], job["image"]) == ("scan", "queued", host.pk, None)
    assert operator.get(f"/api/v1/jobs/{job['id']}/").json() == job


def test_every_field_of_the_contract_is_there(viewer: APIClient) -> None:
    contract = """id kind state waiting_for progress stage message done_bytes total_bytes bytes_per_sec eta_seconds
    commands host
    image guest pool options plan result error created_by created started finished cancel_requested undo"""
    job = JobFactory.create(
        kind="reclaim", target=ImageFactory.create(), state="failed", error_code="tool_failed",
        error_detail="Disk full.", undo_state="available", undo_bytes=GIB, undo_expires=timezone.now(),
    )  # fmt: skip
    shown = viewer.get(f"/api/v1/jobs/{job.pk}/").json()
    assert set(contract.split()) <= set(shown)
    assert shown["image"] == job.target_id
    assert shown["error"] == {"code": "tool_failed", "detail": "Disk full."}
    assert (shown["undo"]["available"], shown["undo"]["bytes"]) == (True, GIB)
    assert shown["undo"]["expires"].endswith("Z")
    assert shown["result"] is None


def test_a_dry_run_answers_with_the_plan_and_writes_nothing(operator: APIClient) -> None:
    image = ImageFactory.create()
    response = post(operator, body={"kind": "reclaim", "image": image.pk, "dry_run": True})
    contract = """method reason commands facts_at before_bytes predicted_after_bytes predicted_low predicted_high
    scratch_bytes undo_bytes refusals warnings affected_images affected_guests"""
    assert response.status_code == 200
    assert set(contract.split()) <= set(response.json())
    assert response.json()["before_bytes"] == image.allocated_size
    assert not Job.objects.exists()


@pytest.fixture
def undeclared(db: None) -> Any:
    return ImageFactory.create(name="disk", declared_format="", declared_by="")


def test_a_dry_run_is_answered_also_where_the_job_would_be_refused(viewer: APIClient, undeclared: Any) -> None:
    response = post(viewer, body={"kind": "reclaim", "image": undeclared.pk, "dry_run": True})
    assert response.status_code == 200
    refusals = response.json()["refusals"]
    assert "format_undeclared" in [refusal["code"] for refusal in refusals]
    assert all(len(refusal["detail"]) > 20 for refusal in refusals)


def test_a_refused_job_is_a_conflict_with_a_code_and_is_not_queued(operator: APIClient, undeclared: Any) -> None:
    response = post(operator, body={"kind": "reclaim", "image": undeclared.pk})
    assert (response.status_code, response.json()["code"]) == (409, "format_undeclared")
    assert set(response.json()) == {"code", "detail", "fields"}
    assert not Job.objects.exists()
    assert AuditEntry.objects.filter(what="reclaim refused").exists()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": "format"}, "kind"), ({"kind": 5}, "kind"), ({"kind": None}, "kind"), ({"host": "local"}, "host"),
        ({"host": True}, "host"), ({"host": 1.5}, "host"), ({"host": 10**30}, "host"), ({"host": -1}, "host"),
        ({"image": 1}, "image"), ({"options": []}, "options"), ({"options": "x"}, "options"),
        ({"dry_run": "yes"}, "dry_run"),
        ({"dry_run": 1}, "dry_run"), ({"optoins": {}}, "optoins"), ({"options": {"deep": True}}, "deep"),
        ({"host": None}, "host"),
    ],
)  # fmt: skip
def test_a_submission_that_makes_no_sense_names_the_field(
    operator: APIClient, change: dict[str, Any], field: str
) -> None:
    body = {"kind": "scan", "host": HostFactory.create().pk} | change
    response = post(operator, body=body)
    assert (response.status_code, response.json()["code"]) == (400, "invalid")
    assert list(response.json()["fields"]) == [field]
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("kind", "options", "field"),
    [
        ("set_io_priority", {"priority": 4.0}, "priority"), ("set_io_priority", {"priority": True}, "priority"),
        ("set_io_priority", {"weight": 100.0}, "weight"),
        ("set_io_priority", {"limits": {"read_iops_sec": 100.0}}, "limits"),
        ("reclaim", {"bandwidth_bytes_sec": 1048576.0}, "bandwidth_bytes_sec"),
        ("convert", {"format_options": {"cluster_size": 65536.0}}, "format_options"),
        ("set_aside", {"grace_days": 30.0}, "grace_days"),
    ],
)  # fmt: skip
def test_an_option_that_is_a_whole_number_is_no_float_and_no_truth_value(
    admin: APIClient, kind: str, options: dict[str, Any], field: str
) -> None:
    guest, image = GuestFactory.create(), ImageFactory.create()
    target = {"guest": guest.pk} if kind == "set_io_priority" else {"image": image.pk}
    response = post(admin, body={"kind": kind, "options": options} | target)
    assert (response.status_code, list(response.json()["fields"])) == (400, [field])
    assert not Job.objects.exists()


def test_the_hours_of_an_undo_copy_may_be_any_number(admin: APIClient) -> None:
    body = {"kind": "reclaim", "image": ImageFactory.create().pk, "options": {"undo_hours": 0.5}}
    assert post(admin, body=body).json()["options"]["undo_hours"] == 0.5


def test_a_submission_without_its_target_says_which_is_missing(operator: APIClient) -> None:
    assert post(operator, body={"kind": "reclaim"}).json()["fields"].keys() == {"image"}


def test_a_target_that_is_not_there_is_not_found(operator: APIClient) -> None:
    assert post(operator, body={"kind": "reclaim", "image": 999}).json()["code"] == "not_found"


def test_the_same_idempotency_key_gets_the_same_job(operator: APIClient) -> None:
    body = {"kind": "scan", "host": HostFactory.create().pk}
    headers = {"Idempotency-Key": "nightly-1"}
    first, second = (post(operator, body=body, **headers) for _ in range(2))
    assert (first.status_code, second.status_code) == (202, 202)
    assert first.json()["id"] == second.json()["id"]
    assert Job.objects.count() == 1
    told = post(operator, body=body, **{"Idempotency-Key": "x" * 256})
    assert (told.status_code, told.json()["code"], set(told.json()["fields"])) == (400, "invalid", {"Idempotency-Key"})


def test_a_host_is_scanned_by_its_own_address(operator: APIClient) -> None:
    host = HostFactory.create()
    response = post(operator, f"hosts/{host.pk}/scan/")
    assert (response.status_code, response.json()["kind"], response.json()["host"]) == (202, "scan", host.pk)


def test_a_failed_job_is_retried_as_a_new_one(operator: APIClient) -> None:
    job = JobFactory.create(state="failed", finished=timezone.now())
    response = post(operator, f"jobs/{job.pk}/retry/")
    assert response.status_code == 202
    assert response.json()["id"] != job.pk
    assert post(operator, f"jobs/{JobFactory.create(state='succeeded').pk}/retry/").status_code == 400


def test_an_undo_of_a_job_without_an_undo_copy_is_refused(operator: APIClient) -> None:
    job = JobFactory.create(kind="reclaim", target=ImageFactory.create(), state="succeeded", finished=timezone.now())
    response = post(operator, f"jobs/{job.pk}/undo/")
    assert response.status_code == 409
    assert response.json()["code"] == "undo_missing"


def test_an_undo_is_a_job_of_its_own(operator: APIClient) -> None:
    job = JobFactory.create(
        kind="reclaim", target=ImageFactory.create(), state="succeeded", finished=timezone.now(), undo_state="available"
    )
    response = post(operator, f"jobs/{job.pk}/undo/")
    assert (response.status_code, response.json()["kind"], response.json()["job"]) == (202, "undo", job.pk)


def test_a_copy_that_may_be_all_that_is_left_goes_only_by_force(admin: APIClient, operator: APIClient) -> None:
    image = ImageFactory.create(state="missing")
    job = JobFactory.create(kind="reclaim", target=image, state="succeeded", undo_state="available")
    assert post(admin, f"jobs/{job.pk}/discard-undo/").json()["code"] == "stale_plan"
    assert post(operator, f"jobs/{job.pk}/discard-undo/", {"force": True}).status_code == 403
    assert post(admin, f"jobs/{job.pk}/discard-undo/", {"force": True}).status_code == 202


def test_a_log_is_read_on_from_where_it_was_read_to(viewer: APIClient) -> None:
    job = JobFactory.create()
    JobLogFactory.create()
    lines = [JobLogFactory.create(job=job, text=str(number), level="command") for number in range(5)]
    page = viewer.get(f"/api/v1/jobs/{job.pk}/log/?limit=2").json()
    texts = []
    while True:
        texts += [line["text"] for line in page["results"]]
        if page["next"] is None:
            break
        page = viewer.get(page["next"]).json()
    assert texts == ["0", "1", "2", "3", "4"]
    assert viewer.get(f"/api/v1/jobs/{job.pk}/log/?after={lines[3].pk}").json()["results"][0]["seq"] == lines[4].pk
    assert viewer.get(f"/api/v1/jobs/{job.pk}/log/?after={lines[4].pk}").json()["results"] == []


def test_pages_of_jobs_stay_put_when_new_ones_come(viewer: APIClient) -> None:
    old = JobFactory.create_batch(4)
    first = viewer.get("/api/v1/jobs/?limit=2").json()
    JobFactory.create_batch(3)
    second = viewer.get(first["next"]).json()
    assert [row["id"] for row in first["results"] + second["results"]] == [job.pk for job in reversed(old)]
    assert first["count"] == 4


@pytest.mark.parametrize(
    ("query", "found"),
    [("state=failed", "b"), ("kind=reclaim", "b"), ("active=true", "a"), ("active=false", "b"), ("image={image}", "b"),
     ("host={host}", "b"), ("pool=1", ""), ("image=0", ""), ("", "b a"), ("ordering=id", "a b")],
)  # fmt: skip
def test_filters(viewer: APIClient, query: str, found: str) -> None:
    image = ImageFactory.create()
    JobFactory.create(target_label="a")
    JobFactory.create(kind="reclaim", target=image, state="failed", target_label="b")
    response = viewer.get(f"/api/v1/jobs/?{query.format(image=image.pk, host=image.host.slug)}")
    assert [row["target_label"] for row in response.json()["results"]] == found.split()


def test_kinds_say_what_they_take_and_who_may(viewer: APIClient) -> None:
    listed = viewer.get("/api/v1/job-kinds/").json()
    kinds = {kind["name"]: kind for kind in listed["results"]}
    assert {"scan", "analyze", "reclaim", "undo", "discard_undo", "recover"} <= set(kinds)
    assert listed["count"] == len(kinds)
    assert kinds["reclaim"]["target"] == "image"
    assert kinds["reclaim"]["roles"] == ["operator", "admin"]
    assert kinds["discard_undo"]["roles"] == ["admin"]
    assert kinds["reclaim"]["options_schema"]["properties"]["undo_hours"]["default"] == 24
