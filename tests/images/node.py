"""A node of Proxmox VE whose /etc/pve is in a folder of the test's own, with one storage, on this machine's agent."""

import socket
from pathlib import Path
from typing import Any

import pytest

from images.scan.run import ScanRun
from storage_admin.hosts import asking
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.models import Host
from storage_admin.jobs.models import Job
from tests.working import run, scan

NODE = socket.gethostname().split(".")[0]


@pytest.fixture
def pve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node whose /etc/pve is in a folder of its own; it has one storage."""
    etc, store = tmp_path / "root/etc/pve", tmp_path / "store"
    (etc / f"nodes/{NODE}/qemu-server").mkdir(parents=True)
    (etc / f"nodes/{NODE}/lxc").mkdir()
    (etc / "nodes/other/qemu-server").mkdir(parents=True)
    (store / "images/100").mkdir(parents=True)
    pretend(etc, store, monkeypatch)
    return etc


def pretend(etc: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has scans take this machine for a node with the storage ``store``, whose /etc/pve is ``etc``."""
    (etc / "storage.cfg").write_text(f"dir: store\n\tpath {store}\n\tcontent images,rootdir\n")
    take, ask = ScanRun.take, asking.ask

    def on_a_node(run_: ScanRun, event: dict[str, Any]) -> None:
        more = {"libvirt": "absent", "proxmox": True, "proxmox_storages": [{"name": "store", "path": str(store)}]}
        take(run_, event | more if event["event"] == "host" else event)

    def at_the_folder(host: Host, verb: str, args: dict[str, Any]) -> dict[str, Any]:
        return ask(host, verb, args | {"etc_pve": str(etc), "root": str(etc.parent.parent)})

    monkeypatch.setattr(ScanRun, "take", on_a_node)
    monkeypatch.setattr(asking, "ask", at_the_folder)
    monkeypatch.setattr(reader, "read", lambda host: None)


def scanned(host: Host) -> None:
    """Scans until no scan asks for another one."""
    scan(host)
    while (job := Job.objects.filter(kind="scan", state="queued").first()) is not None:
        assert run(job).state == "succeeded"


def config(pve: Path, text: str, vmid: int = 100, node: str = NODE) -> None:
    (pve / f"nodes/{node}/qemu-server/{vmid}.conf").write_text(text)
