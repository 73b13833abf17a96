"""Each code that the database can refuse a rewrite with: a sentence that says what to do, and nothing is touched."""

from pathlib import Path
from typing import Any

import pytest

from images.kinds.reclaim import Reclaim
from images.models import Image
from images.rewrite import refusals
from storage_admin.agent.protocol import REFUSALS
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import GIB, HostFactory, ImageFactory, ImageUseFactory, JobFactory, StoragePoolFactory
from tests.working import OPERATOR, create, digests, image_at, refused_as, run, scan, this_machine

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet", "no_hypervisor")]


def codes(image: Image, **options: Any) -> list[str]:
    """The codes that the plan refuses with; each has a sentence, and a submission says the first of them."""
    options = {"method": "compress"} | options
    predicted = services.plan(OPERATOR, "reclaim", image.pk, options)
    for refusal in predicted.refusals:
        assert refusal.code in REFUSALS
        assert len(refusal.detail) > 20
        assert refusal.detail.rstrip()[-1] in ".)"
    if predicted.refusals:
        assert refused_as(services.submit, OPERATOR, "reclaim", image.pk, options) == predicted.refusals[0].code
        assert not Job.objects.exists()
    return [refusal.code for refusal in predicted.refusals]


def test_a_plain_image_is_not_refused() -> None:
    assert codes(ImageFactory.create()) == []


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ({"in_use": True, "in_use_detail": "behind the loop device loop0"}, "image_in_use"),
        ({"in_use": None}, "guests_unknown"),
        ({"declared_format": "", "declared_by": ""}, "format_undeclared"),
        ({"state": "format_mismatch", "state_detail": "It is declared raw, but looks like qcow2."}, "format_mismatch"),
        ({"snapshots": [{"id": "1", "name": "a", "size": 0, "created": 0}]}, "has_internal_snapshots"),
        ({"encrypted": True}, "encrypted"),
        ({"header": {"data_file": "disk.data"}}, "external_data_file"),
        ({"header": {"dirty": True}}, "dirty_or_corrupt"),
        ({"header": {"corrupt": True}}, "dirty_or_corrupt"),
        ({"state": "unreadable", "state_detail": "The file is cut off."}, "dirty_or_corrupt"),
        ({"state": "unreadable", "format": "qcow", "state_detail": "qcow is not read."}, "unsupported_subformat"),
        ({"nlink": 2}, "hard_linked"),
        ({"header": {"immutable": True}}, "immutable"),
        ({"state": "chain_broken", "state_detail": "Its base base.qcow2 is missing."}, "chain_broken"),
        ({"state": "merged", "state_detail": "Job 7 merged its data into the image below it."}, "merged"),
        ({"state": "chain_cycle", "state_detail": "Its chain comes back to itself."}, "chain_cycle"),
        ({"state": "outside_pool", "state_detail": "Its base lies outside every pool."}, "outside_pool"),
        ({"chain_depth": 65}, "chain_too_deep"),
        ({"state": "missing"}, "stale_plan"),
        ({"declared_format": "vdi", "format": "vdi"}, "unsupported_subformat"),
        ({"declared_format": "raw", "format": "raw"}, "unsupported_subformat"),
    ],
)
def test_what_an_image_is_refused_for(columns: dict[str, Any], code: str) -> None:
    assert codes(ImageFactory.create(**columns)) == [code]


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ({"network": True, "owners_unknown": "Other hosts may use it."}, "shared_pool"),
        ({"kind": "lvm"}, "unsupported_pool"),
        ({"available_bytes": 3 * GIB}, "not_enough_space"),
    ],
)
def test_what_a_pool_is_refused_for(columns: dict[str, Any], code: str) -> None:
    assert codes(ImageFactory.create(pool=StoragePoolFactory.create(**columns))) == [code]


@pytest.mark.parametrize(("capabilities", "code"), [({"proxmox": True}, ["guests_unknown"]), ({}, [])])
def test_proxmox_on_a_network_storage_is_refused_by_the_plan(capabilities: dict[str, Any], code: list[str]) -> None:
    host = HostFactory.create(capabilities={"qemu_img": "7.2.22"} | capabilities)
    image = ImageFactory.create(pool=StoragePoolFactory.create(host=host, network=True, all_hosts_registered=True))
    assert codes(image) == code


