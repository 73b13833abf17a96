"""libguestfs' appliance on a disk: a small system in a VM, the only one that ever mounts a guest's filesystems.

The disk reaches it by a unix socket alone: qemu-storage-daemon, confined as all tools that read an image, serves the
bytes as the guest reads them. libguestfs itself (:mod:`.program`) runs as a user to whom nothing belongs, in a network
without anything in it, with limits of memory, time and of what it may write; it sees that socket, and not the image.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import math
import os
import pkgutil
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Callable

from storage_admin.agent.host import locking
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import HostError, Moment, RefusedError, read_text
from storage_admin.agent.qemu.node import Node

#: Where the appliance is built, once for each version of libguestfs and kernel: root's alone, for all to read.
CACHE = "/var/cache/storage-admin/appliance"
#: Users that Debian gives to nobody (Debian Policy, 9.2.2: 65520 to 65533 belong to no package).
_USERS = range(65_520, 65_533)
#: MiB of the VM's memory; bytes of address space, seconds of processor and bytes of a file of each process there.
_MEMORY, _SPACE, _CPU, _FILE = 512, 4 << 30, 900, 256 << 20
#: Seconds for an answer: without KVM the appliance takes about 11 to start.
_PATIENCE = 180.0
#: Seconds in which an image that was written to has to be closed.
_CLOSING = 120.0
#: Seconds that it has to start by KVM, which takes about four.
_START = 30.0
#: Where each appliance has a folder of its own, under a name that is its own as well.
PLACE = "/var/tmp"  # noqa: S108
MARK = ".storage-admin-appliance-"
_MISSING = "python3-guestfs is not installed on this host; install it to look at the files of an image"


class Appliance:
    """An appliance that has a disk. Use :func:`on`."""

    def __init__(self, process: subprocess.Popen[bytes], io: AgentIO, watch: Callable[[], None]) -> None:
        if process.stdin is None or process.stdout is None:
            raise TypeError("the pipes are missing")
        self._into, self._out = process.stdin, process.stdout.fileno()
        self._process, self._io, self._watch = process, io, watch
        self._pending = bytearray()

    def ask(self, do: str, patience: float = _PATIENCE, **fields: Any) -> dict[str, Any]:
        """What it answers to one request, within so many seconds.

        Raises:
            RefusedError: ``unreadable_inside``: it cannot do that, as with a path that is not there; ``tool_missing``.
            HostError: it does not answer.
        """
        try:
            self._into.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self._into.flush()
        except BrokenPipeError:
            pass  # its end is seen below
        return self._line(patience)

    def read(self, device: str, path: str) -> Iterator[bytes]:
        """The bytes of a file, after :meth:`ask` would have told what is against it."""
        self.ask("read", device=device, path=path)
        while length := self._line()["bytes"]:
            if not 0 < length <= 4 << 20:
                raise HostError("the appliance said something that makes no sense")
            yield self._take(length)

    def _line(self, patience: float = _PATIENCE) -> dict[str, Any]:
        while b"\n" not in self._pending:
            self._more(patience)
            if len(self._pending) > 16 << 20:
                raise HostError("the appliance said too much")
        line, _, rest = bytes(self._pending).partition(b"\n")
        self._pending = bytearray(rest)
        try:
            told = json.loads(line)
        except ValueError as error:
            raise HostError("the appliance said something that makes no sense") from error
        if not isinstance(told, dict):
            raise HostError("the appliance said something that makes no sense")
        if "missing" in told:
            raise RefusedError("tool_missing", str(told["missing"]))
        if "error" in told:
            raise RefusedError("unreadable_inside", f"this cannot be read: {told['error']}")
        return told

    def _take(self, length: int) -> bytes:
        while len(self._pending) < length:
            self._more()
        taken = bytes(self._pending[:length])
        del self._pending[:length]
        return taken

    def _more(self, patience: float = _PATIENCE) -> None:
        deadline = time.monotonic() + patience
        while not select.select([self._out], [], [], 0.2)[0]:
            self._io.check()
            self._watch()
            if time.monotonic() > deadline:
                raise HostError(f"the appliance did not answer within {patience:.0f} s")
        chunk = os.read(self._out, 1 << 20)
        if not chunk:
            self._process.wait()
            said = self._process.stderr.read().decode("utf-8", "replace").strip() if self._process.stderr else ""
            if "guestfs" in said and "ModuleNotFoundError" in said:
                raise RefusedError("tool_missing", _MISSING)
            raise HostError(f"the appliance ended: {said.splitlines()[-1][:300] if said else 'it said nothing'}")
        self._pending += chunk


@contextlib.contextmanager
def on(
    io: AgentIO, node: Node, watch: Callable[[], None], *, writable: bool = False, long: bool = False
) -> Iterator[Appliance]:
    """An appliance that has a disk, for as long as the context lasts.

    Args:
        node: the disk.
        watch: called now and then; what it raises ends the appliance.
        writable: whether the appliance may write to it; else what it writes, as when it replays a journal, is thrown
            away.
        long: whether its work may take as long as it takes.

    Raises:
        RefusedError: ``tool_missing``.
        HostError: it does not start.
    """
    built = _built(io)
    clear()
    user = _USERS[os.getpid() % len(_USERS)]
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix=f"{MARK}{os.getpid()}-", dir=PLACE)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        path = os.path.join(folder, "disk")
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(path)
        os.chown(path, user, user)
        os.chmod(path, 0o600)
        os.chown(folder, user, user)  # from now on others of that user may change what is in it
        listening.listen(4)
        stack.enter_context(_started(_export(io, node, listening.fileno(), writable=writable), gently=writable))
        yield _begun(stack, io, watch, built, (folder, path, user), writable=writable, long=long)


def _begun(
    stack: contextlib.ExitStack,
    io: AgentIO,
    watch: Callable[[], None],
    built: str,
    place: tuple[str, str, int],
    *,
    writable: bool,
    long: bool,
) -> Appliance:
    """The appliance, started by KVM where that works: there are machines whose /dev/kvm starts nothing."""
    folder, path, user = place
    known, this_boot = f"{CACHE}/kvm-does-not-work", Moment.now().boot_id
    for kvm in (True, False):
        if kvm and (_kvm_groups() is None or read_text(known) == this_boot):
            continue
        io.progress("starting", 0, None, "starting the appliance that mounts the filesystems")
        process = stack.enter_context(_started(_program(io, built, folder, user, kvm=kvm, long=long)))
        appliance = Appliance(process, io, watch)
        try:
            appliance.ask("begin", _START if kvm else _PATIENCE, socket=path, memory=_MEMORY, writable=writable)
        except (HostError, RefusedError) as error:
            if not kvm or error.code == "tool_missing":
                raise
            io.log(f"the appliance does not start by KVM, and is started without: {error.detail}", "warning")
            with open(known, "w", encoding="ascii") as file:
                file.write(this_boot)
            _end(process)
        else:
            return appliance
    raise HostError("the appliance does not start")


@contextlib.contextmanager
def _started(process: subprocess.Popen[bytes], *, gently: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    tools.running.add(process.pid)
    try:
        yield process
    finally:
        try:
            _end(process, gently=gently)
        finally:
            tools.running.discard(process.pid)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def _end(process: subprocess.Popen[bytes], *, gently: bool = False) -> None:
    """End a program with all of its session; one that has an image open to write is let close it first.

    Raises:
        HostError: it did not.
    """
    late = False
    if gently and process.poll() is None:
        process.terminate()
        try:
            process.wait(_CLOSING)
        except subprocess.TimeoutExpired:
            late = True
    # Of one that was waited for already, the number may be another process's by now.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if late:
        raise HostError(f"the program that serves the disk did not close it within {_CLOSING:.0f} s")


def _export(io: AgentIO, node: Node, listening: int, *, writable: bool) -> subprocess.Popen[bytes]:
    """qemu-storage-daemon with the disk, confined; it makes no socket, but has one that listens already."""
    options = json.loads((node.written() if writable else node.shared()).partition(":")[2])
    options["node-name"] = "disk"
    if writable:
        options["discard"] = options["file"]["discard"] = "unmap"
    argv = [
        "qemu-storage-daemon", "--blockdev", json.dumps(options),
        "--nbd-server", f"addr.type=fd,addr.str={listening}",
        "--export", f"type=nbd,id=export,node-name=disk,name=disk,writable={'on' if writable else 'off'}",
    ]  # fmt: skip
    io.command(["qemu-storage-daemon", "--export", "nbd", node.path.decode("utf-8", "backslashreplace")], None)
    return tools.start(argv, None, idle_io=False, files=node.files(written=writable), pass_fds=[listening], stdin=None)


def _program(io: AgentIO, built: str, folder: str, user: int, *, kvm: bool, long: bool) -> subprocess.Popen[bytes]:
    """libguestfs, as that user, without network; whatever it starts ends with it."""
    text = pkgutil.get_data("storage_admin.agent.appliance", "program.py") or b""
    groups = (_kvm_groups() if kvm else None) or "--clear-groups"
    argv = [
        *(tools.find("setpriv"), "--pdeathsig", "KILL", "--"),
        *(tools.find("unshare"), "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc", "--"),
        *("setpriv", f"--reuid={user}", f"--regid={user}", groups, "--no-new-privs", "--pdeathsig", "KILL", "--"),
        *("prlimit", f"--as={_SPACE}", "--cpu=unlimited" if long else f"--cpu={_CPU}", f"--fsize={_FILE}"),
        *("--core=0", "--nproc=200", "--"),
        *("/usr/bin/python3", "-I", "-c", text.decode()),
    ]
    io.command(["python3", "(libguestfs)"], None)
    places = dict.fromkeys(("TMPDIR", "HOME", "LIBGUESTFS_CACHEDIR", "XDG_RUNTIME_DIR"), folder)
    return subprocess.Popen(
        argv,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env={
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "LIBGUESTFS_PATH": built,
            "LIBGUESTFS_BACKEND": "direct", **places, **({} if kvm else {"LIBGUESTFS_BACKEND_SETTINGS": "force_tcg"}),
        },
    )  # fmt: skip


def _kvm_groups() -> str | None:
    """By which groups a user without rights may use KVM, as an option of setpriv; ``None`` where none may be given."""
    try:
        status = os.stat("/dev/kvm")
    except FileNotFoundError:
        return None
    if status.st_mode & 0o006 == 0o006:
        return "--clear-groups"
    return f"--groups={status.st_gid}" if status.st_gid and status.st_mode & 0o060 == 0o060 else None


@functools.cache  # (its argument is the agent's only one)
def _built(io: AgentIO) -> str:
    """The appliance's folder, made anew where libguestfs or the kernel is another one than when it was made.

    An agent asks once: supermin takes more than a second for that, and a job may start several appliances.
    """
    parts = sorted(glob.glob("/usr/lib*/guestfs/supermin.d") + glob.glob("/usr/lib/*/guestfs/supermin.d"))
    if not parts:
        raise RefusedError("tool_missing", _MISSING)
    os.makedirs(CACHE, exist_ok=True)
    os.chmod(os.path.dirname(CACHE), 0o755)  # noqa: S103 (for whom the appliance runs as)
    lock = os.open(f"{CACHE}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        locking.take_file(lock, math.inf, io.check)
        argv = ["supermin", "--build", "--if-newer", "--copy-kernel", "-f", "ext2", "--host-cpu", os.uname().machine]
        done = tools.run([*argv, parts[-1], "-o", f"{CACHE}/built"], io, limits=None)
        if done.exit_code:
            raise HostError(f"the appliance could not be built, {done.words()}")
        with open(f"{CACHE}/built/README.fixed", "w", encoding="ascii") as file:
            file.write("Made by supermin for Storage Admin. libguestfs takes this folder as it is.\n")
        # Whatever this process leaves to others of what it makes, and whoever had the kernel before.
        for name in ("..", "../built", "kernel", "initrd", "root", "README.fixed"):
            os.chown(f"{CACHE}/built/{name}", 0, 0)
            os.chmod(f"{CACHE}/built/{name}", 0o755 if name.startswith(".") else 0o644)
        # A copied kernel is as old as its package, by which supermin would make all of it anew each time.
        made = os.stat(f"{CACHE}/built/root").st_mtime_ns
        os.utime(f"{CACHE}/built/kernel", ns=(made, made))
    finally:
        os.close(lock)
    return f"{CACHE}/built"


def clear() -> None:
    """Remove what killed agents left, also of those that died before the folder was another user's."""
    for folder in glob.glob(f"{PLACE}/{MARK}*"):
        pid = os.path.basename(folder)[len(MARK) :].partition("-")[0]
        with contextlib.suppress(FileNotFoundError):  # another agent was quicker
            if os.lstat(folder).st_uid in (0, *_USERS) and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                shutil.rmtree(folder, ignore_errors=True)
