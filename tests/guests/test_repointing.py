"""A guest follows its image to another name and format: with a real libvirt, and back again."""

import math
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import libvirt
import pytest

from images.rewrite import repointing
from storage_admin.agent.protocol import HostError
from storage_admin.hosts.libvirt import control, repoint
from storage_admin.hosts.libvirt.disks import ContradictedError, Edit
from storage_admin.hosts.models import Host
from storage_admin.jobs import claims, services
from storage_admin.jobs.models import Job
from tests.agent.harness import qemu_img, reads_as
from tests.harness.filesystems import new_folder
from tests.harness.guests import Disk, Domains, Starts
from tests.harness.patching import do_after
from tests.images.away import goes_away
from tests.working import OPERATOR, create, image_at, reread, run, said, scanned_machine, succeeded

pytestmark = [pytest.mark.guest, pytest.mark.django_db, pytest.mark.usefixtures("quiet", "libvirtd", "no_reserve")]


@pytest.fixture
def disk(shared_folder: Path) -> Path:
    """An image in a folder that libvirt's user may enter."""
    pool = new_folder(shared_folder / "pool", mode=0o755)
    return create(pool / "disk.qcow2", "64M")


@pytest.fixture
def domain(domains: Domains, disk: Path) -> Any:
    """A guest that is off, with that disk, on this machine as it was scanned."""
    made = domains.define([Disk(disk)])
    scanned_machine(disk.parent)
    return made


def definition(domain: Any) -> str:
    return str(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE))


def disks_of(domain: Any) -> list[tuple[str, str]]:
    """Driver type and path of each disk."""
    root = ET.fromstring(definition(domain))
    return [
        (disk.find("driver").get("type"), disk.find("source").get("file"))  # type: ignore[union-attr, misc]
        for disk in root.findall("devices/disk")
    ]


def replace(path: Path, **options: Any) -> Job:
    body = {"format": "raw", "replace": True, "repoint_guest": True, **options}
    return run(services.submit(OPERATOR, "convert", image_at(path).pk, body))


def test_a_guest_boots_from_the_new_file_and_undo_gives_it_the_old_definition_back(
    tcg_guest: Starts, disk: Path
) -> None:
    guest = tcg_guest(Disk(disk))
    guest.write(3, 5, 0x61)
    written = guest.digest(3, 5)
    guest.stop()
    before = definition(guest.domain)
    copy = disk.parent.parent / "copy.qcow2"
    qemu_img("convert", "-O", "qcow2", disk, copy)
    scanned_machine(disk.parent)
    job = succeeded(replace(disk))
    raw = disk.with_suffix(".raw")
    assert disks_of(guest.domain) == [("raw", str(raw))]
    assert reads_as(copy, raw, "qcow2", "raw")
    assert not job.repoint_due
    run(Job.objects.get(kind="scan", state="queued"))
    image = image_at(raw)
    assert [use.disk.guest.name for use in image.uses.all()] == [guest.name]
    assert (image.declared_format, image.declared_by) != ("", "")
    assert run(services.undo(OPERATOR, job)).state == "succeeded"
    assert definition(guest.domain) == before
    assert disk.exists()
    assert not raw.exists()
    assert written  # the guest that wrote it is gone with its console; the bytes were compared above


def test_what_else_was_changed_in_the_definition_meanwhile_stays(domain: Any, domains: Domains, disk: Path) -> None:
    job = succeeded(replace(disk))
    new = definition(domain).replace("cache='none'", "cache='writeback'")
    new = new.replace("<devices>", "<devices><sound model='ich9'/>", 1)
    domains._connection.defineXML(new)
    assert run(services.undo(OPERATOR, job)).state == "succeeded"
    after = definition(domain)
    assert disks_of(domain) == [("qcow2", str(disk))]
    assert "cache='writeback'" in after
    assert "ich9" in after


