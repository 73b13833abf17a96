"""How a disk is driven, changed in the definition of a real libvirt's guest, and restored."""

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import libvirt
import pytest

from storage_admin.guests.kinds.disk_settings import restore_options
from storage_admin.guests.models import Guest
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan
from tests.harness.guests import Disk, LibvirtGuest
from tests.live.chains import done
from tests.live.conftest import scanned
from tests.working import OPERATOR, client_as, create

pytestmark = [
    pytest.mark.guest,
    pytest.mark.services,
    pytest.mark.django_db,
    pytest.mark.usefixtures("quiet", "libvirtd"),
]


def driver_of(guest: LibvirtGuest, flags: int = libvirt.VIR_DOMAIN_XML_INACTIVE) -> dict[str, str]:
    driver = ET.fromstring(guest.domain.XMLDesc(flags)).find("devices/disk/driver")
    return {} if driver is None else dict(driver.attrib)


def plan(row: Guest, **options: object) -> Plan:
    return services.plan(OPERATOR, "set_disk", row.pk, {"disk": "vda", **options})


def changed(row: Guest, **options: object) -> Job:
    return done(services.submit(OPERATOR, "set_disk", row.pk, {"disk": "vda", **options}))


def test_settings_hold_from_the_next_start_on_and_what_was_there_is_restored(
    tcg_guest: Callable[..., LibvirtGuest], shared_folder: Path
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


def test_what_would_not_start_or_do_nothing_is_refused(
    tcg_guest: Callable[..., LibvirtGuest], shared_folder: Path
) -> None:
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
