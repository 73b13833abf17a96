"""Logical volumes that nobody needs, of a real host: set aside, restored, deleted, and cut off in between."""

from collections.abc import Iterator
from typing import Any

import pytest

from images.models import Image
from storage_admin.hosts.models import Host as Row
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import StoragePoolFactory
from tests.machines.host import MIB, Host, host
from tests.machines.test_lvm import group, row
from tests.working import ADMIN, refused_as, run, said, scan, succeeded, work

__all__ = ["group", "host", "row"]

pytestmark = [pytest.mark.machines, pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

THICK, THIN = "vm-900-disk-0", "vm-901-disk-0"
#: Without what is active: an event of udev may activate any volume of a group that has changed.
LISTED = "udevadm settle; lvs --noheadings -o lv_name,lv_autoactivation,lv_tags vg"


@pytest.fixture
def site(group: Host, row: Row) -> Iterator[Host]:
    """Storages of Proxmox VE in the group: volumes of guests that are gone, one active and one not, and others."""
    group.run(f"lvcreate -q -y -L 12M -n {THICK} vg; lvcreate -q -V 20M -T vg/pool -n {THIN}; udevadm settle")
    group.run(f"dd if=/dev/urandom of=/dev/vg/{THIN} bs=1M count=4 oflag=direct status=none")
    group.run(f"dd if=/dev/urandom of=/dev/vg/{THICK} bs=1M oflag=direct status=none || true; udevadm settle")
    for name, kind, path in (("local-lvm", "lvmthin", "lvmthin vg/pool"), ("disks", "lvm", "lvm vg")):
        StoragePoolFactory.create(volumes=True, host=row, name=name, kind=kind, path=path)
    scan(row)
    group.run(f"lvchange -an vg/{THIN}")
    yield group
    group.run("umount /mnt/volume 2>/dev/null || true")


def listed(host: Host) -> dict[str, list[str]]:
    return {(words := line.split())[0]: words[1:] for line in host.run(LISTED).splitlines()}


def volume(name: str) -> Image:
    return Image.every.get(name=name)


def aside(name: str) -> Job:
    return work("set_aside", volume(name).pk, ADMIN, grace_days=1)


def test_only_what_proxmox_ve_has_named_and_no_guest_needs_is_an_orphan(site: Host, row: Row) -> None:
    found = dict(Image.objects.values_list("name", "orphan"))
    assert {name for name, orphan in found.items() if orphan} == {THICK, THIN}
    assert found["thick"] is False  # the guest's, and the origin of a snapshot
    assert set(StoragePool.objects.values_list("source", flat=True)) == {"proxmox"}


@pytest.mark.parametrize("name", [THICK, THIN])
def test_a_volume_is_set_aside_and_comes_back_as_it_was(site: Host, row: Row, name: str) -> None:
    digest = f"lvchange -ay vg/{name}; sha256sum < /dev/vg/{name}; "
    before, content = listed(site), site.run(digest + ("" if name == THICK else f"lvchange -an vg/{name}"))
    job = succeeded(aside(name))
    taken = volume(name).allocated_size
    assert taken
    assert (job.result or {})["held_bytes"] == taken
    other = f".sa-{job.uid}.aside"
    assert listed(site)[other][0] != "enabled"
    assert site.run(f"lvs --noheadings -o lv_active vg/{other}").strip() != "active"
    assert name not in listed(site)
    result = scan(row)
    assert result["vanished"] == 0
    assert volume(name).state == "set_aside"
    assert refused_as(services.submit, ADMIN, "delete_aside", volume(name).pk, {"confirm_name": name}) == "grace_period"
    assert work("restore_aside", volume(name).pk, ADMIN).state == "succeeded"
    assert listed(site) == before
    assert site.run(digest) == content
    scan(row)
    assert volume(name).state == "ok"


@pytest.mark.parametrize("name", [THICK, THIN])
def test_a_deleted_volume_frees_what_was_said(site: Host, row: Row, name: str) -> None:
    work("exclusive", row.pk)
    expected = volume(name).deletion_frees
    aside(name)
    Image.every.filter(name=name).update(aside_until=None)
    job = succeeded(work("delete_aside", volume(name).pk, ADMIN, confirm_name=name))
    assert (job.result or {})["freed_bytes"] == expected == (12 if name == THICK else 4) * MIB
    assert not [one for one in listed(site) if one == name or one.startswith(".sa-")]
    assert scan(row)["vanished"] == 0


def test_a_volume_that_is_open_or_somebody_takes_meanwhile_stays(site: Host, row: Row) -> None:
    before = listed(site)
    site.run(f"mkfs.ext4 -q /dev/vg/{THICK}; mkdir -p /mnt/volume; mount /dev/vg/{THICK} /mnt/volume")
    job = aside(THICK)
    assert (job.state, job.error_code) == ("failed", "image_in_use")
    assert listed(site) == before
    site.run("umount /mnt/volume; lvcreate -q -s -L 4M -n snap vg/" + THICK)
    assert aside(THICK).error_code == "has_overlays"
    site.run("lvremove -q -f vg/snap; vgchange -q --addtag RHAT_storage vg")
    assert aside(THICK).error_code == "shared_pool"
    site.run("vgchange -q --deltag RHAT_storage vg")
    site.run(f"lvrename vg/{THICK} vg/other; lvcreate -q -y -L 4M -n {THICK} vg")
    assert aside(THICK).error_code == "stale_plan"


def test_a_name_that_is_taken_meanwhile_is_not_given_back(site: Host, row: Row) -> None:
    job = aside(THICK)
    site.run(f"lvcreate -q -y -L 4M -n {THICK} vg")
    again = work("restore_aside", Image.every.get(aside_job=job).pk, ADMIN)
    assert (again.state, again.error_code) == ("failed", "target_exists")
    assert f".sa-{job.uid}.aside" in listed(site)


#: A tool of LVM that ends its caller right before, or right after, its work. LVM goes by the name that it is called by.
DIES = (
    "mv /usr/sbin/{tool} /usr/sbin/{tool}.real; printf '#!/bin/sh\\n{before}/usr/sbin/lvm {tool} \"$@\"\\n{after}' "
    ">/usr/sbin/{tool}; chmod +x /usr/sbin/{tool}"
)
OPTIONS: dict[str, dict[str, Any]] = {
    "set_aside": {"grace_days": 1}, "restore_aside": {}, "delete_aside": {"confirm_name": THICK},
}  # fmt: skip
KILL = "kill -KILL $PPID\\nsleep 1\\n"


def test_a_snapshot_that_is_made_right_before_a_deletion_and_its_origin_stay(site: Host, row: Row) -> None:
    before, content = listed(site), site.run(f"sha256sum < /dev/vg/{THICK}")
    image = volume(THICK)
    job = aside(THICK)
    Image.every.filter(pk=image.pk).update(aside_until=None)
    snapshot = 'for last; do :; done\\nlvcreate -q -s -L 4M -n snap "$last"\\n'
    site.run(DIES.format(tool="lvremove", before=snapshot, after=""))
    try:
        deleted = run(services.submit(ADMIN, "delete_aside", image.pk, OPTIONS["delete_aside"]))
    finally:
        site.run("mv /usr/sbin/lvremove.real /usr/sbin/lvremove")
    assert (deleted.state, deleted.error_code) == ("failed", "has_overlays"), said(deleted)
    assert {"snap", f".sa-{job.uid}.aside"} <= set(listed(site))
    site.run("lvremove -q -f vg/snap")
    assert work("restore_aside", image.pk, ADMIN).state == "succeeded"
    assert (listed(site), site.run(f"sha256sum < /dev/vg/{THICK}")) == (before, content)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("kind", "tool"),
    [("set_aside", "lvchange"), ("set_aside", "lvrename"), ("restore_aside", "lvrename"), ("restore_aside", "lvchange"),
     ("delete_aside", "lvremove")],
)  # fmt: skip
def test_a_death_at_any_step_leaves_the_volume_whole_and_the_row_true(
    site: Host, row: Row, kind: str, tool: str, when: str
) -> None:
    before, content = listed(site), site.run(f"sha256sum < /dev/vg/{THICK}")
    options = OPTIONS[kind]
    image = volume(THICK)
    if kind != "set_aside":
        aside(THICK)
        Image.every.filter(pk=image.pk).update(aside_until=None)
    site.run(DIES.format(tool=tool, before=KILL if when == "before" else "", after=KILL if when == "after" else ""))
    try:
        job = run(services.submit(ADMIN, kind, image.pk, options))
    finally:
        site.run(f"mv /usr/sbin/{tool}.real /usr/sbin/{tool}")
    assert job.state == "interrupted"
    Job.objects.filter(pk=job.pk).update(needs_recovery=True)
    work("recover", row.pk)
    scan(row)
    state, names = Image.every.get(pk=image.pk).state, listed(site)
    mine = [name for name in names if name == THICK or name.startswith(".sa-")]
    if state == "deleted":
        assert (kind, mine) == ("delete_aside", [])
        return
    (name,) = mine
    if state == "ok":
        assert (name, names) == (THICK, before)
    else:
        assert (state, name.startswith(".sa-")) == ("set_aside", True)
        Image.every.filter(pk=image.pk).update(aside_until=None)
        assert work("restore_aside", image.pk, ADMIN).state == "succeeded"
        assert listed(site) == before
    assert site.run(f"sha256sum < /dev/vg/{THICK}") == content
