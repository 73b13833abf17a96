"""A scan with the real agent: what becomes rows, what is written again, what vanishes and what heals."""

import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from images.models import Image
from images.scan import bulk_write
from images.scan import run as scanning
from images.scan.run import ScanRun
from storage_admin.agent.protocol import HostError
from storage_admin.hosts.models import Host, PoolSample
from storage_admin.hosts.services import confirm_folder, remove_pool, update_pool
from storage_admin.hosts.transport import agent_bundle
from storage_admin.jobs import runner
from storage_admin.jobs.models import Job
from tests.harness.filesystems import loop_filesystem
from tests.working import ADMIN, create, image_at, register, scan, this_machine, work

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.qemu,
    pytest.mark.usefixtures("quiet", "no_hypervisor"),
    pytest.mark.sql,
]


def plain(path: Path, size: int = 4096) -> Path:
    """A raw image, quickly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def states(host: Host) -> dict[str, str]:
    return dict(Image.objects.filter(host=host).values_list("name", "state"))


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
    host.refresh_from_db()
    assert (host.status, host.owners_unknown) == ("ok", "")


def test_a_scan_of_unchanged_images_writes_none_of_them(tmp_path: Path) -> None:
    for number in range(20):
        plain(tmp_path / f"{number}.raw")
    host = this_machine(tmp_path)
    scan(host)
    before = list(Image.every.order_by("pk").values())
    with CaptureQueriesContext(connection) as queries:
        result = scan(host)
    assert (result["images"], result["read"], result["unchanged"]) == (20, 0, 20)
    assert writes_on_images(queries) == []
    assert list(Image.every.order_by("pk").values()) == before


def test_a_changed_image_is_read_again_and_sampled_over_time(tmp_path: Path) -> None:
    path, other = plain(tmp_path / "a.raw"), plain(tmp_path / "b.raw")
    host = this_machine(tmp_path)
    scan(host)
    plain(path, 1 << 20)
    assert scan(host)["read"] == 1
    sizes = list(image_at(path).samples.values_list("allocated_size", flat=True))
    assert sizes == [4096, 1 << 20]
    assert image_at(other).samples.count() == 1
    assert PoolSample.objects.count() == 2


def test_an_estimate_goes_with_the_content_that_it_was_made_of(tmp_path: Path) -> None:
    path, other = plain(tmp_path / "a.raw"), plain(tmp_path / "b.raw")
    host = this_machine(tmp_path)
    scan(host)
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
    host = this_machine(tmp_path / "pool")
    scan(host)
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
    host = this_machine(tmp_path)
    scan(host)
    path.rename(tmp_path / "new.raw")
    scan(host)
    assert states(host) == {"old.raw": "missing", "new.raw": "ok"}
    assert image_at(tmp_path / "new.raw").pool.images_count == 1


def test_a_base_that_vanishes_breaks_its_overlays_and_heals_them_when_it_is_back(tmp_path: Path) -> None:
    base = create(tmp_path / "base.qcow2")
    create(tmp_path / "top.qcow2", base="base.qcow2")
    host = this_machine(tmp_path)
    scan(host)
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
    host = this_machine(tmp_path / "pool")
    scan(host)
    assert states(host) == {"top.qcow2": "outside_pool"}
    base.rename(tmp_path / "hidden")
    scan(host)
    assert states(host) == {"top.qcow2": "chain_broken"}
    (tmp_path / "hidden").rename(base)
    scan(host)
    assert states(host) == {"top.qcow2": "outside_pool"}


def test_a_folder_that_is_gone_leaves_its_images_as_they_were_last_seen(tmp_path: Path) -> None:
    path = plain(tmp_path / "pool/a.raw")
    host = this_machine(tmp_path / "pool")
    scan(host)
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
    assert "mount it again" in pool.state_detail
    assert scan(host)["vanished"] == 0  # nor by the next scan
    plain(folder / "b.raw")
    assert scan(host)["vanished"] == 0  # somebody uses the folder as it is now, who may not be the pool's
    pool.refresh_from_db()
    assert pool.state == "changed"
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
    host = this_machine(tmp_path)
    scan(host)
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
    host = this_machine(tmp_path / "pool")
    scan(host)
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
    host = this_machine(tmp_path)
    scan(host)
    plain(paths[0], 8192)
    plain(tmp_path / "new.raw")
    totals, calls = bulk_write.write_totals, []

    def away_once(pools: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OperationalError("the database is away")
        totals(pools)

    monkeypatch.setattr(bulk_write, "write_totals", away_once)
    monkeypatch.setattr(runner, "connection", type("Kept", (), {"close": staticmethod(lambda: None)}))
    monkeypatch.setattr("time.sleep", lambda _: None)
    result = scan(host)
    assert (result["read"], result["vanished"], len(calls)) == (2, 0, 2)
    assert states(host) == dict.fromkeys(("0.raw", "1.raw", "2.raw", "new.raw"), "ok")
    assert image_at(paths[0]).file_size == 8192


def test_a_pool_inside_another_has_its_own_images(tmp_path: Path) -> None:
    plain(tmp_path / "top.raw")
    deep = plain(tmp_path / "a/deep.raw")
    host = this_machine(tmp_path)
    scan(host)
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
    host = this_machine(tmp_path)
    scan(host)
    pool = image_at(path).pool
    assert (pool.images_count, pool.allocated_bytes, pool.virtual_bytes) == (2, 65536 + 4096, 65536 + 4096)


def test_totals_are_the_sum_of_what_stat_says(tmp_path: Path) -> None:
    for number in range(30):
        plain(tmp_path / f"{number % 3}/{number}.raw", 1000 * number + 512)
    host = this_machine(tmp_path)
    scan(host)
    paths = list(tmp_path.rglob("*.raw"))
    pool = image_at(paths[0]).pool
    assert pool.allocated_bytes == sum(path.stat().st_blocks * 512 for path in paths)
    assert pool.images_count == 30
    space = os.statvfs(tmp_path)
    assert pool.capacity_bytes == space.f_blocks * space.f_frsize


def test_used_free_and_full_are_what_df_says_where_a_filesystem_keeps_a_part_for_root(tmp_path: Path) -> None:
    with loop_filesystem(tmp_path, 64, make=("-m", "20")) as folder:
        (folder / "a.raw").write_bytes(os.urandom(20 * 1024**2))
        host = this_machine(folder)
        scan(host)
        pool = image_at(folder / "a.raw").pool
        asked = ["df", "--block-size=1", "--output=size,used,avail,pcent", str(folder)]
        shown = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[-4:]
    sizes = [pool.capacity_bytes, pool.used_bytes, pool.available_bytes]
    assert sizes == [int(one) for one in shown[:3]]
    assert (pool.reserved_bytes or 0) > 10 * 1024**2
    assert pool.used_percent is not None
    assert f"{math.ceil(pool.used_percent)}%" == shown[3]
    assert pool.samples.get().used_bytes == pool.used_bytes


def test_an_empty_pool_holds_nothing_and_that_is_known(tmp_path: Path) -> None:
    host = this_machine(tmp_path)
    scan(host)
    pool = host.pools.get()
    assert (pool.images_count, pool.allocated_bytes, pool.virtual_bytes, pool.reclaimable_bytes) == (0, 0, 0, None)


HOSTILE = (
    b"-f.raw", b"nbd:x.raw", b"a,b.raw", b"two\nlines.raw", b"not-utf8-\xff\xfe.raw", b"esc-\x1b[31m.raw",
    b"json:{}.raw", b"<script>alert(1)<.raw", b" lead.raw", b"trail .raw", "ünï-\u202e.raw".encode(), b"'\";--.raw",
    b"x" * 251 + b".raw", b"\xff" * 251 + b".raw",
)  # fmt: skip


def test_any_name_is_one_row_under_its_own_bytes(tmp_path: Path) -> None:
    for name in HOSTILE:
        (tmp_path / os.fsdecode(name)).write_bytes(b"x" * 512)
    host = this_machine(tmp_path)
    assert scan(host)["images"] == len(HOSTILE)
    for name in HOSTILE:
        image = image_at(bytes(tmp_path) + b"/" + name)
        assert image.state == "ok"
        assert image.path.isprintable()
    assert scan(host)["unchanged"] == len(HOSTILE)


def test_a_symbolic_link_is_listed_as_unreadable(tmp_path: Path) -> None:
    plain(tmp_path / "a.raw")
    (tmp_path / "link.qcow2").symlink_to("a.raw")
    scan(this_machine(tmp_path))
    link = image_at(tmp_path / "link.qcow2")
    assert (link.state, link.virtual_size) == ("unreadable", None)
    assert "symbolic link" in link.state_detail


def hostile_qcow2(path: Path, *, backing: bytes = b"", backing_format: bytes = b"") -> None:
    """A qcow2 of one header: what stands in it was written by somebody who means no good (qcow2 specification)."""
    padded = backing_format + bytes(-len(backing_format) % 8)
    extension = struct.pack(">II", 0xE2792ACA, len(backing_format)) + padded + bytes(8)
    name_at = 104 + len(extension)
    header = struct.pack(
        ">4sIQIIQIIQQIIQQQQII", b"QFI\xfb", 3, name_at if backing else 0, len(backing), 16, 1 << 30, 0, 2, 3 << 16,
        1 << 16, 1, 0, 0, 0, 0, 0, 4, 104,
    )  # fmt: skip
    path.write_bytes((header + extension + backing).ljust(4 << 16, b"\0"))


@pytest.mark.parametrize(
    ("backing", "backing_format"),
    [
        (b"ba\0se.qcow2", b"qcow2"), (b"base\x1b[2J", b"qc\0w2"), (b"nb\0d:host", b"raw"), (b"\xff\xfe", b"\xff\xfe"),
        (b"base", b"f" * 200), (b"json:{\"driver\": \"nbd\"}", b"\n\n"), (b"x" * 1023, b"raw"),
    ],
)  # fmt: skip
def test_no_header_ends_a_scan(tmp_path: Path, backing: bytes, backing_format: bytes) -> None:
    hostile_qcow2(tmp_path / "bad.qcow2", backing=backing, backing_format=backing_format)
    plain(tmp_path / "good.raw")
    host = this_machine(tmp_path)
    assert scan(host)["images"] == 2
    bad = image_at(tmp_path / "bad.qcow2")
    assert bad.state in {"unreadable", "outside_pool", "chain_broken"}
    assert "\0" not in bad.backing_file + bad.backing_format + bad.state_detail
    assert states(host)["good.raw"] == "ok"


def test_a_snapshot_may_have_any_name(tmp_path: Path) -> None:
    path = create(tmp_path / "a.qcow2")
    subprocess.run(["qemu-img", "snapshot", "-c", "X" * 4, path], check=True)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"XXXX", b"a\0\x1b\xff"))
    scan(this_machine(tmp_path))
    (snapshot,) = image_at(path).snapshots
    assert snapshot["name"] == "a\\x00\\x1b\\xff"


@pytest.mark.parametrize("seconds", [-(2**31), 14_600_000_000])
def test_a_file_from_another_century_is_known_again(tmp_path: Path, seconds: int) -> None:
    path = plain(tmp_path / "old.raw")
    os.utime(path, (seconds, seconds))
    host = this_machine(tmp_path)
    scan(host)
    assert scan(host)["unchanged"] == 1


def test_three_thousand_files_are_three_thousand_rows(tmp_path: Path) -> None:
    for number in range(3000):
        plain(tmp_path / f"{number % 30}/{number}.raw", 512)
    host = this_machine(tmp_path)
    assert scan(host)["read"] == 3000
    with CaptureQueriesContext(connection) as queries:
        assert scan(host)["unchanged"] == 3000
    assert len(queries) < 100


def test_what_an_admin_sets_while_a_scan_works_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain(tmp_path / "a.raw")
    host = this_machine(tmp_path)
    pool = host.pools.get()
    finish = ScanRun.finish

    def meanwhile(run: ScanRun) -> dict[str, Any]:
        update_pool(ADMIN, host.pools.get(), name="fast disks", warn_percent=50)
        return finish(run)

    monkeypatch.setattr(ScanRun, "finish", meanwhile)
    scan(host)
    pool.refresh_from_db()
    assert (pool.name, pool.warn_percent, pool.state) == ("fast disks", 50, "ok")


def test_a_pool_that_is_removed_while_it_is_scanned_stays_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain(tmp_path / "a/a.raw")
    plain(tmp_path / "b/b.raw")
    host = this_machine(tmp_path / "a", tmp_path / "b")
    finish = ScanRun.finish

    def meanwhile(run: ScanRun) -> dict[str, Any]:
        remove_pool(ADMIN, host.pools.get(name="a"))
        return finish(run)

    monkeypatch.setattr(ScanRun, "finish", meanwhile)
    scan(host)
    assert list(host.pools.values_list("name", flat=True)) == ["b"]
    assert states(host) == {"b.raw": "ok"}


def test_a_declaration_on_a_network_pool_takes_effect_with_the_next_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plain(tmp_path / "a.raw")
    host = this_machine(tmp_path)
    take = ScanRun.take

    def on_nfs(run: ScanRun, event: dict[str, Any]) -> None:
        take(run, event | {"filesystem": "nfs4", "network": True} if event["event"] == "pool" else event)

    monkeypatch.setattr(ScanRun, "take", on_nfs)
    scan(host)
    assert (image_at(path).in_use, image_at(path).orphan) == (None, None)
    update_pool(ADMIN, host.pools.get(), all_hosts_registered=True)
    scan(host)
    assert (image_at(path).in_use, image_at(path).orphan) == (False, True)


def test_what_a_process_has_open_is_in_use_until_it_lets_go(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.raw")
    host = this_machine(tmp_path)
    with subprocess.Popen(["sleep", "60"], stdin=path.open("rb")) as holder:
        scan(host)
        image = image_at(path)
        assert (image.in_use, image.orphan) == (True, False)
        assert f"process {holder.pid} (sleep)" in image.in_use_detail
        holder.kill()
    scan(host)
    assert image_at(path).in_use is False


def test_an_agent_that_samples_an_image_does_not_use_it(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.raw")
    host = this_machine(tmp_path)
    wait = "import sys, time; sys.stdin.fileno(); time.sleep(60)"
    program = str(agent_bundle().path)
    with (
        path.open("rb") as image,
        subprocess.Popen([sys.executable, "-c", wait, program], stdin=image) as fellow,
    ):
        scan(host)
        fellow.kill()
    # This process has it open as well, and is no agent.
    assert f"process {os.getpid()} " in image_at(path).held
    with subprocess.Popen([sys.executable, "-c", wait, program], stdin=path.open("rb")) as fellow:
        scan(host)
        fellow.kill()
    assert image_at(path).in_use is False


def test_a_chain_of_a_thousand_is_as_deep_as_it_is(tmp_path: Path) -> None:
    plain(tmp_path / "0.raw")
    for number in range(1, 1001):
        below = f"{number - 1}.raw" if number == 1 else f"{number - 1}.qcow2"
        hostile_qcow2(
            tmp_path / f"{number}.qcow2", backing=below.encode(), backing_format=b"raw" if number == 1 else b"qcow2"
        )
    host = this_machine(tmp_path)
    scan(host)
    assert image_at(tmp_path / "1000.qcow2").chain_depth == 1001


def test_a_scan_is_done_by_one_job_at_a_time(tmp_path: Path) -> None:
    host = this_machine(tmp_path)
    first = work("scan", host.pk)
    Job.objects.filter(pk=first.pk).update(state="running")
    second = work("scan", host.pk)
    assert (second.state, second.waiting_for) == ("queued", f"the scan at work on {host.name}")
