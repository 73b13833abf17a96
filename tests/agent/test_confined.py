"""A tool that works on an image opens nothing but what it was given, and calls nobody, whatever the header names.

The images here are as they are when a race was lost: no reader of headers has looked at them before qemu does.
"""

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from storage_admin.agent.programs import confined, tools
from storage_admin.agent.programs.confined import Files
from storage_admin.agent.protocol import HostError
from storage_admin.agent.qemu import img
from storage_admin.agent.qemu.img import Conversion, Effort, Node
from tests.agent.every_verb import request
from tests.agent.harness import Agent, ask, heard, held_open, leftovers, make_image, reads_as, write
from tests.agent.harness import qemu_img as run_qemu_img
from tests.agent.hostile import VIRTUAL_SIZE, qcow2, qed, vmdk_sparse, vmdk_text
from tests.agent.recording import RecordingIO
from tests.agent.stranger import CANARY, fingerprints, holds_canary
from tests.faults.swapper import Watch
from tests.harness.filesystems import new_file

pytestmark = pytest.mark.qemu

#: An agent whose tools are confined in another way.
OTHERWISE = [sys.executable, "-m", "tests.agent.other_confinement"]


@dataclass
class Ground:
    """A pool, and what lies outside of it: a secret file, a device, and who listens."""

    folder: Path
    listeners: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool, self.outside = self.folder / "pool", self.folder / "outside"
        for place in (self.pool, self.outside):
            place.mkdir()
        self.secret = self.outside / "secret"
        self.secret.write_bytes(CANARY.ljust(512, b"x") * (2 * VIRTUAL_SIZE // 512))
        self.secret.chmod(0o600)
        os.mknod(self.outside / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
        for family, address in ((socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, str(self.outside / "socket"))):
            listener = socket.socket(family)
            listener.bind(address)
            listener.listen(8)
            listener.setblocking(False)
            self.listeners.append(listener)
        self.port = self.listeners[0].getsockname()[1]
        self.open_secret = os.open(self.secret, os.O_RDWR)
        self._before = fingerprints(self.outside)
        self._watch = Watch(self.outside)

    def names(self) -> dict[str, bytes]:
        """What a header may name, by what that is."""
        socket_path, secret, port = bytes(self.outside / "socket"), bytes(self.secret), self.port
        return {
            "file": secret,
            "relative": b"../outside/secret",
            "json": b'json:{"driver":"raw","file":{"driver":"file","filename":"%s"}}' % secret,
            "device": bytes(self.outside / "device"),
            "device by driver": b"host_device:" + bytes(self.outside / "device"),
            "descriptor": b"/proc/self/fd/%d" % self.open_secret,
            "descriptor of the agent": b"/proc/%d/fd/%d" % (os.getpid(), self.open_secret),
            "root of another process": b"/proc/1/root" + secret,
            "nbd over tcp": b"nbd://127.0.0.1:%d/x" % port,
            "nbd over unix": b"nbd+unix:///x?socket=" + socket_path,
            "nbd in the old way": b"nbd:unix:" + socket_path,
            "http": b"http://127.0.0.1:%d/x" % port,
        }

    def verify(self) -> None:
        """Nothing outside was opened, changed or called, and nothing of it is in the pool."""
        assert self._watch.seen() == []
        for listener in self.listeners:
            with pytest.raises(BlockingIOError):
                listener.accept()
        assert fingerprints(self.outside) == self._before
        self._watch.seen()  # that was this test
        assert not [path for path in self.pool.iterdir() if holds_canary(path)]

    def close(self) -> None:
        self._watch.close()
        os.close(self.open_secret)
        for listener in self.listeners:
            listener.close()


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    made = Ground(tmp_path)
    yield made
    made.close()


NAMES = (
    "file", "relative", "json", "device", "device by driver", "descriptor", "descriptor of the agent",
    "root of another process", "nbd over tcp", "nbd over unix", "nbd in the old way", "http",
)  # fmt: skip


def with_parent(name: bytes) -> bytes:
    text = vmdk_text(b'RW 2048 SPARSE "vm.vmdk"', b"monolithicSparse", name.replace(b'"', b"'"))
    return vmdk_sparse(sparse_vmdk(), text)


@lru_cache
def sparse_vmdk() -> bytes:
    with TemporaryDirectory() as folder:
        run_qemu_img("create", "-q", "-f", "vmdk", Path(folder) / "sparse.vmdk", "1M")
        return (Path(folder) / "sparse.vmdk").read_bytes()


#: The format of an image that names something in its header, and how it is made.
HEADERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "data file": ("qcow2", lambda name: qcow2(data_file=name)),
    "extent": ("vmdk", lambda name: vmdk_text(b'RW 2048 FLAT "%s" 0' % name.replace(b'"', b"'"))),
    "base": ("qcow2", lambda name: qcow2(name, b"raw")),
    "QED base": ("qed", lambda name: qed(name, raw=True)),
    "VMDK parent": ("vmdk", with_parent),
}


class AsItsHeaderSays(Node):
    """An image that is opened with whatever its header names below it: as a tool that was told nothing would."""

    def options(self) -> dict[str, object]:
        return {name: value for name, value in super().options().items() if name != "backing"}


def ways(image: Node, folder: int, form: str) -> dict[str, Callable[[], object]]:
    """Everything that qemu-img is asked to do with an image."""
    io, effort = RecordingIO(), Effort()
    target = Conversion(folder=folder, name=b"new", shown=b"new", format="raw", options="", compress=False)
    wanted: dict[str, Callable[[], object]] = {
        "info": lambda: img.info(io, image),
        "measure": lambda: img.measure(io, image, ""),
        "compare": lambda: img.compare(io, image, image, VIRTUAL_SIZE, effort),
        "convert": lambda: img.convert(io, image, target, effort),
    }
    if form in img.CHECKED:
        wanted["check"] = lambda: img.check(io, image, effort)
    if form in img.REPAIRED:
        wanted["repair"] = lambda: img.change(io, image, ["check", "-r", "all"], effort)
    if form == "qcow2":
        wanted["rebase"] = lambda: img.rebase(io, image, None, effort)
        wanted["name_base"] = lambda: img.name_base(io, image, b"/nowhere", "raw")
    return wanted


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("how", "header"), [*(("landlock", header) for header in HEADERS), ("namespaces", "data file")]
)
def test_no_header_leads_a_tool_to_anything_else(
    monkeypatch: pytest.MonkeyPatch, ground: Ground, how: str, header: str, name: str
) -> None:
    monkeypatch.setattr(confined, "means", lambda: how)
    form, make = HEADERS[header]
    content = make(ground.names()[name])
    path = ground.pool / f"vm.{form}"
    with held_open(ground.pool) as folder:
        for way in ("info", "measure", "compare", "convert", "check", "repair", "rebase", "name_base"):
            path.write_bytes(content)
            (ground.pool / "new").write_bytes(b"")
            with held_open(path, os.O_RDWR) as fd, contextlib.suppress(HostError):  # what it needs is not to be had
                ways(AsItsHeaderSays(fd, form, bytes(path)), folder, form).get(way, bool)()
            ground.verify()


def test_a_vmdk_whose_sparse_header_sends_qemu_to_its_extents(ground: Ground) -> None:
    text = vmdk_text(b'RW 2048 FLAT "%s" 0' % bytes(ground.secret))
    path = new_file(ground.pool / "vm.vmdk", vmdk_sparse(sparse_vmdk(), text, 0))
    with path.open("rb") as file, pytest.raises(HostError):
        img.check(RecordingIO(), Node(file.fileno(), "vmdk", bytes(path)), Effort())
    ground.verify()


@pytest.fixture(params=["landlock", "namespaces"])
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "means", lambda: request.param)


