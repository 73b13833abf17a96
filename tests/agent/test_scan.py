"""What a scan lists of a pool, with real images in a temporary folder."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.protocol import StoppedError, unb64
from storage_admin.agent.verbs import scan
from tests.agent.formats.test_against_qemu import create, qemu_img
from tests.agent.recording import RecordingIO, cancel, encoded, request
from tests.working import refused_as

pytestmark = pytest.mark.qemu


def pool_of(path: Path, kind: str = "dir", known: bytes = b"", number: int = 1) -> dict[str, Any]:
    return {"id": number, "path_b64": encoded(path), "kind": kind, "known_b64": encoded(known)}


def scanned(path: Path, kind: str = "dir", known: bytes = b"", **more: Any) -> RecordingIO:
    io = RecordingIO()
    scan.run(request("scan", pools=[pool_of(path, kind, known)], **more), io)
    return io


def known_of(io: RecordingIO) -> bytes:
    return b"".join(bytes.fromhex(image["fp"]) for image in io.all("image"))


def test_tells_the_same_sizes_as_qemu_img_for_every_format(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(os.urandom(1_000_000))
    for image_format in ("raw", "qcow2", "vmdk", "vdi", "vpc"):
        qemu_img("convert", "-O", image_format, tmp_path / "data", tmp_path / f"disk.{image_format}")
    for subformat in ("monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat", "streamOptimized"):
        qemu_img(
            "convert", "-O", "vmdk", "-o", f"subformat={subformat}", tmp_path / "data", tmp_path / f"{subformat}.vmdk"
        )
    create(tmp_path / "outside.qcow2", "qcow2", f"data_file={tmp_path}/outside.data")
    qemu_img("bench", "-w", "-c", "3", "-f", "qcow2", "-t", "writeback", tmp_path / "outside.qcow2")
    io = scanned(tmp_path)
    assert len(io.images()) == 10
    for image in io.all("image"):
        truth = json.loads(qemu_img("info", "--output=json", "-f", image["format"], unb64(image["path_b64"]).decode()))
        assert image["state"] == "ok"
        assert image["virtual_size"] == truth["virtual-size"]
        assert image["allocated_size"] == truth["actual-size"]
        assert image["file_size"] == Path(unb64(image["path_b64"]).decode()).stat().st_size
    pool = io.one("pool")
    assert (pool["state"], pool["images"], pool["others"]["count"]) == ("ok", 10, 2)  # data and outside.data


def test_an_unchanged_image_is_not_told_again_and_a_changed_one_is(tmp_path: Path) -> None:
    for name in ("a.qcow2", "b.qcow2", "c.qcow2"):
        create(tmp_path / name, "qcow2")
    create(tmp_path / "flat.vmdk", "vmdk", "subformat=monolithicFlat")
    first = scanned(tmp_path)
    again = scanned(tmp_path, known=known_of(first))
    assert again.images() == {}
    assert (again.one("pool")["images"], again.one("pool")["vanished_b64"]) == (4, "")

    os.utime(tmp_path / "b.qcow2", (1, 1))
    (tmp_path / "c.qcow2").unlink()
    third = scanned(tmp_path, known=known_of(first))
    assert set(third.images()) == {b"b.qcow2"}
    gone = unb64(third.one("pool")["vanished_b64"])
    prints = {name: bytes.fromhex(image["fp"]) for name, image in first.images().items()}
    assert {gone[:16], gone[16:]} == {prints[b"b.qcow2"], prints[b"c.qcow2"]}


def test_a_write_to_a_part_of_an_image_is_noticed(tmp_path: Path) -> None:
    create(tmp_path / "disk.vmdk", "vmdk", "subformat=monolithicFlat")
    known = known_of(scanned(tmp_path))
    with (tmp_path / "disk-flat.vmdk").open("r+b") as file:
        file.write(b"x" * 100_000)
    io = scanned(tmp_path, known=known)
    assert set(io.images()) == {b"disk.vmdk"}
    assert scanned(tmp_path, known=known_of(io)).images() == {}


def test_lists_links_of_a_chain_with_the_base_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    create(tmp_path / "base.qcow2", "qcow2")
    create(tmp_path / "sub" / "middle.qcow2", "qcow2", "", "", "-b", "../base.qcow2", "-F", "qcow2")
    create(tmp_path / "leaf.qcow2", "qcow2", "", "", "-b", tmp_path / "sub" / "middle.qcow2", "-F", "qcow2")
    create(tmp_path / "broken.qcow2", "qcow2", "", "8M", "-u", "-b", "gone.qcow2", "-F", "qcow2")
    images = scanned(tmp_path).images()
    base = (tmp_path / "base.qcow2").stat()
    middle = images[b"middle.qcow2"]
    assert unb64(middle["backing_b64"]) == b"../base.qcow2"
    assert unb64(middle["backing_path_b64"]) == bytes(tmp_path / "base.qcow2")
    assert (middle["backing_dev"], middle["backing_inode"]) == (base.st_dev, base.st_ino)
    assert images[b"leaf.qcow2"]["backing_inode"] == middle["inode"]
    assert images[b"leaf.qcow2"]["backing_format"] == "qcow2"
    assert images[b"base.qcow2"]["backing_b64"] is None
    assert unb64(images[b"broken.qcow2"]["backing_path_b64"]) == bytes(tmp_path / "gone.qcow2")
    assert images[b"broken.qcow2"]["backing_inode"] is None


UNSAFE = ["json:{}", "nbd:localhost:1", "nbd://host/x", "file:/etc/passwd", "ssh://root@host/x", "a:b", "fat:rw:/"]


@pytest.mark.parametrize("name", UNSAFE)
def test_a_base_behind_a_protocol_is_named_as_unsafe_and_never_resolved(tmp_path: Path, name: str) -> None:
    create(tmp_path / "over.qcow2", "qcow2", "", "8M", "-u", "-b", "x" * len(name), "-F", "raw")
    image = (tmp_path / "over.qcow2").read_bytes().replace(b"x" * len(name), name.encode(), 1)
    (tmp_path / "over.qcow2").write_bytes(image)
    told = scanned(tmp_path).images()[b"over.qcow2"]
    assert unb64(told["backing_b64"]) == name.encode()
    assert told["backing_unsafe"]
    assert (told["backing_path_b64"], told["backing_inode"]) == (None, None)


def test_a_slash_before_a_colon_makes_a_plain_name(tmp_path: Path) -> None:
    create(tmp_path / "nbd:x", "qcow2")
    create(tmp_path / "over.qcow2", "qcow2", "", "8M", "-u", "-b", "./nbd:x", "-F", "qcow2")
    told = scanned(tmp_path).images()[b"over.qcow2"]
    assert told["backing_unsafe"] is None
    assert told["backing_inode"] == (tmp_path / "nbd:x").stat().st_ino


def test_names_of_any_bytes_travel_unharmed(tmp_path: Path) -> None:
    names = [b"-f.raw", b"a,b.raw", b"nbd:x.raw", b"new\nline.raw", b"\xff\xfe.raw", b"\x1b[31m.raw", b"<script>.raw"]
    names.append(b"n" * 251 + b".raw")
    for name in names:
        with open(bytes(tmp_path) + b"/" + name, "wb") as file:  # noqa: PTH123
            file.write(bytes(1024))
    assert set(scanned(tmp_path).images()) == set(names)


def test_only_images_are_listed_and_the_rest_is_counted(tmp_path: Path) -> None:
    create(tmp_path / "no-extension", "qcow2")
    create(tmp_path / "backup.qcow2.bak", "qcow2")
    (tmp_path / "notes.txt").write_bytes(b"hello" * 1000)
    (tmp_path / "empty").touch()
    (tmp_path / "bare").write_bytes(bytes(2 << 20))
    iso = bytes(32768) + b"\x01CD001\x01" + bytes(30000)
    (tmp_path / "debian.iso").write_bytes(iso)
    (tmp_path / "cd.img").write_bytes(iso)
    (tmp_path / "named").write_bytes(bytes(700))
    io = scanned(tmp_path, named_b64=[encoded(tmp_path / "named"), encoded(tmp_path / "missing")])
    assert set(io.images()) == {b"no-extension", b"backup.qcow2.bak", b"named"}
    others = [tmp_path / name for name in ("notes.txt", "empty", "bare", "debian.iso", "cd.img")]
    assert io.one("pool")["others"] == {"count": 5, "bytes": sum(path.stat().st_blocks * 512 for path in others)}
    assert set(scanned(tmp_path, "libvirt").images()) == {b"no-extension", b"backup.qcow2.bak", b"bare"}


def test_nothing_but_regular_files_is_ever_opened(tmp_path: Path) -> None:
    pool, outside = tmp_path / "pool", tmp_path / "outside"
    pool.mkdir()
    outside.mkdir()
    create(outside / "secret.qcow2", "qcow2")
    os.mkfifo(pool / "pipe.qcow2")
    os.mkfifo(pool / "pipe")
    os.mknod(pool / "null.raw", 0o600 | 0o020000, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(str(pool / "socket.raw"))
        (pool / "link.qcow2").symlink_to(outside / "secret.qcow2")
        (pool / "notes").symlink_to(outside / "secret.qcow2")
        (pool / "folder").symlink_to(outside)
        io = scanned(pool)
    assert set(io.images()) == {b"link.qcow2"}
    link = io.images()[b"link.qcow2"]
    assert (link["state"], link["format"], link["virtual_size"]) == ("unreadable", None, None)
    assert link["detail"] == "is a symbolic link; register the folder that it leads to"
    assert scanned(pool, known=known_of(io)).images() == {}


def test_unreadable_images_are_listed_with_the_reason(tmp_path: Path) -> None:
    create(tmp_path / "a.qcow", "qcow")
    (tmp_path / "b.qcow2").write_bytes(b"QFI\xfb" + bytes(1000))
    images = scanned(tmp_path).images()
    assert images[b"a.qcow"]["detail"] == "looks like qcow, a format that is not supported"
    assert (images[b"b.qcow2"]["state"], images[b"b.qcow2"]["virtual_size"]) == ("unreadable", None)


def test_each_kind_of_pool_looks_where_its_images_are(tmp_path: Path) -> None:
    places = ("top", "sub/a", "images/100/b", "images/100/x/c", "images/odd/d", "lost+found/e", "1/2/3/4/5/6/7/8/f")
    for place in (*places, "1/2/3/4/5/6/7/8/9/g"):
        path = tmp_path / (place + ".raw")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(512))

    def found(kind: str) -> list[bytes]:
        return [name.removesuffix(b".raw") for name in scanned(tmp_path, kind).images()]

    assert found("libvirt") == [b"top"]
    assert found("proxmox") == [b"b"]
    assert sorted(found("dir")) == [b"a", b"b", b"c", b"d", b"f", b"top"]
    deep = tmp_path / "1/2/3/4/5/6/7/8/9/g.raw"
    assert set(scanned(tmp_path, "libvirt", named_b64=[encoded(deep)]).images()) == {b"top.raw", b"g.raw"}


def test_what_jobs_left_beside_an_image_is_no_image(tmp_path: Path) -> None:
    create(tmp_path / "disk.qcow2", "qcow2")
    (tmp_path / ".sa-one.orig").write_bytes(os.urandom(50_000))
    (tmp_path / ".sa-two.orig").hardlink_to(tmp_path / "disk.qcow2")
    (tmp_path / ".sa-one.journal").write_text("{}")
    create(tmp_path / ".sa-two.new", "qcow2")
    io = scanned(tmp_path)
    assert set(io.images()) == {b"disk.qcow2"}
    pool = io.one("pool")
    assert (pool["undo_bytes"], pool["leftovers"]) == ((tmp_path / ".sa-one.orig").stat().st_blocks * 512, 1)
    assert pool["others"]["count"] == 0


def test_a_vmdk_descriptor_cannot_hide_images_of_other_formats(tmp_path: Path) -> None:
    create(tmp_path / "victim.qcow2", "qcow2")
    (tmp_path / "odd-part.bin").write_bytes(bytes(1 << 20))
    (tmp_path / "evil.vmdk").write_text(
        '# Disk DescriptorFile\nversion=1\ncreateType="monolithicFlat"\n'
        'RW 2048 FLAT "victim.qcow2" 0\nRW 2048 FLAT "odd-part.bin" 0\n'
    )
    assert set(scanned(tmp_path).images()) == {b"victim.qcow2", b"evil.vmdk"}


@pytest.mark.parametrize("make", ["nothing", "file"])
def test_nothing_vanishes_from_a_pool_that_is_missing(tmp_path: Path, make: str) -> None:
    if make == "file":
        (tmp_path / "pool").touch()
    pool = scanned(tmp_path / "pool", known=os.urandom(32)).one("pool")
    assert (pool["state"], pool["vanished_b64"], pool["capacity_bytes"]) == ("missing", "", None)


def test_nothing_vanishes_where_a_folder_could_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        create(tmp_path / name / "disk.qcow2", "qcow2")
    known = known_of(scanned(tmp_path))
    real = os.open

    def failing(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if path == "b":
            raise OSError(5, "Input/output error")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", failing)  # root may enter every folder: only the disk itself can refuse it
    pool = scanned(tmp_path, known=known).one("pool")
    assert (pool["state"], pool["vanished_b64"]) == ("unreadable", "")
    assert pool["detail"] == f"{tmp_path}/b: Input/output error: could not be read"


def test_tells_a_pools_space_and_filesystem_as_the_system_does(tmp_path: Path) -> None:
    pool = scanned(tmp_path).one("pool")
    shown = subprocess.run(
        ["findmnt", "-nb", "-o", "SOURCE,FSTYPE", "-T", tmp_path], capture_output=True, text=True, check=True
    ).stdout.split()
    assert [pool["mount_source"], pool["filesystem"]] == shown
    space = os.statvfs(tmp_path)
    assert pool["capacity_bytes"] == space.f_blocks * space.f_frsize
    assert pool["network"] is False
    assert pool["shared_key"].startswith(pool["fs_key"] + ":/")
    assert pool["shared_key"].endswith(str(tmp_path))


def test_looks_for_asked_paths(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    status = (tmp_path / "there").stat()
    asked = [encoded(tmp_path / "there"), encoded(tmp_path / "gone"), encoded(b"relative")]
    seen = scanned(tmp_path, probe_b64=asked).one("seen")
    assert seen["probe"] == [[status.st_dev, status.st_ino], False, None]


def test_fifty_bombs_neither_slow_a_scan_nor_fill_the_memory(tmp_path: Path) -> None:
    create(tmp_path / "seed.qcow2", "qcow2")
    header = (tmp_path / "seed.qcow2").read_bytes()
    end = len(header) + -len(header) % 65536
    entry = struct.pack(">QIHHIIQII", 0, 0, 1, 100, 0, 0, 0, 0, 0) + b"1" + b"n" * 100 + bytes(3)
    fields = [(36, ">I", 2**22), (60, ">I", 65535), (60, ">I", 4096), (24, ">Q", 2 << 60), (56, ">I", 128)]
    for number in range(50):
        offset, layout, value = fields[number % len(fields)]
        image = bytearray(header)
        struct.pack_into(layout, image, offset, value)
        if offset == 60:
            struct.pack_into(">Q", image, 64, end)
            image += bytes(end - len(image)) + entry * 4096
        (tmp_path / f"bomb{number:02}.qcow2").write_bytes(image)
        os.truncate(tmp_path / f"bomb{number:02}.qcow2", 1 << 33)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    io = RecordingIO()
    io.emit_raw = lambda line: lines.append(len(line))  # type: ignore[method-assign]
    lines: list[int] = []
    scan.run(request("scan", pools=[pool_of(tmp_path)]), io)
    assert time.thread_time() - started < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024
    assert len(lines) == 51
    assert max(lines) > 300_000  # one that is within the bounds, in full


def test_stops_when_the_controller_says_so(tmp_path: Path) -> None:
    for number in range(450):
        (tmp_path / f"{number}.raw").touch()
    io = RecordingIO(cancel)
    with pytest.raises(StoppedError):
        scan.run(request("scan", pools=[pool_of(tmp_path)]), io)
    assert len(io.images()) == 199
    assert io.all("pool") == []


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"pools": [], "surprise": 1},
        {"pools": [{"id": 1, "path_b64": encoded(b"relative"), "kind": "dir"}]},
        {"pools": [{"id": 1, "path_b64": encoded(b"/tmp"), "kind": "lvm"}]},
        {"pools": [{"id": 1, "path_b64": "???", "kind": "dir"}]},
        {"pools": [{"id": 1, "path_b64": encoded(b"/tmp"), "kind": "dir", "known_b64": encoded(b"odd")}]},
        {"pools": [{"id": "1", "path_b64": encoded(b"/tmp"), "kind": "dir"}]},
        {"pools": [], "named_b64": [3]},
    ],
)
def test_refuses_arguments_that_are_not_as_they_should_be(args: dict[str, Any]) -> None:
    io = RecordingIO()
    assert refused_as(scan.run, request("scan", **args), io) == "invalid"
    assert io.events == []
