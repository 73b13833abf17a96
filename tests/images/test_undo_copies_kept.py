"""The life of an undo copy, with real files: its window closes, somebody deletes it, its removal is cut off."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from django.test import Client
from django.utils import timezone

from images import tasks
from images.models import Image
from images.selectors.undo_copies import undo_copies
from storage_admin.accounts.models import AuditEntry
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.agent.harness import leftovers
from tests.factories import JobFactory, UserFactory
from tests.images.undo_copies import by_name, job, recovery, window_closes, with_its_journal
from tests.working import ADMIN, OPERATOR, allocated, create, image_at, refused_as, reread, run, said, scan, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]

__all__ = ["job"]


def lose(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(4096))


def empty(path: Path) -> None:
    os.truncate(path, 0)


def exchange(path: Path) -> None:
    path.unlink()
    create(path, "1M")


@pytest.mark.parametrize("harm", [lose, damage, empty])
def test_the_copy_of_an_image_that_may_be_lost_stays_after_its_window(
    path: Path, job: Job, harm: Callable[[Path], None]
) -> None:
    harm(path)
    scan(job.host)
    window_closes(job)
    tasks.expire_undo()
    assert not Job.objects.filter(kind="discard_undo").exists()
    (copy,) = undo_copies(image_at(path).pool).rows
    assert copy.overdue
    assert "may be the only good one left" in copy.trouble
    assert refused_as(services.discard_undo, ADMIN, job) == "stale_plan"
    assert (path.parent / f".sa-{job.uid}.orig").exists()
    assert run(services.discard_undo(ADMIN, job, force=True)).state == "succeeded"
    assert not (path.parent / f".sa-{job.uid}.orig").exists()


@pytest.mark.parametrize("harm", [lose, damage, empty, exchange])
def test_the_agent_sees_it_on_the_spot(path: Path, job: Job, harm: Callable[[Path], None]) -> None:
    harm(path)
    window_closes(job)
    tasks.expire_undo()
    removal = run(Job.objects.get(kind="discard_undo"))
    assert (removal.state, removal.error_code) == ("failed", "stale_plan"), removal.error_detail
    assert "may be all that is left" in removal.error_detail
    assert (reread(job).undo_state, (path.parent / f".sa-{job.uid}.orig").exists()) == ("available", True)


def test_the_copy_of_an_image_that_was_set_aside_and_deleted_goes_when_its_window_closes(path: Path, job: Job) -> None:
    image = image_at(path)
    assert work("set_aside", image.pk, ADMIN).state == "succeeded"
    window_closes(job)
    assert run(services.discard_undo(ADMIN, job)).state == "succeeded"
    assert not (path.parent / f".sa-{job.uid}.orig").exists()


def test_the_copy_of_an_image_that_was_deleted_on_purpose_goes(path: Path, job: Job) -> None:
    image = image_at(path)
    assert work("set_aside", image.pk, ADMIN).state == "succeeded"
    Image.every.filter(pk=image.pk).update(aside_until=timezone.now() - timedelta(seconds=1))
    assert work("delete_aside", image.pk, ADMIN, confirm_name=path.name).state == "succeeded"
    window_closes(job)
    tasks.expire_undo()
    assert run(Job.objects.get(kind="discard_undo")).state == "succeeded"
    assert leftovers(path.parent) == set()


def test_an_expired_copy_that_somebody_deleted_is_missing_and_not_expired(path: Path, job: Job) -> None:
    window_closes(job)
    by_name(job, path)
    tasks.expire_undo()
    removal = run(Job.objects.get(kind="discard_undo"))
    assert (removal.state, removal.result) == ("succeeded", {"copy_bytes": 0, "of_job": job.pk})
    assert (reread(job).undo_state, leftovers(path.parent)) == ("missing", set())
    assert AuditEntry.objects.filter(what="undo copy missing").count() == 1


def test_an_original_that_somebody_put_back_by_hand_has_won_nothing(path: Path, job: Job) -> None:
    (path.parent / f".sa-{job.uid}.orig").rename(path)
    scan(job.host)
    recovery()
    assert (reread(job).undo_state, (job.result or {})["freed_bytes"], leftovers(path.parent)) == ("undone", 0, set())
    assert any("has restored the original" in line for line in said(job))


def test_an_image_that_a_later_job_has_replaced_was_not_put_back_by_hand(path: Path, job: Job) -> None:
    (path.parent / f".sa-{job.uid}.orig").rename(path)
    os.utime(path, ns=(1, 1))  # as a new file that got the number of the deleted one
    JobFactory.create(kind="reclaim", target=image_at(path), state="succeeded", finished=timezone.now())
    work("recover", job.host_id)
    assert reread(job).undo_state == "missing"


def test_what_is_the_original_by_its_size_and_time_was_put_back_whatever_came_later(path: Path, job: Job) -> None:
    (path.parent / f".sa-{job.uid}.orig").rename(path)
    JobFactory.create(kind="reclaim", target=image_at(path), state="succeeded", finished=timezone.now())
    work("recover", job.host_id)
    assert (reread(job).undo_state, job.freed_bytes) == ("undone", 0)


def test_what_was_put_back_under_the_name_that_a_later_job_gave_the_image_was_put_back(path: Path, job: Job) -> None:
    later = work("convert", image_at(path).pk, ADMIN, format="vmdk", replace=True, undo_hours=1)
    run(Job.objects.get(kind="scan", state="queued"))
    (path.parent / f".sa-{job.uid}.orig").rename(path.with_suffix(".vmdk"))
    scan(job.host)
    recovery()
    for one in (job, later):
        one.refresh_from_db()
    assert (job.undo_state, job.freed_bytes, later.undo_state) == ("undone", 0, "available")


def test_a_copy_that_was_moved_goes_on_and_frees_nothing(path: Path, job: Job) -> None:
    (path.parent / f".sa-{job.uid}.orig").rename(path.parent / "moved.qcow2")
    scan(job.host)
    recovery()
    assert (reread(job).undo_state, job.freed_bytes) == ("missing", -allocated(path))
    assert any("it still exists as moved.qcow2" in line for line in said(job))


def test_a_copy_with_a_second_name_frees_nothing(path: Path, job: Job) -> None:
    os.link(path.parent / f".sa-{job.uid}.orig", path.parent / "kept-by-somebody")
    run(services.discard_undo(ADMIN, job))
    assert reread(job).undo_state == "discarded"
    assert (job.result or {})["freed_bytes"] == -allocated(path)
    assert any("has a second name" in line for line in said(job))


def test_a_pool_that_is_not_mounted_has_lost_no_copy(path: Path, job: Job) -> None:
    path.parent.rename(path.parent.parent / "unmounted")
    path.parent.mkdir()
    work("recover", job.host_id)
    assert reread(job).undo_state == "available"
    path.parent.rmdir()
    (path.parent.parent / "unmounted").rename(path.parent)
    assert run(services.undo(OPERATOR, job)).state == "succeeded"


def test_a_copy_that_went_together_with_its_image_is_reported_once_the_image_is_known_to_be_gone(
    path: Path, job: Job
) -> None:
    with_its_journal(job, path)
    path.unlink()
    scan(job.host)
    recovery()
    assert (image_at(path).state, reread(job).undo_state) == ("missing", "missing")


def test_a_removal_that_was_cut_off_after_its_only_step_has_succeeded_after_all(path: Path, job: Job) -> None:
    removal = services.discard_undo(ADMIN, job)
    removal.locks.all().delete()
    by_name(job, path)  # what the agent did before it was killed
    Job.objects.filter(pk=removal.pk).update(
        state="interrupted", needs_recovery=True, finished=timezone.now(), error_code="interrupted"
    )
    work("recover", job.host_id)
    assert (reread(job).undo_state, reread(removal).state, removal.needs_recovery) == ("discarded", "succeeded", False)
    assert not AuditEntry.objects.filter(what="undo copy missing").exists()


def test_a_copy_that_is_removed_while_recovery_looks_is_left_to_its_removal(path: Path, job: Job) -> None:
    removal = services.discard_undo(ADMIN, job)
    Job.objects.filter(pk=removal.pk).update(state="running")
    with_its_journal(job, path)
    work("recover", job.host_id)
    assert reread(job).undo_state == "available"


def test_a_pool_tells_what_its_undo_copies_hold_job_by_job(path: Path, job: Job, client: Client) -> None:
    (path.parent / ".sa-stranger.orig").write_bytes(b"x" * 8192)
    scan(job.host)
    told = undo_copies(image_at(path).pool)
    assert (told.held_bytes, told.others_bytes, told.missing) == (job.undo_bytes, 8192, ())
    (row,) = told.rows
    assert row.image is not None
    assert (row.job.pk, row.image.name, row.overdue, row.trouble) == (job.pk, "disk.qcow2", False, "")
    address = f"/pools/{image_at(path).pool_id}/"
    client.force_login(UserFactory.create(role="viewer"))
    page = client.get(address).content.decode()
    assert f"job {job.pk}" in page
    assert "held, not yet freed" in page
    assert f"/jobs/{job.pk}/discard-undo/" not in page
    client.force_login(UserFactory.create(role="admin"))
    assert f"/jobs/{job.pk}/discard-undo/" in client.get(address).content.decode()
    client.post(f"/jobs/{job.pk}/discard-undo/", {"confirm": f"job {job.pk}"})
    run(Job.objects.get(kind="discard_undo"))
    assert undo_copies(image_at(path).pool).rows == ()


def test_a_pool_tells_of_copies_that_are_missing_and_of_those_that_could_not_be_removed(
    path: Path, job: Job, client: Client
) -> None:
    window_closes(job)
    services.discard_undo(ADMIN, job).locks.all().delete()
    Job.objects.filter(kind="discard_undo").update(state="failed", error_detail="the copy is in use by qemu-nbd")
    (row,) = undo_copies(image_at(path).pool).rows
    assert (row.overdue, row.trouble) == (True, "the copy is in use by qemu-nbd")
    client.force_login(UserFactory.create(role="viewer"))
    address = f"/pools/{image_at(path).pool_id}/"
    assert "the copy is in use by qemu-nbd" in client.get(address).content.decode()
    by_name(job, path)
    scan(job.host)
    recovery()
    told = undo_copies(image_at(path).pool)
    assert (told.rows, [row.job.pk for row in told.missing]) == ((), [job.pk])
    assert "deleted outside this dashboard" in client.get(address).content.decode()
    assert "deleted by somebody else" in client.get(f"/jobs/{job.pk}/").content.decode()
