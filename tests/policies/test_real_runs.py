"""A policy over real images with the real agent: what it chose, did and left out, and what the disk says of it."""

import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from images import tasks
from images.models import Image, Policy, PolicyRun
from images.policies import clock, runs, services
from images.policies.selectors import sums_of
from storage_admin.hosts.models import Host
from storage_admin.jobs import automation
from storage_admin.jobs.models import Job
from tests import passing
from tests.agent.harness import make_image, qemu_img, same_content, write
from tests.factories import PolicyFactory
from tests.working import ADMIN, OPERATOR, create, image_at, reread, run, scan, scanned_machine, this_machine, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]
MINUTE = timedelta(minutes=1)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """Five images: two with something to win, one of which wins more; one with nothing; a template; another format."""
    folder = tmp_path / "pool"
    folder.mkdir()
    make_image(folder / "less.qcow2")
    more = Path(os.fsdecode(make_image(folder / "more.qcow2", size="16M")))
    write(more, 0x62, "8M", "6M")
    create(folder / "empty.qcow2")
    make_image(folder / "template.qcow2")
    (folder / "other.raw").write_bytes(b"\1" * 100_000 + bytes(2_000_000))
    for name in ("more", "less"):
        shutil.copy(folder / f"{name}.qcow2", tmp_path / f"{name}.qcow2")
    return folder


@pytest.fixture
def host(pool: Path) -> Host:
    """This machine, scanned, and every image sampled."""
    machine = scanned_machine(pool)
    sample()
    return machine


def sample() -> None:
    while job := Job.objects.filter(kind="sample", state="queued").first():
        assert run(job).state == "succeeded"


def take_turns(policy_run: PolicyRun) -> list[str]:
    """Steps until nothing is queued any more; jobs are done as they come. Answers what was worked on, in order."""
    done: list[str] = []
    for minute in range(20):
        runs.work(policy_run.started + minute * MINUTE)
        while job := Job.objects.filter(state="queued").order_by("id").first():
            assert run(job).state != "queued", job.waiting_for
            if job.rewrites:
                done.append(job.target_label)
        policy_run.refresh_from_db()
        if policy_run.finished:
            break
    return done


