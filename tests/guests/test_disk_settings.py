"""How a disk is driven, changed in the definition of a real libvirt's guest, and restored."""

import re
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import libvirt
import pytest

from storage_admin.guests.kinds.disk_settings import restore_options
from storage_admin.guests.models import Guest
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan
from tests.harness.guests import Disk, Domains, LibvirtGuest, Starts
from tests.harness.libvirtd import URI
from tests.live.chains import done
from tests.live.conftest import scanned, seen
from tests.working import ON_LIBVIRT, OPERATOR, client_as, create

pytestmark = [pytest.mark.guest, pytest.mark.django_db, *ON_LIBVIRT]


def driver_of(guest: LibvirtGuest, flags: int = libvirt.VIR_DOMAIN_XML_INACTIVE) -> dict[str, str]:
    driver = ET.fromstring(guest.domain.XMLDesc(flags)).find("devices/disk/driver")
    return {} if driver is None else dict(driver.attrib)


def definition(guest: LibvirtGuest, flags: int = libvirt.VIR_DOMAIN_XML_INACTIVE) -> ET.Element:
    return ET.fromstring(guest.domain.XMLDesc(flags))


def buses(guest: LibvirtGuest, flags: int = libvirt.VIR_DOMAIN_XML_INACTIVE) -> dict[str | None, str | None]:
    """The bus of each disk by its target."""
    return {one.get("dev"): one.get("bus") for one in definition(guest, flags).findall("devices/disk/target")}


def plan(row: Guest, **options: object) -> Plan:
    return services.plan(OPERATOR, "set_disk", row.pk, {"disk": "vda", **options})


def changed(row: Guest, **options: object) -> Job:
    return done(services.submit(OPERATOR, "set_disk", row.pk, {"disk": "vda", **options}))


def test_settings_hold_from_the_next_start_on_and_what_was_there_is_restored(
    tcg_guest: Starts, shared_folder: Path
) -> None:
    guest = tcg_guest(Disk(create(shared_folder / "disk.qcow2")))
    __, row = scanned(shared_folder, guest)
    before, running = driver_of(guest), driver_of(guest, 0)
    wanted = {"cache": "none", "io": "native", "discard": "unmap", "detect_zeroes": "unmap", "iothread": "on"}
    assert plan(row, **wanted).refusals == ()
    job = changed(row, **wanted)
    result = job.result or {}
    assert result["pending"] is True
    assert driver_of(guest, 0) == running, "nothing changes while it runs"
    assert driver_of(guest).items() >= (wanted | {"iothread": "1"}).items()
    page = client_as(role="operator").get(f"/guests/{row.pk}/set-disk/").content.decode()
    assert "set-disk/?disk=vda" in page, "the way back"
    guest.stop()
    guest.domain.create()
    assert driver_of(guest, 0)["cache"] == "none", "and it starts with them"
    guest.domain.destroy()
    changed(row, **restore_options(result))
    assert driver_of(guest) == before


def test_a_disk_goes_to_another_bus_and_back_while_its_guest_is_off(tcg_guest: Starts, shared_folder: Path) -> None:
    image = create(shared_folder / "disk.qcow2")
    guest = tcg_guest(Disk(image), Disk(create(shared_folder / "other.qcow2")))
    __, row = scanned(shared_folder, guest)
    guest.write(3, 2, 0x61)
    assert [one.code for one in plan(row, bus="sata").refusals] == ["guest_running"]
    guest.stop()
    disk, result = "vda", dict[str, Any]()
    for bus, name in (("scsi", "sda"), ("sata", "sda"), ("virtio", "vda"), ("scsi", "sda")):
        assert plan(row, disk=disk, bus=bus).refusals == ()
        result = changed(row, disk=disk, bus=bus).result or {}
        assert (result["disk"], result["now"]["bus"]) == (name, bus)
        assert buses(guest) == {name: bus, "vdb": "virtio"}
        guest.domain.create()
        assert buses(guest, 0) == {name: bus, "vdb": "virtio"}, "QEMU starts with it"
        guest.domain.destroy()
        disk = name
    controllers = definition(guest).findall("devices/controller[@type='scsi']")
    assert [one.get("model") for one in controllers] == ["virtio-scsi"]
    page = client_as(role="operator").get(f"/guests/{row.pk}/set-disk/").content.decode()
    assert "set-disk/?disk=sda&amp;bus=virtio" in page, "the way back"
    changed(row, **restore_options(result), disk="sda")
    assert buses(guest) == {"vda": "virtio", "vdb": "virtio"}
    subprocess.run(["qemu-io", "-r", "-f", "qcow2", "-c", "read -P 0x61 3M 2M", image], check=True, capture_output=True)


