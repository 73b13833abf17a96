"""Snapshots of all guests in one list: who keeps each, how old it is, and what it holds."""

import csv
import io
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from images.models import Image
from images.selectors import guests_for
from images.selectors.snapshots import Kept, snapshots_of
from storage_admin.accounts.models import SYSTEM
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host
from storage_admin.hosts.names import path_key
from tests.factories import GuestFactory, HostFactory, ImageFactory, ImageUseFactory, StoragePoolFactory
from tests.harness.guests import write_pattern
from tests.web.html import text_of
from tests.working import at_most_queries, client_as, create, image_at, scan, scanned_machine, this_machine, work

pytestmark = [pytest.mark.django_db, pytest.mark.sql]

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


def told(name: str, days: int | None, *files: str, external: bool = False) -> dict[str, Any]:
    created = None if days is None else int((NOW - timedelta(days=days)).timestamp())
    return {"name": name, "created": created, "external": external, "files": list(files)}


def header(name: str, days: int, number: int = 1) -> dict[str, Any]:
    return {"id": str(number), "name": name, "size": 0, "created": int((NOW - timedelta(days=days)).timestamp())}


def estimate(*held: tuple[dict[str, Any], int]) -> dict[str, Any]:
    return {"basis": {"snapshots": [{"created": one["created"], "held_bytes": size} for one, size in held]}}


def kept(guest: Guest | None = None) -> list[Kept]:
    guests = guests_for(SYSTEM)
    return snapshots_of(guests if guest is None else guests.filter(pk=guest.pk))


def in_short(rows: list[Kept]) -> list[tuple[str, str, str, int | None, int | None]]:
    return [(one.name, one.kind, one.by, one.held_bytes, one.files_bytes) for one in rows]


def test_the_oldest_comes_first_and_each_says_who_keeps_it_and_what_it_holds() -> None:
    one, two = header("both", 5), header("forgotten", 9, 2)
    inside = ImageFactory.create(
        snapshots=[one, two], estimate=estimate((one, 100), (two, 20)), analyzed_at=NOW, fingerprint=b"a"
    )
    overlay = ImageFactory.create(pool=inside.pool, path="/srv/disk.old", path_key=path_key(b"/srv/disk.old"))
    Image.objects.filter(pk=overlay.pk).update(allocated_size=7000)
    guest = GuestFactory.create(
        host=inside.host,
        snapshots=[told("both", 5), told("old", 30, "/srv/disk.old", external=True), told("dark", None)],
    )
    ImageUseFactory.create(image=inside, disk__guest=guest)
    GuestFactory.create()
    assert in_short(kept()) == [
        ("old", "external", "libvirt", None, 7000),
        ("forgotten", "internal", "image", 20, None),
        ("both", "internal", "libvirt", 100, None),
        ("dark", "internal", "libvirt", None, None),
    ]
    assert [row.held_at for row in kept()] == [None, NOW, NOW, None]


def test_what_was_measured_of_other_snapshots_than_there_are_now_is_not_shown() -> None:
    one, new = header("one", 5), header("one", 1)
    image = ImageFactory.create(snapshots=[new], estimate=estimate((one, 100)), analyzed_at=NOW)
    ImageUseFactory.create(image=image)
    assert in_short(kept()) == [("one", "internal", "image", None, None)]


def test_of_several_disks_it_is_the_sum_and_unknown_where_one_is() -> None:
    one = header("one", 5)
    first = ImageFactory.create(snapshots=[one], estimate=estimate((one, 100)), analyzed_at=NOW)
    second = ImageFactory.create(pool=first.pool, snapshots=[one], estimate=estimate((one, 11)), analyzed_at=NOW)
    use = ImageUseFactory.create(image=first, disk__target="vda")
    ImageUseFactory.create(image=second, disk__guest=use.disk.guest, disk__target="vdb")
    assert in_short(kept(use.disk.guest)) == [("one", "internal", "image", 111, None)]
    Image.objects.filter(pk=second.pk).update(estimate=None)
    assert in_short(kept(use.disk.guest)) == [("one", "internal", "image", None, None)]


def test_a_file_that_nobody_has_seen_makes_the_sum_unknown_and_a_senseless_time_is_none() -> None:
    image = ImageFactory.create(path="/srv/disk.one", path_key=path_key(b"/srv/disk.one"))
    both = told("one", 3, "/srv/disk.one", "/elsewhere/second.one", external=True)
    guest = GuestFactory.create(host=image.host, snapshots=[both | {"created": 10**18}])
    ImageUseFactory.create(image=image, disk__guest=guest)
    assert in_short(kept()) == [("one", "external", "libvirt", None, None)]
    assert ([one.created for one in kept()], guest.oldest_snapshot) == ([None], None)