@pytest.mark.usefixtures("means")
def test_what_is_given_to_read_is_not_written_to(tmp_path: Path) -> None:
    for name in ("read", "written"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    # That the descriptor itself could be written to changes nothing.
    with held_open(tmp_path / "read", os.O_RDWR) as read, held_open(tmp_path / "written", os.O_RDWR) as written:
        for source, target, works in ((written, read, False), (read, written, True)):
            copy = ["dd", f"if=/proc/self/fd/{source}", f"of=/proc/self/fd/{target}", "bs=100", "count=1"]
            done = tools.run([*copy, "conv=notrunc"], RecordingIO(), files=Files(read=[read], written=[written]))
            assert (done.exit_code == 0) is works, done.stderr
    assert (tmp_path / "read").read_bytes() == b"read" * 100
    assert (tmp_path / "written").read_bytes().startswith(b"read" * 25)


#: What a tool may try that somebody has taken over, as Python says it.
TRIES = {
    "a file": "open('/etc/passwd')",
    "a folder": "os.listdir('/home')",
    "a file of its own": "open('/usr/lib/mine', 'w')",
    "another's root": "open('/proc/1/root/etc/passwd')",
    "its agent's descriptors": "os.listdir(f'/proc/{os.getppid()}/fd')",
    "a socket over tcp": "socket.socket()",
    "a socket over unix": "socket.socket(socket.AF_UNIX)",
    "a pair of sockets": "socket.socketpair()",
    "a mount": "ctypes.CDLL(None, use_errno=True).mount(b'x', b'/proc', b'proc', 0, None) and os.stat('/gone')",
    "a device": "os.mknod('/dev/mine', 0o020600, os.makedev(1, 1))",
    "its rights": "open('/proc/self/fd/0/../../../etc/passwd')",
}


@pytest.mark.usefixtures("means")
@pytest.mark.parametrize("what", TRIES)
def test_a_tool_that_was_taken_over_gets_nowhere(what: str) -> None:
    text = f"import ctypes, os, socket\ntry: {TRIES[what]}\nexcept OSError as error: print('refused')"
    done = tools.run([os.path.realpath(sys.executable), "-I", "-S", "-c", text], RecordingIO(), files=Files())
    assert (done.exit_code, done.stdout) == (0, b"refused\n"), done.stderr


def test_a_host_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = confined.means.__wrapped__
    assert asked() == "landlock"
    monkeypatch.setattr(confined, "_version", lambda: 0)
    assert asked() == "namespaces"
    monkeypatch.setattr(confined, "can_enclose", lambda: False)
    assert asked() is None


@pytest.mark.parametrize(
    ("image_of", "folder_of", "mode", "refused"),
    [(0, 0, 0o644, False), (12345, 0, 0o600, True), (0, 12345, 0o644, True), (0, 0, 0o664, True)],
)
def test_without_any_means_only_roots_own_images_are_worked_on(
    pool: Path, image: Path, image_of: int, folder_of: int, mode: int, refused: bool
) -> None:
    os.chown(image, image_of, image_of)
    image.chmod(mode)
    os.chown(pool, folder_of, folder_of)
    for how in ("check none", "reclaim copy"):
        verb, args = request(how, bytes(image), pool, "qcow2")
        answer = ask(verb, args, job=verb, command=[*OTHERWISE, "nothing"])
        assert answer.get("code") == ("not_confined" if refused else None), answer
    assert bool(leftovers(pool)) is not refused


@pytest.mark.parametrize(
    "how", ["reclaim compress", "reclaim copy", "flatten rebase", "flatten convert", "convert", "check all"]
)
def test_every_verb_works_where_there_are_only_namespaces(tmp_path: Path, how: str) -> None:
    make_image(tmp_path / "base")
    path = tmp_path / "vm.qcow2"
    run_qemu_img("create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", path)
    write(path, 0x44, "1M", "2M")
    run_qemu_img("convert", "-f", "qcow2", "-O", "qcow2", path, tmp_path / "flat")
    verb, args = request(how, bytes(path), tmp_path, "qcow2")
    answer = ask(verb, args, command=[*OTHERWISE, "namespaces"])
    assert "code" not in answer, answer
    made = tmp_path / "converted.raw" if how == "convert" else path
    assert reads_as(made, tmp_path / "flat", "raw" if how == "convert" else "qcow2")


#: An agent whose image is given another header in the moment in which it is copied.
REWRITTEN = """
import sys
from pathlib import Path
from storage_admin.agent import main
from storage_admin.agent.rewrite import copying as sparse
header, copy_file = Path(sys.argv.pop(1)).read_bytes(), sparse.copy_file
def copy(source, target, *how):
    copy_file(source, target, *how)
    with open(target, "r+b", closefd=False) as file:
        file.write(header)
sparse.copy_file = copy
sys.exit(main.main())
"""


@pytest.mark.parametrize("how", ["flatten rebase", "check leaks", "check all"])
@pytest.mark.parametrize(
    "header", [qcow2(b"base", b"qcow2", data_file=b"/nowhere"), qcow2(b"other", b"qcow2"), qcow2(), b"nothing"]
)
def test_a_copy_with_another_header_than_the_images_is_not_opened_for_writing(
    tmp_path: Path, how: str, header: bytes
) -> None:
    path, evil = tmp_path / "vm.qcow2", tmp_path / "evil"
    (tmp_path / "base").write_bytes(qcow2())
    path.write_bytes(qcow2(b"base", b"qcow2"))
    evil.write_bytes(header)
    verb, args = request(how, bytes(path), tmp_path, "qcow2")
    answer, events = heard(verb, args, command=[*Agent.python(), "-c", REWRITTEN, str(evil)])
    assert answer["code"] == "stale_plan", answer
    ran = [event["argv"][1:3] for event in events if event["event"] == "command"]
    assert not [words for words in ran if words[0] == "rebase" or words[1] == "-r"], ran
    assert leftovers(tmp_path) == set()


def test_no_verb_hands_out_descriptors_without_confinement() -> None:
    """Only benchmarks do, of the folder that they made for themselves; a passphrase is a pipe, an appliance's disk a
    socket.
    """
    agent = Path(confined.__file__).parents[1]
    users = {str(path.relative_to(agent)) for path in agent.rglob("*.py") if "pass_fds" in path.read_text()}
    assert {name for name in users if not name.startswith("bench/")} == {
        "programs/tools.py", "qemu/img.py", "qemu/keys.py", "appliance/appliance.py"
    }  # fmt: skip
