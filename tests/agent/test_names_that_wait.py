"""A name in a header may lead to a filesystem that makes one wait: nobody looks there, whatever links lead on."""

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage_admin.agent.protocol import b64
from storage_admin.agent.rewrite.backing_name import leads_to
from storage_admin.agent.verbs import scan
from tests.agent.harness import ask, held_open, make_image, qemu_img, reclaim_args, write
from tests.agent.recording import RecordingIO, request
from tests.harness.filesystems import new_folder

pytestmark = pytest.mark.qemu

#: Serves a filesystem in which there is nothing, and writes down which names anybody looked for in it. A process of its
#: own: whoever looks waits for it, also this one, and its end lets them go.
#: include/uapi/linux/fuse.h: headers of a request and of an answer; numbers of requests.
_SERVER = """
import errno, os, struct, sys
device, asked = int(sys.argv[1]), open(sys.argv[2], "ab", buffering=0)
head, answer = struct.Struct("=IIQQIIII"), struct.Struct("=IiQ")
LOOKUP, FORGET, INIT, BATCH_FORGET = 1, 2, 26, 42
while True:
    raw = os.read(device, 1 << 20)
    length, what, unique, *_ = head.unpack_from(raw)
    if what in {FORGET, BATCH_FORGET}:
        continue
    if what == LOOKUP:
        asked.write(raw[head.size : length].rstrip(bytes(1)) + b"\\n")
    told = struct.pack("=IIIIHHI", 7, 31, 0, 0, 0, 0, 4096).ljust(64, bytes(1)) if what == INIT else b""
    os.write(device, answer.pack(answer.size + len(told), 0 if told else -errno.ENOENT, unique) + told)
"""
Asked = Callable[[], list[bytes]]


@contextlib.contextmanager
def asking(point: Path, log: Path) -> Iterator[Asked]:
    """Another process serves a filesystem there; tells on each call which names were looked for since the last one."""
    log.touch()
    with held_open("/dev/fuse", os.O_RDWR) as device:
        libc = ctypes.CDLL(None, use_errno=True)
        options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % device
        assert libc.mount(b"there", bytes(point), b"fuse", 0, options) == 0, os.strerror(ctypes.get_errno())
        server = subprocess.Popen([sys.executable, "-c", _SERVER, str(device), log], pass_fds=[device])
    try:
        with log.open("rb") as names:
            yield lambda: names.read().splitlines()
    finally:
        server.kill()
        server.wait()
        subprocess.run(["umount", "-l", point], check=True)


@pytest.fixture(params=["there", "link", "beyond"])
def named(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Asked]]:
    """A path that leads there, in three ways; and who looked for something there."""
    there = new_folder(tmp_path / "there")
    (tmp_path / "pool" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("there")
    (tmp_path / "pool" / "beyond").symlink_to("below/../../link")
    with asking(there, tmp_path / "asked") as asked:
        assert not (there / "anything").exists()
        assert asked() == [b"anything"]
        folder = tmp_path / "pool" / "beyond" if request.param == "beyond" else tmp_path / request.param
        yield folder / "base.qcow2", asked


def test_a_rewrite_does_not_look_for_a_base_there(tmp_path: Path, named: tuple[Path, Asked]) -> None:
    path, asked = named
    base, top = tmp_path / "pool" / "base.qcow2", tmp_path / "pool" / "top.qcow2"
    make_image(base)
    qemu_img("create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", top)
    write(top, 7, "1M", "1M")
    args = reclaim_args(top, base, method="rebase")
    qemu_img("rebase", "-u", "-f", "qcow2", "-b", path, "-F", "qcow2", top)
    args |= {
        name: value for name, value in reclaim_args(top, base).items() if name in {"file_size", "mtime_ns", "ctime_ns"}
    }
    asked()
    assert ask("flatten", args).get("code") == "chain_broken"
    assert asked() == []


def test_the_name_in_a_new_header_is_not_looked_for_there(tmp_path: Path, named: tuple[Path, Asked]) -> None:
    path, asked = named
    (tmp_path / "base").touch()
    folder, base = os.open(tmp_path, os.O_RDONLY), os.open(tmp_path / "base", os.O_RDONLY)
    assert leads_to(folder, b"base", base)
    assert leads_to(folder, b"pool/below/../../base", base)
    assert not leads_to(folder, os.fsencode(path.relative_to(tmp_path)), base)
    assert not leads_to(folder, bytes(path), base)
    os.close(folder)
    os.close(base)
    assert asked() == []


def test_a_scan_does_not_look_there(tmp_path: Path, named: tuple[Path, Asked]) -> None:
    path, asked = named
    top = tmp_path / "pool" / "top.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", "-u", "-b", path, "-F", "qcow2", top, "1M")
    (tmp_path / "disk").symlink_to(path)
    io = RecordingIO()
    args = {
        "pools": [{"id": 1, "path_b64": b64(bytes(tmp_path / "pool")), "kind": "dir"}],
        "named_b64": [b64(bytes(path)), b64(bytes(tmp_path / "disk"))], "probe_b64": [b64(bytes(path))],
    }  # fmt: skip
    asked()
    scan.run(request("scan", **args), io)
    assert io.images()[b"top.qcow2"]["backing_dev"] is None
    assert io.one("seen")["probe"] == [None]
    assert io.one("seen")["outside"][0]["path_b64"] == b64(bytes(tmp_path / "disk"))
    assert asked() == []
