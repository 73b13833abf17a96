"""Images on a storage that two machines mount: the first one is also its server, on the second one the agent works."""

import hashlib
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from storage_admin.agent import bundle, protocol
from storage_admin.agent.protocol import b64
from tests.agent.harness import NO_RESERVE, Agent, Writer
from tests.machines.lab import ADDRESSES, Machine

#: Where both have it mounted, and where the first one has it itself.
MOUNTED, EXPORTED = "/var/lib/libvirt/images", "/srv/images"
SIZE, DATA = 1 << 20, 256 << 10
#: What a guest there writes: byte, place and length; an image has only zeros there.
PATTERN, PLACE, LENGTH = 0x77, 512 << 10, 64 << 10
_AGENT = "/root/agent.pyz"


class Pinged(Agent):
    """One whose lifeline is kept alive, as a loaded machine takes its time."""

    def request(self, verb: str, args: dict[str, Any], job: str = "j1", generation: int = 1) -> None:
        super().request(verb, args, job, generation)
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._ping)
        self._heart.start()

    def _ping(self) -> None:
        while not self._ended.wait(protocol.PING_INTERVAL):
            self.say(protocol.PING)

    def close(self) -> int:
        self._ended.set()
        self._heart.join()
        return super().close()


class Export:
    """The storage; of every image the same content is known.

    Args:
        both: the machines; the first one is the server.
        version: of NFS.
        folder: for what is made here.
    """

    def __init__(self, both: tuple[Machine, Machine], version: str, folder: Path) -> None:
        self.server, self.client, self.version = *both, version
        archive = bundle.build(folder).path.read_bytes()
        source = "/images" if version.startswith("4") else EXPORTED
        for machine in both:
            machine.run(f"cat >{_AGENT}", archive)
            machine.run(
                f"umount {MOUNTED} 2>/dev/null; mount -t nfs -o vers={version},hard {ADDRESSES[0]}:{source} {MOUNTED} "
                f"&& grep -q 'vers={version}' /proc/mounts"
            )
        self.server.run(
            f"rm -rf {EXPORTED}/* {EXPORTED}/.sa-*; truncate -s {SIZE} /root/image; "
            f"qemu-io -f raw -c 'write -P {0x61} 0 {DATA}' -c 'write -P 0 {DATA} {SIZE - DATA}' /root/image"
        )

    def image(self, name: str) -> str:
        """A fresh one, which both machines know already; its path."""
        self.server.run(f"cp /root/image {EXPORTED}/{name}; stat {MOUNTED}/{name}")
        return f"{MOUNTED}/{name}"

    def holds(self, name: str, *, written: bool) -> bool:
        """Whether a guest reads all that it should from an image, with or without what another guest wrote."""
        expected = bytearray(b"\x61" * DATA + bytes(SIZE - DATA))
        if written:
            expected[PLACE : PLACE + LENGTH] = bytes([PATTERN]) * LENGTH
        told = self.server.run(f"sha256sum {EXPORTED}/{name}")
        return told.split()[0] == hashlib.sha256(expected).hexdigest()

    def names(self, name: str) -> list[str]:
        """An image's name, where it is there."""
        return self.server.run(f"ls -A {EXPORTED} | grep -x {name} || true").split()

    def left(self, job: str) -> list[str]:
        """The names of a job's files."""
        return self.server.run(f"ls -A {EXPORTED} | grep '^.sa-{job}[.]' || true").split()

    def agent(self, machine: Machine | None = None, program: str = _AGENT) -> Pinged:
        """The real agent, on the second machine unless another one is given."""
        return Pinged((machine or self.client).command(f"exec python3 {program}"))

    def reclaim(self, path: str, **changes: Any) -> dict[str, Any]:
        """The arguments of a reclaim of an image, as the second machine sees it now."""
        told = self.client.run(f"stat -c '%d %i %s %.9Y %.9Z' {path}").replace(".", "").split()
        names = ("dev", "inode", "file_size", "mtime_ns", "ctime_ns")
        return {
            "path_b64": b64(path.encode()),
            "pool_path_b64": b64(MOUNTED.encode()),
            "format": "raw",
            **dict(zip(names, map(int, told), strict=True)),
            "virtual_size": SIZE,
            "chain": [],
            "children_known": True,
            "method": "copy",
            "idle_io": False,
            "reserve": NO_RESERVE,
            "undo_hours": 0,
            **changes,
        }

    def ask(self, verb: str, args: dict[str, Any], job: str, machine: Machine | None = None) -> dict[str, Any]:
        """One request to an agent of its own, answered with go: the result's data, or the error event."""
        with self.agent(machine) as agent:
            agent.request(verb, args, job)
            return agent.answer()

    def recover(self, machine: Machine) -> list[dict[str, Any]]:
        """What a machine makes of what jobs have left."""
        pool = {"id": 1, "path_b64": b64(MOUNTED.encode()), "kind": "dir"}
        rows = self.ask("recover", {"pools": [pool], "jobs_active": []}, "r1", machine)["recovered"]
        assert isinstance(rows, list)
        return rows

    def writer(self, name: str, *, at_server: bool) -> Writer:
        """A guest on the first machine that has an image open; it may have it from the server's own folder."""
        folder = EXPORTED if at_server else MOUNTED
        return Writer(os.fsencode(f"{folder}/{name}"), form="raw", elsewhere=self.server.command)


class Passing(threading.Thread):
    """A guest on the first machine that opens an image after some seconds, writes, and ends.

    Args:
        tries: how often it does so, as long as it is refused.
    """

    def __init__(self, export: Export, path: str, seconds: float, tries: int = 1) -> None:
        super().__init__()
        self._seconds, self._tries = seconds, tries
        write = f"qemu-io -f raw -c 'write -P {PATTERN} {PLACE} {LENGTH}' -c flush {path}"
        self._argv = export.server.command(write)
        #: Whether it was told that its bytes are safe, and what it failed by, beside that it was refused.
        self.acknowledged, self.wrong = False, ""
        self.start()

    def run(self) -> None:
        time.sleep(self._seconds)
        for _ in range(self._tries):
            done = subprocess.run(self._argv, capture_output=True, text=True)
            said = done.stdout + done.stderr
            if done.returncode == 0 and f"wrote {LENGTH}" in said:
                self.acknowledged = True
                return
            if "can't open device" not in said:  # refused: for its locks, or as the file is no more
                self.wrong = said
                return
