"""A job looks inside an image where an admin allows it, and its page shows what it found."""

import subprocess
from pathlib import Path

import pytest

from images.kinds.inside import last_look
from images.models import Image
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.services import update_pool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.working import ADMIN, OPERATOR, client_as, image_at, run, scan, scanned_machine, succeeded, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]
MIB = 1 << 20


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """A disk with one partition, in it an ext4 of which 20 MiB once held files."""
    filesystem, raw, path = tmp_path / "fs", tmp_path / "disk", tmp_path / "vm.qcow2"
    with filesystem.open("wb") as file:
        file.truncate(60 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-b", "4096", "-E", "lazy_itable_init=0", filesystem], check=True)
    with raw.open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["sfdisk", "-q", raw], input=b"label: gpt\nstart=2048, size=122880\n", check=True)
    with raw.open("r+b") as file:
        file.seek(MIB)
        content = bytearray(filesystem.read_bytes())
        content[30 * MIB : 50 * MIB] = b"\x5a" * (20 * MIB)
        file.write(content)
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, path], check=True)
    filesystem.unlink()
    raw.unlink()
    scanned_machine(tmp_path)
    return image_at(path)


def test_only_where_an_admin_allows_it(image: Image) -> None:
    assert [one.code for one in services.plan(OPERATOR, "inside", image.pk, {}).refusals] == ["inside_off"]
    browser = client_as(role="operator")
    assert f"/images/{image.pk}/inside/" not in browser.get(f"/images/{image.pk}/").content.decode()
    update_pool(ADMIN, image.pool, look_inside=True)
    assert services.plan(OPERATOR, "inside", image.pk, {}).refusals == ()
    assert f"/images/{image.pk}/inside/" in browser.get(f"/images/{image.pk}/").content.decode()


def test_what_it_finds_stands_on_the_page_until_the_image_changes(image: Image) -> None:
    update_pool(ADMIN, image.pool, look_inside=True)
    if (sampled := Job.objects.filter(kind="sample", state=Job.State.QUEUED).first()) is not None:
        run(sampled)
    assert work("analyze", image.pk, OPERATOR, mode="full").state == Job.State.SUCCEEDED
    succeeded(work("inside", image.pk, OPERATOR))
    found = last_look(image_at(Path(image.path)))
    assert found is not None
    (part,) = found["parts"]
    assert (found["table"], part["number"], part["name"]) == ("gpt", 1, "ext4")
    assert (part["start"], part["size"]) == (MIB, 60 * MIB)
    assert part["used_bytes"] + part["free_bytes"] == part["filesystem_bytes"] == 60 * MIB
    assert 10 * MIB < found["deleted_bytes"] <= 21 * MIB
    page = client_as(role="operator").get(f"/images/{image.pk}/")
    assert page.context["inside"]["current"]
    subprocess.run(["qemu-io", "-f", "qcow2", "-c", "write -q -P 1 30M 1M", image.path], check=True)
    scan(Host.objects.get())
    again = last_look(image_at(Path(image.path)))
    assert again is not None
    assert (again["current"], again["deleted_bytes"]) == (False, None)
    StoragePool.objects.update(look_inside=False)
    assert last_look(image_at(Path(image.path))) is None
