"""Orphans as jobs: set aside, restored, deleted after the grace period, and recovered whatever was cut off."""

import os
import secrets
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from images.models import Image
from images.orphans import ask_hypervisors, rows
from images.rewrite import record
from images.scan.run import ScanRun
from storage_admin.accounts.models import AuditEntry
from storage_admin.errors import InvalidError
from storage_admin.hosts.guest_facts import DiskFacts, GuestFacts
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.libvirt.reader import LibvirtFacts
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import path_key
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import GuestFactory
from tests.harness.patching import do_before
from tests.working import ADMIN, create, image_at, invalid_fields, refused_as, reread, run, said, scan, succeeded, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


def orphan(pool: Path, host: Host, name: str = "left.qcow2") -> Image:
    path = create(pool / name)
    scan(host)
    return image_at(path)


def end_grace(image: Image) -> None:
    Image.every.filter(pk=image.pk).update(aside_until=timezone.now() - timedelta(seconds=1))


def fresh(image: Image) -> Image:
    return Image.every.select_related("host", "pool", "aside_job").get(pk=image.pk)


def refusal(kind: str, image: Image, **options: Any) -> str:
    return refused_as(services.submit, ADMIN, kind, image.pk, options)


def test_an_orphan_is_set_aside_and_restored_with_its_history(pool: Path, host: Host) -> None:
    image = orphan(pool, host)
    path, content, size = pool / "left.qcow2", (pool / "left.qcow2").read_bytes(), image.allocated_size
    before = StoragePool.objects.get()
    assert before.allocated_bytes == size
    job = succeeded(work("set_aside", image.pk, ADMIN, grace_days=30))
    assert job.result is not None
    assert (job.result["before_bytes"], job.result["held_bytes"], job.result["freed_bytes"]) == (size, size, 0)
    assert not path.exists()
    assert (pool / f".sa-{job.uid}.aside").read_bytes() == content
    image = fresh(image)
    assert (image.state, image.orphan, image.aside_by, image.path) == ("set_aside", None, "ada", str(path))
    assert image.aside_until is not None
    assert timedelta(days=29) < image.aside_until - timezone.now() < timedelta(days=30)
    found = scan(host)
    assert (found["images"], found["vanished"]) == (0, 0)
    after = StoragePool.objects.get()
    assert (after.images_count, after.allocated_bytes, rows.bytes_aside([after])) == (0, 0, {after.pk: (1, size)})
    assert fresh(image).state == "set_aside"
    assert not Job.objects.filter(kind="recover").exists()

    succeeded(work("restore_aside", image.pk, ADMIN))
    assert path.read_bytes() == content
    assert os.listdir(pool) == ["left.qcow2"]  # noqa: PTH208
    scan(host)
    image = fresh(image)
    assert (image.state, image.orphan, image.aside_since, image.aside_job) == ("ok", True, None, None)
    assert image.samples.count() >= 1
    assert Image.every.count() == 1
    assert (reread(job).result or {})["held_bytes"] == 0


def test_it_is_deleted_only_after_the_grace_period_and_by_its_name(pool: Path, host: Host) -> None:
    image = orphan(pool, host)
    size = image.allocated_size
    first = work("set_aside", image.pk, ADMIN)
    assert refusal("delete_aside", image, confirm_name="left.qcow2") == "grace_period"
    end_grace(image)
    for typed in ("", "left", "LEFT.qcow2", str(pool / "left.qcow2")):
        assert "confirm_name" in invalid_fields(
            services.submit, ADMIN, "delete_aside", image.pk, {"confirm_name": typed}
        )
    assert services.plan(ADMIN, "delete_aside", image.pk, {}).refusals == ()
    job = succeeded(work("delete_aside", image.pk, ADMIN, confirm_name="left.qcow2"))
    assert job.result is not None
    assert [job.result[name] for name in ("before_bytes", "after_bytes", "held_bytes", "freed_bytes")] == [
        size, 0, 0, size,
    ]  # fmt: skip
    assert (job.freed_bytes, job.before_bytes, job.after_bytes) == (size, size, 0)
    assert job.result["freed_at"]
    assert ((reread(first).result or {})["held_bytes"], first.freed_bytes) == (0, None)
    assert list(pool.iterdir()) == []
    scan(host)
    assert (fresh(image).state, fresh(image).deleted_at is not None) == ("deleted", True)
    assert refusal("restore_aside", image) == "aside_missing"
    assert AuditEntry.objects.filter(what="delete_aside queued").exists()


