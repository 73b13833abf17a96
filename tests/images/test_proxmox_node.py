"""A node of Proxmox VE as its agent finds it: guests by the files of /etc/pve, and what they keep from being done."""

import socket
from pathlib import Path
from typing import Any

import pytest

from images import hypervisors
from images.models import Image
from images.scanning import ScanRun
from storage_admin.agent.protocol import RefusedError
from storage_admin.guests.models import Guest
from storage_admin.hosts import asking, libvirt_reader, secrets
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.harness.proxmox.server import proxmox
from tests.harness.proxmox.world import SECRET, TOKEN_ID, lab
from tests.working import OPERATOR, create, image_at, run, scan, this_machine, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_reserve")]

NODE = socket.gethostname().split(".")[0]


@pytest.fixture
def pve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node whose /etc/pve is in a folder of its own; it has one storage."""
    etc, store = tmp_path / "root/etc/pve", tmp_path / "store"
    (etc / f"nodes/{NODE}/qemu-server").mkdir(parents=True)
    (etc / f"nodes/{NODE}/lxc").mkdir()
    (etc / "nodes/other/qemu-server").mkdir(parents=True)
    (store / "images/100").mkdir(parents=True)
    (etc / "storage.cfg").write_text(f"dir: store\n\tpath {store}\n\tcontent images,rootdir\n")
    take, ask = ScanRun.take, asking.ask

    def on_a_node(run_: ScanRun, event: dict[str, Any]) -> None:
        more = {"libvirt": "absent", "proxmox": True, "proxmox_storages": [{"name": "store", "path": str(store)}]}
        take(run_, event | more if event["event"] == "host" else event)

    def at_the_folder(host: Host, verb: str, args: dict[str, Any]) -> dict[str, Any]:
        return ask(host, verb, args | {"etc_pve": str(etc), "root": str(tmp_path / "root")})

    monkeypatch.setattr(ScanRun, "take", on_a_node)
    monkeypatch.setattr(asking, "ask", at_the_folder)
    monkeypatch.setattr(libvirt_reader, "read", lambda host: None)
    return etc


def scanned(host: Host) -> None:
    """Scans until no scan asks for another one: the first finds Proxmox VE and its storage."""
    scan(host)
    while (job := Job.objects.filter(kind="scan", state="queued").first()) is not None:
        assert run(job).state == "succeeded"


def config(pve: Path, text: str, vmid: int = 100, node: str = NODE) -> None:
    (pve / f"nodes/{node}/qemu-server/{vmid}.conf").write_text(text)


def disk(pve: Path, name: str = "vm-100-disk-0.qcow2") -> Path:
    path = pve.parents[2] / "store/images/100" / name
    return create(path)


def test_guests_of_a_node_are_known_and_their_disks_are_no_orphans(pve: Path) -> None:
    path, left = disk(pve), disk(pve, "vm-100-disk-9.qcow2")
    only = disk(pve, "vm-100-disk-1.qcow2")
    config(
        pve,
        "name: web\nscsi0: store:100/vm-100-disk-0.qcow2,size=8M\nmemory: 512\n\n"
        "[before]\nscsi1: store:100/vm-100-disk-1.qcow2,size=8M\n",
    )
    host = this_machine()
    scanned(host)
    host.refresh_from_db()
    assert host.owners_unknown == ""
    assert StoragePool.objects.get(host=host).name == "store"
    guest = Guest.objects.get(host=host)
    assert (guest.kind, guest.uid, guest.name, guest.state) == ("vm", "100", "web", "shut off")
    assert [image_at(one).orphan for one in (path, only, left)] == [False, False, True]
    assert [use.disk.guest.name for use in image_at(path).uses.all()] == ["web"]
    job = work("reclaim", image_at(path).pk, OPERATOR, method="copy")
    assert job.state == "succeeded", (job.error_code, job.error_detail)


def test_a_locked_guest_keeps_its_disks_as_they_are(pve: Path) -> None:
    path = disk(pve)
    config(pve, "name: web\nlock: backup\nscsi0: store:100/vm-100-disk-0.qcow2\n")
    scanned(this_machine())
    with pytest.raises(RefusedError) as refused:
        services.submit(OPERATOR, "reclaim", image_at(path).pk, {})
    assert refused.value.code == "guest_locked"


def test_a_guest_that_was_started_or_locked_since_the_scan_stops_the_job(pve: Path) -> None:
    path = disk(pve)
    config(pve, "name: web\nscsi0: store:100/vm-100-disk-0.qcow2\n")
    host = this_machine()
    scanned(host)
    job = services.submit(OPERATOR, "reclaim", image_at(path).pk, {"method": "copy"})
    config(pve, "name: web\nlock: migrate\nscsi0: store:100/vm-100-disk-0.qcow2\n")
    ended = run(job)
    assert (ended.state, ended.error_code) == ("failed", "guest_locked")


def test_a_file_that_cannot_be_read_leaves_unknown_who_uses_what(pve: Path) -> None:
    path = disk(pve)
    (pve / f"nodes/{NODE}/qemu-server/102.conf").mkdir()
    scanned(this_machine())
    assert image_at(path).in_use is None
    assert "102.conf" in Host.objects.get().owners_unknown
    with pytest.raises(RefusedError) as refused:
        services.submit(OPERATOR, "reclaim", image_at(path).pk, {})
    assert refused.value.code == "guests_unknown"


def test_the_files_are_asked_for_where_the_last_scan_saw_proxmox(pve: Path) -> None:
    host = this_machine()
    assert not hypervisors.is_to_be_asked(host)
    scanned(host)
    host.refresh_from_db()
    assert hypervisors.is_to_be_asked(host)


def test_beside_an_agent_the_api_lists_what_is_no_file_and_nothing_twice(pve: Path, tmp_path: Path) -> None:
    path, world = disk(pve), lab()
    world.statuses = [
        one | {"active": 1, "total": 10**11, "used": 10**10, "avail": 9 * 10**10} if one["type"] == "lvmthin" else one
        for one in world.statuses
    ]
    world.volumes["local-lvm"] = [
        {"volid": "local-lvm:vm-110-disk-0", "content": "images", "format": "raw", "size": 4 << 30, "vmid": 110}
    ]
    (pve / "nodes/pve1/qemu-server").mkdir(parents=True)
    config(pve, "name: blocks\nscsi0: local-lvm:vm-110-disk-0,size=4G\n", vmid=110, node="pve1")
    (tmp_path / "server").mkdir()
    with proxmox(world, tmp_path / "server") as server:
        host = this_machine()
        host.address, host.port, host.tls_fingerprint = server.address, server.port, server.fingerprint
        host.token_id, host.token_locked, host.node = TOKEN_ID, secrets.lock(SECRET), "pve1"
        host.save()
        scanned(host)
        scanned(host)
        assert server.wrong == []
        assert not [one for one in server.seen if one.path.endswith("/store/content")]
    assert sorted(Image.objects.values_list("path", "allocated_size")) == [
        ("/dev/pve/vm-110-disk-0", None),
        (str(path), path.stat().st_blocks * 512),
    ]
    assert image_at(b"/dev/pve/vm-110-disk-0").uses.get().disk.guest.uid == "110"
