"""Images of Ceph that look as if nobody needed them: only those of Proxmox VE's guests that are gone are orphans."""

import json
from pathlib import Path
from typing import Any

import pytest

from images.models import Image
from images.orphans import refusals
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import services
from tests.agent.test_rbd import FSID, MIB, Says, ceph
from tests.factories import GuestFactory, HostFactory, StoragePoolFactory
from tests.guests.test_other_pools import Node, disk, domain, node
from tests.images.test_rbd import on_a_node, proxmox
from tests.images.test_volume_orphans import KNOWN, STRANGE, orphans
from tests.working import ADMIN, scan, this_machine

__all__ = ["ceph", "node", "on_a_node"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet")]

ORPHANS = ("vm-900-disk-0", "vm-900-cloudinit", "base-902-disk-0", "vm-903-state-old")
#: What the pool's answers are made of, in :data:`SAYS`.
SAYS = """
image=$(echo "$*" | sed -n 's/.*--image=\\([^ ]*\\).*/\\1/p')
case "$*" in
*--id=vm*\\ ls\\ --long*) cat {0}/long.json; exit ;;
*--id=vm*\\ ls*) cat {0}/names.json; exit ;;
*--id=vm*\\ info*) cat "{0}/info-$image.json"; exit ;;
*--id=vm*\\ du*) cat {0}/du.json; exit ;;
*--id=vm*\\ status*) [ "$image" = vm-906-disk-0 ] && echo '{{"watchers":[{{"address":"192.0.2.9:0/1"}}]}}' ||
    echo '{{"watchers":[]}}'; exit ;;
esac
"""


def site(says: Says, folder: Path, names: list[str], facts: dict[str, dict[str, Any]], **pool: Any) -> Host:
    """A storage of Proxmox VE with these images; ``facts`` are what Ceph says of one beside what it says of all."""
    (folder / "ceph").mkdir()
    known = {name: {"image": name, "id": f"1{number:x}", "size": MIB} for number, name in enumerate(names)}
    usual = {"features": ["layering", "fast-diff"], "op_features": [], "flags": [], "snapshot_count": 0}
    used = [{"name": name, "used_size": 4096} for name in names]
    told = {"long": list(known.values()), "names": names, "du": {"images": used}}
    told |= {f"info-{name}": one | usual | facts.get(name, {}) for name, one in known.items()}
    for name, answer in told.items():
        (folder / "ceph" / f"{name}.json").write_text(json.dumps(answer))
    says(SAYS.format(folder / "ceph"))
    host = this_machine()
    proxmox(host, **({"all_hosts_registered": True} | pool))
    GuestFactory.create(host=host, kind=Guest.Kind.VM, uid="100", name="web")
    scan(host)
    return host


def test_of_sixty_look_alikes_none_is_an_orphan_and_the_others_are(node: Node, on_a_node: Says, tmp_path: Path) -> None:
    node(domain("web", disk("protocol='rbd' name='vms/vm-904-disk-0'", "vda", kind="network")))
    kept: dict[str, dict[str, Any]] = {
        "vm-905-disk-0": {"snapshot_count": 1}, "vm-907-disk-0": {"op_features": ["group"]},
        "base-908-disk-0": {"op_features": ["clone-parent", "snap-trash"]},
    }  # fmt: skip
    clone: dict[str, dict[str, Any]] = {
        "vm-909-disk-0": {"op_features": ["clone-child"], "parent": {"pool": "vms", "image": "base-908-disk-0"}}
    }
    alike = [*STRANGE, *KNOWN, "vm-904-disk-0", "vm-906-disk-0", "sparse", "vm-", "lun0", "vm-0900-disk-0", *kept]
    assert len(set(alike)) >= 60
    site(on_a_node, tmp_path, [*ORPHANS, *alike, *clone, ".sa-abc.aside"], kept | clone)
    assert orphans() == {*ORPHANS, *clone}
    found = {one.name: one.orphan for one in Image.objects.filter(pool__name="ceph")}
    assert ".sa-abc.aside" not in found
    asked = ("root", "vm-100-disk-7", "vm-904-disk-0", "vm-905-disk-0", "vm-906-disk-0", "vm-907-disk-0")
    assert [found[name] for name in asked] == [None, None, False, False, False, False]


@pytest.mark.parametrize("how", ["libvirt", "hosts that nobody has registered"])
def test_only_a_storage_of_proxmox_ve_whose_hosts_are_all_known_has_orphans(
    node: Node, on_a_node: Says, tmp_path: Path, how: str
) -> None:
    node()
    changes = {"source": "libvirt"} if how == "libvirt" else {"all_hosts_registered": False}
    site(on_a_node, tmp_path, [ORPHANS[0]], {}, **changes)
    image = Image.objects.get(name=ORPHANS[0])
    assert image.orphan is None
    assert "guests_unknown" in {one.code for one in refusals.setting_aside(image)}


@pytest.mark.parametrize(("cluster", "codes"), [("lab", set()), ("other", {"shared_pool"}), ("", {"shared_pool"})])
def test_other_hosts_of_the_cluster_may_have_the_pool_and_no_others(
    node: Node, on_a_node: Says, tmp_path: Path, cluster: str, codes: set[str]
) -> None:
    node()
    host = site(on_a_node, tmp_path, [ORPHANS[0]], {})
    Host.objects.filter(pk=host.pk).update(cluster="lab")
    image = Image.objects.select_related("pool", "host").get(name=ORPHANS[0])
    assert image.pool.shared_key == f"rbd {FSID} vms"
    StoragePoolFactory.create(host=HostFactory.create(slug="b", cluster=cluster), shared_key=image.pool.shared_key)
    assert {one.code for one in refusals.setting_aside(image)} == codes
    (command,) = services.plan(ADMIN, "set_aside", image.pk, {}).commands
    assert command == f"rbd rename vms/{ORPHANS[0]} vms/.sa-JOB.aside"
    assert StoragePool.objects.get(name="ceph").network
