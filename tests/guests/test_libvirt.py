"""Guests of a real libvirt: who uses which image, and what a guest that runs stops."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import libvirt
import pytest

from images.models import Image
from images.rewrite import in_use
from storage_admin.agent.protocol import HostError
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.libvirt import domains as libvirt_domains
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from tests.factories import HostFactory
from tests.harness.guests import Disk, Domains, Starts
from tests.harness.patching import raising
from tests.working import ON_LIBVIRT, OPERATOR, create, image_at, refused_as, reread, run, scan, scanned_machine, work

pytestmark = [pytest.mark.guest, pytest.mark.django_db, *ON_LIBVIRT]


@pytest.fixture
def chain(shared_folder: Path) -> tuple[Path, Path]:
    """A base and its overlay, in a folder that libvirt's user may enter."""
    base = create(shared_folder / "base.qcow2", "64M")
    top = create(shared_folder / "top.qcow2", base="base.qcow2")
    return base, top


@pytest.fixture
def folder_pool(libvirtd: str, shared_folder: Path) -> Iterator[libvirt.virStoragePool]:
    """A libvirt pool on a folder with a volume ``disk.img`` in it."""
    (shared_folder / "volumes").mkdir(mode=0o755)
    connection = libvirt.open(libvirtd)
    name = f"sa-test-{os.getpid()}"
    xml = f"<pool type='dir'><name>{name}</name><target><path>{shared_folder}/volumes</path></target></pool>"
    pool = connection.storagePoolDefineXML(xml)
    pool.create()
    pool.createXML(
        "<volume><name>disk.img</name><capacity unit='MiB'>8</capacity><target><format type='qcow2'/></target></volume>"
    )
    yield pool
    for left in connection.listAllStoragePools():  # a test may have taken it away
        if left.name() == name:
            if left.isActive():
                left.destroy()
            left.undefine()
    connection.close()


def test_a_domains_disks_are_its_images_with_cache_and_discard(domains: Domains, chain: tuple[Path, Path]) -> None:
    base, top = chain
    domain = domains.define([Disk(top, cache="writeback", discard="unmap"), Disk(base, cache="none", readonly=True)])
    host = scanned_machine(top.parent)
    guest = Guest.objects.get(name=domain.name())
    assert (guest.uid, guest.state, guest.kind) == (domain.UUIDString(), "shut off", "domain")
    disks = {disk.target: disk for disk in guest.disks.all()}
    assert (disks["vda"].path, disks["vda"].cache, disks["vda"].discard) == (str(top), "writeback", "unmap")
    assert (disks["vda"].readonly, disks["vdb"].readonly, disks["vdb"].format) == (False, True, "qcow2")
    assert disks["vda"].inode == str(top.stat().st_ino)
    image = image_at(top)
    assert [use.disk.guest_id for use in image.uses.all()] == [guest.pk]
    assert (image.in_use, image.orphan, image.declared_by) == (False, False, _declared(domain.name()))
    assert scan(host)["read"] == 0
    assert Guest.objects.get(name=domain.name()).pk == guest.pk


def _declared(name: str) -> str:
    return f"guest {name}"[:40]


def test_a_running_guest_uses_its_image_and_what_is_below_it_until_it_ends(
    tcg_guest: Starts, chain: tuple[Path, Path]
) -> None:
    base, top = chain
    other = create(top.parent / "other.qcow2")
    guest = tcg_guest(Disk(top))
    host = scanned_machine(top.parent)
    assert [image_at(path).in_use for path in (top, base, other)] == [True, True, False]
    assert guest.name in image_at(top).in_use_detail
    assert refused_as(services.submit, OPERATOR, "reclaim", image_at(top).pk, {}) == "guest_running"
    assert refused_as(services.submit, OPERATOR, "reclaim", image_at(base).pk, {}) == "image_in_use"
    guest.stop()
    scan(host)
    assert [image_at(path).in_use for path in (top, base)] == [False, False]
    assert image_at(base).orphan is False


def test_a_guest_that_was_started_after_the_scan_stops_the_job_before_the_agent_is_asked(
    domains: Domains, chain: tuple[Path, Path]
) -> None:
    base, top = chain
    domain = domains.define([Disk(top)])
    scanned_machine(top.parent)
    job = services.submit(OPERATOR, "reclaim", image_at(top).pk, {})
    before = base.read_bytes(), top.read_bytes()
    domain.create()
    run(job)
    assert (job.state, job.error_code) == ("failed", "guest_running")
    assert domain.name() in job.error_detail
    job = work("reclaim", image_at(base).pk, OPERATOR)
    assert (job.state, job.error_code) == ("failed", "guest_running")
    domain.destroy()
    assert (base.read_bytes(), top.read_bytes()) == before


