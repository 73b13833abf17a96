"""A scan with the real agent: what becomes rows, what is written again, what vanishes and what heals."""

import os
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from images.models import Image
from images.rewrite import space
from images.scan import run as scanning
from images.scan.run import ScanRun
from storage_admin.agent.protocol import HostError
from storage_admin.hosts.models import PoolSample
from storage_admin.hosts.services import confirm_folder
from storage_admin.jobs import runner
from tests.harness.filesystems import loop_filesystem
from tests.images.scanned import plain, states
from tests.working import ADMIN, create, image_at, register, reread, scan, scanned_machine, this_machine, work

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.qemu,
    pytest.mark.usefixtures("quiet", "no_hypervisor"),
    pytest.mark.sql,
]


def writes_on_images(queries: CaptureQueriesContext) -> list[str]:
    words = ("INSERT", "UPDATE", "DELETE")
    return [
        query["sql"][:200]
        for query in queries.captured_queries
        if query["sql"].startswith(words) and f'"{Image._meta.db_table}"' in query["sql"].split("SELECT")[0]
    ]


def test_a_first_scan_lists_what_the_files_and_headers_say(tmp_path: Path) -> None:
    create(tmp_path / "base.qcow2")
    create(tmp_path / "top.qcow2", base="base.qcow2")
    host = this_machine(tmp_path)
    result = scan(host)
    assert (result["images"], result["read"], result["unchanged"], result["vanished"]) == (2, 2, 0, 0)
    top, base = image_at(tmp_path / "top.qcow2"), image_at(tmp_path / "base.qcow2")
    assert (top.state, top.backing, top.chain_depth, top.root_id) == ("ok", base, 2, base.pk)
    assert (base.overlays_count, base.in_use, base.orphan, top.orphan) == (1, False, False, True)
    assert top.virtual_size == base.virtual_size == 8 << 20
    assert top.allocated_size == (tmp_path / "top.qcow2").stat().st_blocks * 512
    assert (reread(host).status, host.owners_unknown) == ("ok", "")


def test_a_scan_of_unchanged_images_writes_none_of_them(tmp_path: Path) -> None:
    for number in range(20):
        plain(tmp_path / f"{number}.raw")
    host = scanned_machine(tmp_path)
    before = list(Image.every.order_by("pk").values())
    with CaptureQueriesContext(connection) as queries:
        result = scan(host)
    assert (result["images"], result["read"], result["unchanged"]) == (20, 0, 20)
    assert writes_on_images(queries) == []
    assert list(Image.every.order_by("pk").values()) == before


def test_a_changed_image_is_read_again_and_sampled_over_time(tmp_path: Path) -> None:
    path, other = plain(tmp_path / "a.raw"), plain(tmp_path / "b.raw")
    host = scanned_machine(tmp_path)
    plain(path, 1 << 20)
    assert scan(host)["read"] == 1
    sizes = list(image_at(path).samples.values_list("allocated_size", flat=True))
    assert sizes == [4096, 1 << 20]
    assert image_at(other).samples.count() == 1
    assert PoolSample.objects.count() == 2


def test_an_estimate_goes_with_the_content_that_it_was_made_of(tmp_path: Path) -> None:
    path, other = plain(tmp_path / "a.raw"), plain(tmp_path / "b.raw")
    host = scanned_machine(tmp_path)
    for image in Image.every.all():
        Image.every.filter(pk=image.pk).update(
            reclaimable_bytes=1, analyzed_fingerprint=image.fingerprint, analyzed_at=image.seen
        )
    plain(path, 1 << 20)
    scan(host)
    assert image_at(path).reclaimable_bytes is None
    assert image_at(other).reclaimable_bytes == 1


def test_a_vanished_image_is_missing_and_comes_back(tmp_path: Path) -> None:
    path = plain(tmp_path / "pool/a.raw")
    plain(tmp_path / "pool/b.raw")
    host = scanned_machine(tmp_path / "pool")
    seen = image_at(path).seen
    path.rename(tmp_path / "a.raw")
    assert scan(host)["vanished"] == 1
    image = image_at(path)
    assert (image.state, image.in_use, image.orphan, image.seen) == ("missing", None, None, seen)
    assert image.missing_since is not None
    assert image.pool.allocated_bytes == 4096
    scan(host)
    assert image_at(path).missing_since == image.missing_since
    (tmp_path / "a.raw").rename(path)
    scan(host)
    back = image_at(path)
    assert (back.pk, back.state, back.missing_since, back.in_use) == (image.pk, "ok", None, False)
    assert back.pool.allocated_bytes == 8192


