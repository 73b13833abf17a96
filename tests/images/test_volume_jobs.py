"""What may be done with volumes: their pages offer what their pools can do, plans refuse the rest."""

from typing import Any

import pytest
from django.urls import reverse

from images.models import Image
from images.rewrite import guest_locks, volumes
from storage_admin.accounts.models import Role
from storage_admin.agent.protocol import b64
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.proxmox.volumes import own_id
from storage_admin.jobs import services
from storage_admin.jobs.plan_and_progress import Plan
from tests.factories import GuestFactory, HostFactory, ImageFactory, ImageUseFactory, StoragePoolFactory
from tests.working import ADMIN, OPERATOR, client_as

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

MIB = 1 << 20
IDS = {"volume": {"group": "vg", "group_id": "g", "name": "vm-100-disk-0", "id": "v", "alias": ""}}


def volume(kind: str, host: Host | None = None, **columns: Any) -> Image:
    host = host or HostFactory.create()
    pool = StoragePoolFactory.create(host=host, kind=kind, path=f"{kind} vms", path_bytes=b"", source="proxmox")
    usual = {"lvmthin": "/dev/vg/vm-100-disk-0", "lvm": "/dev/vg/thick", "rbd": "rbd:vms/vm-100-disk-0"}
    path = usual.get(kind, "/dev/zvol/tank/disk")
    known = {"header": IDS} if kind.startswith("lvm") else {}
    columns = {"virtual_size": 64 * MIB, "allocated_size": 32 * MIB, "in_use": None} | known | columns
    return ImageFactory.create(
        host=host, pool=pool, path=path, path_bytes=path.encode(), name=path.rpartition("/")[2],
        declared_format="", format="raw", **columns,
    )  # fmt: skip


def plan(kind: str, image: Image, **options: Any) -> Plan:
    return services.plan(OPERATOR, kind, image.pk, options)


def codes(kind: str, image: Image, **options: Any) -> list[str]:
    return [one.code for one in plan(kind, image, **options).refusals]


@pytest.mark.parametrize(
    ("kind", "offered"),
    [("lvm", set()), ("lvmthin", {"reclaim", "analyze"}), ("rbd", {"reclaim", "flatten"}), ("zfs", {"flatten"})],
)
def test_a_volumes_page_has_the_jobs_that_its_pool_can_do_and_no_others(kind: str, offered: set[str]) -> None:
    image = volume(kind)
    page = client_as(role=Role.ADMIN.label.lower()).get(reverse("image", args=[image.pk]))
    assert {action.kind.name for action in page.context["actions"]} == offered
    Image.objects.filter(pk=image.pk).update(orphan=True)
    page = client_as(role=Role.ADMIN.label.lower()).get(reverse("image", args=[image.pk]))
    assert {action.kind.name for action in page.context["actions"]} == offered | {"set_aside"}


def test_a_move_is_offered_where_there_is_a_pool_to_move_to_and_proxmox_does_not_move_it_itself() -> None:
    def offered(image: Image) -> bool:
        page = client_as(role=Role.OPERATOR.label.lower()).get(reverse("image", args=[image.pk]))
        return "move" in {action.kind.name for action in page.context["actions"]}

    image = ImageFactory.create()
    assert not offered(image)
    group = StoragePoolFactory.create(host=image.host, kind="lvm", path="/dev/vg", path_bytes=b"")
    one = ImageFactory.create(host=image.host, pool=group, header=IDS)
    assert (offered(image), offered(one)) == (True, True)
    Host.objects.filter(pk=image.host_id).update(kind="proxmox")
    assert (offered(image), offered(one)) == (False, False)


@pytest.mark.parametrize("kind", ["lvmthin", "rbd"])
def test_zeros_of_a_volume_can_be_reclaimed_also_where_nobody_knows_who_uses_it(kind: str) -> None:
    image = volume(kind)
    assert codes("reclaim", image) == []
    assert codes("reclaim", image, method="compress") == ["unsupported_subformat"]
    assert plan("reclaim", image).undo_bytes == 0
    Image.objects.filter(pk=image.pk).update(in_use=True)
    assert codes("reclaim", image) == ["image_in_use"]


@pytest.mark.parametrize(
    ("kind", "job"), [("lvm", "reclaim"), ("zfs", "reclaim"), ("lvm", "flatten"), ("lvmthin", "flatten")]
)
def test_what_a_pool_cannot_do_is_refused(kind: str, job: str) -> None:
    assert codes(job, volume(kind)) == ["unsupported_pool"]


@pytest.mark.parametrize(
    ("theirs", "refused"),
    [("lvm g/pool", ["shared_pool"]), ("lvm g", ["shared_pool"]), ("lvm g/other", ["shared_pool"]), ("lvm g2", []),
     ("lvm g2/pool", []), ("rbd g/pool", [])],
)  # fmt: skip
@pytest.mark.parametrize("ours", [("lvmthin", "lvm g/pool"), ("lvm", "lvm g")])
def test_a_group_that_another_host_sees_is_left_alone_whatever_it_knows_of_it(
    ours: tuple[str, str], theirs: str, refused: list[str]
) -> None:
    """It may have been looked at there before its thin pool was made."""
    image = volume(ours[0])
    StoragePool.objects.update(shared_key=ours[1])
    StoragePoolFactory.create(host=HostFactory.create(slug="other"), shared_key=theirs)
    assert [one.code for one in volumes.seen_elsewhere(Image.objects.get(pk=image.pk))] == refused


