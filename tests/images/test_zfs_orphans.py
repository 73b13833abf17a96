"""Volumes of ZFS that look as if nobody needed them: only those of Proxmox VE's guests that are gone are orphans."""

import pytest

from images.models import Image
from images.orphans import refusals
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import services
from tests.agent.test_zfs import POOLS, line
from tests.factories import GuestFactory, HostFactory, StoragePoolFactory
from tests.guests.test_other_pools import Node, disk, domain, node
from tests.images.test_volume_orphans import KNOWN, STRANGE, orphans
from tests.images.test_zfs import Says, proxmox, zfs_says
from tests.working import ADMIN, scan, this_machine

__all__ = ["node", "zfs_says"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet")]

ORPHANS = ("vm-900-disk-0", "vm-900-cloudinit", "base-902-disk-0", "vm-903-state-old", "subvol-904-disk-0")
TREE = [line("tank"), line("tank/data"), line("tank/small")]


def volume(last: str, *, under: str = "tank/data", **columns: str) -> str:
    if last.startswith(("subvol-", "basevol-")):
        usual = {"mountpoint": f"/vms/{last}"}
        return line("tank/data/subvol-103-disk-0", **({"name": f"{under}/{last}"} | usual | columns))
    return line("tank/small/vm-104-disk-0", **({"name": f"{under}/{last}"} | columns))


def snapshot(of: str, last: str) -> str:
    return volume(of, name=f"tank/data/{of}@{last}", type="snapshot")


BELOW = line("tank/data", name="tank/data/subvol-912-disk-0/below", mountpoint="/vms/subvol-912-disk-0/below")


def site(zfs_says: Says, *lines: str, source: str = "proxmox") -> Host:
    host = this_machine()
    proxmox(host, ("local-zfs", "/vms"))
    StoragePool.objects.update(source=source, path="/vms" if source == "proxmox" else "/dev/zvol/tank/data")
    GuestFactory.create(host=host, kind=Guest.Kind.VM, uid="100", name="web")
    zfs_says(POOLS, [*TREE, *lines])
    scan(host)
    return host


def test_of_eighty_look_alikes_none_is_an_orphan_and_the_others_are(node: Node, zfs_says: Says) -> None:
    node(
        domain("web", disk("dev='/dev/zvol/tank/data/vm-905-disk-0'", "vda")),
        domain("db", disk("file='/vms/subvol-906-disk-0'", "vda", kind="file")),
    )
    alike = [volume(name) for name in (*STRANGE, *KNOWN, "vm-905-disk-0", "subvol-906-disk-0", "subvol-100-disk-0")]
    alike += [volume(f"subvol-{name}") for name in STRANGE[:20]]
    alike += [volume("vm-907-disk-0", under="tank/data/other"), volume("subvol-908-disk-0", mountpoint="/srv/web")]
    kept = {
        "vm-909-disk-0": "__replicate_909-0_1700000000__",
        "base-910-disk-0": "__base__",
        "vm-911-disk-0": "autosnap",
    }
    alike += [volume(name) for name in kept] + [snapshot(name, last) for name, last in kept.items()]
    alike += [volume("subvol-912-disk-0"), BELOW]
    clone = volume("vm-913-disk-0", origin="tank/data/base-910-disk-0@__base__")
    site(zfs_says, *map(volume, ORPHANS), *alike, clone)
    assert len(alike) >= 80
    assert orphans() == {*ORPHANS, "vm-913-disk-0"}
    # Of a container's filesystem nobody looks who has a file open.
    told = {one.name: " ".join(one.orphan_evidence) for one in Image.objects.filter(orphan=True)}
    assert {name for name, why in told.items() if "process" not in why} == {"subvol-904-disk-0"}
    found = {one.name: one.orphan for one in Image.objects.all()}
    asked = ("root", "vm-100-disk-7", "vm-905-disk-0", "subvol-906-disk-0", "vm-907-disk-0", "vm-911-disk-0")
    assert [found[name] for name in asked] == [None, None, False, False, False, False]


def test_where_zfs_does_not_answer_nothing_becomes_an_orphan(node: Node, zfs_says: Says) -> None:
    node()
    host = site(zfs_says, *map(volume, (ORPHANS[0], "vm-909-disk-0")), snapshot("vm-909-disk-0", "kept"))
    for pools in ([], [POOLS[0].replace("tank", "other")]):
        zfs_says(pools, [])
        scan(host)
        assert orphans() == {ORPHANS[0]}


def test_a_guest_is_found_by_where_its_storage_says_that_a_filesystem_is_mounted(node: Node, zfs_says: Says) -> None:
    node(domain("web", disk("file='/vms/subvol-904-disk-0'", "vda", kind="file")))
    site(zfs_says, volume("subvol-904-disk-0", mountpoint="/elsewhere/subvol-904-disk-0"))
    volume_ = Image.objects.get(name="subvol-904-disk-0")
    assert ([use.disk.guest.name for use in volume_.uses.all()], volume_.orphan) == (["web"], False)


@pytest.mark.parametrize("how", ["libvirt", "found", "another host"])
def test_only_a_storage_of_proxmox_ve_that_is_this_hosts_alone_has_orphans(
    node: Node, zfs_says: Says, how: str
) -> None:
    node()
    if how == "found":
        zfs_says(POOLS, [*TREE, volume(ORPHANS[0])])
        scan(this_machine())
    else:
        site(zfs_says, volume(ORPHANS[0]), source="libvirt" if how == "libvirt" else "proxmox")
    if how in {"libvirt", "found"}:
        assert orphans() == set()
        return
    image = Image.objects.get(name=ORPHANS[0])
    assert refusals.setting_aside(image) == []
    (command,) = services.plan(ADMIN, "set_aside", image.pk, {}).commands
    assert command == f"zfs rename tank/data/{ORPHANS[0]} tank/data/.sa-JOB.aside"
    if how == "another host":
        guid = image.pool.shared_key.split()[1]
        StoragePoolFactory.create(host=HostFactory.create(slug="other"), shared_key=f"zfs {guid} tank/more")
        assert {one.code for one in refusals.setting_aside(image)} == {"shared_pool"}


def test_what_is_set_aside_is_counted_and_no_image(node: Node, zfs_says: Says) -> None:
    node()
    aside = [volume(".sa-abc.aside"), line("tank/small", name="tank/data/.sa-abd.aside")]
    site(zfs_says, volume(ORPHANS[0]), *aside)
    assert set(Image.objects.values_list("name", flat=True)) == {ORPHANS[0]}
    shares = StoragePool.objects.get(name="local-zfs").shares
    assert (shares["others"] or 0) > 0
