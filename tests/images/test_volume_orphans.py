"""Logical volumes that look as if nobody needed them: only those of Proxmox VE's guests that are gone are orphans."""

import pytest

from images.models import Image
from images.orphans import refusals
from images.selectors.chains import chain_of
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host, StoragePool
from tests.agent.test_lvm import GROUPS, VOLUMES
from tests.factories import GuestFactory, HostFactory, StoragePoolFactory
from tests.guests.test_other_pools import Node, disk, domain, node
from tests.images.test_lvm import Line, Says, lvm_says
from tests.working import scan, this_machine

__all__ = ["lvm_says", "node"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet")]

ORPHANS = ("vm-900-disk-0", "vm-900-disk-1", "vm-901-cloudinit", "base-902-disk-0", "vm-903-state-old")
#: Names that no guest of the cluster's own is called by: the host's, other programs', what only looks like theirs.
STRANGE = [
    "root", "swap", "home", "var", "data", "backup", "srv", "docker", "pool", "vz", "images", "cache", "db", "mysql",
    "vm", "vm-", "vm-0-disk-0", "vm-x-disk-0", "vm900-disk-0", "VM-900-disk-0", "xvm-900-disk-0", "disk-900-vm", "900",
    "vm_900_disk_0", "vm-9000000000-disk-0", "my-vm-900-disk-0", "lv-vm-900-disk-0", "snap", "snapshot", "base", "old",
    "vm.900.disk.0", "pve-vm-900-disk-0", "linstor_vm-900-disk-0", "drbd-vm-900-disk-0", "iscsi0", "target", "lun1",
    "ceph-osd", "osd-block-1", "brick1", "gluster", "minio", "luks", "crypt", "vmdata", "template",
]  # fmt: skip
#: Names of guests that there are: on this node, on another one, locked.
KNOWN = ["vm-100-disk-7", "vm-100-cloudinit", "vm-100-state-now", "snap_vm-100-disk-0_now", "base-100-disk-1"]


def line(name: str, **columns: str) -> Line:
    usual = next(one for one in VOLUMES if one["lv_name"] == "idle")
    return usual | {"lv_name": name, "lv_uuid": f"id-{name}"} | columns


def site(lvm_says: Says, *lines: Line, source: str = "proxmox", shared: bool = False) -> Host:
    host = this_machine()
    path = "lvm vg0" if source == "proxmox" else "/dev/vg0"
    StoragePoolFactory.create(
        volumes=True, host=host, name="disks", kind="lvm", path=path, source=source, network=shared
    )
    GuestFactory.create(host=host, kind=Guest.Kind.VM, uid="100", name="web")
    lvm_says(GROUPS, list(lines))
    scan(host)
    return host


def orphans() -> set[str]:
    return set(Image.objects.filter(orphan=True).values_list("name", flat=True))


def test_of_sixty_look_alikes_none_is_an_orphan_and_the_others_are(node: Node, lvm_says: Says) -> None:
    taken = ["vm-904-disk-0", "vm-905-disk-0"]
    node(
        domain("web", disk("dev='/dev/vg0/vm-904-disk-0'", "vda")),
        domain("db", disk("dev='/dev/mapper/vg0-vm--905--disk--0'", "vda")),
    )
    alike = [*map(line, (*STRANGE, *KNOWN, *taken)), line("vm-906-disk-0", lv_device_open="open")]
    clones = [line("base-907-disk-0", lv_role="public,origin"), line("vm-908-disk-0", origin="base-907-disk-0")]
    site(lvm_says, *map(line, ORPHANS), *alike, *clones)
    assert len(alike) + 5 >= 60
    assert orphans() == {*ORPHANS, "vm-908-disk-0"}
    evidence = {one.name: one.orphan for one in Image.objects.all()}
    assert [evidence[name] for name in ("root", "vm-100-disk-7", "vm-904-disk-0", "base-907-disk-0")] == [
        None, None, False, False,
    ]  # fmt: skip


def test_a_snapshot_in_the_chain_of_a_volume_is_no_orphan_while_nobody_knows_what_reads_it(
    node: Node, lvm_says: Says
) -> None:
    node()
    head, below = "vm-900-disk-0.qcow2", "snap_vm-900-disk-0_s1.qcow2"
    site(lvm_says, line(head), line(below), line("snap_vm-900-disk-1_s1"))
    assert orphans() == {head, "snap_vm-900-disk-1_s1"}
    assert "not_orphan" in {one.code for one in refusals.setting_aside(Image.objects.get(name=below))}


def test_what_deleting_one_frees_is_never_what_it_shares_with_its_snapshots(node: Node, lvm_says: Says) -> None:
    node()
    site(lvm_says, line(ORPHANS[0]))
    volume = Image.objects.get(name=ORPHANS[0])
    assert chain_of(volume).nodes[0].freed_if_deleted == volume.allocated_size
    Image.objects.filter(pk=volume.pk).update(exclusive_bytes=None)
    assert chain_of(volume).nodes[0].freed_if_deleted is None
    Image.objects.filter(pk=volume.pk).update(alone_bytes=4096)
    assert chain_of(volume).nodes[0].freed_if_deleted == 4096


@pytest.mark.parametrize("how", ["libvirt", "found", "shared", "another host"])
def test_only_a_storage_of_proxmox_ve_that_is_this_hosts_alone_has_orphans(
    node: Node, lvm_says: Says, how: str
) -> None:
    node()
    if how == "found":
        lvm_says(GROUPS, [line(ORPHANS[0])])
        scan(this_machine())
    else:
        site(lvm_says, line(ORPHANS[0]), source="libvirt" if how == "libvirt" else "proxmox", shared=how == "shared")
    if how != "another host":
        assert orphans() == set()
        return
    volume, pool = Image.objects.get(name=ORPHANS[0]), StoragePool.objects.get(name="disks")
    assert "shared_pool" not in {one.code for one in refusals.setting_aside(volume)}
    StoragePoolFactory.create(host=HostFactory.create(slug="other"), shared_key=pool.shared_key)
    assert "shared_pool" in {one.code for one in refusals.setting_aside(volume)}
