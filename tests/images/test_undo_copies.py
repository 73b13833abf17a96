"""The life of an undo copy, with real files: its window closes, somebody deletes it, its removal is cut off."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from images import tasks
from images.kinds.recover import Recover
from images.models import Image
from images.rewrite import holding
from storage_admin.accounts.models import AuditEntry
from storage_admin.agent.protocol import RefusedError, b64
from storage_admin.hosts.models import Host
from storage_admin.hosts.names import path_key
from storage_admin.jobs import runner, services
from storage_admin.jobs.models import Job
from tests.agent.harness import leftovers, qemu_img
from tests.factories import GuestFactory, HostFactory, ImageFactory, JobFactory
from tests.harness.patching import do_after, raising
from tests.images.undo_copies import by_name, job, recovery, window_closes, with_its_journal
from tests.jobs.test_claims import at_once
from tests.working import ADMIN, OPERATOR, allocated, image_at, refused_as, reread, run, scan, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]

__all__ = ["job"]


def asked(kind: str) -> int:
    return Job.objects.filter(kind=kind, state="queued").count()


def test_an_expired_copy_goes_and_only_then_something_is_freed(path: Path, job: Job) -> None:
    before = (job.result or {})["before_bytes"]
    assert image_at(path).pool.undo_bytes == before
    window_closes(job)
    tasks.expire_undo()
    removal = run(Job.objects.get(kind="discard_undo"))
    assert (removal.state, removal.created_by) == ("succeeded", "system")
    result = reread(job).result or {}
    assert (job.undo_state, job.undo_bytes, leftovers(path.parent)) == ("expired", 0, set())
    assert (result["held_bytes"], result["freed_bytes"]) == (0, before - allocated(path))
    assert result["freed_at"] is not None
    assert image_at(path).pool.undo_bytes == 0
    assert AuditEntry.objects.filter(who="system", what="discard_undo queued").count() == 1
    tasks.expire_undo()
    assert Job.objects.filter(kind="discard_undo").count() == 1


def test_a_copy_is_not_removed_while_its_job_is_being_undone(path: Path, job: Job) -> None:
    inode = (path.parent / f".sa-{job.uid}.orig").stat().st_ino
    undo = services.undo(OPERATOR, job)
    window_closes(job)
    tasks.expire_undo()
    assert not Job.objects.filter(kind="discard_undo").exists()
    Job.objects.filter(pk=undo.pk).update(state="running")
    tasks.expire_undo()
    assert not Job.objects.filter(kind="discard_undo").exists()
    Job.objects.filter(pk=undo.pk).update(state="queued")
    assert run(undo).state == "succeeded"
    tasks.expire_undo()
    assert (path.stat().st_ino, Job.objects.filter(kind="discard_undo").count()) == (inode, 0)


def test_after_an_undo_that_was_cut_off_recovery_comes_first(path: Path, job: Job) -> None:
    undo = services.undo(OPERATOR, job)
    undo.locks.all().delete()
    now = timezone.now()
    Job.objects.filter(pk=undo.pk).update(state="interrupted", needs_recovery=True, finished=now)
    window_closes(job)
    tasks.expire_undo()
    assert not Job.objects.filter(kind="discard_undo").exists()
    assert not AuditEntry.objects.filter(who="system", what="discard_undo refused").exists()
    assert refused_as(services.discard_undo, ADMIN, job) == "busy"
    work("recover", job.host_id)
    tasks.expire_undo()
    assert run(Job.objects.get(kind="discard_undo")).state == "succeeded"


def test_a_host_that_does_not_answer_is_asked_when_it_does(path: Path, job: Job) -> None:
    window_closes(job)
    Host.objects.update(status="unreachable")
    tasks.expire_undo()
    assert not Job.objects.filter(kind="discard_undo").exists()
    Host.objects.update(status="ok")
    tasks.expire_undo()
    assert asked("discard_undo") == 1


def test_copies_that_cannot_be_removed_do_not_keep_others_from_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "AT_ONCE", 2)
    host, now = HostFactory.create(), timezone.now()
    jobs = [
        JobFactory.create(
            kind="reclaim", target=ImageFactory.create(pool__host=host), state="succeeded", undo_state="available",
            undo_expires=now - timedelta(hours=10 - number),
        ) for number in range(4)
    ]  # fmt: skip
    for stuck in jobs[:2]:
        values: dict[str, Any] = {"target_kind": "job", "target_id": stuck.pk, "finished": now}
        JobFactory.create(kind="discard_undo", host=host, state="failed", **values)
    tasks.expire_undo()
    queued = Job.objects.filter(kind="discard_undo", state="queued").values_list("target_id", flat=True)
    assert set(queued) == {jobs[2].pk, jobs[3].pk}


def a_guest(path: Path, job: Job) -> None:
    copy = path.parent / f".sa-{job.uid}.orig"
    values = {"path": str(copy), "path_bytes": bytes(copy), "path_key": path_key(bytes(copy))}
    GuestFactory.create(host=job.host, state="shut off").disks.create(target="vda", **values)


def an_overlay(path: Path, job: Job) -> None:
    top = path.with_name("top.qcow2")
    qemu_img("create", "-q", "-f", "qcow2", "-b", f".sa-{job.uid}.orig", "-F", "qcow2", top)
    scan(job.host)


@pytest.mark.parametrize("needs_it", [a_guest, an_overlay])
def test_a_copy_that_a_guest_or_an_overlay_names_stays_until_an_admin_decides(
    path: Path, job: Job, needs_it: Callable[[Path, Job], None]
) -> None:
    needs_it(path, job)
    window_closes(job)
    tasks.expire_undo()
    removal = run(Job.objects.get(kind="discard_undo"))
    assert (removal.state, removal.error_code) == ("failed", "undo_kept")
    tasks.expire_undo()
    assert not asked("discard_undo"), "it is not tried again and again"
    assert [(kept.pk, bool(why)) for kept, why in holding.kept(5)] == [(job.pk, True)]
    assert refused_as(services.discard_undo, ADMIN, job) == "undo_kept"
    assert (path.parent / f".sa-{job.uid}.orig").exists()
    assert run(services.discard_undo(ADMIN, job, force=True)).state == "succeeded"


@pytest.mark.django_db(transaction=True)
def test_of_many_schedulers_at_once_one_removes_a_copy(path: Path, job: Job) -> None:
    window_closes(job)
    assert at_once(6, lambda _: tasks.expire_undo()) == [None] * 6
    assert run(Job.objects.get(kind="discard_undo")).state == "succeeded"
    assert leftovers(path.parent) == set()


@pytest.mark.parametrize("delete", [by_name, with_its_journal])
def test_a_copy_that_somebody_deleted_is_noticed_by_the_next_scan_and_reported(
    path: Path, job: Job, delete: Callable[[Job, Path], None]
) -> None:
    held = job.undo_bytes
    scan(job.host)
    assert asked("recover") == 0
    delete(job, path)
    scan(job.host)
    recovery()
    result = reread(job).result or {}
    assert (job.undo_state, job.undo_bytes, leftovers(path.parent)) == ("missing", 0, set())
    assert (result["held_bytes"], result["freed_bytes"]) == (0, result["before_bytes"] - allocated(path))
    (line,) = job.log_lines.filter(level="warning", text__contains="removed by someone else")
    assert "no longer be undone" in line.text
    entry = AuditEntry.objects.get(what="undo copy missing")
    assert (entry.who, entry.before) == ("system", {"job": job.pk, "undo_bytes": held})
    assert image_at(path).pool.undo_bytes == 0
    scan(job.host)
    assert asked("recover") == 0
    with pytest.raises(RefusedError, match="deleted outside this dashboard"):
        services.undo(OPERATOR, job)


def test_an_undo_that_finds_no_copy_has_the_host_looked_at(path: Path, job: Job) -> None:
    by_name(job, path)
    undo = run(services.undo(OPERATOR, job))
    assert (undo.state, undo.error_code) == ("failed", "undo_missing")
    recovery()
    assert (reread(job).undo_state, leftovers(path.parent)) == ("missing", set())


def test_a_copy_that_was_written_to_still_holds_its_bytes_and_can_only_be_discarded(path: Path, job: Job) -> None:
    os.utime(path.parent / f".sa-{job.uid}.orig", ns=(1, 1))
    undo = run(services.undo(OPERATOR, job))
    assert (undo.state, undo.error_code) == ("failed", "undo_missing")
    recovery()
    assert (reread(job).undo_state, image_at(path).pool.undo_bytes) == ("available", job.undo_bytes)
    refused = run(services.discard_undo(ADMIN, job))
    assert (refused.state, refused.error_code) == ("failed", "undo_written_to")
    assert run(services.discard_undo(ADMIN, job, force=True)).state == "succeeded"
    assert leftovers(path.parent) == set()


def test_a_recovery_that_finds_a_lock_which_nobody_gives_back_says_so_once_and_is_tried_again(job: Job) -> None:
    Job.objects.filter(pk=job.pk).update(state="interrupted", needs_recovery=True)
    found = {"job": job.uid, "outcome": "busy", "detail": "its journal is locked"}
    for _ in range(2):
        again = Job.objects.create(
            kind="recover", host=job.host, target_kind="host", target_id=job.host_id, created_by="x"
        )
        Recover().record(again, {"recovered": [found], "images": [], "unread": [], "silent": [], "away": []})
    assert list(job.log_lines.filter(level="warning").values_list("text", flat=True)) == [found["detail"]]
    assert reread(job).needs_recovery


def test_what_a_host_tells_of_the_jobs_of_hosts_that_share_nothing_with_it_is_not_believed(job: Job) -> None:
    other = HostFactory.create()
    now: dict[str, Any] = {"host": other, "started": timezone.now()}
    began = JobFactory.create(kind="recover", target_kind="host", target_id=other.pk, state="running", **now)
    undo = JobFactory.create(kind="undo", target_kind="job", target_id=job.pk, state="interrupted", **now)
    blank = dict.fromkeys(("original", "made_bytes", "undone_bytes", "discarded_bytes"))
    told: dict[str, Any] = {"path_b64": b64(b"/elsewhere/x"), "dev": 1, "inode": 1, "detail": "it is gone", **blank}
    told |= dict.fromkeys(("undo_bytes", "before_bytes", "after_bytes", "goes_shared", "made_shared"), 1 << 30)
    told |= {"put_back": False, "surely_back": False, "undo_waits": False, "undo_of": None}
    lost = told | {"job": job.uid, "outcome": "lost"}
    undone = told | {"job": undo.uid, "outcome": "finished", "undo_of": job.uid}
    Recover().record(began, {"recovered": [lost, undone], "images": [], "unread": [], "silent": [], "away": []})
    was = (job.undo_state, job.undo_bytes, job.freed_bytes)
    assert (reread(job).undo_state, job.undo_bytes, job.freed_bytes) == was
    assert Image.every.get(pk=job.target_id).path != "/elsewhere/x"


def test_a_swap_whose_storage_failed_right_after_it_is_a_success_after_a_scan_and_its_recovery(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        do_after(patched, runner, "_work", raising(RefusedError("pool_changed", "stale file handle")))
        job = work("reclaim", image_at(path).pk, OPERATOR, undo_hours=1)
    assert (job.state, job.error_code, job.needs_recovery) == ("failed", "pool_changed", False)
    scan(job.host)
    recovery()
    assert (reread(job).state, job.error_code, job.undo_state) == ("succeeded", "", "available")
    assert image_at(path).inode == str(path.stat().st_ino)
