"""Every way to rewrite an image as a job: its plan, what is then on the disk, and what ``auto`` chooses."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from images.kinds.reclaim import chosen_method
from images.models import Image
from images.scan.run import ScanRun
from storage_admin.accounts.models import ForbiddenError
from storage_admin.errors import InvalidError
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.agent.harness import make_image, qemu_img, same_content, write
from tests.agent.test_check import break_entry, leak
from tests.harness.patching import do_before
from tests.working import (
    ADMIN,
    OPERATOR,
    against,
    create,
    digests,
    image_at,
    refused_as,
    register,
    run,
    scan,
    succeeded,
    this_machine,
    work,
)

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


@pytest.fixture
def pool(pool: Path) -> Path:
    """base ← middle ← top, scanned; copies stand beside the pool."""
    for name, below in (("base.qcow2", None), ("middle.qcow2", "base.qcow2"), ("top.qcow2", "middle.qcow2")):
        create(pool / name, "8M", base=below)
        write(pool / name, 0x40 + len(name), f"{len(name) - 9}M", "2M")
    shutil.copytree(pool, pool.parent / "before")
    scan(this_machine(pool))
    return pool


def before(path: Path) -> Path:
    return path.parent.parent / "before" / path.name


def done(kind: str, path: Path, **options: Any) -> Job:
    return succeeded(work(kind, image_at(path).pk, ADMIN, **options))


def rescanned(path: Path) -> Image:
    """The image after the scan that a job asks for."""
    run(Job.objects.get(kind="scan", state="queued"))
    return image_at(path)


def test_a_chain_is_flattened_and_comes_back(pool: Path) -> None:
    top = pool / "top.qcow2"
    plan = services.plan(OPERATOR, "flatten", image_at(top).pk, {})
    assert plan.refusals == ()
    assert plan.method == "rebase"
    assert [thing.name for thing in plan.affected_images] == ["top.qcow2", "middle.qcow2", "base.qcow2"]
    assert any("rebase" in command for command in plan.commands)
    job = done("flatten", top)
    image = rescanned(top)
    assert (image.chain_depth, image.backing_id, image.backing_file) == (1, None, "")
    assert same_content(top, before(top))
    assert run(services.undo(OPERATOR, job)).state == "succeeded"
    assert rescanned(top).chain_depth == 3
    assert same_content(top, before(top))


def test_others_count_with_the_space_that_the_agent_measured_and_not_with_less_that_the_plan_knew(pool: Path) -> None:
    for name, below in (("base.qcow2", None), ("middle.qcow2", "base.qcow2")):
        write(pool / name, 0x44, "0", "7M")  # compresses to nearly nothing
        based = ["-B", below, "-F", "qcow2"] if below else []
        small = pool / "small.qcow2"
        qemu_img("convert", "-c", "-f", "qcow2", "-O", "qcow2", *based, pool / name, small)
        small.replace(pool / name)
    scan(image_at(pool / "top.qcow2").host)
    planned = services.plan(OPERATOR, "flatten", image_at(pool / "top.qcow2").pk, {}).scratch_bytes
    job = done("flatten", pool / "top.qcow2")
    assert planned is not None
    assert job.after_bytes is not None
    assert planned < job.after_bytes <= job.plan["scratch_bytes"]


def test_a_chain_is_flattened_down_to_an_image_in_the_middle(pool: Path) -> None:
    top, base = pool / "top.qcow2", image_at(pool / "base.qcow2")
    done("flatten", top, down_to=base.pk)
    image = rescanned(top)
    assert (image.chain_depth, image.backing_id) == (2, base.pk)
    assert same_content(top, before(top))


def test_a_plan_says_who_else_needs_what_moves_up(pool: Path) -> None:
    create(pool / "other.qcow2", base="middle.qcow2")
    scan(image_at(pool / "top.qcow2").host)
    plan = services.plan(OPERATOR, "flatten", image_at(pool / "top.qcow2").pk, {})
    told = {thing.name: thing.how for thing in plan.affected_images}
    assert "still used by 1 other overlay" in told["middle.qcow2"]
    assert "used by 1 other overlay" in told["base.qcow2"]  # by middle.qcow2, which other.qcow2 stands on


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("base.qcow2", {}, "stale_plan"),
        ("top.qcow2", {"down_to": 987654}, "stale_plan"),
        ("top.qcow2", {"down_to": "middle.qcow2"}, "stale_plan"),
        ("top.qcow2", {"down_to": "base.qcow2", "method": "convert"}, "stale_plan"),
    ],
)
def test_what_cannot_be_flattened_is_refused(pool: Path, name: str, options: dict[str, Any], code: str) -> None:
    if isinstance(options.get("down_to"), str):
        options = options | {"down_to": image_at(pool / options["down_to"]).pk}
    assert refused_as(services.submit, OPERATOR, "flatten", image_at(pool / name).pk, options) == code


def test_a_check_tells_leaks_and_a_repair_takes_them_away(pool: Path) -> None:
    base = pool / "base.qcow2"
    leak(base)
    scan(image_at(base).host)
    assert (done("check", base).result or {})["found"] == {"corruptions": 0, "leaks": 3, "errors": 0}
    rescanned(base)
    job = done("check", base, repair="leaks")
    assert (job.result or {})["swapped"]
    assert b"No errors were found" in qemu_img("check", base)
    assert same_content(base, before(base))
    assert same_content(pool / "top.qcow2", before(pool / "top.qcow2"))


def test_errors_are_repaired_by_an_admin_alone(pool: Path) -> None:
    base = pool / "base.qcow2"
    break_entry(base)
    scan(image_at(base).host)
    with pytest.raises(ForbiddenError):
        services.submit(OPERATOR, "check", image_at(base).pk, {"repair": "all"})
    assert (done("check", base, repair="all").result or {})["found"]["corruptions"] > 0
    assert b"No errors were found" in qemu_img("check", base)


@pytest.mark.parametrize("method", ["compress", "copy", "in_place"])
def test_each_method_wins_what_the_disk_says(tmp_path: Path, method: str) -> None:
    folder = tmp_path / "pool"
    folder.mkdir()
    path = Path(os.fsdecode(make_image(folder / "disk.qcow2")))
    subprocess.run(["cp", "--sparse=always", path, tmp_path / "copy.qcow2"], check=True)
    scan(this_machine(folder))
    size = path.stat().st_blocks * 512
    job = done("reclaim", path, method=method, undo_hours=0)
    result = job.result or {}
    after = path.stat().st_blocks * 512
    assert (result["method"], result["before_bytes"], result["after_bytes"]) == (method, size, after)
    assert result["freed_bytes"] == size - after > (1 << 20)
    assert same_content(path, tmp_path / "copy.qcow2")
    assert rescanned(path).allocated_size == after


def test_a_raw_image_and_one_with_snapshots_are_reclaimed_in_place(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    folder.mkdir()
    (folder / "disk.raw").write_bytes(b"x" * 65536 + bytes(4 << 20))
    make_image(folder / "snap.qcow2")
    qemu_img("snapshot", "-c", "s", folder / "snap.qcow2")
    scan(this_machine(folder))
    for name in ("disk.raw", "snap.qcow2"):
        image = image_at(folder / name)
        plan = services.plan(OPERATOR, "reclaim", image.pk, {})
        assert (plan.method, plan.refusals, plan.scratch_bytes, plan.undo_bytes) == ("in_place", (), 0, 0)
        job = done("reclaim", folder / name)
        assert (job.result or {})["freed_bytes"] > (1 << 20)
        assert job.undo_state == "none"


def test_auto_takes_what_fits_into_a_full_pool(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = image_at(pool / "base.qcow2")
    assert chosen_method(image, {"method": "auto"})[0] == "compress"
    image.pool.available_bytes = 4096
    image.pool.save()
    method, why = chosen_method(image_at(pool / "base.qcow2"), {"method": "auto"})
    assert method == "in_place"
    assert "does not fit" in why
    assert services.plan(OPERATOR, "reclaim", image.pk, {}).refusals == ()
    assert against("reclaim", image, method="copy") == ["not_enough_space"]


def test_a_scan_that_began_before_a_rewrite_does_not_bring_the_old_numbers_back(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(os.fsdecode(make_image(pool / "disk.qcow2")))
    host = image_at(pool / "top.qcow2").host
    scan(host)
    write(path, 0x33, "7M", "64k")  # so that the scan reads it again
    scan(host)
    write(path, 0x34, "7M", "64k")
    jobs: list[Job] = []

    def rewrite_first(_: ScanRun) -> None:
        if not jobs:
            Image.objects.filter(pk=image_at(path).pk).update(file_size=path.stat().st_size)
            row, now = image_at(path), path.stat()
            row.mtime_ns, row.ctime_ns, row.file_size = now.st_mtime_ns, now.st_ctime_ns, now.st_size
            row.save()
            jobs.append(succeeded(work("reclaim", row.pk, OPERATOR, method="compress")))

    do_before(monkeypatch, ScanRun, "finish", rewrite_first)
    scan(host)
    assert jobs
    image = image_at(path)
    assert (image.allocated_size, image.inode) == (path.stat().st_blocks * 512, str(path.stat().st_ino))


@pytest.mark.parametrize(("form", "name"), [("raw", "top.raw"), ("vpc", "top.vhd"), ("vmdk", "top.vmdk")])
def test_an_image_is_converted_beside_itself_and_listed(pool: Path, form: str, name: str) -> None:
    top = pool / "top.qcow2"
    before_all = digests(pool)
    job = done("convert", top, format=form)
    assert (job.result or {})["path"] == str(pool / name)
    new = rescanned(pool / name)
    assert (new.declared_format, new.chain_depth, new.state) == (form, 1, "ok")
    assert new.virtual_size == image_at(top).virtual_size
    compare = ["qemu-img", "compare", "-f", "qcow2", "-F", form, str(top), str(pool / name)]
    assert subprocess.run(compare, capture_output=True).returncode == 0
    assert {path: digest for path, digest in digests(pool).items() if path != name} == before_all


def test_an_image_is_converted_into_another_pool(pool: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    target = register(image_at(pool / "top.qcow2").host, other)
    options = {"format": "qcow2", "target_pool": target.pk, "target_name": "copy of it.qcow2"}
    done("convert", pool / "top.qcow2", **options, format_options={"cluster_size": "2M", "lazy_refcounts": True})
    image = rescanned(other / "copy of it.qcow2")
    assert (image.cluster_size, image.from_header("lazy_refcounts")) == (2 << 20, True)


@pytest.mark.parametrize("name", ["base.qcow2", "middle.qcow2"])
def test_a_conversion_that_would_take_a_name_is_refused(pool: Path, name: str) -> None:
    top, options = image_at(pool / "top.qcow2"), {"format": "qcow2", "target_name": name}
    assert refused_as(services.submit, OPERATOR, "convert", top.pk, options) == "target_exists"


@pytest.mark.parametrize(
    "options",
    [
        {"format": "exe"},
        {"format": "raw", "format_options": {"cluster_size": "64k"}},
        {"format": "vmdk", "format_options": {"subformat": "twoGbMaxExtentFlat"}},
        {"format": "raw", "target_name": "../x"},
        {"format": "raw", "target_name": ".sa-x.new"},
        {"format": "raw", "target_name": "x" * 256},
        {"format": "raw", "target_pool": 987654},
    ],
)
def test_a_conversion_that_makes_no_sense_is_bad_input(pool: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidError):
        services.submit(OPERATOR, "convert", image_at(pool / "top.qcow2").pk, options)


def test_two_conversions_to_one_name_do_not_run_at_once(pool: Path) -> None:
    top, base = image_at(pool / "top.qcow2"), image_at(pool / "base.qcow2")
    for name in ("x.raw", "y.raw"):
        services.submit(OPERATOR, "convert", top.pk, {"format": "raw", "target_name": name})
    taken = {"format": "raw", "target_name": "x.raw"}
    assert refused_as(services.submit, OPERATOR, "convert", base.pk, taken) == "busy"
