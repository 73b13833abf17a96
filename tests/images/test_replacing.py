"""A conversion that takes its image's place, as a job: the row follows the file, and undo brings both back."""

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from images import services as services_of_images
from images.kinds import recover
from images.models import Image
from images.rewrite import repointing
from images.scan.run import ScanRun
from storage_admin.agent.protocol import HostError
from storage_admin.errors import InvalidError
from storage_admin.hosts.names import path_key
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.agent.harness import make_image, qemu_img, reads_as
from tests.factories import GuestDiskFactory, GuestFactory
from tests.images.test_rewrite_jobs import done, rescanned
from tests.working import ADMIN, OPERATOR, create, image_at, refused_as, reread, run, said, scan, this_machine, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A scanned image; a copy stands beside the pool."""
    path = tmp_path / "pool" / "vm.qcow2"
    path.parent.mkdir()
    make_image(path)
    shutil.copy(path, tmp_path / "before.qcow2")
    scan(this_machine(path.parent))
    return path


def before(path: Path) -> Path:
    return path.parent.parent / "before.qcow2"


def refused(path: Path, **options: Any) -> list[str]:
    plan = services.plan(OPERATOR, "convert", image_at(path).pk, {"replace": True, **options})
    return [refusal.code for refusal in plan.refusals]


def test_the_row_follows_the_file_and_undo_brings_both_back(image: Path) -> None:
    row, allocated = image_at(image).pk, image.stat().st_blocks * 512
    plan = services.plan(OPERATOR, "convert", row, {"format": "raw", "replace": True})
    assert (plan.refusals, plan.undo_bytes) == ((), allocated)
    assert any("vm.raw" in command for command in plan.commands)
    job = done("convert", image, format="raw", replace=True)
    new = image.with_suffix(".raw")
    assert (job.result or {})["held_bytes"] == job.undo_bytes == allocated
    assert (job.undo_state, (job.result or {})["freed_bytes"]) == ("available", 0)
    after = rescanned(new)
    assert (after.pk, after.name, after.format, after.declared_format, after.state) == (
        row, "vm.raw", "raw", "raw", "ok",
    )  # fmt: skip
    assert not Image.every.exclude(pk=row).exists()
    assert reads_as(before(image), new, "qcow2", "raw")
    undo = services.plan(OPERATOR, "undo", job.pk, {})
    assert str(image) in " ".join(undo.warnings)
    assert run(services.undo(OPERATOR, job)).state == "succeeded"
    back = rescanned(image)
    assert (back.pk, back.declared_format, back.state) == (row, "qcow2", "ok")
    assert not Image.every.exclude(pk=row).exists()
    assert image.read_bytes() == before(image).read_bytes()


def test_the_same_name_with_other_options(image: Path) -> None:
    job = done("convert", image, format="qcow2", format_options={"cluster_size": 2 << 20}, replace=True)
    assert rescanned(image).cluster_size == 2 << 20
    assert run(services.undo(OPERATOR, job)).state == "succeeded"
    assert rescanned(image).cluster_size == 65536


def test_what_an_admin_declared_follows_the_format_and_comes_back(image: Path) -> None:
    odd = image.with_name("data.bin")
    shutil.copy(image, odd)
    scan(image_at(image).host)
    services_of_images.declare_format(ADMIN, image_at(odd), "qcow2")
    job = done("convert", odd, format="vdi", replace=True)
    new = odd.with_name("data.bin.vdi")
    assert (image_at(new).admin_format, image_at(new).declared_format) == ("vdi", "vdi")
    assert run(services.undo(OPERATOR, job)).state == "succeeded"
    assert image_at(odd).admin_format == "qcow2"


def test_an_image_that_once_had_the_new_name_gets_the_old_one(image: Path) -> None:
    new = image.with_suffix(".raw")
    create(new)
    scan(image_at(image).host)
    gone, row = image_at(new).pk, image_at(image).pk
    new.unlink()
    scan(image_at(image).host)
    done("convert", image, format="raw", replace=True)
    assert rescanned(new).pk == row
    lost = Image.every.get(pk=gone)
    assert (lost.path, lost.state) == (str(image), "missing")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"format": "raw"}, "has_overlays"),
        ({"format": "qcow2"}, None),  # the same name and format: the overlays go on to read it
    ],
)
def test_an_image_with_overlays_keeps_its_name_and_format(
    image: Path, options: dict[str, Any], code: str | None
) -> None:
    create(image.with_name("top.qcow2"), base="vm.qcow2")
    scan(image_at(image).host)
    assert refused(image, **options) == ([code] if code else [])


def test_what_another_image_keeps_its_data_in_keeps_its_name(tmp_path: Path, image: Path) -> None:
    (tmp_path / "link").symlink_to(image.parent)
    create(image.with_name("top.qcow2"), "8M", "-o", f"data_file={tmp_path}/link/data.raw")
    scan(image_at(image).host)
    data = image.with_name("data.raw")
    assert refused(data, format="qcow2") == ["has_overlays"]
    assert refused(data, format="raw") == []


def test_an_image_that_cannot_be_read_may_stand_on_it(image: Path) -> None:
    create(image.with_name("old.qcow"), base=image.name, form="qcow")
    scan(image_at(image).host)
    plan = services.plan(OPERATOR, "convert", image_at(image).pk, {"format": "raw", "replace": True})
    assert [refusal.code for refusal in plan.refusals] == ["guests_unknown"]
    assert "old.qcow" in plan.refusals[0].detail
    assert refused(image, format="qcow2") == []


def test_a_taken_name_is_refused(image: Path) -> None:
    create(image.with_suffix(".vdi"))
    scan(image_at(image).host)
    assert "target_exists" in refused(image, format="vdi")


def test_an_image_that_a_guest_names_needs_the_guests_definition_changed(image: Path) -> None:
    row = image_at(image)
    guest = GuestFactory.create(host=row.host, name="web", state="shut off")
    disk = GuestDiskFactory.create(guest=guest, path=row.path, path_bytes=bytes(row.path_bytes), format="qcow2")
    row.uses.create(disk=disk)
    assert refused(image, format="raw") == ["guest_names_image"]
    assert refused(image, format="raw", repoint_guest=True) == []
    assert refused(image, format="qcow2", format_options={"lazy_refcounts": True}) == []
    plan = services.plan(OPERATOR, "convert", row.pk, {"format": "raw", "replace": True, "repoint_guest": True})
    assert any("web" in warning for warning in plan.warnings)
    assert "virsh define web.xml" in plan.commands
    disk.path_bytes, disk.path = b"/elsewhere/link.qcow2", "/elsewhere/link.qcow2"
    disk.save()
    assert refused(image, format="raw", repoint_guest=True) == ["guest_names_image"]


@pytest.mark.parametrize(
    "options",
    [
        {"replace": True, "target_name": "other.raw"},
        {"replace": True, "target_pool": 1},
        {"repoint_guest": True},
        {"replace": True, "repoint_guest": True, "format": "vhdx"},
    ],
)
def test_options_that_contradict_each_other_are_bad_input(image: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidError):
        services.submit(OPERATOR, "convert", image_at(image).pk, {"format": "raw", **options})


def test_a_replacement_keeps_everybody_else_from_the_image(image: Path) -> None:
    services.submit(OPERATOR, "convert", image_at(image).pk, {"format": "raw", "replace": True})
    assert refused_as(services.submit, OPERATOR, "convert", image_at(image).pk, {"format": "vdi"}) == "busy"


def test_an_undo_is_refused_while_overlays_name_the_new_image(image: Path) -> None:
    job = done("convert", image, format="raw", replace=True)
    rescanned(image.with_suffix(".raw"))
    qemu_img("create", "-q", "-f", "qcow2", "-b", "vm.raw", "-F", "raw", image.with_name("top.qcow2"))
    scan(job.host)
    assert "has_overlays" in [refusal.code for refusal in services.plan(OPERATOR, "undo", job.pk, {}).refusals]


def test_a_job_whose_end_nobody_wrote_down_is_told_by_the_journal(image: Path) -> None:
    row = image_at(image).pk
    job = done("convert", image, format="raw", replace=True)
    # As if the worker had died right after its go: the row is where the image was.
    Image.objects.filter(pk=row).update(
        path=str(image), path_bytes=bytes(image), path_key=_key(image), name=image.name, admin_format=""
    )
    Job.objects.filter(pk=job.pk).update(
        state="interrupted", needs_recovery=True, result=None, undo_state="none", undo_bytes=0,
        finished=timezone.now() - timedelta(minutes=1),
    )  # fmt: skip
    Job.objects.filter(state="queued").delete()
    assert work("recover", job.host_id).state == "succeeded"
    assert (reread(job).state, job.undo_state) == ("succeeded", "available")
    after = rescanned(image.with_suffix(".raw"))
    assert (after.pk, after.declared_format) == (row, "raw")
    assert run(services.undo(OPERATOR, job)).state == "succeeded"


def test_a_recovered_conversion_beside_its_image_leaves_the_image_alone(image: Path) -> None:
    row = image_at(image)
    job = Job.objects.create(
        kind="convert", uid="beside", host=row.host, target_kind="image", target_id=row.pk, rewrites=True,
        state="interrupted", needs_recovery=True, created_by="olga", finished=timezone.now() - timedelta(minutes=1),
        options={"format": "raw", "replace": False, "undo_hours": 24, "target_pool": None, "target_name": None},
    )  # fmt: skip
    found = {
        "outcome": "finished", "undo_bytes": 0, "before_bytes": 1, "after_bytes": 2, "dev": 1, "inode": 2,
        "path_b64": None, "put_back": False, "detail": "", "undo_waits": False, "made_bytes": 2, "original": None,
        "pool": row.pool_id,
    }  # fmt: skip
    recover._finished_after_all(job, found)
    result = reread(job).result or {}
    assert (job.state, result["swapped"], result["freed_bytes"]) == ("succeeded", False, 0)
    assert (job.before_bytes, job.after_bytes, job.freed_bytes, job.space_pool_id) == (0, 2, -2, row.pool_id)
    assert Image.objects.get(pk=row.pk).inode == row.inode


def test_a_scan_that_began_before_lists_no_file_under_the_old_name(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, finish = image_at(image), ScanRun.finish

    def replaced_meanwhile(run_: ScanRun) -> dict[str, Any]:
        monkeypatch.setattr(ScanRun, "finish", finish)
        done("convert", image, format="raw", replace=True)
        return finish(run_)

    Image.objects.filter(pk=row.pk).update(fingerprint=bytes(16))  # so that the scan reads it anew
    monkeypatch.setattr(ScanRun, "finish", replaced_meanwhile)
    scan(row.host)
    assert [(one.pk, one.name) for one in Image.every.all()] == [(row.pk, "vm.raw")]
    assert rescanned(image.with_suffix(".raw")).format == "raw"


def test_a_definition_that_cannot_be_changed_back_yet_is_tried_again(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = done("convert", image, format="raw", replace=True)
    asked: list[bool] = []

    def define(_job: Job, _guest: dict[str, Any], *, forward: bool, check: bool) -> bool:
        asked.append(forward)
        if len(asked) == 1:
            raise HostError("libvirt does not answer")
        return True

    monkeypatch.setattr(repointing, "_define", define)
    Job.objects.filter(pk=job.pk).update(
        repoint_due=True, kept=job.kept | {"guests": [{"uid": "u", "name": "web", "disks": []}]}
    )
    repointing.settle()
    assert reread(job).repoint_due
    assert any("could not be changed yet" in line for line in said(job))
    repointing.settle()
    assert (asked, reread(job).repoint_due) == ([True, True], False)


def _key(path: Path) -> str:
    return path_key(bytes(path))


@pytest.mark.parametrize("conversion", ["stands", "undone"])
def test_an_older_undo_copy_can_be_discarded_whatever_the_image_is_called_now(image: Path, conversion: str) -> None:
    older = done("reclaim", image, method="compress", undo_hours=24)
    rescanned(image)
    newer = done("convert", image, format="raw", replace=True)
    assert run(services.submit(ADMIN, "recover", newer.host_id, {})).state == "succeeded"
    assert reread(older).undo_state == "available"
    if conversion == "undone":
        assert run(services.undo(ADMIN, newer)).state == "succeeded"
    assert run(services.discard_undo(ADMIN, older)).state == "succeeded"
    assert reread(older).undo_state == "discarded"
    assert not (image.parent / f".sa-{older.uid}.orig").exists()
    left, form = (image, "qcow2") if conversion == "undone" else (image.with_suffix(".raw"), "raw")
    assert reads_as(left, before(image), form)
