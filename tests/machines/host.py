"""A real host: one machine with a kernel of its own, and the real agent on it."""

from collections.abc import Iterator
from typing import Any

import pytest

from storage_admin.agent.protocol import b64
from tests.agent.harness import Agent
from tests.machines.inside import FIRST_PORT, HOWS
from tests.machines.lab import Machine, machine
from tests.machines.nfs import Pinged, load_agents

POOL, DEVICE = "/var/lib/libvirt/images", "/dev/.storage-admin/nbd0"
MIB = 1 << 20


class Host:
    """The host, and the real agent on it."""

    def __init__(self, own: Machine) -> None:
        self.run, self.machine = own.run, own

    def agent(self, how: str = "") -> Agent:
        return Pinged(self.machine.connection(FIRST_PORT + HOWS.index(how)))

    def ask(self, verb: str, args: dict[str, Any], job: str = "j1", how: str = "") -> dict[str, Any]:
        with self.agent(how) as agent:
            agent.request(verb, args, job)
            return agent.answer()

    def link(self, name: str, form: str) -> dict[str, Any]:
        told = self.run(f"stat -c '%d %i %s %.9Y %.9Z' {POOL}/{name}").replace(".", "").split()
        names = ("dev", "inode", "file_size", "mtime_ns", "ctime_ns")
        where = {"path_b64": b64(f"{POOL}/{name}".encode()), "pool_path_b64": b64(POOL.encode()), "format": form}
        return where | dict(zip(names, map(int, told), strict=True))

    def args(self, name: str, size: int, *below: str, **more: Any) -> dict[str, Any]:
        """What a job on an image with raw bases asks; its extension is its format."""
        chain = [self.link(base, "raw") for base in below]
        return self.link(name, name.rpartition(".")[2]) | {
            "virtual_size": size,
            "chain": chain,
            "children_known": True,
            **more,
        }

    def attach(self, name: str, size: int, *below: str, **more: Any) -> dict[str, Any]:
        told = self.ask("attach", self.args(name, size, *below, by="ada", **more))
        assert told.get("path") == DEVICE, told
        return told

    def attached(self) -> list[dict[str, Any]]:
        told = self.ask("attached", {})
        assert told["nbd"] == ""
        return list(told["attached"])

    def detach(self, name: str) -> dict[str, Any]:
        dev, inode = map(int, self.run(f"stat -c '%d %i' {POOL}/{name}").split())
        return self.ask("detach", {"device": "nbd0", "dev": dev, "inode": inode})

    def left(self) -> str:
        """What is still there of a device, and whether it is where it was."""
        return self.run("ls -A /dev/.storage-admin; pgrep -x qemu-nbd; ls /dev/nbd0 || true")


def cut_off(host: Host, agent: Agent, how: str, kills: str) -> None:
    """An agent at work is cancelled, or with ``kill`` killed with its tools by a script."""
    if how == "kill":
        host.run(kills)
    else:
        agent.say("cancel")
        assert agent.answer()["code"] == "cancelled"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with machine() as own:
        load_agents(own, tmp_path_factory.mktemp("agent"))
        yield Host(own)
