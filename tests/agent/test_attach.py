"""What is attached to a host is told by its kernel, and where that has no module for it, nothing is attached."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from storage_admin.agent.host import nbd
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import HostError
from storage_admin.agent.rewrite.chain import Chain
from storage_admin.agent.verbs import attach
from tests.agent.harness import ask, leftovers, rewrite_args
from tests.harness.filesystems import new_folder
from tests.harness.processes import running

pytestmark = pytest.mark.qemu

#: What a Debian 12 told while two images were attached: one by an agent, read-only, and one by hand.
THREADS = {"nbd0": 481, "nbd10": 377}
PROCESSES = {481: 477, 377: 374}
NOTE = {"job": "j1", "by": "ada", "at": 1795783105.7, "dev": 65024, "inode": 12987}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host's ``/sys``, ``/proc`` and ``/dev``, as far as they are read."""
    for name, (size, read_only) in {"nbd0": (131072, 1), "nbd10": (2048, 0), "nbd2": (0, 0), "vda": (9, 0)}.items():
        block = new_folder(tmp_path / "sys/block" / name, parents=True)
        (block / "size").write_text(f"{size}\n")
        (block / "ro").write_text(f"{read_only}\n")
        if name in THREADS:
            (block / "pid").write_text(f"{THREADS[name]}\n")
    for thread, files in {481: {9: ("/images/vm.qcow2", 12987), 3: ("socket:[5]", 5)}, 377: {4: ("/x/y", 7)}}.items():
        place = tmp_path / "proc" / str(thread)
        (place / "fd").mkdir(parents=True)
        (place / "fdinfo").mkdir()
        (place / "status").write_text(f"Name:\tqemu-nbd\nTgid:\t{PROCESSES[thread]}\nPid:\t{thread}\n")
        for descriptor, (path, inode) in files.items():
            (place / "fd" / str(descriptor)).symlink_to(path)
            (place / "fdinfo" / str(descriptor)).write_text(f"pos:\t0\nflags:\t02000000\nino:\t{inode}\n")
    folder = new_folder(tmp_path / nbd.FOLDER[1:], parents=True)
    (folder / "nbd0.json").write_text(json.dumps(NOTE))
    return tmp_path


def test_what_is_attached_is_told_with_who_has_attached_it(root: Path) -> None:
    by_hand = dict.fromkeys(NOTE)
    assert nbd.attached(str(root)) == [
        {"device": "nbd0", "path": f"{nbd.FOLDER}/nbd0", "pid": 477, "size": 64 << 20, "read_only": True,
         "file": "/images/vm.qcow2", **NOTE},
        {"device": "nbd10", "path": "/dev/nbd10", "pid": 374, "size": 1 << 20, "read_only": False, "file": "/x/y",
         **by_hand},
    ]  # fmt: skip


def test_a_device_that_serves_another_file_by_now_is_none_of_ours(root: Path) -> None:
    (root / "proc/481/fdinfo/9").write_text("ino:\t12988\n")
    told = nbd.attached(str(root))[0]
    assert (told["job"], told["inode"], told["path"], told["file"]) == (None, None, "/dev/nbd0", "/images/vm.qcow2")


def test_a_note_of_a_host_that_has_started_anew_tells_nothing(root: Path) -> None:
    for name in THREADS:
        (root / "sys/block" / name / "pid").unlink()
    assert nbd.attached(str(root)) == []


@pytest.mark.parametrize(
    ("max_part", "modules", "code"),
    [("0", "", ""), ("16", "kernel/drivers/block/nbd.ko:", "nbd_partitions"), (None, "", "nbd_missing"),
     (None, None, "nbd_missing"), (None, "kernel/drivers/block/nbd.ko.xz:", "")],
)  # fmt: skip
def test_whether_a_host_can_attach_is_told_without_loading_anything(
    tmp_path: Path, max_part: str | None, modules: str | None, code: str
) -> None:
    if max_part is not None:
        place = new_folder(tmp_path / "sys/module/nbd/parameters", parents=True)
        (place / "max_part").write_text(f"{max_part}\n")
    if modules is not None:
        place = new_folder(tmp_path / "lib/modules" / os.uname().release, parents=True)
        (place / "modules.dep").write_text(modules)
    assert nbd.against(str(tmp_path)) == code


def test_without_the_module_an_image_is_refused_and_as_it_was(image: Path) -> None:
    assert nbd.against() == "nbd_missing", "tests/machines/test_attach.py attaches where there is one"
    args, before = rewrite_args(image), image.read_bytes()
    for writable in (False, True):
        assert ask("attach", args | {"writable": writable, "by": "ada"})["code"] == "nbd_missing"
    assert (image.read_bytes() == before, leftovers(image.parent)) == (True, set())


def test_what_is_not_attached_cannot_be_detached(image: Path) -> None:
    status = image.stat()
    for device in ("nbd0", "sda", "../../etc/passwd"):
        answer = ask("detach", {"device": device, "dev": status.st_dev, "inode": status.st_ino})
        assert answer["code"] == "stale_plan"
    told = ask("attached", {})
    assert (told["nbd"], told["attached"]) == ("nbd_missing", [])


def test_only_the_process_that_was_started_for_a_device_is_its_server() -> None:
    name = f"nbd9{os.getpid()}"
    for given, found in ((f"{name}.socket", True), (f"{name}0.socket", False)):
        argv = ["python3", "-c", "import sys; print(flush=True); sys.stdin.read()", f"--socket={nbd.FOLDER}/{given}"]
        with running(argv, b"\n") as process:  # until then its command line may not be there yet
            assert (nbd.servers(name) == [process.pid]) is found


@pytest.mark.parametrize("lives", [True, False])
def test_the_server_has_its_socket_until_the_kernel_serves_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    """It says that it is ready before it has connected there itself: of 150 real ones two did so too late."""
    socket = tmp_path / "nbd0.socket"
    seen: list[bool] = []

    def is_connected(_name: str) -> bool:
        seen.append(socket.exists())
        return len(seen) > 2

    def run(*_argv: object, **_how: object) -> tools.Finished:
        socket.touch()
        return tools.Finished(0, b"", b"")

    monkeypatch.setattr(nbd, "FOLDER", str(tmp_path))
    monkeypatch.setattr(nbd, "is_connected", is_connected)
    monkeypatch.setattr(nbd, "servers", lambda _name: [4711] if lives else [])
    monkeypatch.setattr(tools, "run", run)
    node = SimpleNamespace(options=dict, format="raw", path=b"/images/a.raw", files=lambda **_how: ())
    chain = cast("Chain", SimpleNamespace(node=lambda: node))
    how = nullcontext() if lives else pytest.raises(HostError, match="ended")
    with how:
        attach._connect(cast("AgentIO", None), chain, "nbd0", writable=False)
    assert (seen, socket.exists()) == (([True] * 3, False) if lives else ([True], True))