@pytest.mark.parametrize(
    ("confinement", "header", "code"),
    [
        (None, {"uid": 1000, "mode": 0o600}, ["not_confined"]),
        (None, {"uid": 0, "mode": 0o666}, ["not_confined"]),
        (None, {"uid": 0, "mode": 0o600}, []),
        ("landlock", {"uid": 1000, "mode": 0o666}, []),
    ],
)
def test_where_tools_cannot_be_confined_an_image_of_others_is_refused_by_the_plan(
    confinement: str | None, header: dict[str, int], code: list[str]
) -> None:
    host = HostFactory.create(capabilities={"qemu_img": "7.2.22", "confinement": confinement})
    assert codes(ImageFactory.create(pool=StoragePoolFactory.create(host=host), header=header)) == code


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ({"status": "unreachable", "status_detail": "No route to host."}, "host_unreachable"),
        ({"capabilities": {"qemu_img": None}}, "tool_missing"),
    ],
)
def test_what_a_host_is_refused_for(columns: dict[str, Any], code: str) -> None:
    assert codes(ImageFactory.create(pool__host=HostFactory.create(**columns))) == [code]


def test_a_declared_network_pool_is_not_refused() -> None:
    pool = StoragePoolFactory.create(network=True, all_hosts_registered=True)
    assert codes(ImageFactory.create(pool=pool)) == []


@pytest.mark.parametrize(("network", "code"), [(True, ["unsupported_pool"]), (False, [])])
def test_holes_in_place_are_for_filesystems_of_one_machine_alone(network: bool, code: list[str]) -> None:
    pool = StoragePoolFactory.create(network=network, all_hosts_registered=True)
    for form in ("qcow2", "raw"):
        assert codes(ImageFactory.create(pool=pool, declared_format=form, format=form), method="in_place") == code


def test_auto_does_not_take_holes_in_place_on_a_network_whatever_speaks_for_them() -> None:
    pool = StoragePoolFactory.create(network=True, all_hosts_registered=True)
    most: dict[str, Any] = {"methods": {"in_place": {"reclaimable_bytes": GIB}, "copy": {"reclaimable_bytes": 0}}}
    raw = ImageFactory.create(pool=pool, declared_format="raw", format="raw", estimate=most)
    assert services.plan(OPERATOR, "reclaim", raw.pk, {"method": "auto"}).method == "copy"
    assert codes(raw, method="auto") == []
    for columns, code in (
        ({"snapshots": [{"id": "1", "name": "a", "size": 0, "created": 0}]}, "has_internal_snapshots"),
        ({"nlink": 2}, "hard_linked"),
    ):
        assert codes(ImageFactory.create(pool=pool, estimate=most, **columns), method="auto") == [code]
    StoragePool.objects.update(available_bytes=3 * GIB)
    assert codes(raw, method="auto") == ["not_enough_space"]


@pytest.mark.parametrize("state", ["running", "paused", "suspended", "unknown"])
def test_a_guest_that_is_not_off_is_named(state: str) -> None:
    image = ImageUseFactory.create(image__in_use=True, disk__guest__name="web", disk__guest__state=state).image
    assert codes(image) == ["guest_running"]
    (refusal,) = services.plan(OPERATOR, "reclaim", image.pk, {}).refusals
    assert "Guest web is" in refusal.detail


def test_a_base_whose_format_nobody_declares_is_not_read() -> None:
    base = ImageFactory.create(declared_format="", declared_by="", name="template")
    overlay = ImageFactory.create(backing=base, backing_format="")
    assert codes(overlay) == ["format_undeclared"]


def test_space_is_counted_with_what_must_stay_free() -> None:
    image = ImageFactory.create(pool__capacity_bytes=100 * GIB, pool__available_bytes=9 * GIB, allocated_size=4 * GIB)
    assert codes(image) == []
    assert refusals.for_space(image.pool, 4 * GIB + 1)[0].code == "not_enough_space"
    small = ImageFactory.create(pool__capacity_bytes=10 * GIB, pool__available_bytes=2 * GIB, allocated_size=1)
    assert codes(small) == ["not_enough_space"]


