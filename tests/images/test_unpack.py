"""A job imports a packed image into a pool, by REST's way and by the page."""

import gzip
from pathlib import Path

import pytest

from images.models import Image
from storage_admin.errors import InvalidError
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job
from tests.agent.test_unpack import archive, image, stream_optimized
from tests.images.scanned import folder, pool
from tests.working import OPERATOR, allocated, client_as, codes, image_at, run, scan, succeeded, work

__all__ = ["folder", "pool"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]
MIB = 1 << 20


def test_the_disk_of_an_archive_is_an_image_after_the_next_scan(pool: StoragePool, folder: Path) -> None:
    packed = archive(folder, stream_optimized(image(folder)))
    job = succeeded(work("unpack", pool.pk, OPERATOR, source=str(packed), name="new.qcow2"))
    made = folder / "new.qcow2"
    assert (job.before_bytes, job.after_bytes, job.freed_bytes) == (0, allocated(made), -allocated(made))
    assert ((job.result or {})["packed"], (job.result or {})["packed_bytes"]) == ("ova", packed.stat().st_size)
    run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
    assert (image_at(made).state, image_at(made).virtual_size) == (Image.State.OK, 16 * MIB)


def test_what_is_wrong_is_said_before_anything_is_read(pool: StoragePool, folder: Path, tmp_path: Path) -> None:
    packed = folder / "disk.gz"
    packed.write_bytes(gzip.compress(image(folder).read_bytes()))
    scan(Host.objects.get())
    assert codes("unpack", pool, source=str(packed), name="new.qcow2") == set()
    assert codes("unpack", pool, source=str(tmp_path / "elsewhere.gz"), name="new.qcow2") == {"outside_pool"}
    assert codes("unpack", pool, source=str(packed), name="disk.qcow2") == {"target_exists"}
    wrong: tuple[dict[str, str], ...] = (
        {"source": "disk.gz", "name": "new.qcow2"}, {"source": str(packed), "name": "../new.qcow2"},
        {"source": str(packed), "name": "new.vdi"}, {"source": str(packed)},
        {"source": str(packed), "name": "new.qcow2", "sha256": "abc"},
    )  # fmt: skip
    for options in wrong:
        with pytest.raises(InvalidError):
            codes("unpack", pool, **options)
    job = work("unpack", pool.pk, OPERATOR, source=str(packed), name="new.qcow2", sha256="0" * 64)
    assert (job.state, job.error_code) == (Job.State.FAILED, "dirty_or_corrupt")
    assert not (folder / "new.qcow2").exists()


def test_its_page_plans_and_starts_it(pool: StoragePool, folder: Path) -> None:
    packed = folder / "disk.gz"
    packed.write_bytes(gzip.compress(image(folder).read_bytes()))
    browser, address = client_as(role="operator"), f"/pools/{pool.pk}/unpack/"
    assert address in browser.get(f"/pools/{pool.pk}/").content.decode()
    assert browser.get(address).status_code == 200
    wrong = browser.get(address, {"source": "disk.gz", "name": "new.qcow2"})
    assert wrong.context["error"].fields.keys() == {"source"}
    given = {"source": str(packed), "name": "new.qcow2"}
    shown = browser.get(address, given)
    assert shown.context["plan"].refusals == ()
    started = browser.post(address, {**given, "planned": shown.context["planned"], "key": shown.context["key"]})
    assert started.status_code == 302
    assert run(Job.objects.get(kind="unpack")).state == Job.State.SUCCEEDED
    assert (folder / "new.qcow2").exists()
