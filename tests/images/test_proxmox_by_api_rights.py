"""Images of nodes of Proxmox VE that are reached by their API alone: what it tells, once, and never more than that."""

import json
from typing import Any

import pytest

from images.models import Image
from images.rewrite import neighbours
from storage_admin.agent.protocol import HostError
from storage_admin.guests.models import Guest
from storage_admin.hosts import secrets
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.proxmox import registration
from storage_admin.jobs import services
from tests.harness.patching import raising
from tests.harness.proxmox import world
from tests.harness.proxmox.schema import DATA
from tests.harness.proxmox.server import ProxmoxServer
from tests.harness.proxmox.world import AUDITOR, SECRET
from tests.images.by_api import STORE, add, add_and_scan, at, nodes, scan, server
from tests.working import OPERATOR, client_as, codes, refused_as, reread, run

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

__all__ = ["nodes", "server"]


def test_a_node_that_stops_answering_in_the_middle_of_a_scan_is_told_and_keeps_what_was_known(
    server: ProxmoxServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.world.allow(*AUDITOR)
    host = add_and_scan(server)
    known, seen = host.capabilities, host.last_seen
    silent = HostError("It took the request and did not answer in time.", "host_unreachable")
    monkeypatch.setattr(registration, "facts_of", raising(silent))
    job = run(services.submit(OPERATOR, "scan", host.pk, {}))
    assert (job.state, job.error_code) == ("failed", "host_unreachable")
    assert (reread(host).status, host.capabilities, host.last_seen) == ("unreachable", known, seen)
    assert host.capabilities["missing_rights"]


def test_pages_and_answers_show_what_is_unknown_as_unknown(server: ProxmoxServer) -> None:
    for row in server.world.volumes["store"]:
        row.pop("used")
    host = add_and_scan(server)
    image = at(f"{STORE}/102/vm-102-disk-0.qcow2")
    client = client_as(role="admin")
    told = client.get(f"/api/v1/images/{image.pk}/").json()
    assert (told["allocated_size"], told["file_size"], told["virtual_size"]) == (None, None, 10737418240)
    assert client.get(f"/api/v1/images/{image.pk}/chain/").json()["allocated_size"] is None
    assert client.get(f"/api/v1/pools/{image.pool_id}/").json()["allocated_bytes"] is None
    assert client.get("/api/v1/overview/").json()["totals"]["allocated_bytes"] is None
    sizes = [row["id"] for row in client.get("/api/v1/images/?ordering=-allocated_size").json()["results"]]
    assert len(sizes) == 12
    csv = client.get("/images/export.csv").getvalue().decode()
    assert ",10737418240,,," in csv
    for path in (
        "/", "/images/", f"/images/{image.pk}/", f"/images/{image.pk}/reclaim/", f"/images/{image.pk}/flatten/",
        f"/images/{image.pk}/convert/", f"/images/{image.pk}/check/", f"/pools/{image.pool_id}/", "/guests/", "/hosts/",
        f"/hosts/{host.pk}/connection/",
    ):  # fmt: skip
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert SECRET not in answer.content.decode()
    assert "unknown" in client.get(f"/images/{image.pk}/").content.decode()


def rows_of(host: Host) -> dict[str, tuple[int, Any, str]]:
    rows = Image.objects.filter(host=host).select_related("pool")
    return {row.path: (row.pk, row.first_seen, row.state) for row in rows}


@pytest.mark.parametrize("change", [{"disable": 1}, {"nodes": "pve2"}, {"content": "iso"}])
def test_a_storage_that_is_switched_off_keeps_its_rows_and_their_history(
    server: ProxmoxServer, change: dict[str, Any]
) -> None:
    host = add_and_scan(server)
    pool, before = StoragePool.objects.get(host=host, name="store"), rows_of(host)
    store = next(one for one in server.world.storages if one["storage"] == "store")
    status = next(one for one in server.world.statuses if one["storage"] == "store")
    was, was_status = dict(store), dict(status)
    store |= change
    status |= {"enabled": 0, "active": 0, "total": 0, "used": 0, "avail": 0}
    for _ in range(2):
        assert scan(host)["vanished"] == 0
        assert (reread(pool).state, "last successful scan" in pool.state_detail) == ("missing", True)
        assert rows_of(host) == before
    assert "definition" in pool.state_detail if "content" in change else "disabled" in pool.state_detail
    store.clear()
    store |= was
    status |= was_status
    scan(host)
    assert (reread(pool).state, rows_of(host)) == ("ok", before)


def test_a_storage_that_is_removed_goes_and_one_that_is_forbidden_stays(server: ProxmoxServer) -> None:
    host = add_and_scan(server)
    before = rows_of(host)
    server.world.rights["/storage/store"] = {}
    assert scan(host)["vanished"] == 0
    pool = StoragePool.objects.get(host=host, name="store")
    assert (pool.state, "on /storage/store" in pool.state_detail) == ("unreadable", True)
    assert rows_of(host) == before
    assert (host.status, "on /storage/store" in host.status_detail) == ("degraded", True)
    del server.world.rights["/storage/store"]
    server.world.storages = [one for one in server.world.storages if one["storage"] != "store"]
    server.world.statuses = [one for one in server.world.statuses if one["storage"] != "store"]
    scan(host)
    assert not StoragePool.objects.filter(host=host, name="store").exists()


def test_a_guest_that_is_forbidden_stays_with_its_images_as_last_seen(server: ProxmoxServer) -> None:
    host = add_and_scan(server)
    before, seen = rows_of(host), Guest.objects.get(host=host, uid="100").last_seen
    server.world.rights["/vms/100"] = {}
    assert scan(host)["vanished"] == 0
    assert rows_of(host) == before
    assert Guest.objects.get(host=host, uid="100").last_seen == seen
    pool = StoragePool.objects.get(host=host, name="store")
    assert (pool.state, "100" in pool.state_detail) == ("unreadable", True)
    assert (host.status, "/vms/100" in host.owners_unknown) == ("degraded", True)
    assert Image.objects.filter(host=host, orphan=True).count() == 0
    # One that is really gone has gone.
    gone = [one for one in server.world.volumes["store"] if one["vmid"] == 100]
    del server.world.rights["/vms/100"]
    server.world.volumes["store"] = [one for one in server.world.volumes["store"] if one["vmid"] != 100]
    del server.world.guests["vm", 100]
    assert scan(host)["vanished"] == len(gone)
    assert not Guest.objects.filter(host=host, uid="100").exists()


def test_snapshots_that_are_files_are_shown_in_the_chain_of_their_disk(server: ProxmoxServer) -> None:
    known = json.loads((DATA / "volume_chain.json").read_text())
    server.world.storages.append(known["storage"] | {"digest": "0" * 40})
    store = next(one for one in server.world.statuses if one["storage"] == "store")
    server.world.statuses.append(store | {"storage": "chain", "content": "images"})
    server.world.volumes["chain"] = known["content"]
    for number, text in known["configurations"].items():
        server.world.guests["vm", int(number)] = world.Guest("vm", int(number), text)
    host = add_and_scan(server)
    rows = {row.path: row for row in Image.objects.filter(host=host, pool__name="chain").select_related("backing")}
    assert {path: row.backing_file for path, row in rows.items()} == known["files"]
    assert {row.state for row in rows.values()} == {"ok"}
    top = rows["/srv/disk/chain/images/130/vm-130-disk-0.qcow2"]
    below = rows["/srv/disk/chain/images/130/snap-s1-vm-130-disk-0.qcow2"]
    assert (top.chain_depth, below.virtual_size, below.allocated_size, below.orphan) == (3, None, None, False)
    assert [(use.disk.guest.uid, use.disk.only_in) for use in below.uses.all()] == [("130", "s1")]
    part = neighbours.snapshot_part(below)
    assert (part.sentence if part else "") == "The snapshot s1 of VM 130"
    assert "in_snapshot_chain" in codes("flatten", top)


def test_a_token_that_is_refused_is_no_host_that_is_away(server: ProxmoxServer) -> None:
    assert refused_as(add, server, secret="0" * 36) == "token_refused"
    host = add_and_scan(server)
    Host.objects.filter(pk=host.pk).update(token_locked=secrets.lock("0" * 36))
    job = run(services.submit(OPERATOR, "scan", host.pk, {}))
    assert (job.state, job.error_code) == ("failed", "token_refused")
    assert (reread(host).status, "rejected the API token" in host.status_detail) == ("degraded", True)
    assert Image.objects.filter(host=host, missing_since=None).exists()


def test_what_only_a_header_tells_is_shown_as_unknown(server: ProxmoxServer) -> None:
    host = add_and_scan(server)
    image = Image.objects.filter(host=host, format="qcow2").first()
    assert image is not None
    client = client_as(role="viewer")
    page = client.get(f"/images/{image.pk}/").content.decode()
    assert "not used by this format" not in page
    assert page.count("no agent has read the header") == 2
    told = client.get(f"/api/v1/images/{image.pk}/").json()
    assert (told["snapshots"], told["cluster_size"], told["file_size"]) == (None, None, None)


def test_a_storage_that_was_never_mounted_says_so(server: ProxmoxServer) -> None:
    defined = next(one for one in server.world.storages if one["storage"] == "store")
    defined["is_mountpoint"] = "1"
    status = next(one for one in server.world.statuses if one["storage"] == "store")
    status |= {"active": 0, "total": 0, "used": 0, "avail": 0}
    host = add_and_scan(server)
    pool = StoragePool.objects.get(host=host, name="store")
    assert (pool.state, pool.capacity_bytes) == ("missing", None)
    assert f"Nothing is mounted at {defined['path']}" in pool.state_detail
