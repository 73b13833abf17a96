"""What libvirt alone knows that makes an image no orphan: snapshots, saved states, NVRAM; by a real one."""

from pathlib import Path

import libvirt
import pytest

from images.models import Image
from storage_admin.hosts.libvirt import reader
from storage_admin.jobs import services
from tests.agent.harness import qemu_img
from tests.harness.filesystems import new_file, new_folder
from tests.harness.guests import Disk, Domains
from tests.working import ADMIN, ON_LIBVIRT, create, image_at, run, scan, scanned_machine

pytestmark = [pytest.mark.guest, pytest.mark.django_db, *ON_LIBVIRT]


def evidence(path: Path) -> tuple[bool | None, str]:
    image = image_at(path)
    return image.orphan, " ".join(image.orphan_evidence)


def test_a_disk_that_only_a_snapshot_names_is_no_orphan(domains: Domains, shared_folder: Path, libvirtd: str) -> None:
    old, new, left = (create(shared_folder / f"{name}.qcow2") for name in ("old", "new", "left"))
    domain = domains.define([Disk(old)])
    domain.snapshotCreateXML("<domainsnapshot><name>before</name></domainsnapshot>")
    xml = domain.XMLDesc().replace(str(old), str(new))
    libvirt.open(libvirtd).defineXML(xml)
    scanned_machine(shared_folder)
    assert evidence(old) == (False, f"It is used only in the snapshot before of guest {domain.name()}.")
    assert evidence(new)[0] is False
    assert evidence(left)[0] is True, evidence(left)
    assert "libvirt on" in evidence(left)[1]


def test_nvram_is_no_orphan_and_arguments_of_qemu_leave_it_open(
    domains: Domains, shared_folder: Path, libvirtd: str
) -> None:
    disk, nvram, left = (create(shared_folder / f"{name}.qcow2") for name in ("disk", "nvram", "left"))
    domain = domains.define([Disk(disk)])
    connection = libvirt.open(libvirtd)
    plain = domain.XMLDesc()
    assert "</os>" in plain
    code = new_file(shared_folder / "code.fd", bytes(4096))
    loader = f"<loader readonly='yes' type='pflash'>{code}</loader><nvram>{nvram}</nvram></os>"
    connection.defineXML(plain.replace("</os>", f"{loader}<features><acpi/></features>"))
    host = scanned_machine(shared_folder)
    assert evidence(nvram) == (False, f"It is the NVRAM of guest {domain.name()}.")
    assert evidence(left)[0] is True
    space = "xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'"
    argument = f"<qemu:commandline {space}><qemu:arg value='file={left}'/></qemu:commandline></domain>"
    connection.defineXML(plain.replace("</domain>", argument))
    scan(host)
    orphan, why = evidence(left)
    assert orphan is None
    assert f"qemu:arg file={left}" in why


def test_an_overlay_outside_of_every_pool_that_a_guest_names_keeps_its_base(
    domains: Domains, shared_folder: Path
) -> None:
    pool, elsewhere = (new_folder(shared_folder / name, mode=0o755) for name in ("pool", "elsewhere"))
    base, left = create(pool / "base.qcow2"), create(pool / "left.qcow2")
    top = create(elsewhere / "top.qcow2", base=str(base))
    domains.define([Disk(top)])
    host = scanned_machine(pool)
    assert evidence(base) == (
        False,
        f"{elsewhere}/top.qcow2, a guest disk outside every pool, uses it as its backing file.",
    )
    assert evidence(left)[0] is True
    qemu_img("rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", create(shared_folder / "far.qcow2"), top)
    scan(host)
    orphan, why = evidence(left)
    assert (orphan, "is outside every pool as well" in why) == (None, True)


def test_a_guest_that_is_defined_while_the_job_waits_keeps_its_disk(domains: Domains, shared_folder: Path) -> None:
    path = create(shared_folder / "left.qcow2")
    host = scanned_machine(shared_folder)
    assert reader.read(host) is not None
    job = services.submit(ADMIN, "set_aside", image_at(path).pk, {})
    domain = domains.define([Disk(path)])
    ended = run(job)
    assert (ended.state, ended.error_code) == ("failed", "not_orphan")
    assert domain.name() in ended.error_detail
    assert path.exists()
    assert Image.every.get().state == "ok"
