"""Who needs an image under its name, in its format or with its content keeps a job from taking that away."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from images.models import Claim, Image
from images.orphans import host_facts
from images.rewrite import neighbours
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan
from tests.agent.harness import leftovers, make_image, qemu_img, reads_as, write
from tests.agent.test_shrink import GPT, disk
from tests.harness.patching import do_before
from tests.images.test_linking import resolve, row
from tests.working import ADMIN, OPERATOR, create, image_at, register, run, said, scan, succeeded, this_machine, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]

TO_RAW: dict[str, Any] = {"format": "raw", "replace": True, "undo_hours": 0}
OTHER_OPTIONS: dict[str, Any] = {"format": "qcow2", "format_options": {"cluster_size": 2 << 20}, "replace": True}


@pytest.fixture
def image(pool: Path) -> Path:
    path = pool / "vm.qcow2"
    make_image(path)
    scan(this_machine(pool))
    return path


@pytest.fixture
def host(image: Path) -> Host:
    return image_at(image).host


def described(path: Path) -> str:
    return "json:" + json.dumps({"driver": "qcow2", "file": {"driver": "file", "filename": str(path)}})


def refused(kind: str, target_id: int, **options: Any) -> list[str]:
    with pytest.raises(RefusedError):
        services.submit(ADMIN, kind, target_id, options)
    return [refusal.code for refusal in services.plan(ADMIN, kind, target_id, options).refusals]


def failed(job: Job, code: str) -> None:
    assert (job.state, job.error_code) == ("failed", code), (job.error_detail, said(job))


def readable(path: Path) -> bool:
    return subprocess.run(["qemu-io", "-r", "-c", "read 0 64k", str(path)], capture_output=True).returncode == 0


@pytest.mark.parametrize("base", ["vm.qcow2", "{folder}/vm.qcow2", "{description}"])
def test_an_overlay_that_came_since_the_scan_keeps_its_bases_name(image: Path, base: str) -> None:
    base = base.format(folder=image.parent, description=described(image))
    top = create(image.with_name("top.qcow2"), base=base)
    failed(work("convert", image_at(image).pk, ADMIN, **TO_RAW), "has_overlays")
    assert readable(top)
    assert not image.with_suffix(".raw").exists()
    assert leftovers(image.parent) == set()


def test_an_overlay_that_a_scan_has_not_seen_goes_on_to_read_what_keeps_its_name(image: Path) -> None:
    top = create(image.with_name("top.qcow2"), base=image.name)
    succeeded(work("convert", image_at(image).pk, ADMIN, **OTHER_OPTIONS))
    assert readable(top)


@pytest.mark.parametrize("named_by", ["pool", "link"])
def test_an_overlay_counts_for_every_row_of_its_bases_file(image: Path, host: Host, named_by: str) -> None:
    link = image.parent.parent / "link"
    link.symlink_to(image.parent)
    create(image.with_name("top.qcow2"), base=str(image.parent.parent / named_by / image.name))
    register(host, link)
    scan(host)
    rows = [image_at(image), image_at(link / image.name)]
    assert [(one.inode, one.nlink, one.overlays_count) for one in rows] == [(rows[0].inode, 1, 1)] * 2
    for one in rows:
        assert refused("convert", one.pk, **TO_RAW) == ["has_overlays"]
        assert services.plan(ADMIN, "convert", one.pk, OTHER_OPTIONS).refusals == ()


def test_a_second_pool_of_the_same_folder_that_was_scanned_before_the_overlay_came(image: Path, host: Host) -> None:
    link = image.parent.parent / "link"
    link.symlink_to(image.parent)
    register(host, link)
    scan(host)
    top = create(image.with_name("top.qcow2"), base=str(image))
    failed(work("convert", image_at(link / image.name).pk, ADMIN, **TO_RAW), "has_overlays")
    assert readable(top)


def test_overlays_are_counted_by_their_files() -> None:
    twins = (row(1, inode="1:1", name="one"), row(2, inode="1:1", name="one"))
    overlays = (row(3, 1, inode="1:3"), row(4, 1, inode="1:3"), row(5, 2, inode="1:5"))
    later = (row(6, inode="1:1", missing=True), row(7, inode="1:1", gone="set_aside"))
    stranger = row(8, inode="1:1", name="of a folder that is gone")
    answers = resolve(*twins, *overlays, *later, stranger)
    assert [answers[number].overlays_count for number in (1, 2, 3, 6, 7, 8)] == [2, 2, 0, 0, 0, 0]


def test_an_overlay_that_describes_its_base_keeps_its_name(image: Path, host: Host) -> None:
    create(image.with_name("top.qcow2"), base=described(image))
    scan(host)
    assert refused("convert", image_at(image).pk, **TO_RAW) == ["has_overlays"]
    assert services.plan(ADMIN, "convert", image_at(image).pk, OTHER_OPTIONS).refusals == ()


@pytest.mark.parametrize(("kind", "code"), [("file", "has_overlays"), ("any", "guests_unknown")])
def test_a_guests_disk_outside_of_every_pool_keeps_its_bases_name(
    image: Path, host: Host, kind: str, code: str
) -> None:
    one = image_at(image)
    key = f"{one.dev}:{one.inode}" if kind == "file" else "/elsewhere/disk"
    queued = services.submit(ADMIN, "convert", one.pk, TO_RAW)
    Claim.objects.create(host=host, kind=kind, key=key, why="/elsewhere/disk, a guest's disk, stands on it.")
    failed(run(queued), code)
    assert image.exists()
    assert refused("convert", one.pk, **TO_RAW) == [code]
    assert services.plan(ADMIN, "convert", one.pk, OTHER_OPTIONS).refusals == ()


def test_what_an_undo_copy_stands_on_keeps_its_name(image: Path, host: Host) -> None:
    top = create(image.with_name("top.qcow2"), base=image.name)
    write(top, 0x31, "0", "1M")
    scan(host)
    job = succeeded(work("flatten", image_at(top).pk, ADMIN, undo_hours=1))
    scan(host)
    assert image_at(image).overlays_count == 0
    plan = services.plan(ADMIN, "convert", image_at(image).pk, TO_RAW)
    assert [refusal.code for refusal in plan.refusals] == ["has_overlays"]
    assert f"job {job.pk} " in plan.refusals[0].detail
    succeeded(run(services.undo(ADMIN, job)))
    assert readable(top)


def test_plans_of_many_images_ask_once_who_needs_them(image: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        create(image.with_name(f"{number}.qcow2"))
    scan(host)
    asked: list[Host] = []
    do_before(monkeypatch, host_facts, "needs", asked.append)
    images = list(Image.objects.select_related("host", "pool"))
    neighbours.share(images)
    assert [(neighbours.of(one).needed_by, neighbours.of(one).needs_unknown) for one in images] == [([], "")] * 4
    assert len(asked) == 1


@pytest.fixture
def written_to(image: Path, host: Host) -> Job:
    """A reclaim whose undo copy waits; a guest has written to the new image, and a scan has seen that."""
    job = succeeded(work("reclaim", image_at(image).pk, ADMIN, undo_hours=1))
    scan(host)
    write(image, 0x77, "0", "1M")
    scan(host)
    return job


@pytest.mark.parametrize("seen", [False, True])
def test_a_forced_undo_leaves_an_overlay_what_it_reads(image: Path, host: Host, written_to: Job, seen: bool) -> None:
    top = create(image.with_name("top.qcow2"), base=image.name)
    qemu_img("convert", "-O", "qcow2", top, image.parent.parent / "read.qcow2")
    if seen:
        scan(host)
        assert refused("undo", written_to.pk, force=True) == ["has_overlays"]
    else:
        failed(run(services.submit(ADMIN, "undo", written_to.pk, {"force": True})), "has_overlays")
    assert reads_as(top, image.parent.parent / "read.qcow2")
    top.unlink()
    scan(host)
    succeeded(run(services.submit(ADMIN, "undo", written_to.pk, {"force": True})))


def test_a_forced_undo_is_kept_from_by_a_guests_disk_elsewhere(image: Path, host: Host, written_to: Job) -> None:
    one = image_at(image)
    queued = services.submit(ADMIN, "undo", written_to.pk, {"force": True})
    Claim.objects.create(host=host, kind="file", key=f"{one.dev}:{one.inode}", why="A guest's disk stands on it.")
    failed(run(queued), "has_overlays")
    assert refused("undo", written_to.pk, force=True) == ["has_overlays"]


def test_an_undo_that_changes_nothing_for_overlays_is_not_kept_from(image: Path, host: Host) -> None:
    job = succeeded(work("reclaim", image_at(image).pk, ADMIN, undo_hours=1))
    scan(host)
    top = create(image.with_name("top.qcow2"), base=image.name)
    scan(host)
    succeeded(run(services.undo(ADMIN, job)))
    assert readable(top)


def undo_plan(job: Job) -> Plan:
    return services.plan(OPERATOR, "undo", job.pk, {})


def test_the_undo_of_a_repair_leaves_an_overlay_what_it_reads(image: Path, host: Host) -> None:
    job = succeeded(work("check", image_at(image).pk, ADMIN, repair="all", undo_hours=1))
    scan(host)
    assert undo_plan(job).refusals == ()
    create(image.with_name("top.qcow2"), base=image.name)
    failed(run(services.undo(ADMIN, job)), "has_overlays")
    scan(host)
    assert [refusal.code for refusal in undo_plan(job).refusals] == ["has_overlays"]


def test_the_undo_of_a_repair_of_leaks_changes_nothing_for_overlays(image: Path, host: Host) -> None:
    job = succeeded(work("check", image_at(image).pk, ADMIN, repair="leaks", undo_hours=1))
    scan(host)
    top = create(image.with_name("top.qcow2"), base=image.name)
    succeeded(run(services.undo(ADMIN, job)))
    assert readable(top)


@pytest.fixture
def parted(pool: Path) -> Path:
    """A scanned disk that ends far behind its last partition."""
    path = disk(pool / "vm.raw", GPT, 64 << 20)
    scan(this_machine(pool))
    StoragePool.objects.update(look_inside=True)
    return path


@pytest.mark.parametrize("kind", ["shrink", "sparsify"])
def test_what_changes_blocks_is_refused_to_a_base_that_overlays_read(parted: Path, kind: str) -> None:
    one = image_at(parted)
    assert services.plan(ADMIN, kind, one.pk, {}).refusals == ()
    queued = services.submit(ADMIN, kind, one.pk, {})
    top = parted.with_name("top.qcow2")
    qemu_img("create", "-q", "-f", "qcow2", "-b", parted.name, "-F", "raw", top)
    qemu_img("convert", "-O", "qcow2", top, parted.parent.parent / "read.qcow2")
    failed(run(queued), "has_overlays")
    scan(one.host)
    assert "has_overlays" in refused(kind, one.pk)
    assert reads_as(top, parted.parent.parent / "read.qcow2")


def test_the_undo_of_a_shrink_leaves_an_overlay_what_it_reads(parted: Path) -> None:
    job = succeeded(work("shrink", image_at(parted).pk, ADMIN, undo_hours=1))
    scan(job.host)
    assert undo_plan(job).refusals == ()
    qemu_img("create", "-q", "-f", "qcow2", "-b", parted.name, "-F", "raw", parted.with_name("top.qcow2"))
    failed(run(services.undo(ADMIN, job)), "has_overlays")
    scan(job.host)
    assert [refusal.code for refusal in undo_plan(job).refusals] == ["has_overlays"]


def test_the_undo_of_a_conversion_leaves_an_overlay_its_base(image: Path, host: Host) -> None:
    job = succeeded(work("convert", image_at(image).pk, ADMIN, format="raw", replace=True, undo_hours=1))
    scan(host)
    new, top = image.with_suffix(".raw"), image.with_name("top.qcow2")
    qemu_img("create", "-q", "-f", "qcow2", "-b", new.name, "-F", "raw", top)
    failed(run(services.undo(ADMIN, job)), "has_overlays")
    assert readable(top)
