"""A job writes an image onto a device, for admins who type its path."""

import subprocess
from pathlib import Path

import pytest

from images.models import Image
from storage_admin.accounts.models import ForbiddenError
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.agent.test_from_device import behind, device
from tests.agent.test_unpack import image
from tests.factories import GuestDiskFactory, GuestFactory, ImageFactory
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
    # A volume that is only listed, and one with a snapshot.
    ImageFactory.create(pool=disk.pool, path="/dev/vg/free", path_bytes=b"/dev/vg/free", format="raw")
    origin = {"backing_path": "/dev/vg/free", "backing_path_bytes": b"/dev/vg/free"}
    ImageFactory.create(pool=disk.pool, path="/dev/vg/snap", path_bytes=b"/dev/vg/snap", format="raw", **origin)
    for name, told in (("db1", {"device_in_use"}), ("base", {"device_in_use"}), ("free", set())):
        assert codes("to_device", disk, ADMIN, device=f"/dev/vg/{name}") == told, name
