"""An image from its creation to its restoration: a guest installs itself on it, and finds all of that again."""

from pathlib import Path
from typing import Any

import pytest

from images.models import Image
from storage_admin.jobs.models import Job
from tests.harness.filesystems import new_folder
from tests.harness.guests import Disk, LibvirtGuest, Starts
from tests.working import OPERATOR, image_at, said, scan, scanned_machine, work

pytestmark = [pytest.mark.guest, pytest.mark.django_db, pytest.mark.usefixtures("quiet", "libvirtd", "no_reserve")]

#: What makes a filesystem on the disk and fills it, as an installer does.
_INSTALL = (
    "mkdir -p /target", "mke2fs -q /dev/vda", "mount -t ext2 /dev/vda /target", "mkdir -p /target/etc /target/bin",
    "cp /bin/busybox /target/bin/", "cp /init /target/etc/", "dd if=/dev/urandom of=/target/data bs=64k count=80 2>&1",
    "umount /target", "sync",
)  # fmt: skip


def done(kind: str, target: int, **options: Any) -> dict[str, Any]:
    job = work(kind, target, OPERATOR, **options)
    assert job.state == Job.State.SUCCEEDED, (kind, job.error_code, job.error_detail, said(job))
    return job.result or {}


def test_what_a_guest_installed_is_there_after_export_and_import_by_every_way(
    tcg_guest: Starts, shared_folder: Path
) -> None:
    folder = new_folder(shared_folder / "pool", mode=0o755)
    host = scanned_machine(folder)
    pool = host.pools.get()
    done("create", pool.pk, name="disk.qcow2", virtual_size=64 << 20)
    path = folder / "disk.qcow2"
    guest = tcg_guest(Disk(path))
    for line in _INSTALL:
        guest.console.run(line)
    sums = _sums(guest)
    assert len(sums) == 3
    guest.stop()
    scan(host)
    image = image_at(path)
    assert image.state == Image.State.OK
    restored = []
    for packing, ending in (("ova", "ova"), ("zstd", "qcow2.zst"), ("gzip", "qcow2.gz")):
        told = done("export", image.pk, packing=packing, **({"part_bytes": 2 << 20} if packing == "gzip" else {}))
        assert told["parts"] > 1 or packing != "gzip"
        assert Path(told["path"]).name == f"disk.{ending}" + (".001" if told["parts"] > 1 else "")
        name = f"from-{packing}.qcow2"
        done("unpack", pool.pk, source=told["path"], name=name, sha256=told["sha256"])
        restored.append(folder / name)
    # A backup by a compressed conversion, and back.
    done("convert", image.pk, target_name="backup.qcow2", format_options={"compression_type": "zstd"})
    scan(host)
    done("convert", image_at(folder / "backup.qcow2").pk, target_name="from-backup.qcow2")
    again = tcg_guest(*map(Disk, (*restored, folder / "from-backup.qcow2")))
    again.console.run("mkdir -p /target")
    assert [_sums(again, f"vd{letter}") for letter in "abcd"] == [sums] * 4


def _sums(guest: LibvirtGuest, disk: str = "vda") -> list[str]:
    guest.console.run(f"mount -t ext2 /dev/{disk} /target")
    told = guest.console.run("find /target -type f | sort | xargs sha256sum")
    guest.console.run("umount /target")
    return [line for line in told.splitlines() if "/target/" in line and len(line.split()[0]) == 64]