def test_of_proxmox_ve_it_is_a_file_where_the_storage_keeps_files_and_else_the_storages() -> None:
    host = HostFactory.create(kind=Host.Kind.PROXMOX)
    pool = StoragePoolFactory.create(host=host)
    layer = ImageFactory.create(pool=pool, path="/srv/snap_one.qcow2")
    Image.objects.filter(pk=layer.pk).update(allocated_size=500)
    guest = GuestFactory.create(host=host, kind=Guest.Kind.VM, snapshots=[told("one", 3), told("thin", 2)])
    ImageUseFactory.create(image=layer, disk__guest=guest, disk__target="scsi0", disk__only_in="one")
    assert in_short(kept()) == [("one", "external", "proxmox", None, 500), ("thin", "storage", "proxmox", None, None)]


def test_of_a_thin_pool_it_is_what_the_snapshots_volumes_have_alone() -> None:
    host = HostFactory.create(kind=Host.Kind.PROXMOX)
    pool = StoragePoolFactory.create(host=host, kind="lvmthin", path="lvmthin pve/data", source="proxmox")
    names = ("vm-9-disk-0", "vm-9-disk-1", "snap_vm-9-disk-0_one", "snap_vm-9-disk-1_one", "vm-9-state-one")
    volumes = [
        ImageFactory.create(pool=pool, path=(path := f"/dev/pve/{name}"), path_key=path_key(path.encode()))
        for name in (*names, "snap_vm-9-disk-0_two", "snap_vm-99-disk-0_one")
    ]
    for number, volume in enumerate(volumes):
        Image.objects.filter(pk=volume.pk).update(alone_bytes=10**number, alone_at=NOW + timedelta(hours=number))
    guest = GuestFactory.create(host=host, kind=Guest.Kind.VM, uid="9", snapshots=[told("one", 3), told("two", 2)])
    for number in (0, 1):
        ImageUseFactory.create(image=volumes[number], disk__guest=guest, disk__target=f"scsi{number}")
    assert in_short(kept()) == [
        ("one", "storage", "proxmox", 11100, None), ("two", "storage", "proxmox", 100000, None),
    ]  # fmt: skip
    assert kept()[0].held_at == NOW + timedelta(hours=2)
    Image.objects.filter(pk=volumes[3].pk).update(alone_bytes=None)
    assert kept()[0].held_bytes is None


def test_of_files_it_is_what_the_image_above_hides_of_the_state() -> None:
    """libvirt's snapshot is told with the overlay that came above it, Proxmox VE's with the file of the state."""
    base = ImageFactory.create(path="/srv/base", path_key=path_key(b"/srv/base"))
    hides = {"estimate": {"basis": {"hidden_bytes": 300}}, "analyzed_at": NOW}
    ImageFactory.create(pool=base.pool, path="/srv/top", path_key=path_key(b"/srv/top"), backing=base, **hides)
    GuestFactory.create(host=base.host, snapshots=[told("one", 3, "/srv/top", external=True)])
    node = StoragePoolFactory.create(host=HostFactory.create(kind=Host.Kind.PROXMOX))
    layer = ImageFactory.create(pool=node, path="/srv/snap_one.qcow2")
    ImageFactory.create(pool=node, path="/srv/vm-1-disk-0.qcow2", backing=layer, **hides)
    vm = GuestFactory.create(host=node.host, kind=Guest.Kind.VM, snapshots=[told("one", 2)])
    ImageUseFactory.create(image=layer, disk__guest=vm, disk__target="scsi0", disk__only_in="one")
    assert [(one.by, one.held_bytes, one.held_at) for one in kept()] == [
        ("libvirt", 300, NOW), ("proxmox", 300, NOW),
    ]  # fmt: skip
    old = Image.objects.filter(backing=base)
    old.update(analyzed_at=NOW - timedelta(days=4))  # before the snapshot was made
    assert [one.held_bytes for one in kept()] == [None, 300]
    old.update(analyzed_at=NOW)
    for state in (base, layer):  # reads the state as well
        ImageFactory.create(pool=state.pool, path=f"{state.path}.clone", backing=state, **hides)
    assert [one.held_bytes for one in kept()] == [None, None]


@pytest.mark.qemu
@pytest.mark.services
@pytest.mark.usefixtures("quiet", "no_hypervisor")
def test_the_sample_that_follows_a_scan_measures_what_an_overlay_hides(tmp_path: Path) -> None:
    base = create(tmp_path / "base.qcow2", "32M")
    write_pattern(base, "qcow2", (0, 8, 1))
    top = create(tmp_path / "top.qcow2", base="base.qcow2")
    write_pattern(top, "qcow2", (4, 8, 2))
    host = scanned_machine(tmp_path)
    work("sample", host.pk)
    assert (image_at(top).estimate or {})["basis"]["hidden_bytes"] == 4 << 20
    assert "hidden_bytes" not in (image_at(base).estimate or {})["basis"]


