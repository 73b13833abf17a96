"""What the tests of linked clones share."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_admin.hosts import secrets, transport
from storage_admin.hosts.models import Host
from storage_admin.hosts.shells import LocalShell
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.harness.proxmox import world
from tests.harness.proxmox.server import ProxmoxServer, proxmox
from tests.harness.proxmox.world import SECRET, TOKEN_ID, lab
from tests.images import node
from tests.images.node import scanned
from tests.working import OPERATOR, create, image_at, info, reread, this_machine

LINKED = "store:100/base-100-disk-0.qcow2/101/vm-101-disk-0.qcow2"


OWN = "store:101/vm-101-disk-0.qcow2"


class OnDisk(world.Guest):
    """A guest whose file lies in the node's folder: the agent and the API see the same."""

    file: Path

    def __init__(self, file: Path, vmid: int, text: str) -> None:
        object.__setattr__(self, "file", file)
        super().__init__("vm", vmid, text)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "text":
            self.file.write_text(value)
        else:
            super().__setattr__(name, value)

    def __getattribute__(self, name: str) -> Any:
        if name == "text":
            return object.__getattribute__(self, "file").read_text()
        return super().__getattribute__(name)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store/images/100").mkdir(parents=True)
    (tmp_path / "store/images/101").mkdir()
    return tmp_path / "store"


@pytest.fixture
def server(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxmoxServer]:
    """A node with a template and its clone: /etc/pve in a folder, and the API over the same files."""
    etc = tmp_path / "root/etc/pve"
    (etc / "nodes/pve1/qemu-server").mkdir(parents=True)
    (etc / "nodes/pve1/lxc").mkdir()
    (etc / "local").symlink_to("nodes/pve1")
    node.pretend(etc, store, monkeypatch)
    there = lab()
    there.guests = {
        ("vm", vmid): OnDisk(etc / f"nodes/pve1/qemu-server/{vmid}.conf", vmid, text)
        for vmid, text in (
            (100, "name: tmpl\nscsi0: store:100/base-100-disk-0.qcow2,size=8M\ntemplate: 1\n"),
            (101, f"name: clone\nscsi0: {LINKED},discard=on,size=8M\n"),
        )
    }
    for one in there.storages:
        if one["storage"] == "store":
            one["path"] = str(store)
    with proxmox(there, tmp_path) as running:
        yield running
    assert running.wrong == []


@pytest.fixture
def clone(server: ProxmoxServer, store: Path) -> Path:
    """The clone's image, with data of its base and of its own."""
    base = create(store / "images/100/base-100-disk-0.qcow2")
    path = create(store / "images/101/vm-101-disk-0.qcow2", base="../100/base-100-disk-0.qcow2")
    for one, pattern, offset in ((base, 0x61, "0"), (path, 0x62, "4M")):
        # The base as it was before it became one: nothing is written to it once the clone has data.
        subprocess.run(["qemu-io", "-f", "qcow2", "-c", f"write -P {pattern} {offset} 1M", one], check=True)
    return path


@pytest.fixture
def host(server: ProxmoxServer, clone: Path) -> Host:
    """This machine as that node, with a token, scanned."""
    host = this_machine()
    endpoint = server.endpoint()
    Host.objects.filter(pk=host.pk).update(
        address=endpoint.address, port=endpoint.port, tls_fingerprint=endpoint.fingerprint, node="pve1",
        token_id=TOKEN_ID, token_locked=secrets.lock(SECRET),
    )  # fmt: skip
    scanned(reread(host))
    server.seen.clear()
    return host


def conf(server: ProxmoxServer) -> dict[str, str]:
    return server.world.guests["vm", 101].conf.now


def backing(path: Path) -> str:
    return str(info(path).get("backing-filename", ""))


def holds(path: Path) -> bool:
    """Whether a reader of the image finds all data, its base's and its own."""
    reads = [("-c", f"read -P {pattern} {offset} 1M") for pattern, offset in ((0x61, "0"), (0x62, "4M"))]
    words = [word for read in reads for word in read]
    done = subprocess.run(["qemu-io", "-r", "-f", "qcow2", *words, path], capture_output=True, text=True)
    return done.returncode == 0 and "failed" not in done.stdout


def flatten(path: Path, **options: Any) -> Job:
    return services.submit(OPERATOR, "flatten", image_at(path).pk, options)


PVESH = """#!{python}
import json, sys
from urllib.parse import quote
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.endpoint import Endpoint, Token
verb, path, *rest = sys.argv[1:]
params = dict(zip([name[2:] for name in rest[::2]], rest[1::2]))
assert params.pop("output-format") == "json"
client = Client(Endpoint("127.0.0.1", {port}, "{fingerprint}"), Token("{token}", "{secret}"), 5)
try:
    answer = getattr(client, dict(get="get", set="put", create="post", delete="delete")[verb])(
        *path.strip("/").split("/"), params=params)
except (HostError, RefusedError) as error:
    # pvesh tells in words alone; these are the ones that Proxmox VE has for it.
    lock = error.detail.partition("(")[2].partition(")")[0]
    words = dict(stale_plan="checksum mismatch (file change by other user?)", guest_locked=f"VM is locked ({{lock}})")
    sys.stderr.write(words.get(error.code, error.detail.partition(" says: ")[2] or error.detail) + chr(10))
    sys.exit(255)
if verb == "set":  # as PVE::API2::Qemu does where no web server stands between
    told = [f"-{{key}} {{params[key]}}" for key in sorted(params) if key != "digest"]
    print(f"update VM {{path.split('/')[4]}}: {{' '.join(told)}}")
if answer is not None:
    print(json.dumps(answer))
"""


@pytest.fixture
def by_command(server: ProxmoxServer, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node without a token, and a double of pvesh there that asks the same server, as root."""
    server.world.root = True
    Host.objects.filter(pk=host.pk).update(token_id="", token_locked=b"", address="", port=None, node="")
    tool = tmp_path / "bin/pvesh"
    tool.parent.mkdir()
    endpoint = server.endpoint()
    tool.write_text(
        PVESH.format(
            python=sys.executable, port=endpoint.port, fingerprint=endpoint.fingerprint, token=TOKEN_ID, secret=SECRET
        )
    )
    tool.chmod(0o755)
    root = Path(__file__).parents[2]
    env = {"PATH": f"{tool.parent}:{os.defpath}", "PYTHONPATH": str(root)}
    monkeypatch.setattr(transport, "shell", lambda host: LocalShell(os.environ | env))
