"""However a job ends that changes something on a host, the audit trail says so once: by whom, before and after."""

from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from storage_admin.accounts.models import AuditEntry
from storage_admin.agent.protocol import b64
from storage_admin.jobs import claims, kinds, reaper, services
from storage_admin.jobs.kinds import Wait
from storage_admin.jobs.models import Job
from tests.factories import GuestFactory, ImageFactory, JobFactory
from tests.working import OPERATOR, reread

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet"), pytest.mark.sql]


def ends() -> list[AuditEntry]:
    return list(AuditEntry.objects.filter(what__endswith=" ended").order_by("id"))


def rewrite(**columns: Any) -> Job:
    return JobFactory.create(kind="reclaim", target=ImageFactory.create(), created_by="token nightly", **columns)


def end(job: Job, state: str = "succeeded", **columns: Any) -> AuditEntry:
    with transaction.atomic():
        assert claims.finish(job, state, **columns)
    [entry] = ends()
    return entry


def test_a_rewrite_that_succeeds_says_what_the_image_took_before_and_takes_now() -> None:
    job = rewrite(state="running", plan={"reason": "long"}, commands=[{"argv": ["qemu-img"]}])
    entry = end(
        job, result={"before_bytes": 9, "after_bytes": 4, "held_bytes": 9, "freed_bytes": 0, "swapped": True,
                     "found": {"errors": ["…"] * 100}, "words": "many"}
    )  # fmt: skip
    assert (entry.who, entry.what, entry.target) == ("token nightly", "reclaim ended", job.target_label)
    assert (entry.refused, entry.address) == (False, None)
    assert entry.before == {"allocated_bytes": 9}
    assert entry.after == {
        "job": job.pk, "host": job.host.slug, "state": "succeeded", "allocated_bytes": 4, "held_bytes": 9,
        "freed_bytes": 0, "swapped": True,
    }  # fmt: skip


def test_one_that_fails_says_why_and_nothing_of_what_a_tool_printed() -> None:
    job = rewrite(state="running")
    entry = end(job, "failed", error_code="tool_failed", error_detail="a long story")
    assert entry.before is None
    assert entry.after == {"job": job.pk, "host": job.host.slug, "state": "failed", "code": "tool_failed"}


def test_work_in_place_that_is_cut_off_says_how_far_it_came() -> None:
    entry = end(rewrite(state="running", before_bytes=9, after_bytes=7), "interrupted", error_code="interrupted")
    assert (entry.before, (entry.after or {})["allocated_bytes"]) == ({"allocated_bytes": 9}, 7)


def test_a_guests_setting_says_both_values() -> None:
    job = JobFactory.create(kind="set_io_priority", target=GuestFactory.create(name="web"), state="running")
    was, now = ({"io_priority": value, "io_weight": None, "io_limits": None} for value in (3, 7))
    entry = end(job, result={"before": was, "now": now, "effect": "now", "words": "many"})
    assert (entry.target, entry.before) == (job.target_label, was)
    assert now.items() <= (entry.after or {}).items()
    assert (entry.after or {})["effect"] == "now"


def test_an_enlarged_disk_says_both_sizes() -> None:
    job = JobFactory.create(kind="resize", target=GuestFactory.create(), state="running")
    was, now = ({"volume": "local:100/a.qcow2", "size_bytes": size} for size in (1024, 4096))
    entry = end(job, result={"disk": "scsi0", "before": was, "now": now, "task": "UPID:…", "warnings": 0})
    assert entry.before == was
    assert (now | {"disk": "scsi0", "task": "UPID:…"}).items() <= (entry.after or {}).items()


def test_a_conversion_into_a_new_file_does_not_say_that_its_image_has_changed() -> None:
    job = JobFactory.create(kind="convert", target=ImageFactory.create(), state="running", options={"replace": False})
    entry = end(job, result={"before_bytes": 9, "after_bytes": 4, "swapped": False, "format": "raw", "path": "/a.raw"})
    assert entry.before is None
    new = {"allocated_bytes": 4, "swapped": False, "format": "raw", "path": "/a.raw"}
    assert new.items() <= (entry.after or {}).items()


def test_a_conversion_that_fails_says_no_sizes() -> None:
    job = JobFactory.create(kind="convert", target=ImageFactory.create(), state="running", options={"replace": False})
    entry = end(job, "failed", error_code="not_enough_space")
    assert (entry.before, entry.after) == (
        None, {"job": job.pk, "host": job.host.slug, "state": "failed", "code": "not_enough_space"},
    )  # fmt: skip


