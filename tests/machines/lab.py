"""Two Debian machines on one wire, under TCG: built once, and started in seconds from the state that was saved then.

Of Debian 12, and of Debian 13 where :data:`WANTED` is set: it has the ZFS and LVM of Proxmox VE 9.

What was built is kept in :data:`KEPT`, under a stamp of all that it was made from.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.harness.processes import free_port, wait_until

BUILD = Path(__file__).with_name("build.sh")
KEPT = Path("/var/cache/storage-admin-machines")
SUITES = ("bookworm", "trixie")
#: Names the suite of the machines that tests run on.
WANTED = "STORAGE_ADMIN_TEST_MACHINE"
#: As it was saved it has to be started again; what is behind its network cards may differ. No hardware's random
#: numbers nor AES, which TCG is slow at.
MACHINE = (
    "qemu-system-x86_64", "-machine", "q35,usb=off,graphics=off", "-accel", "tcg,thread=multi",
    "-smp", "2", "-m", "640", "-cpu", "qemu64,+ssse3,+sse4.1,+sse4.2,+popcnt",
    "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
    "-kernel", "vmlinuz", "-initrd", "initrd.gz", "-append",
    "console=ttyS0 quiet mitigations=off nokaslr net.ifnames=0 random.trust_cpu=1 panic=-1 cryptomgr.notests",
    "-device", "virtio-blk-pci,drive=disk", "-device", "virtio-rng-pci",
    "-device", "virtio-net-pci,netdev=outside,romfile=", "-device", "virtio-net-pci,netdev=wire,romfile=",
    "-monitor", "stdio",
)  # fmt: skip
#: Addresses on the wire.
ADDRESSES = ("10.9.0.1", "10.9.0.2")


def built(suite: str = "") -> Path:
    """The folder of what was built; it is there once that was done."""
    suite = suite or os.environ.get(WANTED, SUITES[0])
    version = subprocess.run([MACHINE[0], "--version"], capture_output=True, check=True).stdout
    made_from = BUILD.read_bytes() + version + repr(MACHINE).encode() + suite.encode()
    return KEPT / hashlib.sha256(made_from).hexdigest()[:16]


def is_built() -> bool:
    """Whether the machines are there."""
    return shutil.which(MACHINE[0]) is not None and built().exists()


class Machine:
    """A machine that runs; ``with`` ends it.

    Args:
        folder: for its own files; a short path.
        disk: options of its disk.
        wire: what its second network card hangs on.
        more: further options of qemu.
    """

    def __init__(self, folder: Path, kept: Path, disk: str, wire: str, more: Sequence[str] = ()) -> None:
        self._folder, self.port, self.key = folder, free_port(), kept / "key"
        folder.mkdir(exist_ok=True)
        argv = [
            "setpriv", "--pdeathsig", "KILL",  # it outlives no test that is killed
            *MACHINE, "-drive", f"if=none,id=disk,cache=unsafe,{disk}", "-serial", f"file:{folder}/console",
            "-netdev", f"user,id=outside,restrict=on,hostfwd=tcp:127.0.0.1:{self.port}-:22", "-netdev", wire, *more,
        ]  # fmt: skip
        with (folder / "qemu.log").open("wb") as log:
            self.process = subprocess.Popen(argv, cwd=kept, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def monitor(self, line: str) -> None:
        """Has qemu do something, some time soon."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def command(self, line: str) -> list[str]:
        """An argument list that runs a line of shell in the machine."""
        options = (
            "BatchMode=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR",
            "ConnectTimeout=5", "ControlMaster=auto", f"ControlPath={self._folder}/control", "ControlPersist=yes",
        )  # fmt: skip
        given = [word for option in options for word in ("-o", option)]
        return ["ssh", "-F", "/dev/null", "-i", str(self.key), "-p", str(self.port), *given, "root@127.0.0.1", line]

    def connection(self, port: int) -> list[str]:
        """An argument list that talks with a port of the machine's own."""
        return [*self.command("")[:-2], "-W", f"127.0.0.1:{port}", "root@127.0.0.1"]

    def run(self, line: str, given: bytes = b"") -> str:
        """What a line of shell printed.

        Raises:
            AssertionError: it failed.
        """
        done = subprocess.run(self.command(line), input=given, capture_output=True, timeout=300)
        said = (done.stdout + done.stderr).decode(errors="replace")
        assert done.returncode == 0, f"{line}: exit code {done.returncode}: {said}"
        return done.stdout.decode()

    def wait_until_up(self, seconds: float) -> None:
        """Waits until it lets one in."""

        def is_up() -> bool:
            assert self.process.poll() is None, (self._folder / "qemu.log").read_text()
            return subprocess.run(self.command("true"), capture_output=True).returncode == 0

        wait_until(is_up, seconds, "the machine lets one in")

    def stop(self) -> None:
        """Pulls the plug."""
        subprocess.run([*self.command("-")[:-2], "-O", "exit", "root@127.0.0.1"], capture_output=True)
        self.process.kill()
        self.process.communicate()


