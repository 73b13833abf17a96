"""A job writes an image onto a device, for admins who type its path."""

import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from images.models import Image, ImageUse
from images.rewrite import refusals
from storage_admin.accounts.models import ForbiddenError
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.names import path_key
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.agent.test_from_device import behind, device
from tests.agent.test_unpack import image
from tests.factories import GuestDiskFactory, GuestFactory, HostFactory, ImageFactory, StoragePoolFactory
from tests.images.scanned import folder, pool
from tests.working import ADMIN, OPERATOR, client_as, codes, image_at, run, scan, succeeded

__all__ = ["behind", "device", "folder", "pool"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


@pytest.fixture
def disk(pool: StoragePool, folder: Path) -> Image:
    path = image(folder)
    scan(pool.host)
    return image_at(path)


def test_an_admin_types_the_device_and_the_image_is_on_it(disk: Image, behind: Path, device: Path) -> None:
    browser, address = client_as(role="admin"), f"/images/{disk.pk}/to_device/"
    assert browser.get(address).status_code == 200
    given = {"device": str(device)}
    shown = browser.get(address, given)
    assert shown.context["plan"].refusals == ()
    sent = given | {"planned": shown.context["planned"], "key": "k"}
    for wrong in ("", disk.name):
        refused = browser.post(address, sent | {"confirm_name": wrong})
        assert (refused.status_code, refused.context["error"].fields.keys()) == (409, {"confirm_name"})
    assert browser.post(address, sent | {"confirm_name": str(device)}).status_code == 302
    job = succeeded(run(Job.objects.get(kind="to_device")))
    result = job.result or {}
    assert (result["device"], result["device_bytes"]) == (str(device), behind.stat().st_size)
    compare = ["qemu-img", "compare", "-f", "qcow2", "-F", "raw", disk.path]
    subprocess.run(["truncate", "-s", str(disk.virtual_size), behind], check=True)
    subprocess.run([*compare, behind], check=True, capture_output=True)
    assert job.freed_bytes in {None, 0}


def test_what_is_on_the_device_and_who_asks_is_minded(disk: Image, device: Path) -> None:
    with pytest.raises(ForbiddenError):
        services.submit(OPERATOR, "to_device", disk.pk, {"device": str(device)})
    subprocess.run(["mkfs.ext4", "-q", "-F", device], check=True)
    job = run(services.submit(ADMIN, "to_device", disk.pk, {"device": str(device)}))
    assert (job.state, job.error_code) == (Job.State.FAILED, "target_exists")
    assert codes("to_device", disk, ADMIN) == {"invalid"}
    for wrong in ("/etc/passwd", "/dev/../etc/passwd", "dev/sda"):
        answer = client_as(role="admin").post(
            "/api/v1/jobs/", {"kind": "to_device", "image": disk.pk, "options": {"device": wrong}}, "application/json"
        )
        assert (answer.status_code, list(answer.json()["fields"])) == (400, ["device"]), wrong


def test_a_device_that_is_a_guests_or_an_images_is_refused_by_the_plan(disk: Image) -> None:
    guest = GuestFactory.create(host=disk.host, state="shut off")
    GuestDiskFactory.create(guest=guest, path="/dev/vg/db1", path_bytes=b"/dev/vg/db1")
    ImageFactory.create(pool=disk.pool, backing_path="/dev/vg/base", backing_path_bytes=b"/dev/vg/base")
    for name in ("db1", "base"):
        assert codes("to_device", disk, ADMIN, device=f"/dev/vg/{name}") == {"device_in_use"}, name


def volume(pool: StoragePool, name: str, **more: Any) -> Image:
    """One that a scan has listed, of no guest."""
    path = f"/dev/vg/{name}"
    told = {"path": path, "path_bytes": path.encode(), "path_key": path_key(path.encode()), "format": "raw"}
    return ImageFactory.create(pool=pool, host=pool.host, **told | more)


@pytest.mark.parametrize("kind", ["lvm", "lvmthin"])
def test_a_snapshot_keeps_what_was_on_its_origin_only_where_it_is_thin(disk: Image, kind: str) -> None:
    pool = StoragePoolFactory.create(host=disk.host, kind=kind)
    volume(pool, "free")
    assert codes("to_device", disk, ADMIN, device="/dev/vg/free") == set()
    volume(pool, "snap", backing_path="/dev/vg/free", backing_path_bytes=b"/dev/vg/free")
    refused = {"device_in_use"} if kind == "lvm" else set()
    assert codes("to_device", disk, ADMIN, device="/dev/vg/free") == refused


@pytest.mark.parametrize("kind", ["lvmthin", "zfs"])
def test_a_pool_has_to_have_room_for_all_that_is_written(disk: Image, kind: str) -> None:
    size = disk.virtual_size or 0
    free = size - 1 + refusals.reserve_of(size)
    pool = StoragePoolFactory.create(host=disk.host, kind=kind, capacity_bytes=size, available_bytes=free)
    there = volume(pool, "thin", allocated_size=0)
    assert codes("to_device", disk, ADMIN, device="/dev/vg/thin") == {"not_enough_space"}
    for has in ({"allocated_size": 1}, {"allocated_size": 0, "reservation_bytes": 1}):
        Image.objects.filter(pk=there.pk).update(**has)
        assert codes("to_device", disk, ADMIN, device="/dev/vg/thin") == set()


def test_a_device_that_others_of_the_cluster_or_of_the_storage_use_is_refused(disk: Image) -> None:
    other = HostFactory.create(kind="proxmox", cluster="c", node="b")
    type(disk.host).objects.filter(pk=disk.host.pk).update(cluster="c")
    GuestDiskFactory.create(guest=GuestFactory.create(host=other), path="/dev/vg/a", path_bytes=b"/dev/vg/a")
    assert codes("to_device", image_at(Path(disk.path)), ADMIN, device="/dev/vg/a") == {"device_in_use"}
    pool = StoragePoolFactory.create(host=disk.host, kind="lvm", shared_key="lvm GROUP")
    far = GuestDiskFactory.create(guest=GuestFactory.create(host=HostFactory.create()), path="/dev/mapper/vg-b")
    ImageUse.objects.create(image=volume(pool, "b"), disk=far)
    assert codes("to_device", disk, ADMIN, device="/dev/vg/b") == {"device_in_use"}
    volume(pool, "c")
    assert codes("to_device", disk, ADMIN, device="/dev/vg/c") == set()
    StoragePoolFactory.create(host=HostFactory.create(), kind="lvm", shared_key="lvm GROUP")
    assert codes("to_device", disk, ADMIN, device="/dev/vg/c") == {"shared_pool"}


def test_a_device_that_may_be_another_one_than_when_the_job_was_submitted_is_left_alone(
    disk: Image, behind: Path, device: Path
) -> None:
    before = behind.read_bytes()
    for age in (timedelta(seconds=60), timedelta(days=10_000)):  # that one before the host's start
        job = services.submit(ADMIN, "to_device", disk.pk, {"device": str(device)})
        Job.objects.filter(pk=job.pk).update(created=timezone.now() - age)
        device.chmod(0o660)  # as where somebody else gets it
        run(job)
        assert (job.state, job.error_code) == ("failed", "stale_plan"), job.error_detail
    assert behind.read_bytes() == before
