"""Undo copies and scratch of a dashboard that is no more: shown, and put back or removed by an admin's word."""

from pathlib import Path
from typing import Any

import pytest

from images.models import Image
from images.scan import known
from storage_admin.accounts.models import AuditEntry
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.agent.harness import leftovers as files_of
from tests.agent.harness import same_content, write
from tests.working import ADMIN, OPERATOR, client_as, digests, image_at, refused_as, run, scan, succeeded, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


@pytest.fixture
def left(path: Path) -> str:
    """A reclaim's undo copy waits, and the database that knew the job is another one by now."""
    job = succeeded(work("reclaim", image_at(path).pk, OPERATOR))
    uid = job.uid
    Job.objects.all().delete()
    scan(Host.objects.get())
    return str(uid)


def pool_of(path: Path) -> StoragePool:
    return image_at(path).pool


def settle(path: Path, uid: str, action: str, **more: Any) -> Job:
    return run(services.submit(ADMIN, "settle_leftover", pool_of(path).pk, {"job": uid, "action": action, **more}))


def test_what_no_job_here_knows_is_shown(path: Path, left: str) -> None:
    [found] = known.leftovers_of(pool_of(path))
    assert (found.job, found.shown, found.has_copy) == (left, str(path), True)
    assert found.held_bytes > 0
    browser = client_as(role="admin")
    assert left in browser.get(f"/pools/{pool_of(path).pk}/").content.decode()
    assert [one["job"] for one in browser.get(f"/api/v1/pools/{pool_of(path).pk}/").json()["leftovers"]] == [left]


def test_undo_copies_of_our_own_jobs_are_none(path: Path) -> None:
    work("reclaim", image_at(path).pk, OPERATOR)
    scan(Host.objects.get())
    assert known.leftovers_of(pool_of(path)) == []


def test_an_admin_puts_the_original_back(path: Path, left: str) -> None:
    succeeded(settle(path, left, "restore"))
    assert files_of(path.parent) == set()
    assert same_content(path, path.parent.parent / "copy.qcow2")
    assert image_at(path).inode == str(path.stat().st_ino)
    assert known.leftovers_of(pool_of(path)) == []
    assert AuditEntry.objects.filter(what="settle_leftover queued", who=ADMIN.name).exists()
    assert AuditEntry.objects.filter(what="settle_leftover ended").exists()


def test_an_admin_removes_the_copy(path: Path, left: str) -> None:
    before, held = digests(path.parent)[path.name], known.leftovers_of(pool_of(path))[0].held_bytes
    job = succeeded(settle(path, left, "remove", force=True))
    assert (job.result or {})["freed_bytes"] == held
    assert files_of(path.parent) == set()
    assert digests(path.parent)[path.name] == before


def test_what_was_written_since_is_lost_only_by_force(path: Path, left: str) -> None:
    write(path, 0x42, "1M", "64k")
    scan(Host.objects.get())
    assert settle(path, left, "restore").error_code == "undo_written_to"
    assert settle(path, left, "restore", force=True).state == "succeeded"


def test_a_job_that_this_dashboard_knows_is_not_settled_that_way(path: Path) -> None:
    job = work("reclaim", image_at(path).pk, OPERATOR)
    assert refused_as(settle, path, job.uid, "remove", force=True) == "undo_missing"
    assert (path.parent / f".sa-{job.uid}.orig").exists()


def test_a_copy_whose_journal_says_nothing_is_shown_and_left_alone(path: Path, left: str) -> None:
    (path.parent / f".sa-{left}.journal").write_bytes(b'{"name_b64": "Li4vLi4vZXRjL3NoYWRvdw=="}\n')
    scan(Host.objects.get())
    [found] = known.leftovers_of(pool_of(path))
    assert (found.has_copy, found.path) == (False, None)
    assert refused_as(settle, path, left, "restore")


def test_a_page_asks_for_the_jobs_name(path: Path, left: str) -> None:
    browser = client_as(role="admin")
    address = f"/pools/{pool_of(path).pk}/leftover/"
    browser.post(address, {"job": left, "action": "restore", "confirm": "no"})
    assert not Job.objects.filter(kind="settle_leftover").exists()
    browser.post(address, {"job": left, "action": "restore", "confirm": left})
    assert run(Job.objects.get(kind="settle_leftover")).state == "succeeded"
    assert Image.objects.get().state == "ok"