def test_an_image_that_gets_another_name_says_both() -> None:
    kept = {"path_b64": b64(b"/pool/a.qcow2"), "new_path_b64": b64(b"/pool/a.raw")}
    job = JobFactory.create(kind="convert", target=ImageFactory.create(), state="running", kept=kept)
    entry = end(job, result={"swapped": True, "path": "/pool/a.raw"})
    assert (entry.before, (entry.after or {})["path"]) == ({"path": "/pool/a.qcow2"}, "/pool/a.raw")


def test_an_undo_copy_that_is_removed_says_what_it_held() -> None:
    job = JobFactory.create(kind="discard_undo", target=rewrite(state="succeeded"), state="running")
    entry = end(job, result={"copy_bytes": 9, "of_job": 3})
    assert (entry.before, (entry.after or {})["undo_bytes"]) == ({"undo_bytes": 9}, 0)


def test_a_recovery_says_how_many_it_found_of_each_outcome() -> None:
    job = JobFactory.create(kind="recover", state="running")
    found = [{"job": "a", "outcome": outcome, "detail": ""} for outcome in ("kept", "reverted", "kept")]
    assert (end(job, result={"recovered": found, "replaced": False}).after or {})["recovered"] == {
        "kept": 2, "reverted": 1,
    }  # fmt: skip


def test_a_running_job_that_is_cancelled_says_who_wanted_that_and_its_end() -> None:
    job = rewrite(state="running")
    services.cancel(OPERATOR, job)
    assert ends() == []
    claims.finish(job, "cancelled")
    assert [(entry.who, entry.what) for entry in AuditEntry.objects.order_by("id")] == [
        ("olga", "job cancelled"), ("token nightly", "reclaim ended"),
    ]  # fmt: skip
    assert (ends()[0].after or {})["state"] == "cancelled"


@pytest.mark.parametrize("verb", ["cancel", "withdraw"])
def test_one_that_has_not_begun_ends_with_its_cancel(verb: str) -> None:
    job = rewrite()
    if verb == "cancel":
        services.cancel(OPERATOR, job)
    else:
        assert services.withdraw(OPERATOR, job, "no need")
        assert not services.withdraw(OPERATOR, job, "no need")
    assert [entry.what for entry in AuditEntry.objects.order_by("id")] == ["job cancelled", "reclaim ended"]
    assert (ends()[0].after or {})["state"] == "cancelled"


def test_one_that_waited_in_vain_says_so_once() -> None:
    job = rewrite()
    assert claims.park(job, Wait("a guest", timezone.now()))
    assert claims.give_up(reread(job), "image_in_use", "The guest did not shut down.")
    assert not claims.give_up(job, "image_in_use", "The guest did not shut down.")
    assert [(entry.after or {})["code"] for entry in ends()] == ["image_in_use"]


def test_one_whose_worker_was_killed_is_ended_once_by_whoever_finds_out() -> None:
    job = rewrite(state="running", generation=1, heartbeat=None)
    assert (reaper.reap(), reaper.reap()) == (1, 0)
    assert not claims.finish(job, "succeeded")
    [entry] = ends()
    assert (entry.who, entry.target) == ("token nightly", job.target_label)
    assert entry.after == {"job": job.pk, "host": job.host.slug, "state": "interrupted", "code": "interrupted"}


def test_one_that_was_called_lost_and_has_succeeded_after_all_says_both() -> None:
    job = rewrite(state="running", generation=1, heartbeat=None, worker="w")
    reaper.reap()
    with transaction.atomic():
        assert claims.take_back(job)
        assert claims.finish(job, "succeeded", result={"before_bytes": 9, "after_bytes": 4})
    assert [(entry.after or {})["state"] for entry in ends()] == ["interrupted", "succeeded"]


def test_an_end_that_is_rolled_back_is_not_in_the_trail() -> None:
    with transaction.atomic():
        claims.finish(rewrite(state="running"), "succeeded")
        transaction.set_rollback(True)
    assert ends() == []


@pytest.mark.parametrize(
    ("kind", "options"),
    [("scan", {}), ("sample", {}), ("exclusive", {}), ("analyze", {}), ("benchmark", {"kind": "dd"}),
     ("check", {"repair": "none"})],
)  # fmt: skip
def test_what_only_looks_is_not_in_the_trail(kind: str, options: dict[str, Any]) -> None:
    claims.finish(JobFactory.create(kind=kind, options=options, state="running"), "succeeded", result={})
    assert ends() == []


def test_every_other_kind_is() -> None:
    told = {kind.name for kind in kinds.every() if not kind.only_looks({"repair": "leaks"})}
    assert {kind.name for kind in kinds.every()} - told == {"scan", "sample", "exclusive", "analyze", "benchmark"}
