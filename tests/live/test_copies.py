"""Disks copied under guests that write all the time, to another pool and format, and the way back."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from images.live import follow
from images.live.follow import Follower
from images.rewrite import refusals
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt.block_jobs import Ended
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.agent.harness import overwrite
from tests.harness import libvirtd as daemons
from tests.harness.filesystems import loop_filesystem, new_folder
from tests.harness.guests import Disk, LibvirtGuest, Starts, write_pattern
from tests.live.chains import PATTERNS, at_stage, chain_of, definition_of, done, patterns, submit, whole
from tests.live.conftest import OnChain, scanned
from tests.live.writer import acknowledged, begin, check, wait_for_writes, writing
from tests.working import ON_LIBVIRT, OPERATOR, against, client_as, create, register, run, said, scan, work

pytestmark = [pytest.mark.guest, pytest.mark.django_db, *ON_LIBVIRT]
AS_BEFORE = ["top.qcow2", "middle.qcow2", "base.qcow2"]


def pool_at(folder: Path) -> int:
    return StoragePool.objects.get(path_bytes=bytes(folder)).pk


def test_a_disk_is_moved_to_another_pool_and_format_under_a_guest_that_writes_and_switched_back(
    on_chain: OnChain, chain: list[Path]
) -> None:
    guest, row, folder = on_chain
    other = new_folder(folder / "other")
    register(row.host, other)
    scan(row.host)
    with writing(guest):
        wait_for_writes(guest, 2)
        copied: list[int] = []
        with at_stage("ready", lambda: copied.append(acknowledged(guest))):
            job = done(submit("live_copy", row, target_pool=pool_at(other), format="raw"))
        wait_for_writes(guest, 2)
        assert chain_of(guest) == ["top.raw"]
    copy = other / "top.raw"
    assert definition_of(guest) == "top.raw"
    assert 18 << 20 <= (job.after_bytes or 0) <= copy.stat().st_blocks * 512
    assert job.freed_bytes == -(job.after_bytes or 0), "the image before stays"
    assert against("switch_back", row, job=job.pk) == ["image_in_use"], "it runs"
    last = acknowledged(guest)
    assert patterns(guest) == PATTERNS
    guest.stop()
    check(copy, last, "raw")
    scan(row.host)
    page = client_as(role="operator").get(f"/guests/{row.pk}/").content.decode()
    assert f"switch-back/?job={job.pk}" in page
    done(services.submit(OPERATOR, "switch_back", row.pk, {"job": job.pk}))
    assert definition_of(guest) == "top.qcow2"
    check(chain[0], copied[0])
    assert copy.exists()


def test_a_guest_is_switched_back_to_an_image_whose_name_does_not_tell_its_format(
    tcg_guest: Starts, shared_folder: Path
) -> None:
    guest = tcg_guest(Disk(create(shared_folder / "disk.img", form="qcow2")))
    host, row = scanned(shared_folder, guest)
    job = done(submit("live_copy", row))
    guest.stop()
    scan(host)
    done(services.submit(OPERATOR, "switch_back", row.pk, {"job": job.pk}))
    assert definition_of(guest) == "disk.img"
    driver = "devices/disk/driver"
    assert ET.fromstring(guest.domain.XMLDesc()).find(driver).get("type") == "qcow2"  # type: ignore[union-attr]


def test_what_was_written_to_since_is_not_switched_back_to(on_chain: OnChain, chain: list[Path]) -> None:
    guest, row, _ = on_chain
    job = done(submit("live_copy", row))
    assert chain_of(guest) == ["top-copy.qcow2"]
    guest.stop()
    overwrite(chain[0], 1 << 20, b"x")
    assert against("switch_back", row, job=job.pk) == ["stale_plan"]
    chain[0].unlink()
    assert against("switch_back", row, job=job.pk) == ["undo_missing"]
    assert against("switch_back", row, job=job.pk + 1000) == ["undo_missing"]


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "made since the scan"])
def test_an_image_that_others_stand_on_by_now_is_not_switched_back_to(
    on_chain: OnChain, chain: list[Path], is_known: bool
) -> None:
    guest, row, folder = on_chain
    copy = done(submit("live_copy", row))
    guest.stop()
    scan(row.host)
    job = services.submit(OPERATOR, "switch_back", row.pk, {"job": copy.pk})
    create(folder / "clone.qcow2", "96M", base=str(chain[0]))
    if is_known:
        scan(row.host)
        assert against("switch_back", row, job=copy.pk) == ["shared_base"]
    run(job)
    assert (job.state, job.error_code) == ("failed", "shared_base" if is_known else "has_overlays")
    assert definition_of(guest) == "top-copy.qcow2"


@pytest.mark.parametrize("stage", ["mirroring", "ready"])
def test_a_cancel_leaves_the_guest_where_it_was_and_nothing_of_the_copy(
    on_chain: OnChain, chain: list[Path], stage: str
) -> None:
    guest, row, folder = on_chain
    before = {path.name for path in folder.iterdir()}
    with writing(guest):
        job = submit("live_copy", row, bandwidth_bytes_sec=2 << 20 if stage == "mirroring" else None)
        with at_stage(stage, lambda: services.cancel(OPERATOR, job)):
            run(job)
        assert job.state == "cancelled", (job.error_code, job.error_detail, said(job))
        assert chain_of(guest) == AS_BEFORE
    assert {path.name for path in folder.iterdir()} == before
    whole(guest, chain[0], acknowledged(guest))


@contextlib.contextmanager
def _guest_and_small_pool(tcg_guest: Starts, disk: Path, mebibytes: int) -> Iterator[tuple[LibvirtGuest, Guest, Path]]:
    """A running guest, and a folder of images on a filesystem of its own."""
    with loop_filesystem(disk.parent, mebibytes) as small, daemons.sees(small):
        guest = tcg_guest(Disk(disk))
        host, row = scanned(disk.parent, guest)
        small.chmod(0o755)
        register(host, small)
        scan(host)
        yield guest, row, small


def test_a_copy_is_given_up_before_others_are_left_without_room(
    tcg_guest: Starts, chain: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guests whose images lie there would be paused."""
    write_pattern(chain[0], "qcow2", (20, 60, 0x11))
    monkeypatch.setattr(follow, "WATCH", 0.5)
    monkeypatch.setattr(refusals, "RESERVE_BYTES", 20 << 20)
    monkeypatch.setattr(refusals, "RESERVE_PERCENT", 0)
    with _guest_and_small_pool(tcg_guest, chain[0], 160) as (guest, row, small):
        with writing(guest):
            job = submit("live_copy", row, target_pool=pool_at(small), bandwidth_bytes_sec=2 << 20)

            def fill() -> None:
                room = os.statvfs(small)
                (small / "others").write_bytes(bytes(room.f_bavail * room.f_frsize - (18 << 20)))

            with at_stage("mirroring", fill):
                run(job)
            assert (job.state, job.error_code) == ("failed", "not_enough_space"), said(job)
            assert chain_of(guest) == AS_BEFORE
        assert {path.name for path in small.iterdir()} == {"lost+found", "others"}
        whole(guest, chain[0], acknowledged(guest))


