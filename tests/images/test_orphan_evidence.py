"""What makes an image look like an orphan that is none: each is known, and told as evidence."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from images.models import Claim, Image
from images.orphans.evidence import Facts, Naming, Needs, World, bases_in_ids, judge, number_of
from images.orphans.selectors import evidence
from images.scan import bulk_write
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job
from tests.factories import GuestDiskFactory, GuestFactory, HostFactory, ImageFactory, JobFactory, StoragePoolFactory
from tests.images.node import config, scanned
from tests.images.test_proxmox_node import disk
from tests.working import ADMIN, OPERATOR, create, image_at, reread, scan, this_machine, work

ASKED = "libvirt was asked."


def facts(name: str = "left.qcow2", path: str = "", **more: Any) -> Facts:
    plain: dict[str, Any] = {
        "id": 1, "inode": "1:1", "namings": (), "has_overlays": False, "aside": (), "held": "", "owners_unknown": "",
    }  # fmt: skip
    return Facts(name=name, path=path or f"/pool/{name}", **(plain | more))


def test_what_nothing_speaks_against_is_an_orphan_with_its_evidence() -> None:
    assert judge(facts(), World(ASKED)) == (True, [ASKED, "No overlay uses it.", "No process has it open."])


@pytest.mark.parametrize(
    ("naming", "sentence"),
    [
        (Naming("web", "unused0", "", "vm", "104"), "It is listed as unused0 of VM web (vm 104)."),
        (Naming("web", "scsi0", "before", "vm", "104"), "It is used only in the snapshot before of VM web (vm 104)."),
        (Naming("web", "scsi0", "pending", "vm", "104"), "A pending change of VM web (vm 104) uses it."),
        (Naming("web", "vda", "the saved state", "domain", "u"), "It is used only in the saved state of guest web."),
        (Naming("web", "fleecing", "fleecing", "vm", "104"), "A backup of VM web (vm 104) created it."),
        (
            Naming("ct", "mp0", "hidden", "container", "7"),
            "container ct (container 7) that its hypervisor does not understand uses it",
        ),
        (Naming("web", "nvram", "", "domain", "u"), "It is the NVRAM of guest web."),
    ],
)
def test_a_naming_that_is_no_plain_disk_is_told(naming: Naming, sentence: str) -> None:
    orphan, told = judge(facts(namings=[naming]), World(ASKED))
    assert orphan is False
    assert sentence in told[0]


def test_a_plain_disk_needs_no_words() -> None:
    assert judge(facts(namings=[Naming("web", "vda", "", "domain", "u")]), World(ASKED)) == (False, [])


@pytest.mark.parametrize(
    ("world", "answer"),
    [
        (World(ASKED, Needs(paths={"/pool/left.qcow2": "top keeps its data in it."})), False),
        (World(ASKED, Needs(files={"1:1": "a disk outside stands on it."})), False),
        (World(ASKED, Needs(kept={1: "The undo copy of job 3 stands on it."})), False),
        (World(ASKED, unread="a line."), None),
        (World(ASKED, unseen="processes."), None),
        (World(ASKED, Needs(unseen="a disk outside."), unseen="processes."), None),
    ],
)
def test_what_else_is_known_of_the_host_counts(world: World, answer: bool | None) -> None:
    orphan, told = judge(facts(), world)
    assert orphan is answer
    assert len(told) == 1


@pytest.mark.parametrize(
    ("name", "path", "number"),
    [
        ("vm-104-disk-0.qcow2", "/s/images/104/vm-104-disk-0.qcow2", "104"),
        ("vm-104-state-before.raw", "", "104"),
        ("base-9-disk-0.raw", "", "9"),
        ("subvol-7-disk-0.subvol", "", "7"),
        ("odd.qcow2", "/s/images/105/odd.qcow2", "105"),
        ("vm-0-disk-0.raw", "", ""),
        ("vm-x-disk-0.raw", "", ""),
        ("left.qcow2", "/images/left.qcow2", ""),
    ],
)
def test_whose_disk_it_is_by_its_name(name: str, path: str, number: str) -> None:
    assert number_of(name, path) == number


def test_a_disk_of_a_guest_on_another_node_by_its_name_is_left_open() -> None:
    world = World(ASKED, elsewhere={"104": "Its name is that of a disk of guest 104, which is on another node."})
    assert judge(facts("vm-104-disk-7.raw"), world) == (None, [world.elsewhere["104"]])
    assert judge(facts("vm-105-disk-7.raw"), world)[0] is True
    here = World(ASKED, numbers={"104": "web (vm 104)"})
    assert judge(facts("vm-104-disk-7.raw"), here)[1][-1] == (
        "Its name is that of a disk of web (vm 104), which does not use it."
    )
    locked = World(ASKED, busy={"104": "locked"})
    assert judge(facts("vm-104-disk-7.raw"), locked) == (None, ["locked"])


def test_the_base_in_the_id_of_a_linked_clone() -> None:
    told = bases_in_ids(
        [("s:101/base-101-disk-0.qcow2/102/vm-102-disk-0.qcow2", "/s/images/102/vm-102-disk-0.qcow2", "clone"),
         ("s:102/vm-102-disk-1.qcow2", "/s/images/102/vm-102-disk-1.qcow2", "clone"), ("", "", "x")]
    )  # fmt: skip
    assert told == {"/s/images/101/base-101-disk-0.qcow2": "Guest clone uses it as the base of a linked clone."}


#: Each volume, and how a configuration names it.
NAMED = {
    "vm-100-disk-0.qcow2": "scsi0: store:100/vm-100-disk-0.qcow2,size=8M",
    "vm-100-disk-1.qcow2": "efidisk0: store:100/vm-100-disk-1.qcow2,efitype=4m,size=528K",
    "vm-100-disk-2.raw": "tpmstate0: store:100/vm-100-disk-2.raw,size=4M,version=v2.0",
    "vm-100-cloudinit.qcow2": "ide2: store:100/vm-100-cloudinit.qcow2,media=cdrom",
    "vm-100-state-suspend-2026-11-22.raw": "vmstate: store:100/vm-100-state-suspend-2026-11-22.raw",
    "vm-100-disk-3.qcow2": "unused0: store:100/vm-100-disk-3.qcow2",
    "vm-100-disk-8.qcow2": "ide0: media=cdrom,file=store:100/vm-100-disk-8.qcow2",
}
SECTIONS = {
    "vm-100-disk-4.qcow2": "[PENDING]\nscsi1: store:100/vm-100-disk-4.qcow2,size=8M\n",
    "vm-100-disk-5.qcow2": "[before]\nscsi1: store:100/vm-100-disk-5.qcow2,size=8M\n",
    "vm-100-state-before.raw": "[later]\nvmstate: store:100/vm-100-state-before.raw\n",
    "vm-100-fleece-0.qcow2": "[special:fleecing]\nfleecing-images: store:100/vm-100-fleece-0.qcow2\n",
}


@pytest.mark.django_db
@pytest.mark.qemu
@pytest.mark.usefixtures("quiet", "no_reserve")
def test_everything_that_proxmox_names_is_no_orphan_and_what_it_does_not_is_one(pve: Path) -> None:
    store = pve.parents[2] / "store/images"
    for name in (*NAMED, *SECTIONS, "vm-100-disk-9.qcow2"):
        disk(pve, name) if name.endswith("qcow2") else create(store / "100" / name, form="raw")
    template = store / "101"
    template.mkdir()
    create(template / "base-101-disk-0.qcow2")
    elsewhere = store / "104"
    elsewhere.mkdir()
    create(elsewhere / "vm-104-disk-0.qcow2")
    text = "name: web\n" + "\n".join(NAMED.values()) + "\n\n" + "\n".join(SECTIONS.values())
    config(pve, text)
    config(pve, "name: golden\ntemplate: 1\nscsi0: store:101/base-101-disk-0.qcow2\n", vmid=101)
    config(pve, "name: far\nscsi0: local-lvm:vm-104-disk-0,size=4G\n", vmid=104, node="other")
    host = this_machine()
    scanned(host)
    found = {image.name: (image.orphan, " ".join(image.orphan_evidence)) for image in Image.objects.all()}
    assert {name for name, (orphan, _) in found.items() if orphan is not False} == {
        "vm-100-disk-9.qcow2", "vm-104-disk-0.qcow2",
    }  # fmt: skip
    assert found["vm-100-disk-3.qcow2"][1] == "It is listed as unused0 of VM web (vm 100)."
    assert found["vm-100-disk-4.qcow2"][1] == "A pending change of VM web (vm 100) uses it."
    assert found["vm-100-disk-5.qcow2"][1] == "It is used only in the snapshot before of VM web (vm 100)."
    assert found["vm-100-fleece-0.qcow2"][1] == "A backup of VM web (vm 100) created it."
    orphan, why = found["vm-100-disk-9.qcow2"]
    assert orphan is True
    assert "none of 2 VMs and 0 containers uses it" in why
    assert "no hypervisor" not in why
    orphan, why = found["vm-104-disk-0.qcow2"]
    assert (orphan, "disk of guest 104, which is on another node" in why) == (None, True)
    assert not any(word in why for word in ("far", "the node other"))
    image = image_at(store / "100/vm-100-disk-9.qcow2")
    assert [
        sentence for sentence in evidence(image) if "last changed at" in sentence or "These facts are from" in sentence
    ]

    # A line that is not understood leaves all of them open; so does one of another node that shares a storage.
    config(pve, text.replace("name: web\n", "name: web\nargs: -drive file=/srv/x.img\n"))
    scanned_again(host)
    assert image_at(store / "100/vm-100-disk-9.qcow2").orphan is None
    config(pve, text)
    (pve / "storage.cfg").write_text(f"dir: store\n\tpath {store.parent}\n\tcontent images\n\tshared 1\n")
    config(pve, "name: far\nargs: -drive file=/srv/x.img\n", vmid=104, node="other")
    scanned_again(host)
    assert image_at(store / "100/vm-100-disk-9.qcow2").orphan is None
    assert Host.objects.get().has_proxmox


def scanned_again(host: Host) -> None:
    scanned(reread(host))


@pytest.mark.django_db
@pytest.mark.qemu
@pytest.mark.usefixtures("quiet", "no_hypervisor")
def test_a_data_file_is_no_orphan(pool: Path) -> None:
    (pool / "below").mkdir()
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-o", "data_file=below/data.raw", "top.qcow2", "8M"]
    subprocess.run(command, check=True, cwd=pool)
    create(pool / "left.raw", form="raw")
    scan(this_machine(pool))
    assert image_at(pool / "below/data.raw").orphan_evidence == ["top.qcow2 keeps its data in it."]
    assert [image_at(pool / name).orphan for name in ("below/data.raw", "left.raw")] == [False, True]


def rows(host: Host, name: str = "left.qcow2", **more: Any) -> Image:
    pool = host.pools.first() or StoragePoolFactory.create(host=host)
    return ImageFactory.create(pool=pool, name=name, orphan=None, **more)


def resolved(image: Image) -> tuple[bool | None, list[str]]:
    bulk_write.resolve_host(image.host)
    return reread(image).orphan, image.orphan_evidence


@pytest.mark.django_db
def test_what_an_undo_copy_stands_on_is_needed() -> None:
    image = rows(HostFactory.create())
    top = rows(image.host, "top.qcow2")
    plan = {
        "affected_images": [
            {"id": top.pk, "name": "top", "how": "rewritten"},
            {"id": image.pk, "name": "left", "how": "no longer its base"},
        ]
    }
    job = JobFactory.create(target=top, kind="flatten", state="succeeded", undo_state="available", plan=plan)
    assert resolved(image) == (False, [f"The undo copy of job {job.pk} uses it as its backing file."])
    Job.objects.update(undo_state="discarded")
    assert resolved(image)[0] is True


@pytest.mark.django_db
@pytest.mark.qemu
@pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")
def test_a_scan_after_an_undo_copy_went_says_that_nothing_stands_on_the_base_any_more(tmp_path: Path) -> None:
    base = create(tmp_path / "base.qcow2")
    top = create(tmp_path / "top.qcow2", "8M", base="base.qcow2")
    host = this_machine(tmp_path)
    scan(host)
    job = work("flatten", image_at(top).pk, OPERATOR)
    assert job.state == "succeeded", job.error_detail
    scan(host)
    told = f"The undo copy of job {job.pk} uses it as its backing file."
    assert image_at(base).orphan_evidence == [told]
    # Nothing but the copy goes: no image's file changes.
    assert work("discard_undo", job.pk, ADMIN).state == "succeeded"
    scan(host)
    image = image_at(base)
    assert (image.orphan, told in image.orphan_evidence) == (True, False)
    Job.objects.filter(pk=job.pk).update(undo_state="available")
    scan(host)
    assert image_at(base).orphan_evidence == [told]


@pytest.mark.django_db
@pytest.mark.parametrize("state", ["ok", "missing", "changed", "unreadable", "silent"])
def test_a_file_with_the_inode_of_a_base_in_a_folder_that_was_not_seen_is_left_open(state: str) -> None:
    host = HostFactory.create()
    left, away = rows(host), StoragePoolFactory.create(host=host, state=state)
    base = ImageFactory.create(pool=away, name="base.qcow2", dev=left.dev, inode=left.inode)
    ImageFactory.create(pool=away, backing_file=base.path, backing_key=base.path_key)
    orphan, told = resolved(left)
    assert orphan is (False if state == "ok" else None)
    assert state == "ok" or "base.qcow2" in told[0]


@pytest.mark.django_db
def test_where_processes_cannot_be_seen_nothing_is_an_orphan() -> None:
    image = rows(HostFactory.create(capabilities={"busy_complete": False}))
    orphan, why = resolved(image)
    assert (orphan, "Run the agent as root" in why[0]) == (None, True)


@pytest.mark.django_db
def test_claims_of_a_scan_count() -> None:
    image = rows(HostFactory.create())
    Claim.objects.create(host=image.host, kind="file", key=f"{image.dev}:{image.inode}", why="/x stands on it.")
    assert resolved(image) == (False, ["/x stands on it."])
    Claim.objects.update(kind="any", why="nobody knows")
    assert resolved(image) == (None, ["nobody knows"])


def sharing_hosts(**other: Any) -> tuple[Image, StoragePool]:
    """An image on a share that another host has mounted elsewhere; every host that uses it is registered."""
    same = {"network": True, "all_hosts_registered": True, "shared_key": "nfs:nas:/export/vms"}
    here = StoragePoolFactory.create(path="/mnt/a", path_bytes=b"/mnt/a", **same)
    host = HostFactory.create(last_seen=timezone.now(), **({"owners_unknown": ""} | other))
    there = StoragePoolFactory.create(host=host, path="/srv/b", path_bytes=b"/srv/b", **same)
    return ImageFactory.create(pool=here, name="left.qcow2", path="/mnt/a/left.qcow2", orphan=None), there


@pytest.mark.django_db
def test_a_disk_of_a_guest_on_another_host_that_shares_the_storage_is_no_orphan() -> None:
    image, there = sharing_hosts()
    assert resolved(image)[0] is True
    guest = GuestFactory.create(host=there.host, state="running")
    named = GuestDiskFactory.create(guest=guest, path="/srv/b/left.qcow2", path_bytes=b"/srv/b/left.qcow2")
    assert resolved(image)[0] is False
    assert (image.in_use, image.in_use_detail) == (True, "a guest of another host is running")
    assert (image.declared_by, image.uses.exists()) == ("a guest of another host", False)
    named.path = "/srv/b2/left.qcow2"
    named.path_bytes = b"/srv/b2/left.qcow2"
    named.save()
    assert resolved(image)[0] is True


@pytest.mark.django_db
def test_an_overlay_on_another_host_that_shares_the_storage_keeps_its_base() -> None:
    image, there = sharing_hosts()
    own = StoragePoolFactory.create(host=there.host, path="/var/own", path_bytes=b"/var/own")
    ImageFactory.create(
        pool=own, name="top.qcow2", backing_file="/srv/b/left.qcow2", backing_key="x", backing_path="/srv/b/left.qcow2",
        backing_path_bytes=b"/srv/b/left.qcow2",
    )  # fmt: skip
    assert resolved(image) == (False, ["An image of another host uses it as its backing file."])


@pytest.mark.django_db
def test_data_of_an_image_of_another_host_that_shares_the_storage_is_kept() -> None:
    image, there = sharing_hosts()
    own = StoragePoolFactory.create(host=there.host, path="/var/own", path_bytes=b"/var/own")
    top = ImageFactory.create(
        pool=own, name="top.qcow2", path="/var/own/top.qcow2", header={"data_file": "/srv/b/left.qcow2"}
    )
    assert resolved(image) == (False, ["An image of another host keeps its data in it."])
    Image.objects.filter(pk=top.pk).update(header={}, unreadable="It is damaged.")
    orphan, why = resolved(image)
    assert orphan is None
    assert ("an image of another host that shares the storage" in why[0], "top" in why[0]) == (True, False)


@pytest.mark.django_db
@pytest.mark.parametrize("other", [{"owners_unknown": "It was not read."}, {"status": "unreachable"}])
def test_where_a_host_that_shares_it_is_not_known_nothing_on_it_is_an_orphan(other: dict[str, str]) -> None:
    image, there = sharing_hosts(**other)
    orphan, why = resolved(image)
    assert orphan is None
    assert why[0].startswith("Another host shares")
    assert there.host.name not in why[0]  # it may not exist for whoever reads that


@pytest.mark.django_db
def test_a_storage_that_unregistered_hosts_may_use_is_left_open() -> None:
    pool = StoragePoolFactory.create(network=True, owners_unknown="hosts that are not registered here may use it.")
    assert resolved(ImageFactory.create(pool=pool, orphan=None)) == (None, [pool.owners_unknown])


def test_a_snapshots_file_is_of_the_guest_whose_folder_it_is_in() -> None:
    name = "snap-x-vm-100-disk-0-data.qcow2"
    assert number_of(name, f"/srv/images/1007/{name}") == "1007"
    assert number_of("snap-s1-vm-100-disk-0.qcow2", "/srv/elsewhere/snap-s1-vm-100-disk-0.qcow2") == "100"
