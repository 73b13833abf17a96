"""Images on a storage that two machines mount: the first one is also its server, on the second one the agent works."""

import contextlib
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any, Self

from storage_admin.agent import bundle, protocol
from storage_admin.agent.protocol import b64
from tests.agent.harness import NO_RESERVE, Agent, Writer
from tests.harness.processes import wait_until
from tests.machines.inside import FIRST_PORT, HOWS
from tests.machines.lab import ADDRESSES, Machine

#: Where both have it mounted, and where the first one has it itself.
MOUNTED, EXPORTED = "/var/lib/libvirt/images", "/srv/images"
SIZE, DATA = 1 << 20, 256 << 10
#: What a guest there writes: byte, place and length; an image has only zeros there.
PATTERN, PLACE, LENGTH = 0x77, 512 << 10, 64 << 10
_INSIDE = "exec python3 -IS /root/inside.py"


class Pinged(Agent):
    """One whose lifeline is kept alive for as long as it takes, as a loaded machine takes its time."""

    def _ping(self) -> None:
        while not self._over.wait(protocol.PING_INTERVAL):
            with contextlib.suppress(ValueError, OSError):  # the line is closed
                self.say(protocol.PING)


class Inside:
    """A program of ``inside.py`` that runs on the server until it ends, or ``with`` does."""

    def __init__(self, server: Machine, *argv: object) -> None:
        command = server.command(" ".join([_INSIDE, *map(str, argv)]))
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def says(self) -> str:
        """Its next line."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def load_agents(machine: Machine, folder: Path) -> None:
    """Has a machine wait for connections that want an agent.

    Args:
        folder: for what is made here.
    """
    machine.run("cat >/root/agent.pyz", bundle.build(folder).path.read_bytes())
    machine.run("cat >/root/inside.py", Path(__file__).with_name("inside.py").read_bytes())
    machine.run("setsid python3 /root/inside.py agents /root/agent.pyz </dev/null >/root/agents 2>&1 &")
    loaded = f"ss -Hltn | grep -c :{FIRST_PORT + len(HOWS) - 1} || true"
    wait_until(lambda: machine.run(loaded).strip() == "1", 300, "agents are loaded")


class Export:
    """The storage; of every image the same content is known.

    Args:
        both: the machines; the first one is the server.
        version: of NFS.
        source: what is mounted; empty for the folder of the machine as it was built.
        size: of its images in bytes.
    """

    def __init__(self, both: tuple[Machine, Machine], version: str, source: str = "", size: int = SIZE) -> None:
        self.server, self.client, self.version, self.size = *both, version, size
        source = source or ("/images" if version.startswith("4") else EXPORTED)
        for machine in both:
            write = f"write -P {0x61} 0 {DATA}' -c 'write -P 0 {DATA} {size - DATA}"
            machine.run(f"truncate -s {size} /root/image; qemu-io -f raw -c '{write}' /root/image")
            machine.run(
                f"umount {MOUNTED} 2>/dev/null; mount -t nfs -o vers={version},hard {ADDRESSES[0]}:{source} {MOUNTED} "
                f"&& grep -q 'vers={version}' /proc/mounts"
            )
        self.server.run(f"rm -rf {EXPORTED}/* {EXPORTED}/.sa-*")

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

    def named(self, pattern: str) -> list[str]:
        """The names of files that match a pattern as a whole."""
        return self.server.run(f"ls -A {EXPORTED} | grep -x '{pattern}' || true").split()

    def left(self, job: str) -> list[str]:
        """The names of a job's files."""
        return self.named(f"[.]sa-{job}[.].*")

    def agent(self, machine: Machine | None = None, how: str = "") -> Pinged:
        """The real agent, on the second machine unless another one is given; what is done to it says ``inside.py``."""
        return Pinged((machine or self.client).connection(FIRST_PORT + HOWS.index(how)))

    def link(self, path: str, form: str = "raw") -> dict[str, Any]:
        """An image as the second machine sees it now."""
        told = self.client.run(f"stat -c '%d %i %s %.9Y %.9Z' {path}").replace(".", "").split()
        names = ("dev", "inode", "file_size", "mtime_ns", "ctime_ns")
        where = {"path_b64": b64(path.encode()), "pool_path_b64": b64(bytes(Path(path).parent)), "format": form}
        return where | dict(zip(names, map(int, told), strict=True))

    def reclaim(self, path: str, **changes: Any) -> dict[str, Any]:
        """The arguments of a reclaim of an image."""
        asked = {"virtual_size": self.size, "chain": [], "children_known": True, "method": "copy", "idle_io": False}
        return self.link(path) | asked | {"reserve": NO_RESERVE, "undo_hours": 0} | changes

    def ask(
        self, verb: str, args: dict[str, Any], job: str, machine: Machine | None = None, how: str = ""
    ) -> dict[str, Any]:
        """One request to an agent of its own, answered with go: the result's data, or the error event."""
        with self.agent(machine, how) as agent:
            agent.request(verb, args, job)
            return agent.answer()

    def recover(self, machine: Machine, *merges: dict[str, str]) -> list[dict[str, Any]]:
        """What a machine makes of what jobs have left; of these, merges are done again."""
        pool = {"id": 1, "path_b64": b64(MOUNTED.encode()), "kind": "dir"}
        answer = self.ask("recover", {"pools": [pool], "jobs_active": [], "merges": list(merges)}, "r1", machine)
        assert isinstance(answer.get("recovered"), list), answer
        return list(answer["recovered"])

    def writer(self, name: str, *, at_server: bool) -> Writer:
        """A guest on the first machine that has an image open; it may have it from the server's own folder."""
        folder = EXPORTED if at_server else MOUNTED
        return Writer(os.fsencode(f"{folder}/{name}"), form="raw", elsewhere=self.server.command)

    def inside(self, *argv: object) -> Inside:
        """A program of ``inside.py`` on the first machine."""
        return Inside(self.server, *argv)
