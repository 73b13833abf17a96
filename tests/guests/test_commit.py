"""An overlay of a guest that is off is merged into its base, which its definition names then: with a real libvirt."""

from pathlib import Path

import libvirt
import pytest

from images.models import Image
from images.rewrite import repointing
from storage_admin.agent.protocol import HostError
from storage_admin.hosts.models import Host
from storage_admin.jobs.models import Job
from tests.agent.harness import leftovers, qemu_img, qemu_io
from tests.guests.test_repointing import definition, disks_of
from tests.harness.filesystems import new_folder
from tests.harness.guests import Disk, Domains, Starts
from tests.harness.patching import do_before, raising
from tests.working import OPERATOR, codes, create, image_at, run, scan, scanned_machine, succeeded, work

pytestmark = [pytest.mark.guest, pytest.mark.django_db, pytest.mark.usefixtures("quiet", "libvirtd", "no_reserve")]


@pytest.fixture
def pair(shared_folder: Path) -> tuple[Path, Path]:
    """A base and an overlay on it, in a folder that libvirt's user may enter."""
    pool = new_folder(shared_folder / "pool", mode=0o755)
    base = create(pool / "base.qcow2", "64M")
    path = create(pool / "vm.qcow2", base="base.qcow2")
    qemu_io(path, "write -q -P 5 7M 9M")
    return base, path


def test_its_guest_boots_from_the_base_and_reads_what_it_wrote(tcg_guest: Starts, pair: tuple[Path, Path]) -> None:
    base, path = pair
    guest = tcg_guest(Disk(path))
    guest.write(3, 5, 0x61)
    guest.stop()
    copy = path.parent.parent / "copy.qcow2"
    qemu_img("convert", "-O", "qcow2", path, copy)
    scanned_machine(path.parent)
    succeeded(work("commit", image_at(path).pk, OPERATOR))
    assert disks_of(guest.domain) == [("qcow2", str(base))]
    qemu_img("compare", copy, base)
    guest.start()
    assert guest.domain.isActive()


def test_the_definition_names_the_base_and_the_overlay_can_only_be_deleted(
    domains: Domains, pair: tuple[Path, Path]
) -> None:
    base, path = pair
    domain = domains.define([Disk(path)])
    scanned_machine(path.parent)
    succeeded(work("commit", image_at(path).pk, OPERATOR))
    assert disks_of(domain) == [("qcow2", str(base))]
    run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
    assert (image_at(path).state, image_at(base).state) == (Image.State.MERGED, Image.State.OK)
    assert "merged" in codes("commit", image_at(path))
    assert leftovers(path.parent) == set()


def test_what_libvirt_refuses_leaves_definition_and_overlay_in_use(
    domains: Domains, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = pair
    domain = domains.define([Disk(path)])
    before = definition(domain)
    scanned_machine(path.parent)
    monkeypatch.setattr(repointing, "lead_to_the_base", raising(HostError("libvirt says no")))
    job = work("commit", image_at(path).pk, OPERATOR)
    assert (job.state, job.error_detail) == (Job.State.FAILED, "libvirt says no")
    assert definition(domain) == before
    run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
    assert image_at(path).state == Image.State.OK
    assert qemu_img("compare", path, path.with_name("base.qcow2"))


def test_a_base_in_another_folder_is_named_by_its_path(domains: Domains, pair: tuple[Path, Path]) -> None:
    base, _ = pair
    far = new_folder(base.parent / "far", mode=0o755)
    path = create(far / "vm.qcow2", base=base)
    (base.parent / "vm.qcow2").unlink()
    domain = domains.define([Disk(path)])
    scanned_machine(base.parent)
    succeeded(work("commit", image_at(path).pk, OPERATOR))
    assert disks_of(domain) == [("qcow2", str(base))]


def test_a_guest_that_starts_meanwhile_waits_or_wins_and_nothing_is_lost(
    domains: Domains, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right before its definition is changed somebody tries to start it: the overlay is held, so that it does not."""
    base, path = pair
    domain = domains.define([Disk(path)])
    scanned_machine(path.parent)
    started = list[str]()

    def somebody_starts_it(*_: object) -> None:
        try:
            domain.create()
        except libvirt.libvirtError as error:
            started.append(str(error))

    do_before(monkeypatch, repointing, "lead_to_the_base", somebody_starts_it)
    job = work("commit", image_at(path).pk, OPERATOR)
    assert len(started) == 1, "the guest could be started while the overlay was held"
    succeeded(job)
    assert disks_of(domain) == [("qcow2", str(base))]


def test_who_else_needs_base_or_overlay_keeps_it_from_being_merged(domains: Domains, pair: tuple[Path, Path]) -> None:
    base, path = pair
    domains.define([Disk(path)])
    host = scanned_machine(path.parent)
    assert codes("commit", image_at(path)) == set()
    sibling = create(path.with_name("sibling.qcow2"), base="base.qcow2")
    scan(host)
    assert codes("commit", image_at(path)) == {"shared_base"}
    sibling.unlink()
    domains.define([Disk(base)])
    scan(Host.objects.get())
    assert "shared_base" in codes("commit", image_at(path))