@pytest.mark.parametrize("days", [0, 366, 1.5, "14"])
def test_a_grace_period_is_one_to_365_days(pool: Path, host: Host, days: object) -> None:
    image = orphan(pool, host)
    with pytest.raises(InvalidError):
        services.submit(ADMIN, "set_aside", image.pk, {"grace_days": days})


def test_what_is_needed_is_not_set_aside(pool: Path, host: Host) -> None:
    base = orphan(pool, host, "base.qcow2")
    create(pool / "top.qcow2", base="base.qcow2")
    scan(host)
    assert refusal("set_aside", base) == "has_overlays"
    Image.every.filter(pk=base.pk).update(orphan=None, orphan_evidence=["nobody knows"])
    assert refusal("set_aside", base) == "guests_unknown"
    top = image_at(pool / "top.qcow2")
    assert work("set_aside", top.pk, ADMIN).state == "succeeded"
    scan(host)
    base = fresh(base)
    assert base.orphan is False
    assert base.orphan_evidence == ["top.qcow2, which is set aside, uses it as its backing file."]
    assert refusal("set_aside", base) == "has_overlays"
    assert refusal("reclaim", top) == "set_aside"
    assert refusal("analyze", top) == "set_aside"
    assert refusal("set_aside", top) == "set_aside"


def test_a_file_that_took_its_place_is_another_image_and_keeps_it(pool: Path, host: Host) -> None:
    image = orphan(pool, host)
    work("set_aside", image.pk, ADMIN)
    create(pool / "left.qcow2")
    scan(host)
    other = Image.every.exclude(pk=image.pk).get()
    assert (other.state, fresh(image).state) == ("ok", "set_aside")
    job = work("restore_aside", image.pk, ADMIN)
    assert (job.state, job.error_code) == ("failed", "target_exists")
    (pool / "left.qcow2").unlink()
    scan(host)
    assert fresh(other).state == "missing"
    assert work("restore_aside", image.pk, ADMIN).state == "succeeded"
    scan(host)
    assert [(one.pk, one.state) for one in Image.every.all()] == [(image.pk, "ok")]


def test_an_image_that_came_to_miss_it_keeps_it_from_being_deleted(pool: Path, host: Host) -> None:
    base = orphan(pool, host, "base.qcow2")
    work("set_aside", base.pk, ADMIN)
    end_grace(base)
    (pool / f".sa-{fresh(base).aside_job.uid}.aside").rename(pool.parent / "parked")  # type: ignore[union-attr]
    (pool.parent / "parked").rename(pool / "base.qcow2")
    create(pool.parent / "top.qcow2", base=str(pool / "base.qcow2"))
    (pool / "base.qcow2").rename(pool / f".sa-{fresh(base).aside_job.uid}.aside")  # type: ignore[union-attr]
    (pool.parent / "top.qcow2").rename(pool / "top.qcow2")
    scan(host)
    assert image_at(pool / "top.qcow2").state == "chain_broken"
    assert refusal("delete_aside", base, confirm_name="base.qcow2") == "has_overlays"
    assert work("restore_aside", base.pk, ADMIN).state == "succeeded"
    scan(host)
    assert image_at(pool / "top.qcow2").state == "ok"


def test_a_guest_that_has_it_by_its_other_name_keeps_it_from_being_deleted(pool: Path, host: Host) -> None:
    image = orphan(pool, host)
    job = work("set_aside", image.pk, ADMIN)
    end_grace(image)
    path = pool / f".sa-{job.uid}.aside"
    values = {"path": str(path), "path_bytes": bytes(path), "path_key": path_key(bytes(path))}
    GuestFactory.create(host=host, state="shut off").disks.create(target="vda", **values)
    assert refusal("delete_aside", image, confirm_name="left.qcow2") == "not_orphan"


