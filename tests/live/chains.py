"""What the tests of block jobs share: a chain with patterns in it, and what libvirt and QEMU say of it."""

import contextlib
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree as ET

import libvirt

from images.live.follow import Follower
from storage_admin.guests.models import Guest
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.harness.guests import LibvirtGuest, write_pattern
from tests.harness.processes import wait_until
from tests.live.writer import check
from tests.working import OPERATOR, create, run, succeeded

#: What :func:`patterns` are of the chain that :func:`make_chain` makes.
PATTERNS = [hashlib.sha256(bytes([byte]) * (mib << 20)).hexdigest() for byte, mib in ((0x5A, 8), (0x33, 4), (0x77, 6))]


def make_chain(folder: Path) -> list[Path]:
    """An image on two others, from above, with a pattern of its own in each."""
    base = create(folder / "base.qcow2", "96M")
    write_pattern(base, "qcow2", (0, 8, 0x5A))
    middle = create(folder / "middle.qcow2", base="base.qcow2")
    write_pattern(middle, "qcow2", (8, 4, 0x33))
    top = create(folder / "top.qcow2", base="middle.qcow2")
    write_pattern(top, "qcow2", (12, 6, 0x77))
    return [top, middle, base]


def patterns(guest: LibvirtGuest) -> list[str]:
    """Digests of them, as the guest reads them."""
    return [guest.digest(0, 8), guest.digest(8, 4), guest.digest(12, 6)]


def chain_of(guest: LibvirtGuest) -> list[str]:
    """As ``virsh dumpxml`` has it."""
    disk = ET.fromstring(guest.domain.XMLDesc()).find("devices/disk")
    found = []
    while disk is not None and (source := disk.find("source")) is not None:
        found.append(Path(source.get("file", "")).name)
        disk = disk.find("backingStore")
    return found


def definition_of(guest: LibvirtGuest) -> str:
    """The image that ``virsh dumpxml --inactive`` names."""
    source = ET.fromstring(guest.domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)).find("devices/disk/source")
    assert source is not None
    return Path(source.get("file", "")).name


def pid_of(guest: LibvirtGuest) -> int:
    """Its QEMU's."""
    return int(Path(f"/run/libvirt/qemu/{guest.name}.pid").read_text())


def kill_qemu(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}/fd/0").exists(), 30, "the guest has ended")


def submit(kind: str, row: Guest, **options: object) -> Job:
    return services.submit(OPERATOR, kind, row.pk, {"disk": "vda", **options})


def done(job: Job) -> Job:
    return succeeded(run(job))


def whole(guest: LibvirtGuest, image: Path, last: int) -> None:
    """Patterns and writes are there, as the guest reads them and in the file once it is off."""
    if guest.domain.isActive():
        assert patterns(guest) == PATTERNS
        guest.stop()
    check(image, last)


@contextlib.contextmanager
def at_stage(stage: str, happens: Callable[[], object]) -> Iterator[None]:
    """Within it, something happens in the moment in which a followed block job is first told to be at a stage."""
    tell, happened = Follower._told, list[str]()

    def told(self: Follower, document: dict[str, Any]) -> None:
        tell(self, document)
        if document["stage"] == stage and not happened:
            happened.append(stage)
            happens()

    with mock.patch.object(Follower, "_told", told):
        yield
    assert happened, f"it was never {stage}"
