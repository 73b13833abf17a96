"""A disk goes to a volume or from one, and its guest follows: a real libvirt; loop devices stand in for volumes.

What LVM itself does is tried on a real host (tests/machines/test_move.py).
"""

import hashlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import libvirt
import pytest

from images.models import Image
from storage_admin.guests.models import GuestDisk
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.agent.harness import qemu_img, write
from tests.factories import StoragePoolFactory
from tests.harness.guests import Disk, Domains
from tests.harness.lvm import GROUP, VOLUME, Lvm
from tests.working import OPERATOR, create, image_at, refused_as, reread, run, said, scan, succeeded, this_machine, work

pytestmark = [pytest.mark.guest, pytest.mark.django_db, pytest.mark.usefixtures("quiet", "libvirtd", "no_reserve")]

MIB = 1 << 20
THIN_POOL = {
    "lv_name": "data", "lv_layout": "thin,pool", "lv_role": "private", "lv_size": str(640 * MIB), "zero": "zero",
    "chunk_size": "65536",
    "lv_metadata_size": "4194304", "data_percent": "10.00", "metadata_percent": "9.77",
}  # fmt: skip


@pytest.fixture
def lvm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lvm]:
    """A group with a thin pool and a volume of its own."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    state, group = Lvm(tmp_path / "bin"), f"sat{secrets.token_hex(4)}"
    lines = [
        VOLUME | {"vg_name": group, "lv_uuid": f"id-{one['lv_name']}"} | one for one in (THIN_POOL, {"lv_name": "a"})
    ]
    name = f"{group}-data-tpool"
    thin = f"{name}: 0 1310720 thin-pool 1 100/1024 1000/10240 - rw discard_passdown queue_if_no_space - 1024"
    state.install(vg=[GROUP | {"vg_name": group}], lv=lines, thin=thin)
    yield state
    state.let_go()
    shutil.rmtree(f"/dev/{group}", ignore_errors=True)


@pytest.fixture
def disk(shared_folder: Path, lvm: Lvm) -> Path:
    """An image of 9 MiB on a host with volumes, of which some are data."""
    pool = shared_folder / "pool"
    pool.mkdir(mode=0o755)
    path = create(pool / "disk.qcow2", "9M")
    write(path, 0x41, "1M", "3M")
    write(path, 0x42, "8M", "1M")
    return path


def group(lvm: Lvm) -> str:
    return group_name(lvm.read())


def group_name(state: dict[str, Any]) -> str:
    return str(state["vg"][0]["vg_name"])


def thick() -> StoragePool:
    return StoragePool.objects.get(kind="lvm")


def thin() -> StoragePool:
    return StoragePool.objects.get(kind="lvmthin")


def move(image: Image, pool: StoragePool, **options: Any) -> Job:
    return run(services.submit(OPERATOR, "move", image.pk, {"target_pool": pool.pk, **options}))


def disks_of(domain: Any) -> list[tuple[str, str, str]]:
    """Of each disk its type, its format and where it is."""
    root = ET.fromstring(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
    found = []
    for one in root.findall("devices/disk"):
        driver, source = one.find("driver"), one.find("source")
        assert driver is not None
        assert source is not None
        found.append((one.get("type", ""), driver.get("type", ""), source.get("file") or source.get("dev") or ""))
    return found


def used(disk: Path, domains: Domains) -> tuple[libvirt.virDomain, Host]:
    """A guest that has a disk, and this machine, which a scan has seen."""
    domain, host = domains.define([Disk(disk)]), this_machine(disk.parent)
    scan(host)
    return domain, host


def read(path: str | Path, form: str = "raw", size: int = 9 * MIB) -> str:
    """The digest of what a guest reads of the beginning of a disk."""
    flat = Path("/tmp") / f"flat-{secrets.token_hex(4)}"
    qemu_img("convert", "-f", form, "-O", "raw", path, flat)
    try:
        return hashlib.sha256(flat.read_bytes()[:size]).hexdigest()
    finally:
        flat.unlink()


@pytest.mark.qemu
def test_a_guest_follows_its_disk_onto_a_thick_volume_a_thin_one_and_into_a_file(
    lvm: Lvm, disk: Path, domains: Domains
) -> None:
    domain, host = used(disk, domains)
    digest, stands = read(disk, "qcow2"), disk.stat()
    job = succeeded(move(image_at(disk), thick()))
    assert (job.result or {})["after_bytes"] == 12 * MIB  # whole extents
    assert disks_of(domain) == [("block", "raw", f"/dev/{group(lvm)}/disk")]
    assert read(f"/dev/{group(lvm)}/disk") == digest
    tail = Path(lvm.volumes()["disk"]["file"]).read_bytes()[9 * MIB :]
    assert tail == bytes(3 * MIB), "what others have left behind the end of the disk is no guest's business"
    assert (disk.stat().st_ino, disk.stat().st_mtime_ns) == (stands.st_ino, stands.st_mtime_ns)
    scan(host)
    moved = Image.objects.get(name="disk")
    assert [one.disk.guest.name for one in moved.uses.all()] == [domain.name()]
    assert not reread(image_at(disk)).uses.exists()

    job = succeeded(move(moved, thin(), target_name="slim"))
    assert disks_of(domain) == [("block", "raw", f"/dev/{group(lvm)}/slim")]
    assert read(f"/dev/{group(lvm)}/slim") == digest
    lines = lvm.volumes()
    assert {name: (one["lv_tags"], one["lv_autoactivation"], one["lv_active"]) for name, one in lines.items()} == {
        "data": ("", "enabled", ""), "a": ("", "enabled", ""),
        "disk": ("", "enabled", "active"), "slim": ("", "enabled", "active"),
    }  # fmt: skip
    scan(host)

    back = StoragePool.objects.get(path=str(disk.parent))
    job = succeeded(move(Image.objects.get(name="slim"), back, target_name="back.qcow2"))
    path = disk.with_name("back.qcow2")
    assert disks_of(domain) == [("file", "qcow2", str(path))]
    assert read(path, "qcow2") == digest
    assert not job.repoint_due


@pytest.mark.qemu
def test_a_copy_that_no_guest_is_to_follow_leaves_definitions_alone(lvm: Lvm, disk: Path, domains: Domains) -> None:
    domain = domains.define([Disk(disk)])
    scan(this_machine(disk.parent))
    before = disks_of(domain)
    job = move(image_at(disk), thin(), repoint_guest=False, target_name="copy")
    assert (job.state, disks_of(domain)) == ("succeeded", before), said(job)
    assert read(f"/dev/{group(lvm)}/copy") == read(disk, "qcow2")


@pytest.mark.qemu
@pytest.mark.parametrize("source", ["disk.qcow2", "a"])
@pytest.mark.parametrize(("dies", "is_moved"), [("lvcreate", False), ("lvrename", True)])
def test_a_guest_has_the_disk_that_is_complete_after_a_death(
    lvm: Lvm, disk: Path, domains: Domains, source: str, dies: str, is_moved: bool
) -> None:
    host = this_machine(disk.parent)
    name, before = group(lvm), lvm.read()
    if source == "a":
        file = lvm.folder / "a.img"
        file.write_bytes(disk.read_bytes().ljust(24 * MIB, b"\0"))
        lines = [one | ({"file": str(file)} if one["lv_name"] == "a" else {}) for one in before["lv"]]
        lvm.write(before | {"lv": lines})
        domain = domains.define([Disk(Path(f"/dev/{name}/a"), "raw")])
    else:
        domain = domains.define([Disk(disk)])
    scan(host)
    image = Image.objects.get(name=source)
    named = disks_of(domain)
    if source == "a" and is_moved:  # the first one hides it
        lvm.write(lvm.read() | {"dies": "lvrename", "spared": 1})
    else:
        lvm.write(lvm.read() | {"dies": dies})
    job = move(image, thin(), target_name="moved")
    assert job.state == "interrupted", (job.error_code, job.error_detail, said(job)[-4:])
    Job.objects.filter(pk=job.pk).update(needs_recovery=True)
    work("recover", host.pk)
    job.refresh_from_db()
    there = lvm.volumes()
    assert ("moved" in there, job.state, job.repoint_due) == (
        is_moved, "succeeded" if is_moved else "interrupted", False
    ), said(job)  # fmt: skip
    assert not [one for one in there if one.startswith(".sa-")]
    assert {one["lv_tags"] for one in there.values()} == {""}
    assert disks_of(domain) == ([("block", "raw", f"/dev/{name}/moved")] if is_moved else named)
    if is_moved:
        assert job.freed_bytes == -(job.result or {})["after_bytes"] != 0


@pytest.mark.qemu
def test_a_guest_keeps_the_copy_that_was_complete_while_its_group_comes_late(
    lvm: Lvm, disk: Path, domains: Domains
) -> None:
    domain, host = used(disk, domains)
    lvm.write(lvm.read() | {"dies": "lvrename"})
    job = move(image_at(disk), thin(), target_name="moved")
    there = lvm.read()
    lvm.write(there | {"vg": [], "lv": []})
    Job.objects.filter(pk=job.pk).update(needs_recovery=True)
    moved = [("block", "raw", f"/dev/{group_name(there)}/moved")]
    work("recover", host.pk)
    assert (reread(job).state, job.repoint_due, disks_of(domain)) == ("interrupted", True, moved), said(job)
    lvm.write(there)
    work("recover", host.pk)
    assert (reread(job).state, job.repoint_due, disks_of(domain)) == ("succeeded", False, moved), said(job)


def test_what_stands_against_it_is_said_before(lvm: Lvm, disk: Path, domains: Domains) -> None:
    _, host = used(disk, domains)
    image, folder = image_at(disk), StoragePool.objects.get(path=str(disk.parent))

    def code(pool: StoragePool | None, one: Image = image, **options: Any) -> str:
        given = {"target_pool": pool and pool.pk, **options}
        return refused_as(services.submit, OPERATOR, "move", one.pk, given)

    assert code(None) == "invalid"
    assert code(folder) == "unsupported_pool"
    assert code(thick(), target_name="a") == "target_exists"
    assert code(thick(), target_name="ä b") == "invalid"
    assert code(thick(), target_name="disk_tmeta") == code(thin(), target_name="snapshot1") == "invalid"
    assert code(thin(), Image.objects.get(name="a"), target_name="a") == "target_exists"
    ours = thick()
    other = StoragePoolFactory.create(kind="lvm", path="/dev/other", path_bytes=b"", shared_key=ours.shared_key)
    assert code(ours) == "shared_pool"
    other.delete()
    StoragePool.objects.filter(pk=ours.pk).update(source="proxmox")
    assert code(folder, Image.objects.get(name="a"), target_name="new.qcow2") == "unsupported_pool"
    assert GuestDisk.objects.filter(guest__host=host).count() == 1
