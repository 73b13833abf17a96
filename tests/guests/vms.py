"""What the tests of proxmox vms share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.protocol import b64
from storage_admin.guests import proxmox_vms
from storage_admin.guests.models import Guest
from storage_admin.hosts import asking
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox import registration, tasks
from storage_admin.jobs import runner, services
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Recorder
from tests.harness.patching import do_before
from tests.harness.proxmox import world
from tests.harness.proxmox.server import ProxmoxServer, proxmox
from tests.harness.proxmox.world import FREE_VM, SECRET, TOKEN_ID, lab
from tests.working import ADMIN, OPERATOR, run, said, succeeded

WEB = FREE_VM.replace("scsi0:", "name: web\nscsi0:")
OLD = "store:120/vm-120-disk-0.qcow2"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxmoxServer]:
    """The node of the tests' data with one VM more. At the end nothing may be wrong with any request or answer."""
    monkeypatch.setitem(tasks.follow.__kwdefaults__ or {}, "interval", 0.02)
    monkeypatch.setattr(proxmox_vms, "SHARED_SECONDS", 0.0)
    with proxmox(lab(), tmp_path) as running:
        running.world.guests["vm", 120] = world.Guest("vm", 120, WEB)
        yield running
    assert running.wrong == []


def files_of(server: ProxmoxServer) -> dict[str, Any]:
    """What the agent on that node would tell of /etc/pve."""
    folders = {"vm": "qemu-server", "container": "lxc"}
    guests = server.world.guests.items()
    files = {f"nodes/pve1/{folders[kind]}/{number}.conf": one.text for (kind, number), one in guests}
    told = [{"name": name, "content_b64": b64(text.encode())} for name, text in files.items()]
    return {"proxmox": True, "node": "pve1", "files": told, "failed": [], "running": {}}


@pytest.fixture
def host(server: ProxmoxServer, monkeypatch: pytest.MonkeyPatch) -> Host:
    """That node, added with its token and scanned; then its agent can read its files."""
    endpoint = server.endpoint()
    wanted = registration.WantedNode(
        name="pve", address=endpoint.address, port=endpoint.port, token_id=TOKEN_ID, token_secret=SECRET,
        tls_fingerprint=endpoint.fingerprint,
    )  # fmt: skip
    host = registration.add_node(ADMIN, wanted)
    succeeded(run(services.submit(OPERATOR, "scan", host.pk, {})))
    monkeypatch.setattr(asking, "ask", lambda host, verb, args: files_of(server))
    reached(host, Host.Transport.API_SSH)
    server.seen.clear()
    return host


def reached(host: Host, way: str) -> None:
    Host.objects.filter(pk=host.pk).update(transport=way)
    host.refresh_from_db()


@pytest.fixture
def web(host: Host) -> Guest:
    return Guest.objects.get(host=host, uid="120")


def guest(host: Host, uid: str) -> Guest:
    return Guest.objects.get(host=host, uid=uid)


def conf(server: ProxmoxServer, vmid: int = 120) -> dict[str, str]:
    return server.world.guests["vm", vmid].conf.now


def submit(kind: str, row: Guest, **options: Any) -> Job:
    return services.submit(OPERATOR, kind, row.pk, options)


def cancelled_meanwhile(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """The job as it ended after somebody had cancelled it at work."""

    def somebody_cancels(recorder: Recorder) -> None:
        Job.objects.filter(pk=job.pk).update(cancel_requested=True)
        recorder._written = 0.0

    do_before(monkeypatch, Recorder, "tick", somebody_cancels)
    ended = run(job)
    assert ended.state == "cancelled", (ended.error_detail, said(ended))
    return ended


def stopped_meanwhile(job: Job, server: ProxmoxServer, monkeypatch: pytest.MonkeyPatch) -> Job:
    """The job as it ended after its worker was told to end as its task began."""
    do_before(monkeypatch, server.world, "begin", lambda *_: runner.stopping.set())
    return run(job)


def good(job: Job) -> dict[str, Any]:
    return dict(succeeded(job).result or {})
