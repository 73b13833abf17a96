"""A job makes a new image in a pool: what its plan says comes true, and what cannot be is refused before anything."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from images.models import Image
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import ImageFactory, ImageUseFactory, StoragePoolFactory
from tests.images.scanned import folder, pool
from tests.working import OPERATOR, client_as, image_at, info, invalid_fields, refused_as, run, scan, succeeded, work

__all__ = ["folder", "pool"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]
MIB, GIB = 1 << 20, 1 << 30


def based_on(folder: Path, name: str = "base.qcow2") -> Image:
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", folder / name, "64M"], check=True)
    subprocess.run(["qemu-io", "-f", "qcow2", "-c", "write -q -P 7 1M 3M", folder / name], check=True)
    scan(Host.objects.get())
    return image_at(folder / name)


@pytest.mark.parametrize(
    ("form", "options", "exact"),
    [
        ("qcow2", {}, True),
        ("qcow2", {"cluster_size": "2M"}, True),
        ("qcow2", {"cluster_size": "512"}, True),
        ("qcow2", {"extended_l2": True, "cluster_size": "128k"}, True),
        ("qcow2", {"preallocation": "metadata"}, True),
        ("qcow2", {"preallocation": "metadata", "cluster_size": "2k"}, False),
        ("qcow2", {"preallocation": "falloc"}, False),
        ("qcow2", {"preallocation": "full", "cluster_size": "4k"}, False),
        ("raw", {}, False),
        ("raw", {"preallocation": "full"}, False),
        ("vmdk", {}, True),
        ("vdi", {}, True),
        ("vhdx", {}, False),
        ("vpc", {}, True),
        ("vpc", {"subformat": "fixed"}, False),
    ],
)
def test_a_new_image_takes_what_its_plan_says(
    pool: StoragePool, folder: Path, form: str, options: dict[str, Any], exact: bool
) -> None:
    given = {"name": f"new.{form}", "format": form, "format_options": options, "virtual_size": 256 * MIB}
    job = succeeded(work("create", pool.pk, OPERATOR, **given))
    taken = (folder / f"new.{form}").stat().st_blocks * 512
    assert (job.result or {})["after_bytes"] == taken == -(job.freed_bytes or 0)
    assert job.plan["predicted_low"] <= taken <= job.plan["predicted_high"]
    if exact:
        assert job.plan["predicted_after_bytes"] == taken
    run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
    image = image_at(folder / f"new.{form}")
    assert (image.virtual_size, image.allocated_size, image.format) == (256 * MIB, taken, form)


def test_an_overlay_has_the_size_of_its_base_and_is_listed_above_it(pool: StoragePool, folder: Path) -> None:
    base = based_on(folder)
    job = succeeded(work("create", pool.pk, OPERATOR, name="over.qcow2", base=base.pk))
    assert (job.result or {})["virtual_size"] == 64 * MIB
    run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
    over = image_at(folder / "over.qcow2")
    assert (over.backing, over.chain_depth) == (base, 2)
    assert info(folder / "over.qcow2")["backing-filename"] == "base.qcow2"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"virtual_size": GIB}, "name"),
        ({"name": "new.qcow2"}, "virtual_size"),
        ({"name": "new.qcow2", "virtual_size": 1000}, "virtual_size"),
        ({"name": "new.qcow2", "virtual_size": 0}, "virtual_size"),
        ({"name": "new.raw", "virtual_size": GIB}, "name"),
        ({"name": ".new.qcow2", "virtual_size": GIB}, "name"),
        ({"name": "../new.qcow2", "virtual_size": GIB}, "name"),
        ({"name": "a/new.qcow2", "virtual_size": GIB}, "name"),
        ({"name": ".sa-j1.new", "virtual_size": GIB}, "name"),
        ({"name": "new\n.qcow2", "virtual_size": GIB}, "name"),
        ({"name": "new.qcow2", "virtual_size": GIB, "format_options": {"cluster_size": "3k"}}, "cluster_size"),
        ({"name": "new.qcow2", "virtual_size": GIB, "format_options": {"encrypt.format": "luks"}}, "encrypt.format"),
        (
            {"name": "new.vmdk", "format": "vmdk", "virtual_size": GIB, "format_options": {"subformat": "x"}},
            "subformat",
        ),
        ({"name": "new.qcow2", "base": 0}, "base"),
        ({"name": "new.raw", "format": "raw", "base": 1}, "format"),
        ({"name": "new.qcow2", "base": 1, "format_options": {"preallocation": "full"}}, "preallocation"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, Any], field: str) -> None:
    assert field in invalid_fields(services.plan, OPERATOR, "create", StoragePoolFactory.create().pk, options)


def test_a_base_of_another_host_is_none(pool: StoragePool, folder: Path) -> None:
    other = ImageFactory.create()
    assert "base" in invalid_fields(
        services.plan, OPERATOR, "create", pool.pk, {"name": "over.qcow2", "base": other.pk}
    )


def codes(pool: StoragePool, **options: Any) -> set[str]:
    return {one.code for one in services.plan(OPERATOR, "create", pool.pk, options).refusals}


def test_a_name_that_is_listed_is_taken_and_so_is_one_that_came_since(pool: StoragePool, folder: Path) -> None:
    based_on(folder)
    assert codes(pool, name="base.qcow2", virtual_size=GIB) == {"target_exists"}
    job = services.submit(OPERATOR, "create", pool.pk, {"name": "new.qcow2", "virtual_size": GIB})
    (folder / "new.qcow2").write_bytes(b"mine")
    assert run(job).error_code == "target_exists"
    assert (folder / "new.qcow2").read_bytes() == b"mine"


@pytest.mark.parametrize(
    "options",
    [
        {"compat": "0.10"},
        {"lazy_refcounts": "on", "refcount_bits": "32"},
        {"extended_l2": "on", "compression_type": "zstd", "cluster_size": "256k"},
    ],
)
def test_what_the_header_says_is_told_over_rest_and_on_the_page(
    pool: StoragePool, folder: Path, options: dict[str, str]
) -> None:
    path = folder / "new.qcow2"
    work("create", pool.pk, OPERATOR, name="new.qcow2", virtual_size=GIB, format_options=options)
    if "compat" not in options:
        for words in (("daily",), ("-g", "1M", "--disable", "weekly")):
            subprocess.run(["qemu-img", "bitmap", "--add", *words[:-1], path, words[-1]], check=True)
    scan(pool.host)
    browser, said = client_as(role="viewer"), info(path)["format-specific"]["data"]
    image = image_at(path)
    header = browser.get(f"/api/v1/images/{image.pk}/").json()["header"]
    for name in ("compat", "refcount_bits", "lazy_refcounts", "extended_l2", "corrupt"):
        assert header[name] == said.get(name.replace("_", "-"), header[name]), name
    assert [(one["name"], one["granularity"], one["enabled"]) for one in header["bitmaps"]] == [
        (one["name"], one["granularity"], "auto" in one["flags"]) for one in said.get("bitmaps", [])
    ]
    page = browser.get(f"/images/{image.pk}/").content.decode()
    assert all(one["name"] in page for one in header["bitmaps"])


def test_two_jobs_do_not_make_one_file(pool: StoragePool) -> None:
    services.submit(OPERATOR, "create", pool.pk, {"name": "new.qcow2", "virtual_size": GIB})
    given = {"name": "new.qcow2", "virtual_size": 2 * GIB}
    assert refused_as(services.submit, OPERATOR, "create", pool.pk, given) == "busy"


def test_a_base_whose_guest_runs_is_refused_and_one_whose_guest_is_off_is_warned_of(
    pool: StoragePool, folder: Path
) -> None:
    base = based_on(folder)
    guest = ImageUseFactory.create(image=base, disk__guest__state="running").disk.guest
    assert codes(pool, name="over.qcow2", base=base.pk) == {"guest_running"}
    guest.state = "shut off"
    guest.save()
    plan = services.plan(OPERATOR, "create", pool.pk, {"name": "over.qcow2", "base": base.pk})
    assert not plan.refusals
    assert any(guest.name in warning for warning in plan.warnings)


def test_an_overlay_is_not_smaller_than_its_base(pool: StoragePool, folder: Path) -> None:
    base = based_on(folder)
    assert codes(pool, name="over.qcow2", base=base.pk, virtual_size=MIB) == {"invalid"}


def test_what_is_preallocated_needs_its_room_and_what_is_not_is_warned_of(pool: StoragePool) -> None:
    large = (pool.capacity_bytes or 0) // MIB * MIB + GIB
    full = {"name": "new.raw", "format": "raw", "format_options": {"preallocation": "full"}}
    assert codes(pool, **full, virtual_size=large) == {"not_enough_space"}
    plan = services.plan(OPERATOR, "create", pool.pk, {"name": "new.qcow2", "virtual_size": large})
    assert not plan.refusals
    assert len(plan.warnings) == 1


def test_a_pool_whose_images_are_no_files_takes_none(pool: StoragePool) -> None:
    StoragePool.objects.update(kind=StoragePool.Kind.LVM)
    assert "unsupported_pool" in codes(pool, name="new.qcow2", virtual_size=GIB)


def test_a_format_that_lacks_the_options_that_the_form_begins_with_is_planned_without_them(pool: StoragePool) -> None:
    given = {"name": "new.raw", "format": "raw", "size_gib": "1", "cluster_size": "64K", "preallocation": "falloc"}
    context = client_as(role="operator").get(f"/pools/{pool.pk}/create/", given).context
    assert (context["error"], context["plan"].options["format_options"]) == (None, {"preallocation": "falloc"})


def test_a_base_on_a_storage_that_does_not_answer_is_refused(pool: StoragePool, folder: Path) -> None:
    base = based_on(folder)
    StoragePool.objects.filter(pk=base.pool_id).update(state=StoragePool.SILENT)
    assert "pool_silent" in codes(pool, name="over.qcow2", base=base.pk)


@pytest.mark.parametrize(("form", "field"), [("create", "name"), ("upload", "file"), ("unpack", "source")])
def test_a_form_that_is_sent_empty_names_the_field_that_is_missing(pool: StoragePool, form: str, field: str) -> None:
    shown = client_as().post(f"/pools/{pool.pk}/{form}/", {"show": "1"})
    assert field in shown.context["error"].fields
