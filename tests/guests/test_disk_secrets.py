"""The secret by which a real libvirt opens an encrypted disk: defined with the image, changed with its passphrases."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import libvirt
import pytest

from images.models import Image
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.harness.filesystems import new_file, new_folder
from tests.harness.guests import Disk, Domains
from tests.harness.libvirtd import URI
from tests.working import OPERATOR, codes, image_at, run, said, scan, scanned_machine, succeeded

pytestmark = [pytest.mark.guest, pytest.mark.django_db, pytest.mark.usefixtures("quiet", "libvirtd", "no_reserve")]
FIRST, SECOND = "first, with a comma", "second"
BOTH = {"passphrase": FIRST, "new_passphrase": SECOND}


@pytest.fixture
def connection() -> Iterator[libvirt.virConnect]:
    """What is defined in it is gone afterwards."""
    opened = libvirt.open(URI)
    yield opened
    for secret in opened.listAllSecrets():
        secret.undefine()
    opened.close()


@pytest.fixture
def folder(shared_folder: Path) -> Path:
    return new_folder(shared_folder / "pool", mode=0o755)


def created(folder: Path) -> Job:
    pool = scanned_machine(folder).pools.get()
    options = {"virtual_size": 8 << 20, "encryption": "luks", "iter_time": 20, "libvirt_secret": True}
    named = options | {"name": "vm.qcow2"}
    return succeeded(run(services.submit(OPERATOR, "create", pool.pk, named, secrets={"new_passphrase": FIRST})))


@pytest.fixture
def guest(domains: Domains, connection: libvirt.virConnect, folder: Path) -> tuple[libvirt.virSecret, Any]:
    """The secret of an image that was created, and a guest that opens it by that."""
    created(folder)
    (secret,) = connection.listAllSecrets()
    return secret, of_a_guest(domains, connection, folder / "vm.qcow2", secret.UUIDString())


def of_a_guest(domains: Domains, connection: libvirt.virConnect, path: Path, uuid: str) -> libvirt.virDomain:
    """A guest whose disk is the image, opened by that secret."""
    path.chmod(0o666)
    xml = domains.define([Disk(path)]).XMLDesc()
    opened = f"<encryption format='luks'><secret type='passphrase' uuid='{uuid}'/></encryption>"
    return connection.defineXML(re.sub(r"(<source file='[^']*vm.qcow2'[^/>]*)/>", rf"\1>{opened}</source>", xml))


def test_data_of_an_encrypted_disk_is_never_written_in_the_clear_while_its_guest_runs(
    guest: tuple[libvirt.virSecret, Any], folder: Path
) -> None:
    _, domain = guest
    folder.chmod(0o777)
    domain.create()
    scan(Host.objects.get())
    row = Guest.objects.get(uid=domain.UUIDString())
    assert codes("live_copy", row, disk="vda") == {"encrypted"}
    assert codes("snapshot", row, name="now", quiesce=False) == {"encrypted"}
    # By hand, and so into an overlay that is not encrypted.
    flags = libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA
    domain.snapshotCreateXML("<domainsnapshot><name>now</name></domainsnapshot>", flags)
    scan(Host.objects.get())
    assert codes("live_flatten", row, disk="vda") == {"encrypted"}
    assert codes("live_merge", row, disk="vda") == set(), "down into the encrypted one"


def keys(image: Image, secrets: dict[str, str], **options: int) -> Job:
    scan(image.host)
    options |= {"iter_time": 20, "undo_hours": 0}
    return run(services.submit(OPERATOR, "keys", image.pk, options, secrets=secrets))


def test_a_guest_starts_with_the_secret_before_and_after_its_passphrase_is_changed(
    domains: Domains, connection: libvirt.virConnect, folder: Path
) -> None:
    job, path = created(folder), folder / "vm.qcow2"
    (secret,) = connection.listAllSecrets()
    assert (secret.usageID(), secret.value()) == (str(path), FIRST.encode())
    assert any(secret.UUIDString() in line for line in said(job))
    domain = of_a_guest(domains, connection, path, secret.UUIDString())
    domain.create()
    domain.destroy()
    scan(Host.objects.get())
    image = image_at(path)
    assert [disk.guest.name for disk in image.disks] == [domain.name()]

    added = succeeded(keys(image, BOTH))
    assert secret.value() == SECOND.encode()
    refused = keys(image, {"passphrase": FIRST}, slot=1)  # the one that the guest needs by now
    assert (refused.state, refused.error_code) == (Job.State.FAILED, "wrong_passphrase")
    emptied = succeeded(keys(image, {"passphrase": SECOND}, slot=0))
    path.chmod(0o666)
    domain.create()
    with contextlib.suppress(libvirt.libvirtError):
        domain.destroy()
    for one in (added, emptied, job):
        assert not any(word in line for word in (FIRST, SECOND) for line in said(one))


def test_a_secret_of_a_guest_is_left_where_that_is_asked_for(
    guest: tuple[libvirt.virSecret, Any], folder: Path
) -> None:
    scan(Host.objects.get())
    succeeded(keys(image_at(folder / "vm.qcow2"), BOTH, libvirt_secret=False))
    assert guest[0].value() == FIRST.encode()


def test_a_secret_that_opens_something_else_as_well_is_never_set(
    guest: tuple[libvirt.virSecret, Any], domains: Domains, connection: libvirt.virConnect, folder: Path
) -> None:
    secret, _ = guest
    (folder / "other").mkdir()
    other = new_file(folder / "other/vm.qcow2", (folder / "vm.qcow2").read_bytes())
    of_a_guest(domains, connection, other, secret.UUIDString())
    scan(Host.objects.get())
    job = keys(image_at(folder / "vm.qcow2"), BOTH)
    assert (job.state, secret.value()) == (Job.State.SUCCEEDED, FIRST.encode())
    assert any(str(other) in line for line in said(job))


def test_a_secret_that_is_there_under_an_images_name_stays_as_it_is(
    connection: libvirt.virConnect, folder: Path
) -> None:
    usage = f"<usage type='volume'><volume>{folder}/vm.qcow2</volume></usage>"
    there = connection.secretDefineXML(f"<secret ephemeral='no' private='no'>{usage}</secret>")
    there.setValue(b"of an image that was moved")
    created(folder)
    assert there.value() == b"of an image that was moved"