def test_a_plan_never_promises_what_snapshots_hold() -> None:
    predicted = {"predicted_after_bytes": 10 * MIB, "predicted_low": 8 * MIB, "predicted_high": 12 * MIB}
    estimate = {"allocated_size": 30 * MIB, "methods": {"in_place": predicted}}
    image = volume("lvmthin", estimate=estimate)
    told = plan("reclaim", image)
    assert (told.predicted_low, told.predicted_high, told.won_bytes) == (8 * MIB, 12 * MIB, 20 * MIB)
    Image.objects.filter(pk=image.pk).update(alone_bytes=5 * MIB)
    assert plan("reclaim", image).won_bytes == 5 * MIB


def test_what_flattening_a_clone_of_ceph_takes_is_between_what_it_has_and_what_its_parent_has() -> None:
    image = volume("rbd", allocated_size=16 * MIB)
    base = ImageFactory.create(
        host=image.host, pool=image.pool, path="rbd:vms/base", path_bytes=b"rbd:vms/base", name="base",
        allocated_size=0, snapshot_bytes=32 * MIB, virtual_size=64 * MIB,
    )  # fmt: skip
    assert codes("flatten", image) == ["stale_plan"]
    Image.objects.filter(pk=image.pk).update(backing=base)
    told = plan("flatten", image)
    assert (told.refusals, told.predicted_low, told.predicted_high) == ((), 32 * MIB, 48 * MIB)
    assert told.predicted_after_bytes == 40 * MIB
    assert codes("flatten", image, method="convert") == ["unsupported_subformat"]


@pytest.mark.parametrize(
    ("kind", "needed", "refused"), [(Guest.Kind.VM, True, []), (Guest.Kind.CONTAINER, True, ["guests_unknown"])]
)
def test_guests_of_proxmox_ve_are_locked_while_their_volume_has_another_name(
    kind: Guest.Kind, needed: bool, refused: list[str]
) -> None:
    host = HostFactory.create(kind="ssh", capabilities={"proxmox": True}, transport=Host.Transport.SSH)
    image = volume("lvmthin", host)
    assert not guest_locks.are_needed(image)
    guest = GuestFactory.create(host=host, kind=kind, uid="100", state="stopped")
    ImageUseFactory.create(image=image, disk__guest=guest)
    image = Image.objects.get(pk=image.pk)
    assert guest_locks.are_needed(image) is needed
    assert codes("reclaim", image) == refused
    Host.objects.filter(pk=host.pk).update(transport=Host.Transport.FORCED)
    assert codes("reclaim", image) == ["guests_unknown"]


@pytest.mark.parametrize(
    ("linked", "flat"),
    [("ceph:base-101-disk-0/vm-102-disk-0", "ceph:vm-102-disk-0"), ("ceph:vm-102-disk-0", "ceph:vm-102-disk-0"),
     ("local:101/base-101-disk-0.qcow2/102/vm-102-disk-0.qcow2", "local:102/vm-102-disk-0.qcow2")],
)  # fmt: skip
def test_a_linked_clone_has_an_id_of_its_own_once_it_is_flat(linked: str, flat: str) -> None:
    assert own_id(linked) == flat


def test_a_device_is_a_volume_of_its_pool_alone() -> None:
    assert services.plan(ADMIN, "flatten", volume("zfs").pk, {}).refusals[0].code == "stale_plan"


@pytest.mark.parametrize(
    ("kind", "job"), [("lvmthin", "reclaim"), ("rbd", "reclaim"), ("rbd", "flatten"), ("zfs", "flatten")]
)
def test_the_page_of_a_volumes_job_asks_for_nothing_that_only_files_have(kind: str, job: str) -> None:
    page = client_as(role="operator").get(reverse(job, args=[volume(kind).pk]))
    assert {field.name for field in page.context["fields"]} == {"idle_io", "start_after"}
    assert (page.context["has_undo"], page.context["replaces"]) == (False, False)


def test_an_image_of_ceph_is_told_by_its_id_where_a_scan_has_told_that() -> None:
    ids = {"backend": "rbd", "group": "vms", "group_id": "f", "name": "vm-100-disk-0", "id": "1a"}
    one = volume("rbd", header={"volume": ids})
    assert volumes.place(one) == {
        "pool": "vms", "name_b64": b64(b"vm-100-disk-0"), "size": 64 * MIB, "id": "1a"
    }  # fmt: skip
    one.header = {}
    assert volumes.place(one)["id"] == ""


def test_a_thin_volume_that_reads_from_a_volume_outside_of_its_pool_gives_no_zeros_back() -> None:
    image = volume("lvmthin")
    group = StoragePoolFactory.create(host=image.host, kind="lvm", path="/dev/vg", path_bytes=b"", source="proxmox")
    base = ImageFactory.create(host=image.host, pool=group, path="/dev/vg/base", path_bytes=b"/dev/vg/base")
    Image.objects.filter(pk=image.pk).update(backing=base)
    assert codes("reclaim", Image.objects.get(pk=image.pk)) == ["unsupported_pool"]
    Image.objects.filter(pk=base.pk).update(pool=image.pool)
    assert codes("reclaim", Image.objects.get(pk=image.pk)) == []