def allocated(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def nightly(**columns: object) -> Policy:
    values = {"formats": ["qcow2"], "name_pattern": "!template*", "options": {"undo_hours": 0}} | columns
    values = {"min_reclaimable_bytes": 512 * 1024} | values
    return PolicyFactory.create(**values)


def test_a_night_wins_what_it_said_in_the_order_of_gain_and_says_why_it_left_the_rest(host: Host, pool: Path) -> None:
    before = allocated(pool)
    night = services.run_now(OPERATOR, nightly())
    assert take_turns(night) == ["more.qcow2", "less.qcow2"]
    assert (night.state, night.detail) == ("finished", "")
    states = dict(night.picks.values_list("label", "code"))
    assert states == {"more.qcow2": "", "less.qcow2": "", "empty.qcow2": "too_little"}
    assert night.left_out == {"other_name": 1, "other_format": 1}
    sums = sums_of([night])[night.pk]
    assert (sums.counts, sums.held) == ({"succeeded": 2, "skipped": 1}, 0)
    assert sums.won == before - allocated(pool) > 0
    for job in Job.objects.filter(kind="reclaim"):
        assert job.created_by == f"policy {night.policy.name}"
    for name in ("more", "less"):
        assert same_content(pool / f"{name}.qcow2", pool.parent / f"{name}.qcow2")
    # The next night finds nothing left to win.
    sample()
    again = services.run_now(OPERATOR, night.policy)
    assert take_turns(again) == []
    assert set(again.picks.values_list("code", flat=True)) == {"too_little"}


def test_undo_copies_are_held_and_not_won_and_do_not_expire_while_automation_is_paused(host: Host, pool: Path) -> None:
    night = services.run_now(OPERATOR, nightly(name_pattern="less*", options={"undo_hours": 24}))
    assert take_turns(night) == ["less.qcow2"]
    sums = sums_of([night])[night.pk]
    assert (sums.won, sums.held) == (0, Job.objects.get(kind="reclaim").undo_bytes)
    passing.undo_window(Job.objects.get(kind="reclaim"))
    automation.switch(ADMIN, paused=True)
    tasks.expire_undo()
    assert not Job.objects.filter(kind="discard_undo").exists()
    automation.switch(ADMIN, paused=False)
    tasks.expire_undo()
    run(Job.objects.get(kind="discard_undo"))
    won = sums_of([night])[night.pk].won
    assert won == (Job.objects.get(kind="reclaim").before_bytes or 0) - (pool / "less.qcow2").stat().st_blocks * 512


def test_what_grew_back_is_left_out_the_next_night(host: Host, pool: Path) -> None:
    policy = nightly(name_pattern="more*")
    take_turns(services.run_now(OPERATOR, policy))
    write(pool / "more.qcow2", 0x63, "0", "14M")
    scan(host)
    sample()
    again = services.run_now(OPERATOR, policy)
    assert take_turns(again) == []
    [pick] = again.picks.all()
    assert (pick.code, pick.label) == ("decayed", "more.qcow2")
    services.change(ADMIN, policy, {"include_decayed": True})
    assert take_turns(services.run_now(OPERATOR, policy)) == ["more.qcow2"]


def test_a_window_opens_by_the_clock_and_its_end_withdraws_what_has_not_begun(host: Host, pool: Path) -> None:
    start = timezone.now().replace(minute=0, second=0, microsecond=0)
    policy = nightly(cron=f"0 {(start.hour + 1) % 24} * * *", clock=start, max_jobs_per_host=2)
    opens = start + 60 * MINUTE
    assert clock.advance(opens - MINUTE) == []
    [night] = clock.advance(opens + MINUTE)
    runs.work(opens + MINUTE)
    first, second = Job.objects.filter(kind="reclaim", state="queued").order_by("id")
    assert (first.target_label, second.target_label) == ("more.qcow2", "less.qcow2")
    run(first)
    untouched = (pool / "less.qcow2").read_bytes()
    runs.work(night.ends - policy.quiet_minutes * MINUTE)
    assert reread(second).state == "cancelled"
    run(second)  # its bell rings late
    assert (pool / "less.qcow2").read_bytes() == untouched
    assert reread(night).state == "finished"
    assert dict(night.picks.values_list("label", "code"))["less.qcow2"] == "window_closed"


def test_an_image_that_changed_since_the_scan_is_left_out_by_the_agent(host: Host, pool: Path) -> None:
    night = services.run_now(OPERATOR, nightly(name_pattern="less*"))
    write(pool / "less.qcow2", 0x64, "0", "64k")
    kept = (pool / "less.qcow2").read_bytes()
    take_turns(night)
    [pick] = night.picks.all()
    assert (pick.state, pick.code) == ("skipped", "stale_plan")
    assert pick.job is not None
    assert night.state == "finished"
    assert (pool / "less.qcow2").read_bytes() == kept


def test_chains_are_flattened_and_images_are_checked_and_analyzed_by_policies(pool: Path) -> None:
    create(pool / "leaf.qcow2", base="template.qcow2")
    before = pool.parent / "before.raw"
    qemu_img("convert", "-O", "raw", pool / "leaf.qcow2", before)
    scan(this_machine(pool))
    sample()
    assert take_turns(services.run_now(OPERATOR, PolicyFactory.create(kind="flatten", options={"undo_hours": 0}))) == [
        "leaf.qcow2"
    ]
    assert image_at(pool / "leaf.qcow2").chain_depth == 1
    after = pool.parent / "after.raw"
    qemu_img("convert", "-O", "raw", pool / "leaf.qcow2", after)
    assert before.read_bytes() == after.read_bytes()
    checked = services.run_now(OPERATOR, PolicyFactory.create(kind="check", options={}, formats=["qcow2"]))
    assert sorted(take_turns(checked)) == ["empty.qcow2", "leaf.qcow2", "less.qcow2", "more.qcow2", "template.qcow2"]
    Image.objects.update(analyzed_at=None)
    looked = services.run_now(OPERATOR, PolicyFactory.create(kind="analyze", options={"mode": "full"}))
    take_turns(looked)
    assert looked.picks.filter(state="succeeded").count() == 6
    assert not Image.objects.filter(analyzed_at=None).exists()


def test_a_benchmark_of_a_pool_runs_by_a_policy(host: Host, pool: Path) -> None:
    options = {"kind": "dd", "quick": True, "repetitions": 1, "size_bytes": 1 << 20}
    night = services.run_now(OPERATOR, PolicyFactory.create(kind="benchmark", options=options))
    take_turns(night)
    [pick] = night.picks.all()
    assert (pick.state, pick.image, pick.label) == ("succeeded", None, "pool"), pick.reason


def test_by_hand_and_by_policy_at_once_the_image_is_done_once(host: Host, pool: Path) -> None:
    work("reclaim", image_at(pool / "less.qcow2").pk, OPERATOR, undo_hours=0)
    night = services.run_now(OPERATOR, nightly(name_pattern="less*", min_age_hours=1))
    assert take_turns(night) == []
    assert night.picks.get().code in {"too_young", "not_analyzed"}