def test_a_guest_that_was_defined_since_the_scan_keeps_its_disk(
    pool: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = orphan(pool, host)
    disk = DiskFacts("vda", "disk", str(pool / "left.qcow2"), only_in="the snapshot before")
    facts = LibvirtFacts(domains=(GuestFacts("domain", "u", "web", "shut off", (disk,)),))
    queued = services.submit(ADMIN, "set_aside", image.pk, {})
    monkeypatch.setattr(reader, "read", lambda host: facts)
    job = run(queued)
    assert (job.state, job.error_code) == ("failed", "not_orphan")
    assert (pool / "left.qcow2").exists()
    unread = GuestFacts("domain", "u", "web", "shut off", (), unread=("qemu:arg file=/x",))
    monkeypatch.setattr(reader, "read", lambda host: LibvirtFacts(domains=(unread,)))
    assert refused_as(ask_hypervisors.refuse_named, image) == "guests_unknown"


def test_two_admins_at_once_are_one_effect(pool: Path, host: Host) -> None:
    image = orphan(pool, host)
    first = services.submit(ADMIN, "set_aside", image.pk, {})
    assert refusal("set_aside", image) == "busy"
    assert run(first).state == "succeeded"
    end_grace(image)
    restoring = services.submit(ADMIN, "restore_aside", image.pk, {})
    assert refusal("delete_aside", image, confirm_name="left.qcow2") == "busy"
    assert run(restoring).state == "succeeded"
    assert refusal("delete_aside", image, confirm_name="left.qcow2") == "aside_missing"


@pytest.mark.parametrize(
    "name", [b"-f.img", b"a,b.img", b"new\nline.img", b"\xff\xfe.qcow2", b"\x1b[2J.raw", b"<script>.img"]
)
def test_a_hostile_name_goes_and_comes_back(pool: Path, host: Host, name: bytes) -> None:
    path = Path(os.fsdecode(bytes(pool) + b"/" + name))
    path.write_bytes(secrets.token_bytes(4096))
    content = path.read_bytes()
    scan(host)
    image = image_at(path)
    assert work("set_aside", image.pk, ADMIN).state == "succeeded"
    assert work("restore_aside", image.pk, ADMIN).state == "succeeded"
    assert path.read_bytes() == content
    scan(host)
    assert work("set_aside", image.pk, ADMIN).state == "succeeded"
    end_grace(image)
    succeeded(work("delete_aside", image.pk, ADMIN, confirm_name=image.name))
    assert list(pool.iterdir()) == []


def interrupt(job: Job) -> None:
    """As if its worker had died when the agent was done."""
    Job.objects.filter(pk=job.pk).update(
        state="interrupted", result=None, needs_recovery=True, finished=timezone.now() - timedelta(seconds=5),
        freed_bytes=None,
    )  # fmt: skip


def recover(host: Host) -> None:
    succeeded(work("recover", host.pk))


def test_a_recovery_tells_that_a_job_whose_worker_died_has_succeeded(
    pool: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = orphan(pool, host)
    size = image.allocated_size
    steps = [
        ("set_aside", {}, "set_aside"), ("restore_aside", {}, "ok"), ("set_aside", {}, "set_aside"),
        ("delete_aside", {"confirm_name": "left.qcow2"}, "deleted"),
    ]  # fmt: skip
    for kind, options, state in steps:
        scan(host)
        end_grace(image)
        with monkeypatch.context() as patched:
            for name in ("set_aside", "restored", "deleted"):
                patched.setattr(rows, name, lambda *_: None)
            patched.setattr(record, "write_line", lambda *_, **__: None)
            job = succeeded(work(kind, image.pk, ADMIN, **options))
        interrupt(job)
        recover(host)
        assert (reread(job).state, fresh(image).state) == ("succeeded", state), said(job)
        assert not job.needs_recovery
    assert (job.freed_bytes, job.result["freed_bytes"]) == (size, size)  # type: ignore[index]
    assert list(pool.iterdir()) == []


def test_what_somebody_put_back_or_removed_by_hand_is_told_by_the_next_scan(pool: Path, host: Host) -> None:
    image = orphan(pool, host)
    job = work("set_aside", image.pk, ADMIN)
    aside = pool / f".sa-{job.uid}.aside"
    aside.rename(pool / "left.qcow2")
    scan(host)
    assert run(Job.objects.get(kind="recover", state="queued")).state == "succeeded"
    scan(host)
    assert [(one.pk, one.state) for one in Image.every.all()] == [(image.pk, "ok")]
    assert not list(pool.glob(".sa-*"))
    job = work("set_aside", image.pk, ADMIN)
    (pool / f".sa-{job.uid}.aside").unlink()
    scan(host)
    assert run(Job.objects.get(kind="recover", state="queued")).state == "succeeded"
    scan(host)
    assert fresh(image).state == "missing"
    assert not list(pool.glob(".sa-*"))
    assert AuditEntry.objects.filter(what__startswith="image set aside").count() == 2


def test_a_scan_that_was_at_work_meanwhile_makes_no_second_row(pool: Path, host: Host) -> None:
    """It has read the image under its own name, and tells so when the image is set aside already."""
    image = orphan(pool, host)
    queued = services.submit(ADMIN, "scan", host.pk, {})

    def late(_: ScanRun) -> None:
        if fresh(image).state == "ok":
            succeeded(work("set_aside", image.pk, ADMIN))

    with pytest.MonkeyPatch.context() as patched:
        do_before(patched, ScanRun, "finish", late)
        succeeded(run(queued))
    assert [(one.pk, one.state) for one in Image.every.all()] == [(image.pk, "set_aside")]