def test_a_swap_that_does_not_come_about_leaves_the_definition_as_it_was(
    domain: Any, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = definition(domain)

    def somebody_takes_the_name(*_: object) -> None:
        assert disks_of(domain) == [("raw", str(disk.with_suffix(".raw")))]
        disk.with_suffix(".raw").write_text("mine")

    do_after(monkeypatch, repointing, "lead_to_the_new_one", somebody_takes_the_name)
    job = replace(disk)
    assert (job.state, job.error_code) == ("failed", "target_exists")
    assert definition(domain) == before
    assert not reread(job).repoint_due


@pytest.mark.parametrize("then", ["goes on", "is refused"])
def test_a_database_that_goes_away_after_a_definition_was_changed_is_waited_for(
    domain: Any, disk: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    before = disks_of(domain)
    away = goes_away(monkeypatch, claims, "log", "its definition now names")
    if then == "is refused":
        monkeypatch.setattr(claims, "may_swap", lambda job: not away)
    job = replace(disk)
    changed = then == "goes on"
    assert (job.state == "succeeded", len(away)) == (changed, 2), (job.error_detail, said(job))
    assert disks_of(domain) == ([("raw", str(disk.with_suffix(".raw")))] if changed else before)


def test_a_definition_that_libvirt_does_not_take_leaves_the_image_alone(
    domain: Any, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = definition(domain)
    real = control.repoint

    def refuse(host: Host, uid: str, edits: list[Edit], *, write: bool, forward: bool = True) -> Any:
        if write:
            raise HostError("libvirt said: no")
        return real(host, uid, edits, write=write, forward=forward)

    monkeypatch.setattr(control, "repoint", refuse)
    inode = disk.stat().st_ino
    job = replace(disk)
    assert (job.state, "libvirt said: no" in job.error_detail) == ("failed", True)
    assert (disk.stat().st_ino, definition(domain)) == (inode, before)
    assert sorted(entry.name for entry in disk.parent.iterdir()) == ["disk.qcow2"]
    monkeypatch.setattr(control, "repoint", real)
    repointing.settle()
    assert not reread(job).repoint_due


def test_a_guest_defined_since_the_scan_is_found_before_anything_is_copied(domains: Domains, disk: Path) -> None:
    scanned_machine(disk.parent)
    job = services.submit(OPERATOR, "convert", image_at(disk).pk, {"format": "raw", "replace": True})
    domains.define([Disk(disk)])
    ended = run(job)
    assert (ended.state, ended.error_code) == ("failed", "guest_names_image")
    assert disk.exists()


def test_what_libvirt_remembers_of_a_guest_refuses_it(domain: Any, disk: Path) -> None:
    xml = "<domainsnapshot><name>s</name><state>disk-snapshot</state><memory snapshot='no'/><disks>"
    xml += f"<disk name='vda' snapshot='external'><driver type='qcow2'/><source file='{disk}'/></disk></disks>"
    xml += f"<creationTime>1</creationTime>{definition(domain)}</domainsnapshot>"
    domain.snapshotCreateXML(
        xml, libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_REDEFINE | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY
    )
    job = replace(disk)
    assert (job.state, job.error_code) == ("failed", "stale_plan")
    assert "snapshots in libvirt" in job.error_detail
    assert disk.exists()


def test_every_guest_that_names_the_image_follows(domains: Domains, disk: Path) -> None:
    first, second = domains.define([Disk(disk)]), domains.define([Disk(disk)])
    scanned_machine(disk.parent)
    succeeded(replace(disk, format="vmdk"))
    expected = [("vmdk", str(disk.with_suffix(".vmdk")))]
    assert disks_of(first) == disks_of(second) == expected
    assert subprocess.run(["qemu-img", "check", "-f", "vmdk", disk.with_suffix(".vmdk")], check=False).returncode == 0


def test_a_guest_that_begins_to_start_while_its_definition_is_changed_keeps_the_old_one(
    domain: Any, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it writes goes to the old file then, so the job must not say that it uses the new one."""
    connection = domain.connect()
    define = connection.defineXML

    def somebody_starts_it(xml: str) -> Any:
        if not domain.isActive():
            domain.create()
        return define(xml)

    monkeypatch.setattr(connection, "defineXML", somebody_starts_it)
    edit = asdict(Edit("vda", str(disk), str(create(disk.with_name("new.raw"), "64M", form="raw")), "raw"))
    request = {"uid": domain.UUIDString(), "edits": [edit], "until": math.inf, "write": True, "forward": True}
    with pytest.raises(ContradictedError):
        repoint._repoint(connection, request)
    source = ET.fromstring(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)).find("devices/disk/source")
    assert source is not None
    assert source.get("file") == str(disk)