def test_all_reasons_are_given_the_most_fundamental_first() -> None:
    image = ImageFactory.create(
        pool__host__status="unreachable", pool__host__status_detail="No answer.", in_use=None, encrypted=True, nlink=3
    )
    assert codes(image) == ["host_unreachable", "guests_unknown", "encrypted", "hard_linked"]


def test_an_undo_is_refused_where_it_is_not_known_who_uses_the_image() -> None:
    for in_use, code in ((None, "guests_unknown"), (True, "image_in_use")):
        image = ImageFactory.create(in_use=in_use)
        job = JobFactory.create(kind="reclaim", target=image, state="succeeded", undo_state="available")
        assert refused_as(services.undo, OPERATOR, job) == code


@pytest.mark.parametrize(
    ("columns", "code"), [({"in_use": None}, "guests_unknown"), ({"encrypted": True}, "encrypted")]
)
def test_what_changes_between_plan_and_work_is_refused_before_the_agent_is_asked(
    columns: dict[str, Any], code: str
) -> None:
    image = ImageFactory.create()
    job = services.submit(OPERATOR, "reclaim", image.pk, {})
    Image.objects.filter(pk=image.pk).update(**columns)
    job = run(job)
    assert (job.state, job.error_code) == ("failed", code)


def test_every_sentence_stands_also_for_a_hostile_name() -> None:
    image = ImageFactory.create(declared_format="", name="<script>alert(1)</script>\\x1b")
    assert codes(image) == ["format_undeclared"]


@pytest.mark.qemu
def test_nothing_on_disk_is_changed_by_any_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(tmp_path / "base.qcow2")
    create(tmp_path / "good.qcow2", base="base.qcow2")
    create(tmp_path / "locked.qcow2")
    (tmp_path / "raw.qcow2").write_bytes(b"no qcow2" * 512)
    (tmp_path / "cut.qcow2").write_bytes((tmp_path / "base.qcow2").read_bytes()[:80])
    create(tmp_path / "broken.qcow2", base="base.qcow2")
    (tmp_path / "linked.qcow2").hardlink_to(tmp_path / "locked.qcow2")
    create(tmp_path / "undeclared.disk")
    (tmp_path / "undeclared.disk").rename(tmp_path / "undeclared")
    scan(this_machine(tmp_path))
    before = digests(tmp_path)
    for name, code in (
        ("locked.qcow2", "hard_linked"),
        ("raw.qcow2", "format_mismatch"),
        ("cut.qcow2", "dirty_or_corrupt"),
        ("linked.qcow2", "hard_linked"),
        ("undeclared", "format_undeclared"),
    ):
        image = image_at(tmp_path / name)
        assert refused_as(services.submit, OPERATOR, "reclaim", image.pk, {"method": "compress"}) == code, name
    assert digests(tmp_path) == before


@pytest.mark.qemu
def test_the_reserve_reaches_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(tmp_path / "disk.qcow2")
    scan(this_machine(tmp_path))
    job = services.submit(OPERATOR, "reclaim", image_at(tmp_path / "disk.qcow2").pk, {})
    request = Reclaim().request(job)
    assert request["reserve"] == {"percent": 5.0, "bytes": 2 * GIB}
    monkeypatch.setattr(refusals, "RESERVE_PERCENT", 99.9)
    before = digests(tmp_path)
    job = run(job)
    assert (job.state, job.error_code) == ("failed", "not_enough_space")
    assert digests(tmp_path) == before


@pytest.mark.parametrize(("source", "expected"), [("proxmox", ["immutable"]), ("admin", [])])
def test_a_templates_disk_is_refused_in_storages_of_proxmox_ve(source: str, expected: list[str]) -> None:
    image = ImageFactory.create(name="base-101-disk-0.qcow2", pool=StoragePoolFactory.create(source=source))
    assert codes(image) == expected
    for kind, options in (("check", {}), ("convert", {"format": "raw", "target_name": "copy.raw"})):
        plan = services.plan(OPERATOR, kind, image.pk, options)  # these read it alone
        assert "immutable" not in [one.code for one in plan.refusals]
    repair = services.plan(OPERATOR, "check", image.pk, {"repair": "leaks"})
    assert [one.code for one in repair.refusals] == expected
