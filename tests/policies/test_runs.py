"""A run at work, over rows: what is submitted when, and how each pick ends."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from images.models import Image, Policy, PolicyPick, PolicyRun
from images.policies import runs, services
from storage_admin.accounts.models import AuditEntry
from storage_admin.agent.protocol import RefusedError
from storage_admin.events.models import Alert
from storage_admin.jobs import automation
from storage_admin.jobs.models import Job, ResourceLock
from tests.factories import GIB, ImageFactory, JobFactory, PolicyFactory, StoragePoolFactory
from tests.harness.patching import raising
from tests.working import ADMIN, OPERATOR, reread, said

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet"), pytest.mark.sql]
NOW = timezone.now()
MINUTE = timedelta(minutes=1)


def images(count: int, **columns: Any) -> list[Image]:
    """Images of one host; each wins less than the one before."""
    columns = {"pool": columns.pop("pool", None) or StoragePoolFactory.create(available_bytes=90 * GIB)} | columns
    return [
        ImageFactory.create(
            name=f"disk{number}",
            **{"reclaimable_bytes": (count - number) * (GIB // 8)} | columns,
            **estimated(count - number),
        )
        for number in range(count)
    ]


def estimated(eighths: int) -> dict[str, Any]:
    wins = eighths * (GIB // 8)
    after = dict.fromkeys(("predicted_after_bytes", "predicted_low", "predicted_high"), 4 * GIB - wins)
    return {"estimate": {"methods": dict.fromkeys(("copy", "compress"), {"reclaimable_bytes": wins} | after)}}


def begun(policy: Policy, at: Any = NOW) -> PolicyRun:
    run = services.run_now(OPERATOR, policy, at)
    runs.work(at)
    return PolicyRun.objects.get(pk=run.pk)


def stepped(run: PolicyRun, at: datetime) -> PolicyRun:
    """The run as it is after a step of all runs at that time."""
    runs.work(at)
    return reread(run)


def night(count: int, **columns: Any) -> PolicyRun:
    """What a new policy has begun over so many images of one host."""
    images(count)
    return begun(PolicyFactory.create(**columns))


def picks(run: PolicyRun) -> list[tuple[str, str, str]]:
    return [(pick.label, pick.state, pick.code) for pick in run.picks.order_by("place", "label")]


def end(state: str = "succeeded", **columns: Any) -> None:
    """Every job that is queued has run and ended."""
    for job in Job.objects.filter(state__in=Job.ACTIVE).exclude(kind="scan"):
        Job.objects.filter(pk=job.pk).update(state=state, finished=timezone.now(), **columns)
        ResourceLock.objects.filter(job=job).delete()


def at_work() -> list[str]:
    return list(Job.objects.filter(state__in=Job.ACTIVE).order_by("pk").values_list("target_label", flat=True))


def test_as_many_jobs_as_a_policy_allows_are_at_work_on_each_host_in_the_order_of_gain() -> None:
    images(4)
    run = night(3, max_jobs_per_host=2)
    assert sorted(at_work()) == ["disk0", "disk0", "disk1", "disk1"]
    job = Job.objects.order_by("pk")[0]
    assert job.created_by == f"policy {run.policy.name}"
    assert job.policy_pick.predicted_bytes == 4 * (GIB // 8)
    runs.work(NOW + MINUTE)
    assert len(at_work()) == 4
    Job.objects.filter(pk=job.pk).update(state="succeeded", finished=NOW)
    ResourceLock.objects.filter(job=job).delete()
    runs.work(NOW + 2 * MINUTE)
    assert sorted(at_work()) == ["disk0", "disk1", "disk1", "disk2"]


def test_a_job_that_waits_for_a_guest_takes_no_slot_of_its_policy_and_is_withdrawn_with_the_window() -> None:
    run = night(2)
    assert at_work() == ["disk0"]
    Job.objects.update(parked_at=NOW, waiting_for="guest web to be shut down")
    runs.work(NOW + MINUTE)
    assert at_work() == ["disk0", "disk1"]
    runs.work(run.ends)
    assert picks(reread(run)) == [("disk0", "skipped", "window_closed"), ("disk1", "skipped", "window_closed")]


def test_a_run_ends_when_all_has_ended_and_says_how() -> None:
    images(2)
    images(1, in_use=True, in_use_detail="guest web is running")
    run = begun(PolicyFactory.create())
    assert picks(run) == [("disk0", "submitted", ""), ("disk1", "chosen", ""), ("disk0", "skipped", "guest_running")]
    end()
    runs.work(NOW + MINUTE)
    end("failed", error_code="bug", error_detail="It broke.")
    assert picks(stepped(run, NOW + 2 * MINUTE))[:2] == [("disk0", "succeeded", ""), ("disk1", "failed", "bug")]
    assert (run.state, run.finished) == ("finished", NOW + 2 * MINUTE)
    entry = AuditEntry.objects.get(what="policy run ended")
    assert (entry.who, entry.after) == (f"policy {run.policy.name}", {"run": run.pk, "state": "finished"})
    assert "1 of its jobs failed" in Alert.objects.get(closed=None).title


def test_a_job_that_failed_is_not_tried_again_in_the_same_run() -> None:
    run = night(1)
    end("failed", error_code="bug")
    for minute in range(1, 5):
        runs.work(NOW + minute * MINUTE)
    run.refresh_from_db()
    assert Job.objects.count() == 1
    assert (run.state, run.detail) == ("failed", "All of its jobs failed.")


def test_an_alert_of_a_failed_policy_is_closed_by_a_run_that_ends_well() -> None:
    policy = night(1).policy
    end("failed", error_code="bug")
    runs.work(NOW + MINUTE)
    assert Alert.objects.get().closed is None
    begun(policy, NOW + 2 * MINUTE)
    end()
    runs.work(NOW + 3 * MINUTE)
    assert Alert.objects.get().closed is not None


def test_a_job_that_was_interrupted_has_failed_once_its_host_was_recovered() -> None:
    run = night(1)
    end("interrupted", error_code="interrupted", needs_recovery=True)
    assert picks(stepped(run, NOW + MINUTE)) == [("disk0", "submitted", "")]
    Job.objects.update(needs_recovery=False, error_detail="Its worker was lost.")
    assert picks(stepped(run, NOW + 2 * MINUTE)) == [("disk0", "failed", "interrupted")]
    assert run.picks.get().reason == "Its worker was lost."


def test_a_host_that_is_never_recovered_does_not_keep_a_run_for_ever() -> None:
    run = night(1)
    end("interrupted", error_code="interrupted", needs_recovery=True)
    assert (stepped(run, run.ends).state, picks(run)) == ("failed", [("disk0", "failed", "interrupted")])


def test_what_the_agent_refuses_on_the_spot_is_left_out_and_is_no_failure() -> None:
    run = night(1)
    end("failed", error_code="guest_running", error_detail="Guest web was started.")
    assert picks(stepped(run, NOW + MINUTE)) == [("disk0", "skipped", "guest_running")]
    assert run.state == "finished"
    assert not Alert.objects.exists()


def test_a_job_that_somebody_cancelled_is_left_out() -> None:
    run = night(1)
    end("cancelled")
    assert picks(stepped(run, NOW + MINUTE)) == [("disk0", "skipped", "cancelled")]


def test_what_a_plan_refuses_is_left_out_with_its_code_and_the_next_one_comes() -> None:
    first, _second = images(2)
    Image.objects.filter(pk=first.pk).update(header={"data_file": "data.raw"})
    run = begun(PolicyFactory.create())
    assert picks(run) == [("disk0", "skipped", "external_data_file"), ("disk1", "submitted", "")]


def test_in_the_last_quiet_minutes_nothing_begins_and_what_has_not_begun_is_withdrawn() -> None:
    run = night(3, max_jobs_per_host=2)
    first, second = Job.objects.order_by("pk")
    Job.objects.filter(pk=first.pk).update(state="running")
    quiet = run.ends - 30 * MINUTE
    runs.work(quiet - MINUTE)
    assert Job.objects.filter(state="cancelled").count() == 0
    runs.work(quiet)
    assert reread(second).state == "cancelled"
    assert not ResourceLock.objects.filter(job=second).exists()
    assert any("last 30 minutes" in line for line in said(second))
    assert picks(run) == [
        ("disk0", "submitted", ""), ("disk1", "skipped", "window_closed"), ("disk2", "skipped", "window_closed"),
    ]  # fmt: skip
    assert reread(run).state == "running"
    # The one at work is never cut, and may end long after the window.
    assert (reread(first).state, first.cancel_requested) == ("running", False)
    runs.work(run.ends + 60 * MINUTE)
    end()
    assert (stepped(run, run.ends + 61 * MINUTE).state, run.finished) == ("finished", run.ends + 61 * MINUTE)


def test_jobs_of_the_last_run_that_are_still_at_work_take_slots_of_the_next() -> None:
    policy = night(3).policy
    Job.objects.update(state="running")
    PolicyRun.objects.update(ends=NOW + MINUTE, due=NOW - MINUTE)
    runs.work(NOW + MINUTE)
    services.stop(OPERATOR, PolicyRun.objects.get())
    later = begun(policy, NOW + 2 * MINUTE)
    assert Job.objects.count() == 1
    assert picks(later) == [("disk1", "chosen", ""), ("disk2", "chosen", ""), ("disk0", "skipped", "busy")]


def test_while_automation_is_paused_nothing_is_submitted_and_what_has_not_begun_goes_back() -> None:
    run = night(2, max_jobs_per_host=2)
    Job.objects.filter(target_label="disk0").update(state="running")
    automation.switch(ADMIN, paused=True, reason="maintenance")
    runs.work(NOW + MINUTE)
    assert at_work() == ["disk0"]
    assert picks(run) == [("disk0", "submitted", ""), ("disk1", "chosen", "")]
    with pytest.raises(RefusedError, match="paused by ada"):
        services.run_now(OPERATOR, PolicyFactory.create())
    automation.switch(ADMIN, paused=False)
    runs.work(NOW + 2 * MINUTE)
    assert sorted(at_work()) == ["disk0", "disk1"]


def test_an_image_that_another_job_has_waits_for_its_turn() -> None:
    run = night(2, max_jobs_per_host=1)
    end()
    blocker = JobFactory.create(target=Image.objects.get(name="disk1"), kind="check", state="running")
    ResourceLock.objects.create(job=blocker, key=f"image:{Image.objects.get(name='disk1').pk}", exclusive=True)
    assert picks(stepped(run, NOW + MINUTE)) == [("disk0", "succeeded", ""), ("disk1", "chosen", "busy")]
    ResourceLock.objects.all().delete()
    assert picks(stepped(run, NOW + 2 * MINUTE))[1] == ("disk1", "submitted", "")


def test_what_still_waits_for_another_job_when_the_window_closes_says_so() -> None:
    images(1)
    services.run_now(OPERATOR, PolicyFactory.create(), NOW)
    run = PolicyRun.objects.get()
    runs.work(NOW)
    PolicyPick.objects.update(state="chosen", code="busy", reason="Job 7 needs it.", job=None)
    runs.work(run.ends)
    assert [(pick.code, pick.reason) for pick in run.picks.all()] == [("busy", "Job 7 needs it.")]


def test_a_full_pool_is_never_driven_past_its_reserve_and_what_does_not_fit_says_so() -> None:
    pool = StoragePoolFactory.create(capacity_bytes=100 * GIB, available_bytes=8 * GIB)
    images(3, pool=pool)
    policy = PolicyFactory.create(options={"method": "copy"}, max_jobs_per_host=3)
    run = begun(policy)
    # Each copy takes more than 3 GiB, and 5 GiB have to stay free.
    assert run.picks.filter(state="skipped", code="not_enough_space").count() == 3
    StoragePoolFactory._meta.model.objects.update(available_bytes=9 * GIB)
    run = begun(policy, NOW + MINUTE)
    assert [state for _label, state, _code in picks(run)] == ["submitted", "chosen", "chosen"]
    assert run.picks.filter(code="not_enough_space").count() == 2
    assert "must stay free" in run.picks.filter(code="not_enough_space")[0].reason


def test_what_would_not_be_done_in_time_is_left_out_where_the_hosts_speed_is_known() -> None:
    one, _small = images(2)
    result = {"before_bytes": 100 * 1024**2, "seconds": 1000}
    for _ in range(3):
        JobFactory.create(target=one.host, kind="reclaim", state="succeeded", finished=NOW, result=result)
    Image.objects.filter(name="disk0").update(allocated_size=40 * GIB)
    run = begun(PolicyFactory.create(window_minutes=800))
    found = run.picks.get(label="disk0")
    assert (found.state, found.code) == ("skipped", "too_long")
    assert "about 4 days at 102 KiB/s" in found.reason
    assert at_work() == ["disk1"]


def test_after_a_job_the_next_one_waits_for_the_scan_that_tells_how_much_is_free() -> None:
    one, _other = images(2)
    run = begun(PolicyFactory.create())
    end()
    scan = JobFactory.create(target=one.host, kind="scan", created=NOW)
    assert picks(stepped(run, NOW + MINUTE))[1] == ("disk1", "chosen", "")
    assert picks(stepped(run, NOW + 6 * MINUTE))[1] == ("disk1", "submitted", "")
    assert reread(scan).state == "queued"


def test_stopping_a_run_lets_what_is_at_work_end() -> None:
    run = night(2)
    Job.objects.update(state="running")
    services.stop(OPERATOR, run)
    assert picks(run) == [("disk0", "submitted", ""), ("disk1", "skipped", "policy_stopped")]
    runs.work(NOW + MINUTE)
    end()
    runs.work(NOW + 2 * MINUTE)
    assert (reread(run).state, run.detail, run.finished) == ("stopped", "Stopped by olga.", NOW + 2 * MINUTE)
    assert picks(run)[0] == ("disk0", "succeeded", "")
    entry = AuditEntry.objects.get(what="policy run stopped")
    assert (entry.who, entry.target, entry.after) == ("olga", run.policy.name, {"run": run.pk})


def test_switching_a_policy_off_stops_its_run() -> None:
    run = night(2)
    services.change(ADMIN, run.policy, {"enabled": False})
    assert (reread(run).state, run.detail) == ("stopped", "The policy was disabled by ada.")
    assert at_work() == []


def test_a_policy_that_is_deleted_leaves_its_jobs_at_work() -> None:
    images(2)
    policy = PolicyFactory.create(max_jobs_per_host=2)
    begun(policy)
    Job.objects.filter(target_label="disk0").update(state="running")
    services.remove(ADMIN, policy)
    assert at_work() == ["disk0"]
    assert not PolicyRun.objects.exists()


def test_what_is_wrong_with_one_run_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    images(1)
    broken = services.run_now(OPERATOR, PolicyFactory.create(), NOW)
    PolicyRun.objects.filter(pk=broken.pk).update(rules=broken.rules | {"kind": "no such kind"}, due=NOW - MINUTE)
    good = begun(PolicyFactory.create(), NOW)
    assert picks(good) == [("disk0", "submitted", "")]
    assert reread(broken).state == "running"
    assert broken.detail.startswith("The run cannot continue for now")


def test_a_run_whose_choice_could_never_be_made_has_failed_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = services.run_now(OPERATOR, PolicyFactory.create(), NOW)
    monkeypatch.setattr("images.policies.rules.choose", raising(ZeroDivisionError("no such thing")))
    runs.work(NOW)
    assert stepped(run, run.ends).state == "failed"
    assert "no such thing" in run.detail
    assert "could not run any job" in Alert.objects.get(closed=None).title


def test_what_rules_left_out_long_ago_is_kept_as_a_number() -> None:
    images(1)
    images(2, reclaimable_bytes=0)
    policy = PolicyFactory.create()
    old = begun(policy)
    end()
    runs.work(NOW + MINUTE)
    assert old.picks.count() == 3
    later = NOW + timedelta(days=31)
    Image.objects.all().delete()
    begun(policy, later)
    assert picks(reread(old)) == [("disk0", "succeeded", "")]
    assert old.left_out == {"too_little": 2}


def test_an_image_that_is_gone_when_its_turn_comes_says_so() -> None:
    run = night(2)
    end()
    Image.objects.filter(name="disk1").delete()
    assert picks(stepped(run, NOW + MINUTE))[1] == ("disk1", "skipped", "gone")


def test_a_host_with_many_refused_images_still_gets_to_the_others() -> None:
    pool = StoragePoolFactory.create()
    images(30, pool=pool, header={"data_file": "data.raw"})
    ImageFactory.create(name="good", pool=pool, reclaimable_bytes=1 << 20, **estimated(1))
    run = begun(PolicyFactory.create())
    assert at_work() == ["good"]
    assert run.picks.filter(code="external_data_file").count() == 30
