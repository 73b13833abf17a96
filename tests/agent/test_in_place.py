"""Reclaim in place: what it wins, that nobody reads anything else afterwards, and what it refuses."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.protocol import StoppedError
from storage_admin.agent.rewrite.chain import Chain, Planned
from storage_admin.agent.verbs import reclaim as verb
from tests.agent.harness import Writer, at_stage, kept, leftovers, link, make_image, qemu_img, same_content, write
from tests.agent.recording import RecordingIO, cancel
from tests.chance import seed
from tests.harness.filesystems import loop_filesystem, new_folder
from tests.working import create

pytestmark = pytest.mark.qemu

AGENT = [sys.executable, str(Path(__file__).with_name("in_place_agent.py"))]
BLOCK = 4096
MIB = 1 << 20
#: What a filesystem may need for itself to remember where the pieces of a file are.
EXTENT_TREE = 64 << 10


@pytest.fixture(scope="module", params=[("ext4", 600), ("xfs", 320)], ids=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    form, size_mib = request.param
    with loop_filesystem(tmp_path_factory.mktemp(form), size_mib, form=form) as place:
        yield place


@pytest.fixture
def pool(disk: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    folder = new_folder(disk / "pool")
    yield folder
    assert leftovers(folder) == set()
    shutil.rmtree(folder)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return make_image(tmp_path / "vm.qcow2")


def reclaim(
    path: Path,
    *ancestors: Path,
    form: str = "qcow2",
    io: RecordingIO | None = None,
    bandwidth: int | None = None,
    children_known: bool = True,
    shared: bool = False,
) -> dict[str, Any]:
    """Reclaims an image by this process."""
    below = [
        Planned.parse(link(ancestor, form="raw" if ancestor.suffix == ".raw" else "qcow2")) for ancestor in ancestors
    ]
    with contextlib.closing(Chain(Planned.parse(link(path, form=form)), below)) as chain:
        answer = verb.dig(io or RecordingIO(), chain, children_known=children_known, bandwidth=bandwidth, idle_io=True)
        # Whoever called has the chain as it was: read only, without any lock.
        assert os.pread(chain.image.fd, 4, 0) == path.read_bytes()[:4]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(chain.image.fd, b"x", 0)
    assert shared or answer["freed_bytes"] == answer["before_bytes"] - answer["after_bytes"]
    assert (answer["held_bytes"], answer["undo"], answer["compression"], answer["swapped"]) == (0, None, None, False)
    assert (answer["dev"], answer["inode"]) == (path.stat().st_dev, path.stat().st_ino)
    assert answer["after_bytes"] == path.stat().st_blocks * 512
    return answer


def copy_of(path: Path, folder: Path) -> Path:
    """A full copy, every zero on the disk."""
    subprocess.run(["cp", "--sparse=never", path, folder / f"copy-{path.name}"], check=True)
    return folder / f"copy-{path.name}"


def bytes_with_content(path: Path) -> int:
    """How much of a file is in blocks that hold anything but zeros."""
    content = path.read_bytes()
    return BLOCK * sum(1 for at in range(0, len(content), BLOCK) if content[at : at + BLOCK].strip(b"\0"))


def wins_what_was_predicted(answer: dict[str, Any], path: Path) -> None:
    expected = bytes_with_content(path)
    assert expected <= answer["after_bytes"] <= expected + EXTENT_TREE
    assert answer["changed"] is (answer["before_bytes"] != answer["after_bytes"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        "",
        "compat=0.10",
        "cluster_size=512",
        "cluster_size=2M",
        "extended_l2=on,cluster_size=128k",
        "lazy_refcounts=on",
        "preallocation=metadata",
        "preallocation=falloc",
        "preallocation=full",
    ],
)
def test_a_qcow2_image_of_any_kind_reads_as_before(pool: Path, tmp_path: Path, options: str) -> None:
    path = make_image(pool / "vm.qcow2", options=options)
    before = copy_of(path, tmp_path)
    answer = reclaim(path)
    wins_what_was_predicted(answer, path)
    assert answer["freed_bytes"] > 3 * MIB // 2
    assert path.read_bytes() == before.read_bytes()
    assert same_content(path, before)
    assert b"No errors" in qemu_img("check", "-f", "qcow2", path)
    write(path, 0x55, "3M", "2M")  # a guest goes on with it
    assert b"No errors" in qemu_img("check", "-f", "qcow2", path)


def test_compressed_clusters_read_as_before(pool: Path, tmp_path: Path, image: Path) -> None:
    path = pool / "vm.qcow2"
    qemu_img("convert", "-c", "-O", "qcow2", image, path)
    write(path, 0, "5M", "1M")
    answer = reclaim(path)
    wins_what_was_predicted(answer, path)
    write(image, 0, "5M", "1M")
    assert same_content(path, image)


@pytest.mark.parametrize("size", ["8M", "8388096"])
def test_a_raw_image_reads_as_before(pool: Path, tmp_path: Path, size: str) -> None:
    path = create(pool / "vm.raw", size, form="raw")
    write(path, 0x61, "1M", "1M", "raw")
    write(path, 0, "3M", "4M", "raw")
    before = copy_of(path, tmp_path)
    answer = reclaim(path, form="raw")
    wins_what_was_predicted(answer, path)
    assert answer["freed_bytes"] >= 4 * MIB - EXTENT_TREE
    assert path.stat().st_size == before.stat().st_size
    assert same_content(path, before, "raw")


def test_internal_snapshots_stay_and_read_as_before(pool: Path, tmp_path: Path) -> None:
    path = make_image(pool / "vm.qcow2")
    qemu_img("snapshot", "-c", "first", path)
    write(path, 0x33, "3M", "1M")
    before = copy_of(path, tmp_path)
    assert reclaim(path)["freed_bytes"] > MIB
    assert same_content(path, before)
    for one in (path, before):
        qemu_img("snapshot", "-a", "first", one)
    assert same_content(path, before)
    assert b"No errors" in qemu_img("check", "-f", "qcow2", path)


@pytest.mark.parametrize("form", ["qcow2", "raw"])
def test_a_base_is_dug_and_its_overlays_read_as_before(pool: Path, tmp_path: Path, form: str) -> None:
    base, overlay = pool / f"base.{form}", pool / "overlay.qcow2"
    if form == "qcow2":
        make_image(base)
    else:
        qemu_img("create", "-q", "-f", "raw", base, "8M")
        write(base, 0, "2M", "4M", "raw")
        write(base, 0x21, "1M", "1M", "raw")
    qemu_img("create", "-q", "-f", "qcow2", "-b", base.name, "-F", form, overlay)
    write(overlay, 0x44, "1M", "512k")
    before = kept(overlay, tmp_path)
    assert reclaim(base, form=form)["freed_bytes"] > MIB
    assert same_content(overlay, before)
    # And the overlay itself: what it covers with zeros of its own stays covered.
    write(overlay, 0, "1M", "1M")
    before = kept(overlay, tmp_path)
    assert reclaim(overlay, base)["freed_bytes"] > MIB // 2
    assert same_content(overlay, before)


def test_every_attribute_and_the_time_of_modification_stay(pool: Path) -> None:
    path = make_image(pool / "vm.qcow2")
    os.link(path, pool / "second name.qcow2")
    path.chmod(0o640)
    os.chown(path, 1234, 2345)
    os.setxattr(path, "user.note", b"mine")
    os.utime(path, ns=(1_500_000_000_123_456_789, 1_400_000_000_987_654_321))
    before = path.stat()
    assert reclaim(path)["changed"]
    after = path.stat()
    for name in ("st_ino", "st_mode", "st_uid", "st_gid", "st_size", "st_mtime_ns", "st_nlink"):
        assert getattr(after, name) == getattr(before, name), name
    assert os.getxattr(path, "user.note") == b"mine"
    assert after.st_ctime_ns > before.st_ctime_ns


def test_a_second_time_wins_nothing_and_touches_nothing(image: Path) -> None:
    assert reclaim(image)["changed"]
    before = image.stat()
    answer = reclaim(image)
    assert (answer["changed"], answer["freed_bytes"]) == (False, 0)
    assert image.stat().st_ctime_ns == before.st_ctime_ns


def test_it_tells_how_far_it_is_and_keeps_to_its_bandwidth(image: Path) -> None:
    io, size = RecordingIO(), image.stat().st_size
    began = time.monotonic()
    reclaim(image, io=io, bandwidth=4 * MIB)
    assert time.monotonic() - began > (size - MIB) / (4 * MIB) * 0.9
    told = [event for event in io.all("progress") if event["stage"] == "digging"]
    assert [event["done"] for event in told] == sorted(event["done"] for event in told)
    assert told[-1]["done"] == told[-1]["total"] == size
    assert io.checks > 5 * (size - MIB) / (4 * MIB)


def test_a_cancel_ends_it_at_once_and_the_image_is_free(image: Path, tmp_path: Path) -> None:
    before, started = copy_of(image, tmp_path), image.stat()
    io = RecordingIO()

    def cancel_while_digging() -> None:
        if any(event["stage"] == "digging" for event in io.all("progress")):
            cancel()

    io._on_check = cancel_while_digging
    with pytest.raises(StoppedError):
        reclaim(image, io=io, bandwidth=2 * MIB)
    assert image.stat().st_mtime_ns == started.st_mtime_ns
    assert same_content(image, before)
    with Writer(image) as guest:
        assert not guest.refused


# Others, while it digs


def test_who_only_passes_by_is_let_in_and_the_work_goes_on(image: Path, tmp_path: Path) -> None:
    before = copy_of(image, tmp_path)
    with at_stage("digging", "in_place", {"image": link(image), "chain": [], "bandwidth": 6 * MIB}, AGENT) as agent:
        for _ in range(5):
            asked = time.monotonic()
            # As libvirt opens it: without waiting for anybody.
            os.close(os.open(image, os.O_RDONLY | os.O_NONBLOCK))
            assert time.monotonic() - asked < 0.5
            time.sleep(0.05)
        assert json.loads(qemu_img("info", "-U", "--output=json", image))["format"] == "qcow2"
        answer = agent.answer()
    assert answer.get("changed") is True, answer
    wins_what_was_predicted(answer, image)
    assert same_content(image, before)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_guest_that_starts_wins_at_once(image: Path, read_only: bool) -> None:
    with at_stage("digging", "in_place", {"image": link(image), "chain": [], "bandwidth": MIB}, AGENT) as agent:
        asked = time.monotonic()
        with Writer(image, read_only=read_only) as guest:
            assert not guest.refused
            assert time.monotonic() - asked < 1
            assert agent.answer()["code"] in {"image_in_use", "stale_plan"}
            assert time.monotonic() - asked < 5


WRITER = (
    "import os, sys; fd = os.open(sys.argv[1], os.O_RDWR)\n"
    "for at in sys.argv[2:]: os.pwrite(fd, bytes([0xC3]) * 3000, int(at))"
)


@pytest.mark.fuzz
@pytest.mark.parametrize("trial", range(4))
def test_nothing_is_lost_of_what_somebody_writes_while_many_pieces_are_read_ahead(tmp_path: Path, trial: int) -> None:
    """At full speed, with several threads: what was seen as zeros before he came in does not count after it."""
    rng, path, size = random.Random(f"{seed()}-{trial}"), tmp_path / "vm.raw", 192 * MIB
    pattern = b"x" * BLOCK + bytes(rng.choice([BLOCK, 8 * BLOCK, 32 * BLOCK]))
    with path.open("wb") as file:
        while file.tell() < size // 2:
            file.write(pattern * (MIB // len(pattern)))
        file.write(bytes(size // 2))
    copy = copy_of(path, tmp_path)
    args: dict[str, Any] = {"image": link(path, form="raw"), "chain": [], "bandwidth": None}
    with at_stage("digging", "in_place", args, AGENT) as agent:
        for _ in range(6):
            time.sleep(rng.uniform(0, 0.03))
            places = [str(rng.randrange(size - 3000)) for _ in range(100)]
            for one in (path, copy):
                subprocess.run([sys.executable, "-c", WRITER, one, *places], check=True)
        answer = agent.answer()
    assert answer.get("changed") or answer["code"] in {"stale_plan", "image_in_use"}
    assert path.read_bytes() == copy.read_bytes()
