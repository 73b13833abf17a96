"""What an image needs, and what cannot be seen plainly: a header that cannot be read, a link, another host's image."""

from collections.abc import Callable
from pathlib import Path

import pytest

from images.models import Image
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.agent.harness import overwrite, qemu_img
from tests.working import ADMIN, create, image_at, refused_as, run, scan

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


def refusal(image: Image) -> str:
    return refused_as(services.submit, ADMIN, "set_aside", image.pk, {})


def set_aside_by_surprise(image: Image) -> Job:
    """What the agent says where the database has called an image an orphan wrongly."""
    Image.objects.filter(pk=image.pk).update(orphan=True)
    return run(services.submit(ADMIN, "set_aside", image.pk, {}))


def an_unknown_feature(path: Path) -> None:
    overwrite(path, 72, bytes([0x80]))  # the highest of the incompatible features' bits


def old_overlay(pool: Path, base: Path) -> Path:
    top = pool / "top.qcow"
    qemu_img("create", "-f", "qcow", "-b", base.name, "-F", "qcow2", str(top), cwd=pool)
    return top


def later_overlay(pool: Path, base: Path) -> Path:
    top = create(pool / "top.qcow2", base=base.name)
    an_unknown_feature(top)
    return top


def codes(image: Image) -> list[str]:
    options = {"format": "raw", "replace": True}
    return [refusal.code for refusal in services.plan(ADMIN, "convert", image.pk, options).refusals]


def test_a_split_vmdk_is_in_nobodys_way(pool: Path, host: Host) -> None:
    image = create(pool / "vm.qcow2")
    qemu_img("create", "-q", "-f", "vmdk", "-o", "subformat=twoGbMaxExtentSparse", pool / "split.vmdk", "5G")
    scan(host)
    assert codes(image_at(image)) == []
    assert set_aside_by_surprise(image_at(image)).state == "succeeded"


@pytest.mark.parametrize("left", ["split-s001.vmdk", ".sa-j9.orig"])
def test_what_the_last_look_will_not_get_past_is_told_by_the_plan(pool: Path, host: Host, left: str) -> None:
    """An extent beside a descriptor that does not name it; an undo copy that cannot be read."""
    image = create(pool / "vm.qcow2")
    qemu_img("create", "-q", "-f", "vmdk", pool / "split.vmdk", "8M")
    (pool / left).write_bytes(b"KDMV" + b"\xff" * 1000)
    scan(host)
    assert "guests_unknown" in codes(image_at(image))


@pytest.mark.parametrize("made", [old_overlay, later_overlay])
def test_what_an_image_that_cannot_be_read_may_stand_on_is_no_orphan(
    pool: Path, host: Host, made: Callable[[Path, Path], Path]
) -> None:
    base = create(pool / "base.qcow2")
    top = made(pool, base)
    scan(host)
    image = image_at(base)
    assert (image.orphan, image_at(top).orphan) == (None, True)
    assert image.orphan_evidence == [
        f"The backing files of these images cannot be read, and one of them may be this image: {top.name}."
    ]
    assert refusal(image) == "guests_unknown"
    job = set_aside_by_surprise(image)
    assert (job.state, job.error_code, base.exists()) == ("failed", "guests_unknown", True), job.error_detail
    assert str(top) in job.error_detail
    assert run(services.submit(ADMIN, "set_aside", image_at(top).pk, {})).state == "succeeded"
    scan(host)
    assert image_at(base).orphan is None, "the other one may be restored"


def test_a_file_that_only_looks_damaged_in_a_format_without_bases_hides_nothing(pool: Path, host: Host) -> None:
    base = create(pool / "base.qcow2")
    (pool / "root.hds").write_bytes(b"WithoutFreeSpace" + bytes(4096))
    scan(host)
    assert image_at(pool / "root.hds").unreadable
    assert image_at(base).orphan is True
    assert run(services.submit(ADMIN, "set_aside", image_at(base).pk, {})).state == "succeeded"


def test_a_damaged_header_that_says_plainly_that_it_names_no_other_file_hides_nothing(pool: Path, host: Host) -> None:
    base, damaged, old = create(pool / "base.qcow2"), create(pool / "damaged.qcow2"), pool / "old.qcow"
    qemu_img("create", "-f", "qcow", str(old), "1M")
    overwrite(damaged, 20, (99).to_bytes(4, "big"))  # bits of a cluster: 9 to 21 there are
    scan(host)
    assert image_at(damaged).unreadable
    assert image_at(old).unreadable
    assert image_at(base).orphan is True
    assert run(services.submit(ADMIN, "set_aside", image_at(base).pk, {})).state == "succeeded"


@pytest.mark.parametrize("link", ["../link/data.raw", "{folder}/link/data.raw"])
def test_data_that_is_reached_by_a_link_is_no_orphan(pool: Path, host: Host, link: str) -> None:
    (pool.parent / "link").symlink_to(pool)
    name = link.format(folder=pool.parent)
    top = pool / "top.qcow2"
    qemu_img("create", "-f", "qcow2", "-o", f"data_file={name}", str(top), "8M", cwd=pool)
    scan(host)
    data = image_at(pool / "data.raw")
    assert (data.orphan, data.orphan_evidence) == (False, ["top.qcow2 keeps its data in it."])
    assert refusal(data) == "not_orphan"
    job = set_aside_by_surprise(data)
    assert (job.state, job.error_code, (pool / "data.raw").exists()) == ("failed", "has_overlays", True)


def test_a_link_that_leads_elsewhere_since_the_scan_is_followed_when_it_counts(pool: Path, host: Host) -> None:
    create(pool / "old.qcow2")
    create(pool / "new.qcow2")
    link = pool.parent / "link"
    link.symlink_to(pool / "old.qcow2")
    top = pool / "top.qcow2"
    qemu_img("create", "-f", "qcow2", "-b", str(link), "-F", "qcow2", str(top), cwd=pool)
    scan(host)
    assert image_at(pool / "old.qcow2").orphan is False
    link.unlink()
    link.symlink_to(pool / "new.qcow2")
    job = set_aside_by_surprise(image_at(pool / "new.qcow2"))
    assert (job.state, job.error_code) == ("failed", "has_overlays"), job.error_detail
