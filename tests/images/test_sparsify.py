"""A job trims the filesystems of an image, where an admin lets it be looked into."""

import os
from pathlib import Path

import pytest

from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.agent.harness import make_image, qemu_img
from tests.agent.test_sparsify import MIB, disk_of, filesystem
from tests.working import OPERATOR, allocated, client_as, codes, image_at, scan, scanned_machine, succeeded, work

__all__ = ["filesystem"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


def test_the_plan_tells_from_the_last_look_what_becomes_free_and_the_job_frees_it(
    tmp_path: Path, filesystem: Path
) -> None:
    path = disk_of(tmp_path, filesystem, "qcow2")
    scanned_machine(tmp_path)
    image = image_at(path)
    assert codes("sparsify", image) == {"inside_off"}
    StoragePool.objects.update(look_inside=True)
    image = image_at(path)
    assert codes("sparsify", image) == set()
    assert services.plan(OPERATOR, "sparsify", image.pk, {}).predicted_after_bytes is None
    for kind in ("inside", "analyze"):
        assert work(kind, image.pk, OPERATOR).state == Job.State.SUCCEEDED
    plan, before = services.plan(OPERATOR, "sparsify", image.pk, {}), allocated(path)
    assert plan.predicted_after_bytes is not None
    page = client_as(role="operator").get(f"/images/{image.pk}/sparsify/")
    assert (page.status_code, b"Trim filesystems" in page.content) == (200, True)
    assert b'id="zero-fill"' not in page.content, "it needs no zeros"
    job = succeeded(work("sparsify", image.pk, OPERATOR, undo_hours=0))
    assert [one["argv"][0] for one in job.commands].count("supermin") == 1
    freed = before - allocated(path)
    assert (job.freed_bytes, freed > 38 * MIB) == (freed, True)
    # Of what is in use, inode tables that were never written take nothing.
    assert 0 <= plan.predicted_after_bytes - allocated(path) < 16 * MIB


def test_what_the_job_would_lose_or_miss_is_refused_by_the_plan(tmp_path: Path) -> None:
    make_image(tmp_path / "vm.qcow2")
    qemu_img("snapshot", "-c", "s", tmp_path / "vm.qcow2")
    scanned_machine(tmp_path)
    StoragePool.objects.update(look_inside=True)
    assert codes("sparsify", image_at(tmp_path / "vm.qcow2")) == {"has_internal_snapshots"}
    qemu_img("snapshot", "-d", "s", tmp_path / "vm.qcow2")
    os.link(tmp_path / "vm.qcow2", tmp_path / "again.qcow2")
    scan(Host.objects.get())
    assert "hard_linked" in codes("sparsify", image_at(tmp_path / "vm.qcow2"))


def test_other_formats_have_to_be_converted_first(tmp_path: Path) -> None:
    make_image(tmp_path / "vm.qcow2")
    disk_of(tmp_path, tmp_path / "vm.qcow2", "vdi")
    scanned_machine(tmp_path)
    StoragePool.objects.update(look_inside=True)
    assert codes("sparsify", image_at(tmp_path / "vm.vdi")) == {"unsupported_subformat"}
