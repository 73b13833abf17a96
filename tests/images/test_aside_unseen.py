"""What no scan has linked says of an orphan: an overlay that was only read, one whose base has no plain name."""

import json
from pathlib import Path

import pytest

from images.models import Image
from images.scan.run import ScanRun
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from tests.images.test_set_aside import end_grace, fresh, orphan
from tests.working import ADMIN, create, image_at, run, said, scan, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


def test_an_overlay_that_a_scan_has_read_and_not_linked_yet_keeps_its_base(pool: Path, host: Host) -> None:
    image = orphan(pool, host)
    create(pool / "new.qcow2", base="left.qcow2")
    queued = services.submit(ADMIN, "scan", host.pk, {})
    with pytest.MonkeyPatch.context() as patched:
        # The batch is written by itself, as when it is full; then the scan comes to nothing.
        patched.setattr(ScanRun, "finish", ScanRun._write_batch)
        run(queued)
    assert Image.every.filter(name="new.qcow2").exists()
    assert fresh(image).orphan
    job = work("set_aside", image.pk, ADMIN)
    assert (job.state, job.error_code) == ("failed", "has_overlays"), said(job)
    assert (pool / "left.qcow2").exists()


def test_a_base_that_is_named_by_a_json_description_is_no_orphan(pool: Path, host: Host) -> None:
    create(pool / "left.qcow2")
    described = {"driver": "qcow2", "file": {"driver": "file", "filename": str(pool / "left.qcow2")}}
    create(pool / "top.qcow2", base="json:" + json.dumps(described))
    scan(host)
    image = image_at(pool / "left.qcow2")
    assert (image.orphan, image.orphan_evidence) == (
        None, ["top.qcow2 does not name its backing file by a plain path, and may mean this image."]
    )  # fmt: skip
    # Also where the host was not scanned since.
    Image.every.filter(pk=image.pk).update(orphan=True)
    job = work("set_aside", image.pk, ADMIN)
    assert (job.state, job.error_code) == ("failed", "has_overlays"), said(job)


@pytest.mark.parametrize("base", ["left.qcow2", "{folder}/left.qcow2", "json:{description}"])
def test_an_overlay_that_came_since_keeps_what_it_misses_from_being_deleted(pool: Path, host: Host, base: str) -> None:
    image = orphan(pool, host)
    first = work("set_aside", image.pk, ADMIN)
    end_grace(image)
    description = json.dumps({"driver": "qcow2", "file.filename": str(pool / "left.qcow2")})
    named = base.format(folder=pool, description=description)
    create(pool / "came.qcow2", "", "-u", "-o", "size=1M", base=named)
    job = work("delete_aside", image.pk, ADMIN, confirm_name="left.qcow2")
    assert (job.state, job.error_code) == ("failed", "has_overlays"), said(job)
    assert (pool / f".sa-{first.uid}.aside").exists()
