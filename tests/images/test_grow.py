"""A job makes an image larger; the qcow2 comes back by an undo, what cannot grow says so."""

import subprocess
from pathlib import Path

import pytest

from images.models import Image
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import ImageUseFactory
from tests.working import OPERATOR, client_as, codes, image_at, info, run, scan, scanned_machine, succeeded, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]
MIB = 1 << 20


def made(folder: Path, form: str, *options: str) -> Image:
    path = folder / f"vm.{form}"
    subprocess.run(["qemu-img", "create", "-q", "-f", form, *options, path, "64M"], check=True)
    subprocess.run(["qemu-io", "-f", form, "-c", "write -q -P 7 1M 3M", path], check=True)
    scanned_machine(folder)
    image = image_at(path)
    if form == "raw":
        image.declared_format = image.admin_format = "raw"
        image.save()
    return image


@pytest.mark.parametrize("form", ["qcow2", "raw"])
def test_an_image_grows_as_its_plan_says(tmp_path: Path, form: str) -> None:
    image = made(tmp_path, form)
    job = succeeded(work("grow", image.pk, OPERATOR, size_bytes=96 * MIB))
    assert info(image.path)["virtual-size"] == 96 * MIB
    result = job.result or {}
    assert (result["virtual_size"], result["swapped"]) == (96 * MIB, form == "qcow2")
    taken = Path(image.path).stat().st_blocks * 512
    assert job.plan["predicted_low"] <= taken <= job.plan["predicted_high"]
    run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
    assert image_at(image.path.encode()).virtual_size == 96 * MIB
    if form == "qcow2":
        assert run(services.undo(OPERATOR, job)).state == Job.State.SUCCEEDED
        assert info(image.path)["virtual-size"] == 64 * MIB
    else:
        assert not job.undo_available


def test_what_cannot_grow_says_so(tmp_path: Path) -> None:
    image = made(tmp_path, "qcow2")
    assert codes("grow", image) == {"invalid"}
    assert codes("grow", image, size_bytes=64 * MIB) == {"invalid"}
    assert codes("grow", image, size_bytes=96 * MIB) == set()
    ImageUseFactory.create(image=image, disk__guest__state="running")
    Image.objects.update(in_use=True)
    assert codes("grow", image, size_bytes=96 * MIB) == {"guest_running"}


def test_a_format_that_cannot_grow_is_sent_to_a_conversion(tmp_path: Path) -> None:
    image = made(tmp_path, "vdi")
    assert codes("grow", image, size_bytes=96 * MIB) == {"unsupported_subformat"}


def test_the_unused_end_goes_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "vm.qcow2"
    raw = tmp_path / "disk"
    with raw.open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["sfdisk", "-q", raw], input=b"label: gpt\nstart=2048, size=40960\n", check=True)
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, path], check=True)
    raw.unlink()
    scanned_machine(tmp_path)
    image = image_at(path)
    assert codes("shrink", image) == set()
    early = work("shrink", image.pk, OPERATOR, size_bytes=8 * MIB)
    assert (early.state, early.error_code) == (Job.State.FAILED, "end_in_use")
    scan(Host.objects.get())
    job = succeeded(work("shrink", image.pk, OPERATOR))
    assert (job.result or {})["virtual_size"] == info(image.path)["virtual-size"] == 22 * MIB
    run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
    assert image_at(path).virtual_size == 22 * MIB
    assert run(services.undo(OPERATOR, job)).state == Job.State.SUCCEEDED
    assert info(image.path)["virtual-size"] == 64 * MIB


def test_its_page_asks_for_the_size_and_plans_with_it(tmp_path: Path) -> None:
    image = made(tmp_path, "qcow2")
    browser = client_as(role="operator")
    assert f"/images/{image.pk}/grow/" in browser.get(f"/images/{image.pk}/").content.decode()
    asked = browser.get(f"/images/{image.pk}/grow/")
    assert (asked.status_code, asked.context["plan"].refusals[0].code) == (200, "invalid")
    planned = browser.get(f"/images/{image.pk}/grow/", {"size_gib": "0.5"})
    assert (planned.context["plan"].refusals, planned.context["plan"].options["size_bytes"]) == ((), 512 * MIB)
    wrong = browser.get(f"/images/{image.pk}/grow/", {"size_gib": "big"})
    assert wrong.context["error"].fields.keys() == {"size_gib"}