def booting(domains: Domains, folder: Path, *disks: Disk, machine: str = "q35") -> tuple["libvirt.virDomain", Guest]:
    """A domain that boots from its first disk, the first one at its bus called a, and its row."""
    xml = domains.define(disks, machine=machine).XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
    xml = re.sub(r"<(kernel|initrd|cmdline)>.*?</\1>", "", xml, flags=re.DOTALL)
    xml = xml.replace("</os>", "<boot dev='hd'/></os>").replace("dev='sdb'", "dev='sda'")
    domain = libvirt.open(URI).defineXML(xml)
    return domain, seen(folder, domain)


def test_a_guest_keeps_the_disk_that_it_boots_from(domains: Domains, shared_folder: Path) -> None:
    system, data = create(shared_folder / "system.qcow2"), create(shared_folder / "data.qcow2")
    domain, row = booting(domains, shared_folder, Disk(system), Disk(data, bus="sata"))
    # It would be sdb then, and so come behind the other one.
    assert [one.code for one in plan(row, disk="vda", bus="sata").refusals] == ["invalid"]
    assert plan(row, disk="vda", bus="scsi").refusals == ()
    assert plan(row, disk="sda", bus="virtio").refusals == ()
    xml = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE).replace("<boot dev='hd'/>", "")
    domain.connect().defineXML(re.sub(r"(<target dev='vda' bus='virtio'/>)", r"\1<boot order='1'/>", xml))
    assert plan(row, disk="vda", bus="sata").refusals == ()


def test_a_disk_goes_back_to_an_old_bus(domains: Domains, shared_folder: Path) -> None:
    domain, row = booting(domains, shared_folder, Disk(create(shared_folder / "old.qcow2"), bus="ide"), machine="pc")
    result = changed(row, disk="sda", bus="virtio").result or {}
    assert result["disk"] == "vda"
    changed(row, **restore_options(result), disk="vda")
    target = ET.fromstring(domain.XMLDesc()).find("devices/disk/target")
    assert target is not None
    assert target.attrib == {"dev": "hda", "bus": "ide"}


def test_what_only_virtio_knows_goes_with_it(domains: Domains, shared_folder: Path) -> None:
    driver = "queues='2' ioeventfd='on' event_idx='on'"
    domain = domains.define([Disk(create(shared_folder / "disk.qcow2"), driver=driver)])
    row = seen(shared_folder, domain)
    result = changed(row, bus="sata").result or {}
    assert changed(row, disk=result["disk"], bus="virtio").state == "succeeded"


def test_a_disk_that_snapshots_know_by_its_name_keeps_its_bus(domains: Domains, shared_folder: Path) -> None:
    domain = domains.define([Disk(create(shared_folder / "disk.qcow2"))])
    row = seen(shared_folder, domain)
    assert plan(row, bus="sata").refusals == ()
    domain.snapshotCreateXML("<domainsnapshot><name>one</name></domainsnapshot>")
    assert [one.code for one in plan(row, bus="sata").refusals] == ["in_snapshot_chain"]
    assert plan(row, cache="writeback").refusals == ()


def test_what_would_not_start_or_do_nothing_is_refused(tcg_guest: Starts, shared_folder: Path) -> None:
    guest = tcg_guest(Disk(create(shared_folder / "disk.qcow2"), bus="scsi"))
    __, row = scanned(shared_folder, guest)
    [disk] = row.disks.filter(device="disk").values_list("target", flat=True)
    for options, code in (
        ({"io": "native", "cache": "writeback"}, "invalid"),
        ({"detect_zeroes": "unmap", "discard": "ignore"}, "invalid"),
        ({"iothread": "on"}, "invalid"),
        ({"disk": "vdz", "cache": "none"}, "stale_plan"),
        ({}, "stale_plan"),
    ):
        refusals = plan(row, **{"disk": disk, **options}).refusals
        assert [one.code for one in refusals] == [code], options
    before = driver_of(guest)
    assert plan(row, disk=disk, io="native", cache="none").refusals == ()
    assert driver_of(guest) == before, "a plan changes nothing"
