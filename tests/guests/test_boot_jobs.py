"""A boot storm from its submission to its figures: the real agent, real guests under TCG, and nothing left of them."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import libvirt
import pytest

from benchmarks import results, services
from benchmarks.models import Benchmark
from storage_admin.accounts.models import Actor
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Recorder
from tests.harness import guests
from tests.harness.filesystems import new_folder
from tests.harness.guests import Disk, LibvirtGuest
from tests.harness.patching import do_before
from tests.working import ADMIN, ON_LIBVIRT, OPERATOR, create, image_at, reread, run, scanned_machine, succeeded

pytestmark = [pytest.mark.guest, pytest.mark.django_db, *ON_LIBVIRT, pytest.mark.usefixtures("no_reserve")]

MIB = 1 << 20


@pytest.fixture
def folder(shared_folder: Path) -> Path:
    """A pool with an image, in a folder that libvirt's user may enter."""
    pool = new_folder(shared_folder / "pool", mode=0o755)
    image = create(pool / "template.qcow2", "16M")
    guests.write_pattern(image, "qcow2", (1, 2, 0x41))
    return pool


@pytest.fixture
def here(folder: Path, libvirtd: str) -> Iterator[StoragePool]:
    """That pool of this machine; no guest of a storm is left after the test."""
    host = scanned_machine(folder)
    yield StoragePool.objects.select_related("host").get(host=host, path=str(folder))
    assert ours(libvirtd) == []


def storm(shared_folder: Path, folder: Path, **options: Any) -> dict[str, Any]:
    """The tests' kernel, with the image as its guests' disk."""
    boot = {
        "image": image_at(folder / "template.qcow2").pk, "kernel": str(guests._kernel()), "guests": [2],
        "initrd": str(guests.initramfs(shared_folder)), "append": guests._command_line(), "pattern": "=up",
        "memory_bytes": 128 * MIB,
    }  # fmt: skip
    return {"repetitions": 1, "seconds": 150, "size_bytes": 16 * MIB, "boot": boot | options}


def submitted(pool: StoragePool, options: dict[str, Any], actor: Actor = ADMIN) -> tuple[Benchmark, Job]:
    benchmark = services.submit(actor, "boot", pool.pk, options)
    assert benchmark.job is not None
    return benchmark, benchmark.job


def state_of(folder: Path) -> dict[str, tuple[str, int, int, int]]:
    """Every file: its content's hash, owner, inode and time of last change."""
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), status.st_uid, status.st_ino, status.st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        for status in [path.stat()]
    }


def ours(uri: str) -> list[str]:
    with contextlib.closing(libvirt.open(uri)) as connection:
        return [domain.name() for domain in connection.listAllDomains() if domain.name().startswith("sa-bench-")]


def test_guests_boot_copies_of_an_image_in_each_layout_and_the_figures_arrive(
    here: StoragePool, folder: Path, shared_folder: Path
) -> None:
    before = state_of(folder)
    benchmark, job = submitted(here, storm(shared_folder, folder))
    job = succeeded(run(job))
    assert state_of(folder) == before
    benchmark.refresh_from_db()
    found = {(row.name, row.metric): row for row in results.of(benchmark)}
    assert set(found) == {
        (f"{layout} guests 2", metric)
        for layout in ("raw", "raw+qcow2", "qcow2+qcow2")
        for metric in ("boot_seconds", "boot_all_seconds")
    }
    for (_, metric), row in found.items():
        assert row.repetitions == (2 if metric == "boot_seconds" else 1)
        assert row.min is not None
        assert row.max is not None
        assert 0.2 < row.min <= row.max < 150
    assert benchmark.caches == "dropped"
    assert benchmark.finished is not None
    assert job.result is not None
    assert job.result["scratch_bytes_at_most"] <= job.plan["scratch_bytes"]


def test_cancelled_in_the_middle_nothing_of_the_guests_is_left(
    here: StoragePool, folder: Path, shared_folder: Path, libvirtd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state_of(folder)
    benchmark, job = submitted(here, storm(shared_folder, folder, pattern="never"))
    seen = []

    def cancel(_: Recorder) -> None:
        if len(ours(libvirtd)) == 2:
            seen.append(job.pk)
            Job.objects.filter(pk=job.pk).update(cancel_requested=True)

    do_before(monkeypatch, Recorder, "tick", cancel)
    job = run(job)
    assert (job.state, job.error_code) == ("cancelled", "")
    assert seen
    assert state_of(folder) == before
    assert reread(benchmark).finished is None


def test_guests_of_an_operators_image_are_up_when_their_agent_answers(
    here: StoragePool, folder: Path, shared_folder: Path
) -> None:
    initrd = str(guests.initramfs(shared_folder, agent=True))
    options = storm(shared_folder, folder, up="agent", initrd=initrd, layouts=["raw+qcow2"])
    benchmark, job = submitted(here, options)
    job = succeeded(run(job))
    assert {row.name for row in results.of(benchmark)} == {"raw+qcow2 guests 2"}


def test_an_image_that_a_guest_has_started_on_since_is_not_read(
    here: StoragePool, folder: Path, tcg_guest: Any
) -> None:
    image = image_at(folder / "template.qcow2")
    _, job = submitted(here, {"boot": {"image": image.pk}}, OPERATOR)
    guest: LibvirtGuest = tcg_guest(Disk(folder / "template.qcow2"))
    job = run(job)
    assert job.state == "failed"
    assert job.error_code in {"image_in_use", "stale_plan"}
    assert guest.domain.isActive()
    assert [path.name for path in folder.iterdir()] == ["template.qcow2"]


def test_a_guest_whose_disk_does_not_boot_fails_the_run_and_says_what_it_showed(
    here: StoragePool, folder: Path
) -> None:
    image = image_at(folder / "template.qcow2").pk
    boot = {"image": image, "guests": [1], "layouts": ["raw"], "memory_bytes": 64 * MIB}
    _, job = submitted(here, {"seconds": 4, "repetitions": 1, "boot": boot}, OPERATOR)
    job = run(job)
    assert job.state == "failed"
    assert "1 of 1 guests did not show 'login:'" in job.error_detail
    assert sorted(path.name for path in folder.iterdir()) == ["template.qcow2"]