def test_a_renamed_image_is_missing_under_the_old_name_and_there_under_the_new(tmp_path: Path) -> None:
    path = plain(tmp_path / "old.raw")
    host = scanned_machine(tmp_path)
    path.rename(tmp_path / "new.raw")
    scan(host)
    assert states(host) == {"old.raw": "missing", "new.raw": "ok"}
    assert image_at(tmp_path / "new.raw").pool.images_count == 1


def test_a_base_that_vanishes_breaks_its_overlays_and_heals_them_when_it_is_back(tmp_path: Path) -> None:
    base = create(tmp_path / "base.qcow2")
    create(tmp_path / "top.qcow2", base="base.qcow2")
    host = scanned_machine(tmp_path)
    # Under another name it is an image of its own: what stands on it does not find it there.
    base.rename(tmp_path / "other.qcow2")
    scan(host)
    assert states(host) == {"base.qcow2": "missing", "other.qcow2": "ok", "top.qcow2": "chain_broken"}
    scan(host)
    assert states(host)["top.qcow2"] == "chain_broken"
    (tmp_path / "other.qcow2").rename(base)
    scan(host)
    assert states(host) == {"base.qcow2": "ok", "other.qcow2": "missing", "top.qcow2": "ok"}


def test_a_base_outside_every_pool_that_comes_and_goes_is_noticed(tmp_path: Path) -> None:
    base = create(tmp_path / "outside.qcow2")
    (tmp_path / "pool").mkdir()
    create(tmp_path / "pool/top.qcow2", base="../outside.qcow2")
    host = scanned_machine(tmp_path / "pool")
    assert states(host) == {"top.qcow2": "outside_pool"}
    base.rename(tmp_path / "hidden")
    scan(host)
    assert states(host) == {"top.qcow2": "chain_broken"}
    (tmp_path / "hidden").rename(base)
    scan(host)
    assert states(host) == {"top.qcow2": "outside_pool"}


def test_a_folder_that_is_gone_leaves_its_images_as_they_were_last_seen(tmp_path: Path) -> None:
    path = plain(tmp_path / "pool/a.raw")
    host = scanned_machine(tmp_path / "pool")
    pool = image_at(path).pool
    (tmp_path / "pool").rename(tmp_path / "away")
    assert scan(host)["vanished"] == 0
    image = image_at(path)
    assert (image.state, image.pool.state, image.pool.last_scanned) == ("ok", "missing", pool.last_scanned)
    assert (image.pool.capacity_bytes, image.pool.available_bytes) == (None, None)


def test_a_folder_whose_filesystem_is_not_mounted_keeps_its_images(tmp_path: Path) -> None:
    with loop_filesystem(tmp_path, 64) as folder:
        plain(folder / "a.raw")
        host = this_machine(folder)
        assert scan(host)["images"] == 1
    assert scan(host)["vanished"] == 0
    pool = host.pools.get()
    assert (pool.state, states(host)) == ("missing", {"a.raw": "ok"})
    assert "Mount the pool again" in pool.state_detail
    assert scan(host)["vanished"] == 0  # nor by the next scan
    plain(folder / "b.raw")
    assert scan(host)["vanished"] == 0  # somebody uses the folder as it is now, who may not be the pool's
    assert reread(pool).state == "changed"
    confirm_folder(ADMIN, pool)
    assert scan(host)["vanished"] == 1


class DiedError(HostError):
    pass