def test_a_destination_that_fills_up_leaves_the_guest_where_it_was(
    tcg_guest: Starts, chain: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody looks in time."""
    monkeypatch.setattr(follow, "WATCH", 1000.0)
    write_pattern(chain[0], "qcow2", (20, 60, 0x11))  # QEMU copies 16 MiB at once, whatever the limit
    with _guest_and_small_pool(tcg_guest, chain[0], 128) as (guest, row, small):
        StoragePool.objects.filter(path_bytes=bytes(small)).update(available_bytes=1 << 40, capacity_bytes=1 << 40)
        with writing(guest):
            job = submit("live_copy", row, target_pool=pool_at(small), bandwidth_bytes_sec=4 << 20)

            def fill() -> None:
                with contextlib.suppress(OSError), (small / "filler").open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(1 << 20))

            with at_stage("mirroring", fill):
                run(job)
            assert (job.state, job.error_code) == ("failed", "tool_failed"), said(job)
            wait_for_writes(guest, 2)
            assert chain_of(guest) == AS_BEFORE
        assert {path.name for path in small.iterdir()} == {"lost+found", "filler"}
        whole(guest, chain[0], acknowledged(guest))


def test_a_copy_that_its_host_does_not_see_is_not_switched_over_to(tcg_guest: Starts, chain: list[Path]) -> None:
    """libvirt, and QEMU with it, has another mount namespace here than the agent, and does not see what is mounted."""
    folder = chain[0].parent
    with loop_filesystem(folder, 128) as hidden:
        guest = tcg_guest(Disk(chain[0]))
        host, row = scanned(folder, guest)
        register(host, hidden)
        scan(host)
        StoragePool.objects.filter(path_bytes=bytes(hidden)).update(available_bytes=1 << 40, capacity_bytes=1 << 40)
        job = run(submit("live_copy", row, target_pool=pool_at(hidden)))
        assert (job.state, job.error_code) == ("failed", "tool_failed"), said(job)
        assert chain_of(guest) == AS_BEFORE
        assert patterns(guest) == PATTERNS


def test_a_guest_that_ends_right_after_the_switch_keeps_its_copy(
    on_chain: OnChain, chain: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before libvirt was asked what came of it: all that is known then is what the definition names."""
    guest, row, folder = on_chain
    run_to_end = Follower.run

    def ends(self: Follower, *, taken_over: bool) -> Ended:
        ended = run_to_end(self, taken_over=taken_over)
        guest.domain.destroy()
        return Ended(active=False, chain=[], later=ended.later)

    monkeypatch.setattr(Follower, "run", ends)
    begin(guest)
    last = acknowledged(guest)
    job = run(submit("live_copy", row))
    assert (job.state, job.error_code) == ("failed", "guest_ended")
    assert (folder / "top-copy.qcow2").exists()
    assert definition_of(guest) == "top-copy.qcow2"
    check(folder / "top-copy.qcow2", last)


def test_what_is_there_and_what_another_guest_uses_stand_against_a_copy(tcg_guest: Starts, shared_folder: Path) -> None:
    image = create(shared_folder / "disk.raw", form="raw")
    create(shared_folder / "there.raw", form="raw")
    guest = tcg_guest(Disk(image, "raw"))
    __, row = scanned(shared_folder, guest)
    assert against("live_copy", row, disk="vda") == [], "raw is copied like any other"
    assert against("live_copy", row, disk="vda", target_name="there.raw") == ["target_exists"]
    assert against("live_copy", row, disk="vda", target_pool=pool_at(shared_folder) + 1000) == ["outside_pool"]
    other = tcg_guest(Disk(create(shared_folder / "other.qcow2")))
    other.stop()
    xml = other.domain.XMLDesc().replace("other.qcow2", "disk.raw").replace("type='qcow2'", "type='raw'")
    other.domain.connect().defineXML(xml)
    work("scan", row.host_id)
    assert against("live_copy", row, disk="vda") == ["image_in_use"]
    assert Job.objects.filter(kind="live_copy").count() == 0
