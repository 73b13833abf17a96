"""Bitmaps that a checkpoint of a real libvirt has are told from those that nothing has any more, and stay."""

from pathlib import Path

import libvirt
import pytest

from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from tests.agent.harness import image_info, qemu_img
from tests.harness.guests import Disk, Domains
from tests.live.conftest import scanned
from tests.working import ON_LIBVIRT, OPERATOR, client_as, create, image_at, scan, scanned_machine, succeeded, work

pytestmark = [pytest.mark.guest, pytest.mark.django_db(transaction=True), *ON_LIBVIRT]

KEPT, GONE = "1700000000", "virtnbdbackup.0"


def bitmaps(path: Path) -> set[str]:
    return {one["name"] for one in image_info(path)["format-specific"]["data"].get("bitmaps", [])}


def codes(path: Path, **options: object) -> set[str]:
    return {one.code for one in services.plan(OPERATOR, "bitmaps", image_at(path).pk, options).refusals}


def test_a_bitmap_of_a_checkpoint_is_kept_and_one_whose_checkpoint_is_gone_is_stale(
    domains: Domains, shared_folder: Path
) -> None:
    path = create(shared_folder / "vm.qcow2")
    qemu_img("bitmap", "--add", path, GONE)
    guest = domains.run([Disk(path)])
    guest.domain.checkpointCreateXML(f"<domaincheckpoint><name>{KEPT}</name></domaincheckpoint>", 0)
    guest.stop()
    scanned_machine(shared_folder)
    row = Guest.objects.get(uid=guest.domain.UUIDString())
    assert row.checkpoints == {"vda": [KEPT]}
    told = {one["name"]: (one["checkpoint_of"], one["stale"]) for one in image_at(path).bitmaps}
    assert told == {KEPT: (row.name, False), GONE: ("", True)}
    page = client_as(role="viewer").get(f"/images/{image_at(path).pk}/").content.decode()
    assert f"libvirt checkpoint of {row.name}" in page
    assert (codes(path), codes(path, which="all")) == (set(), {"checkpoint_kept"})
    assert codes(path, which="all", accept_checkpoints=True) == set()
    succeeded(work("bitmaps", image_at(path).pk, OPERATOR))
    assert bitmaps(path) == {KEPT}
    guest.domain.checkpointLookupByName(KEPT).delete(libvirt.VIR_DOMAIN_CHECKPOINT_DELETE_METADATA_ONLY)
    scan(Host.objects.get())
    assert [(one["checkpoint_of"], one["stale"]) for one in image_at(path).bitmaps] == [("", True)]
    assert codes(path, which="all") == set()


def test_what_backups_keep_of_a_running_guest_stands_against_changing_its_chain(
    domains: Domains, chain: list[Path]
) -> None:
    qemu_img("bitmap", "--add", chain[1], GONE)
    guest, folder = domains.run([Disk(chain[0])]), chain[0].parent
    __, row = scanned(folder, guest)

    def told(kind: str) -> tuple[set[str], bool]:
        options = {"disk": "vda"} if kind in kinds else {"name": "now", "quiesce": False}
        plan = services.plan(OPERATOR, kind, row.pk, options)
        return {one.code for one in plan.refusals}, any(GONE in warning for warning in plan.warnings)

    kinds = ("live_flatten", "live_merge", "live_copy")
    assert [told(kind) for kind in kinds] == [(set(), True)] * 3
    made = guest.domain.checkpointCreateXML(f"<domaincheckpoint><name>{KEPT}</name></domaincheckpoint>", 0)
    assert [told(kind)[0] for kind in (*kinds, "snapshot")] == [{"checkpoint_kept"}] * 4
    made.delete()
    folder.chmod(0o777)  # QEMU makes a socket in it
    guest.domain.backupBegin(
        f"<domainbackup mode='pull'><server transport='unix' socket='{folder}/nbd'/><disks>"
        f"<disk name='vda' type='file'><scratch file='{folder}/scratch'/></disk></disks></domainbackup>",
        None,
    )
    assert [told(kind)[0] for kind in (*kinds, "snapshot")] == [{"guest_locked"}] * 4
    guest.domain.abortJob()
    assert [told(kind)[0] for kind in (*kinds, "snapshot")] == [set()] * 4