def test_a_guest_defined_after_the_scan_is_found_by_the_file_whatever_path_it_names(
    domains: Domains, chain: tuple[Path, Path]
) -> None:
    _, top = chain
    scanned_machine(top.parent)
    (top.parent / "link.qcow2").symlink_to(top.name)
    domain = domains.define([Disk(top.parent / "link.qcow2")])
    in_use.check_guests_off(image_at(top))
    domain.create()
    assert refused_as(in_use.check_guests_off, image_at(top)) == "guest_running"


def test_a_volume_of_a_pool_is_found_by_its_name(
    domains: Domains, folder_pool: libvirt.virStoragePool, shared_folder: Path
) -> None:
    connection = domains._connection
    xml = (
        f"<domain type='qemu'><name>sa-volume-{os.getpid()}</name><memory unit='MiB'>64</memory>"
        "<os><type arch='x86_64'>hvm</type></os><devices><disk type='volume' device='disk'>"
        f"<driver name='qemu' type='qcow2' cache='none'/><source pool='{folder_pool.name()}' volume='disk.img'/>"
        "<target dev='vda' bus='virtio'/></disk><disk type='file' device='cdrom'><target dev='sda' bus='sata'/></disk>"
        "</devices></domain>"
    )
    domain = connection.defineXML(xml)
    domains._domains.append(domain)
    host = scanned_machine()
    pool = StoragePool.objects.get(source="libvirt", path=f"{shared_folder}/volumes")
    assert pool.name == folder_pool.name()
    scan(host)
    image = Image.objects.get(pool=pool)
    assert (image.name, image.declared_format) == ("disk.img", "qcow2")
    assert [use.disk.guest.name for use in image.uses.all()] == [domain.name()]
    empty = GuestDisk.objects.get(guest__name=domain.name(), device="cdrom")
    assert (empty.path, empty.path_key) == ("", "")


def test_a_pool_that_libvirt_forgets_goes_and_one_of_an_admin_stays(
    folder_pool: libvirt.virStoragePool, shared_folder: Path
) -> None:
    host = scanned_machine(shared_folder)
    paths = set(StoragePool.objects.values_list("path", flat=True))
    assert f"{shared_folder}/volumes" in paths
    folder_pool.destroy()
    folder_pool.undefine()
    scan(host)
    paths = set(StoragePool.objects.values_list("path", flat=True))
    assert f"{shared_folder}/volumes" not in paths
    assert str(shared_folder) in paths


def test_a_domain_that_is_undefined_is_gone_with_its_disks(domains: Domains, chain: tuple[Path, Path]) -> None:
    _, top = chain
    domain = domains.define([Disk(top)])
    host = scanned_machine(top.parent)
    name = domain.name()
    assert image_at(top).orphan is False
    domain.undefine()
    domains._domains.remove(domain)
    scan(host)
    assert not Guest.objects.filter(name=name).exists()
    assert image_at(top).orphan is True


def test_where_libvirt_has_guests_and_does_not_answer_nobody_knows_who_uses_an_image(
    domains: Domains, chain: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, top = chain
    domain = domains.define([Disk(top)])
    host = scanned_machine(top.parent)
    job = services.submit(OPERATOR, "reclaim", image_at(base).pk, {})
    # As when libvirtd has stopped while domains are defined: its socket is there, and nobody answers.
    monkeypatch.setattr(reader, "read", raising(HostError("libvirt does not answer: connection refused")))
    run(job)
    assert (job.state, job.error_code) == ("failed", "guests_unknown")
    scan(host)
    assert [image_at(path).in_use for path in (top, base)] == [None, None]
    assert Guest.objects.filter(name=domain.name()).exists()
    assert "libvirt does not answer" in reread(host).owners_unknown
    assert refused_as(services.submit, OPERATOR, "reclaim", image_at(top).pk, {}) == "guests_unknown"


def test_a_libvirt_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "TIMEOUT", 0.001)
    with pytest.raises(HostError, match="did not answer within"):
        reader.read(HostFactory.build())


def test_every_state_of_a_domain_has_a_word() -> None:
    states = {value for name, value in vars(libvirt).items() if name.startswith("VIR_DOMAIN_") and _is_state(name)}
    assert states <= libvirt_domains.STATES.keys()


def _is_state(name: str) -> bool:
    words = ["NOSTATE", "RUNNING", "BLOCKED", "PAUSED", "SHUTDOWN", "SHUTOFF", "CRASHED", "PMSUSPENDED"]
    return name.removeprefix("VIR_DOMAIN_") in words


def test_the_query_is_one_document_on_its_standard_output(libvirtd: str) -> None:
    command = [sys.executable, "-m", "storage_admin.hosts.libvirt.query", libvirtd]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stderr == b""
    assert done.stdout.startswith(b'{"pools"')