def die_after(batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent is gone after so many batches of two images were written."""
    monkeypatch.setattr(scanning, "BATCH", 2)
    write = ScanRun._write_batch
    written: list[int] = []

    def write_and_die(run: ScanRun) -> None:
        if len(written) == batches:
            raise DiedError("the agent ended without an answer", "interrupted")
        written.append(1)
        write(run)

    monkeypatch.setattr(ScanRun, "_write_batch", write_and_die)


def test_a_scan_that_dies_half_way_leaves_the_last_truth_and_the_next_one_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        plain(tmp_path / f"{number}.raw")
    host = scanned_machine(tmp_path)
    plain(tmp_path / "1.raw", 8192)
    (tmp_path / "5.raw").unlink()
    for number in range(10, 16):
        plain(tmp_path / f"{number}.raw")
    Image.every.update(analyzed_at=image_at(tmp_path / "0.raw").seen, reclaimable_bytes=5, analyzed_fingerprint=b"old")
    with monkeypatch.context() as patched:
        die_after(2, patched)
        job = work("scan", host.pk)
    assert (job.state, job.error_code) == ("interrupted", "interrupted")
    assert states(host) == {f"{number}.raw": "ok" for number in range(6)}
    assert Image.every.filter(listed=False).count() in {3, 4}

    (tmp_path / "10.raw").unlink()  # it came and went between the two scans
    assert scan(host)["vanished"] == 1
    wanted = {f"{number}.raw": "ok" for number in (0, 1, 2, 3, 4, 11, 12, 13, 14, 15)} | {"5.raw": "missing"}
    assert states(host) == wanted
    assert not Image.every.filter(listed=False).exists()
    assert list(image_at(tmp_path / "1.raw").samples.values_list("file_size", flat=True)) == [4096, 8192]
    assert image_at(tmp_path / "12.raw").samples.count() == 1
    assert image_at(tmp_path / "1.raw").reclaimable_bytes is None


def test_an_image_that_came_back_in_a_scan_that_died_is_missing_until_one_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [plain(tmp_path / f"pool/{number}.raw") for number in range(6)]
    host = scanned_machine(tmp_path / "pool")
    for path in paths:
        path.rename(tmp_path / path.name)
    scan(host)
    for path in paths:
        (tmp_path / path.name).rename(path)
    with monkeypatch.context() as patched:
        die_after(2, patched)
        work("scan", host.pk)
    assert set(states(host).values()) == {"missing"}
    scan(host)
    assert set(states(host).values()) == {"ok"}


def test_the_end_of_a_scan_is_written_again_after_the_database_was_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [plain(tmp_path / f"{number}.raw") for number in range(3)]
    host = scanned_machine(tmp_path)
    plain(paths[0], 8192)
    plain(tmp_path / "new.raw")
    totals, calls = space.write_totals, []

    def away_once(pools: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OperationalError("the database is away")
        totals(pools)

    monkeypatch.setattr(space, "write_totals", away_once)
    monkeypatch.setattr(runner, "connection", type("Kept", (), {"close": staticmethod(lambda: None)}))
    monkeypatch.setattr("time.sleep", lambda _: None)
    result = scan(host)
    assert (result["read"], result["vanished"], len(calls)) == (2, 0, 2)
    assert states(host) == dict.fromkeys(("0.raw", "1.raw", "2.raw", "new.raw"), "ok")
    assert image_at(paths[0]).file_size == 8192


def test_a_pool_inside_another_has_its_own_images(tmp_path: Path) -> None:
    plain(tmp_path / "top.raw")
    deep = plain(tmp_path / "a/deep.raw")
    host = scanned_machine(tmp_path)
    outer, row = image_at(deep).pool, image_at(deep).pk
    inner = register(host, tmp_path / "a")
    assert scan(host)["vanished"] == 0
    assert (image_at(deep).pool, image_at(deep).pk, image_at(deep).state) == (inner, row, "ok")
    outer.refresh_from_db()
    inner.refresh_from_db()
    assert (outer.images_count, inner.images_count, outer.allocated_bytes, inner.allocated_bytes) == (1, 1, 4096, 4096)
    assert scan(host)["read"] == 0


def test_names_of_one_file_count_once(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.raw", 65536)
    os.link(path, tmp_path / "b.raw")
    os.link(path, tmp_path / "c.raw")
    plain(tmp_path / "d.raw")
    scanned_machine(tmp_path)
    pool = image_at(path).pool
    assert (pool.images_count, pool.allocated_bytes, pool.virtual_bytes) == (2, 65536 + 4096, 65536 + 4096)


def test_totals_are_the_sum_of_what_stat_says(tmp_path: Path) -> None:
    for number in range(30):
        plain(tmp_path / f"{number % 3}/{number}.raw", 1000 * number + 512)
    scanned_machine(tmp_path)
    paths = list(tmp_path.rglob("*.raw"))
    pool = image_at(paths[0]).pool
    assert pool.allocated_bytes == sum(path.stat().st_blocks * 512 for path in paths)
    assert pool.images_count == 30
    space = os.statvfs(tmp_path)
    assert pool.capacity_bytes == space.f_blocks * space.f_frsize