def test_the_page_the_file_and_rest_say_the_same_within_each_ones_hosts() -> None:
    mine, other = HostFactory.create(slug="mine"), HostFactory.create(slug="other")
    for host in (mine, other):
        GuestFactory.create(host=host, name=f"on-{host.slug}", snapshots=[told("before <b>", 40)])
    viewer, limited = client_as(role="viewer"), client_as(role="viewer", hosts=["mine"])
    assert names(viewer) == ["on-mine", "on-other"]
    assert names(limited) == ["on-mine"]
    assert names(viewer, f"?host={mine.pk}") == ["on-mine"]
    page = limited.get("/guests/snapshots/").content.decode()
    assert "before &lt;b&gt;" in page
    assert "on-other" not in page
    assert viewer.get("/api/v1/snapshots/?limit=1").json()["count"] == 2
    for unknown in ("nothing=1", "ordering=name", "kind=internal"):
        assert viewer.get(f"/api/v1/snapshots/?{unknown}").status_code == 400


def test_sums_are_unknown_while_nothing_in_them_is_known_and_say_of_how_many_they_lack_something() -> None:
    host = HostFactory.create()
    GuestFactory.create(host=host, snapshots=[told("files", 2, "/srv/unseen", external=True)])
    GuestFactory.create(host=host, kind="vm", snapshots=[told("storage", 1)])
    nothing = said()
    assert "together: unknown. Files of external ones: unknown. What 2 of them hold, or their files," in nothing
    assert "0 B" not in nothing
    image = ImageFactory.create(
        pool__host=host, snapshots=[header("in", 5)], estimate=estimate((header("in", 5), 4096))
    )
    ImageUseFactory.create(image=image, disk__guest=GuestFactory.create(host=host))
    assert "together: 4 KiB. Files of external ones: unknown. What 2 of them hold, or their files," in said()
    Guest.objects.exclude(disks__use__image=image).delete()
    assert "together: 4 KiB. Files of external ones: 0 B. Snapshot" in said()


def said() -> str:
    return text_of(client_as(role="viewer").get("/guests/snapshots/"))


def names(client: Client, query: str = "") -> list[str]:
    rest = [row["guest_name"] for row in client.get(f"/api/v1/snapshots/{query}").json()["results"]]
    file = client.get(f"/guests/snapshots/export.csv{query}").getvalue().decode()
    assert [row["guest"] for row in csv.DictReader(io.StringIO(file))] == rest
    return rest


def test_the_number_of_queries_does_not_grow_with_them() -> None:
    host = HostFactory.create()
    for number in range(20):
        image = ImageFactory.create(pool=StoragePoolFactory.create(host=host), snapshots=[header("one", 5)])
        guest = GuestFactory.create(host=host, snapshots=[told("one", 5, f"/srv/{number}.one", external=True)])
        ImageUseFactory.create(image=image, disk__guest=guest)
    with at_most_queries(8):
        assert len(kept()) == 20


@pytest.mark.qemu
@pytest.mark.services
@pytest.mark.usefixtures("quiet", "no_hypervisor")
def test_after_an_analysis_an_images_snapshots_say_what_deleting_them_gives_back(tmp_path: Path) -> None:
    path = create(tmp_path / "disk.qcow2", "32M")
    write_pattern(path, "qcow2", (0, 8, 1))
    subprocess.run(["qemu-img", "snapshot", "-c", "before", path], check=True)
    write_pattern(path, "qcow2", (0, 8, 2))
    scan(this_machine(tmp_path))
    image = image_at(path)
    viewer = client_as(role="viewer")
    assert viewer.get(f"/api/v1/images/{image.pk}/").json()["snapshots"][0]["held_bytes"] is None
    work("analyze", image.pk, mode="sample")
    (row,) = viewer.get(f"/api/v1/images/{image.pk}/").json()["snapshots"]
    created = datetime.fromisoformat(row["created"])
    assert abs(timezone.now() - created) < timedelta(minutes=5)
    assert "as of the last analysis" in viewer.get(f"/images/{image.pk}/").content.decode()
    before = path.stat().st_blocks * 512
    subprocess.run(["qemu-img", "snapshot", "-d", "before", path], check=True)
    freed = before - path.stat().st_blocks * 512
    # QEMU writes tables as a whole then, of which parts were holes.
    assert 8 << 20 <= row["held_bytes"] <= freed + (128 << 10)
    assert freed <= row["held_bytes"]
