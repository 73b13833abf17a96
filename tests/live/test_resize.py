"""A disk of a running guest of libvirt grows; what the guest has written stays, and it sees the new size."""

from pathlib import Path

import pytest

from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt import running
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.agent.harness import image_info, qemu_img
from tests.harness.guests import Disk, Domains, LibvirtGuest
from tests.live.conftest import scanned
from tests.working import OPERATOR, run, succeeded, work

pytestmark = [pytest.mark.guest, pytest.mark.django_db, pytest.mark.usefixtures("quiet", "no_reserve", "libvirtd")]
MIB = 1 << 20


def codes(guest: Guest, **options: object) -> set[str]:
    return {one.code for one in services.plan(OPERATOR, "resize", guest.pk, dict(options)).refusals}


def size_of(guest: LibvirtGuest, disk: str) -> int:
    return int(guest.console.run(f"cat /sys/block/{disk}/size")) * 512


def test_disks_grow_while_their_guest_runs_and_keep_what_it_has_written(shared_folder: Path, domains: Domains) -> None:
    base, top, raw = (shared_folder / name for name in ("base.qcow2", "top.qcow2", "data.raw"))
    qemu_img("create", "-q", "-f", "qcow2", base, "64M")
    qemu_img("create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", top)
    qemu_img("create", "-q", "-f", "raw", raw, "32M")
    for path in (base, top, raw):
        path.chmod(0o666)
    guest = domains.run([Disk(top), Disk(raw, "raw")])
    guest.console.run("mkdir -p /sys && mount -t sysfs sys /sys")
    guest.write(8, 4, 0x41)
    guest.write(4, 4, 0x42, "vdb")
    before = guest.digest(0, 64), guest.digest(0, 32, "vdb")
    _, row = scanned(shared_folder, guest)
    assert codes(row, disk="vda", size_bytes=64 * MIB) == {"invalid"}
    assert codes(row, disk="vda", size_bytes=32 * MIB) == {"invalid"}
    assert codes(row, disk="vdz", size_bytes=96 * MIB) == {"invalid"}
    for disk, path, form in (("vda", top, "qcow2"), ("vdb", raw, "raw")):
        job = succeeded(work("resize", row.pk, OPERATOR, disk=disk, size_bytes=96 * MIB))
        assert (job.result or {})["now"]["size_bytes"] == 96 * MIB
        assert size_of(guest, disk) == 96 * MIB
        qemu_img("info", "-U", "-f", form, path)
        run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
        (image,) = [use.image for use in row.disks.get(target=disk).use.image.uses.all()]
        assert image.virtual_size == 96 * MIB
    guest.write(90, 4, 0x43)
    assert (guest.digest(0, 64), guest.digest(0, 32, "vdb")) == before
    assert image_info(base)["virtual-size"] == 64 * MIB
    now = {disk.target: disk.virtual_bytes for disk in running.look(row.host, row.uid).disks}
    assert now == {"vda": 96 * MIB, "vdb": 96 * MIB}
    guest.stop()
    assert codes(row, disk="vda", size_bytes=128 * MIB) == {"guest_off"}
    assert image_info(top)["virtual-size"] == 96 * MIB