def build(suite: str) -> Path:
    """Builds the machine of a suite and saves its state, where that was not done yet: some minutes, and 1 GB.

    Returns:
        Its folder.
    """
    kept = built(suite)
    if kept.exists():
        return kept
    KEPT.mkdir(mode=0o700, exist_ok=True)
    alone = os.open(KEPT, os.O_RDONLY)
    try:
        fcntl.flock(alone, fcntl.LOCK_EX)  # of two at once, one would take the other's half for an old one
        if not kept.exists():
            for old in set(KEPT.iterdir()) - set(map(built, SUITES)):  # of earlier stamps
                shutil.rmtree(old)
            _build(suite, kept)
    finally:
        os.close(alone)
    return kept


def _build(suite: str, kept: Path) -> None:
    half = Path(tempfile.mkdtemp(dir=KEPT))
    subprocess.run([BUILD, half, suite], check=True, stdin=subprocess.DEVNULL)
    machine = Machine(half / "run", half, "file=disk.img,format=raw", "hubport,id=wire,hubid=0")
    try:
        machine.wait_until_up(300)
        ready = "systemctl -q is-active nfs-server rpc-statd && showmount -e 127.0.0.1 && qemu-img -V"
        machine.run(f"until {ready}; do sleep 1; done; systemctl is-system-running --wait || true")
        time.sleep(12)  # until its server gives locks and leases
        machine.run("sync; date")
        machine.monitor('migrate_set_parameter max-bandwidth 10G\nmigrate "exec:cat >state"\nquit')
        machine.process.wait(120)
        assert (half / "state").stat().st_size > 1 << 20, (half / "run/qemu.log").read_text()
    finally:
        machine.stop()
    shutil.rmtree(half / "run")
    half.rename(kept)


@contextlib.contextmanager
def machine() -> Iterator[Machine]:
    """One of them, alone.

    Raises:
        AssertionError: it was not built.
    """
    with _running(["hubport,id=wire,hubid=0"]) as alone:
        yield alone[0]


@contextlib.contextmanager
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Two of them: the first one is an NFS server, and both can reach it.

    Raises:
        AssertionError: they were not built.
    """
    ports = (free_port(), free_port())
    ends = (f"udp=127.0.0.1:{to},localaddr=127.0.0.1:{own}" for own, to in (ports, ports[::-1]))
    with _running([f"socket,id=wire,{end}" for end in ends]) as both:
        for number, one in enumerate(both, 1):
            one.run(
                f"ip link set eth1 address 52:54:00:00:00:0{number}; "
                f"ip address add {ADDRESSES[number - 1]}/24 dev eth1; ip link set eth1 up"
            )
        yield both[0], both[1]


@contextlib.contextmanager
def _running(wires: Sequence[str]) -> Iterator[list[Machine]]:
    """A machine on each of these wires."""
    kept = built()
    assert kept.exists(), f"There are no machines in {kept}: `make machines` builds them (about half an hour)."
    with tempfile.TemporaryDirectory(prefix="machines-") as name, contextlib.ExitStack() as stack:
        folder, running = Path(name), list[Machine]()
        for own, wire in enumerate(wires):
            disk = folder / f"{own}.qcow2"
            create = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(kept / "disk.img"), str(disk)]
            subprocess.run(create, check=True)
            more = ("-incoming", f"exec:cat {kept}/state")
            running.append(Machine(folder / str(own), kept, f"file={disk},format=qcow2", wire, more))
            stack.callback(running[-1].stop)
        for number, one in enumerate(running, 1):
            one.wait_until_up(120)
            # What all have in common since they were saved: the time, a name, randomness.
            one.run(f"date -s @{time.time():.0f}; hostname machine{number}; cat >/dev/urandom", os.urandom(512))
        yield running
