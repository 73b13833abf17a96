"""A scan with the real agent: what becomes rows, what is written again, what vanishes and what heals."""

import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from images.scan.run import ScanRun
from storage_admin.hosts.services import remove_pool, update_pool
from storage_admin.hosts.transport import agent_bundle
from storage_admin.jobs.models import Job
from tests.harness.filesystems import loop_filesystem
from tests.harness.patching import do_before
from tests.images.scanned import plain, states
from tests.working import ADMIN, create, image_at, reread, scan, scanned_machine, this_machine, work

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.qemu,
    pytest.mark.usefixtures("quiet", "no_hypervisor"),
    pytest.mark.sql,
]


def test_used_free_and_full_are_what_df_says_where_a_filesystem_keeps_a_part_for_root(tmp_path: Path) -> None:
    with loop_filesystem(tmp_path, 64, make=("-m", "20")) as folder:
        (folder / "a.raw").write_bytes(os.urandom(20 * 1024**2))
        scanned_machine(folder)
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
    host = scanned_machine(tmp_path)
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
    host = scanned_machine(tmp_path)
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
    wanted: dict[str, Any] = {"name": "fast disks", "warn_percent": 50}
    do_before(monkeypatch, ScanRun, "finish", lambda _: update_pool(ADMIN, host.pools.get(), **wanted))
    scan(host)
    assert (reread(pool).name, pool.warn_percent, pool.state) == ("fast disks", 50, "ok")


def test_a_pool_that_is_removed_while_it_is_scanned_stays_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain(tmp_path / "a/a.raw")
    plain(tmp_path / "b/b.raw")
    host = this_machine(tmp_path / "a", tmp_path / "b")
    do_before(monkeypatch, ScanRun, "finish", lambda _: remove_pool(ADMIN, host.pools.get(name="a")))
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
    with path.open("rb") as image, subprocess.Popen([sys.executable, "-c", wait, program], stdin=image) as fellow:
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
    scanned_machine(tmp_path)
    assert image_at(tmp_path / "1000.qcow2").chain_depth == 1001


def test_a_scan_is_done_by_one_job_at_a_time(tmp_path: Path) -> None:
    host = this_machine(tmp_path)
    first = work("scan", host.pk)
    Job.objects.filter(pk=first.pk).update(state="running")
    second = work("scan", host.pk)
    assert (second.state, second.waiting_for) == ("queued", f"the running scan on {host.name}")
