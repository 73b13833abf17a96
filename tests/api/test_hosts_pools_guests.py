"""Hosts, pools and guests over REST."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone
from rest_framework.test import APIClient

from storage_admin.accounts.models import AuditEntry
from storage_admin.hosts.models import StoragePool
from tests.factories import (
    GIB,
    GuestDiskFactory,
    GuestFactory,
    HostFactory,
    ImageFactory,
    ImageUseFactory,
    PoolSampleFactory,
    StoragePoolFactory,
)
from tests.working import client_as, reread

pytestmark = pytest.mark.sql


def test_hosts_say_what_the_contract_promises(viewer: APIClient) -> None:
    contract = """id slug name kind address port user transport cluster status status_detail last_seen
    capabilities max_jobs"""
    host = HostFactory.create(slug="local", capabilities={"qemu_img": "7.2.22", "zstd": True})
    (row,) = viewer.get("/api/v1/hosts/").json()["results"]
    assert set(contract.split()) <= set(row)
    assert row["capabilities"] == {"qemu_img": "7.2.22", "zstd": True}
    assert viewer.get(f"/api/v1/hosts/{host.pk}/").json() == row


@pytest.mark.parametrize(
    ("body", "field"),
    [({"max_jobs": 0}, "max_jobs"), ({"max_jobs": 65}, "max_jobs"), ({"max_jobs": "2"}, "max_jobs"),
     ({"name": " "}, "name"),
     ({"name": None}, "name"), ({"name": 5}, "name"), ({"address": "x"}, "address"), ({"slug": "x"}, "slug"),
     ({"name": "x" * 201}, "name")],
)  # fmt: skip
def test_a_host_is_not_changed_by_what_makes_no_sense(admin: APIClient, body: dict[str, Any], field: str) -> None:
    host = HostFactory.create()
    response = admin.patch(f"/api/v1/hosts/{host.pk}/", body, format="json")
    assert (response.status_code, list(response.json()["fields"])) == (400, [field])
    assert not AuditEntry.objects.exists()


def test_pools_say_what_the_contract_promises(viewer: APIClient) -> None:
    contract = """id host name kind path shared_key all_hosts_registered capacity_bytes available_bytes allocated_bytes
    virtual_bytes overcommit_ratio reclaimable_bytes undo_bytes warn_percent days_until_full"""
    pool = StoragePoolFactory.create(virtual_bytes=250 * GIB, reserved_bytes=10 * GIB)
    (row,) = viewer.get("/api/v1/pools/").json()["results"]
    assert set(contract.split()) <= set(row)
    assert (row["overcommit_ratio"], row["used_bytes"]) == (2.78, 50 * GIB)
    assert (row["allocated_bytes"], row["reclaimable_bytes"], row["days_until_full"]) == (None, None, None)
    assert viewer.get(f"/api/v1/pools/{pool.pk}/").json() == row


def test_of_a_pool_that_was_never_scanned_nobody_knows_what_undo_copies_hold(viewer: APIClient) -> None:
    pool = StoragePoolFactory.create(last_scanned=None)
    assert viewer.get(f"/api/v1/pools/{pool.pk}/").json()["undo_bytes"] is None
    (row,) = viewer.get("/api/v1/overview/").json()["pools"]
    assert row["undo_bytes"] is None


def test_a_growing_pool_says_when_it_is_full(viewer: APIClient) -> None:
    pool = StoragePoolFactory.create(available_bytes=40 * GIB)
    for days in range(10):
        at = timezone.now() - timedelta(days=days)
        PoolSampleFactory.create(pool=pool, at=at, available_bytes=(40 + days) * GIB)
    assert viewer.get(f"/api/v1/pools/{pool.pk}/").json()["days_until_full"] == pytest.approx(40, abs=0.1)


@pytest.mark.parametrize("by", ["id", "slug"])
def test_an_admin_registers_a_folder(admin: APIClient, tmp_path: Path, by: str) -> None:
    host = HostFactory.create(slug="local")
    body = {"host": host.pk if by == "id" else "local", "kind": "dir", "path": str(tmp_path)}
    response = admin.post("/api/v1/pools/", body, format="json")
    assert response.status_code == 201, response.json()
    assert (response.json()["path"], response.json()["host"]) == (str(tmp_path), host.pk)
    assert (response.json()["capacity_bytes"], response.json()["allocated_bytes"]) == (None, None)
    again = admin.post("/api/v1/pools/", body, format="json")
    assert (again.status_code, list(again.json()["fields"])) == (400, ["path"])


@pytest.mark.parametrize(
    ("change", "field"),
    [({"path": "/etc"}, "path"), ({"path": "/no/such/folder"}, "path"), ({"path": "relative"}, "path"),
     ({"path": ""}, "path"),
     ({"path": "/" + "x" * 300}, "path"), ({"path": "/etc/passwd"}, "path"), ({"path": 5}, "path"),
     ({"host": 99}, "host"),
     ({"host": "none"}, "host"), ({"host": True}, "host"), ({"host": 10**30}, "host"), ({"kind": "nfs"}, "kind"),
     ({"capacity_bytes": 5}, "capacity_bytes"), ({"path": None}, "path")],
)  # fmt: skip
def test_a_folder_that_makes_no_sense_is_not_registered(
    admin: APIClient, tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    body = {"host": HostFactory.create(slug="local").pk, "path": str(tmp_path)} | change
    response = admin.post("/api/v1/pools/", body, format="json")
    assert (response.status_code, list(response.json()["fields"])) == (400, [field])
    assert not StoragePool.objects.exists()


def test_an_admin_changes_and_forgets_a_pool(admin: APIClient) -> None:
    pool = StoragePoolFactory.create()
    ImageFactory.create(pool=pool)
    path = f"/api/v1/pools/{pool.pk}/"
    row = admin.patch(path, {"name": "fast", "warn_percent": 70, "all_hosts_registered": True}, format="json").json()
    assert (row["name"], row["warn_percent"], row["all_hosts_registered"]) == ("fast", 70, True)
    assert admin.delete(path).status_code == 204
    assert admin.get(path).status_code == 404
    assert admin.get("/api/v1/images/").json()["count"] == 0


def test_only_who_sees_all_hosts_says_that_all_which_use_a_storage_are_registered(
    admin: APIClient,
) -> None:
    pool = StoragePoolFactory.create(network=True)
    path, limited = f"/api/v1/pools/{pool.pk}/", client_as(role="admin", hosts=[pool.host.slug])
    body = {"all_hosts_registered": True}
    assert limited.patch(path, body, content_type="application/json").status_code == 403
    assert b"all_hosts_registered" not in limited.get(f"/pools/{pool.pk}/").content
    assert admin.patch(path, body, format="json").status_code == 200
    assert limited.post(f"/pools/{pool.pk}/change/", {"name": "fast", "warn_percent": "70"}).status_code == 302
    assert (reread(pool).name, pool.all_hosts_registered) == ("fast", True)


def test_a_pool_that_comes_from_libvirt_is_not_removed_here(admin: APIClient) -> None:
    pool = StoragePoolFactory.create(source="libvirt")
    assert admin.delete(f"/api/v1/pools/{pool.pk}/").status_code == 400
    assert StoragePool.objects.count() == 1


@pytest.mark.parametrize("change", [{"warn_percent": 0}, {"warn_percent": 101}, {"warn_percent": 8.5}, {"path": "/srv"},
                                    {"all_hosts_registered": "yes"}])  # fmt: skip
def test_a_pool_is_not_changed_by_what_makes_no_sense(admin: APIClient, change: dict[str, Any]) -> None:
    response = admin.patch(f"/api/v1/pools/{StoragePoolFactory.create().pk}/", change, format="json")
    assert (response.status_code, list(response.json()["fields"])) == (400, list(change))


def test_guests_name_the_image_of_each_disk(viewer: APIClient) -> None:
    use = ImageUseFactory.create(disk__target="vda", disk__cache="writeback", disk__discard="")
    GuestDiskFactory.create(guest=use.disk.guest, target="vdb", path="/dev/sdb", format="raw", cache="")
    (row,) = viewer.get("/api/v1/guests/").json()["results"]
    assert {"id", "host", "kind", "uid", "name", "state", "io_priority", "io_weight", "io_limits"} <= set(row)
    disks = [(disk["target"], disk["image"], disk["cache"], disk["discard"]) for disk in row["disks"]]
    assert disks == [("vda", use.image.pk, "writeback", None), ("vdb", None, None, "unmap")]
    assert (row["io_priority"], row["io_weight"], row["io_limits"]) == (None, None, {})
    assert viewer.get(f"/api/v1/guests/{row['id']}/").json() == row


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("state=running", "a"),
        ("kind=vm", "b"),
        ("host={host}", "a"),
        ("search=B", "b"),
        ("ordering=-name", "b a"),
        ("", "a b"),
    ],
)
def test_guests_are_filtered(viewer: APIClient, query: str, found: str) -> None:
    first = GuestFactory.create(name="a", state="running", uid="1")
    GuestFactory.create(name="b", kind="vm", uid="2")
    response = viewer.get(f"/api/v1/guests/?{query.format(host=first.host.slug)}")
    assert [row["name"] for row in response.json()["results"]] == found.split()


def test_pools_of_unknown_size_come_last_either_way(viewer: APIClient) -> None:
    for size in (None, 5, 9):
        StoragePoolFactory.create(name=f"of-{size}", available_bytes=size, capacity_bytes=size)
    for down, wanted in (("", [5, 9, None]), ("-", [9, 5, None])):
        told = viewer.get(f"/api/v1/pools/?search=of-&ordering={down}available_bytes").json()["results"]
        assert [one["available_bytes"] for one in told] == wanted


@pytest.mark.parametrize(
    "path",
    ["guests/?state=dancing", "guests/?kind=pet", "guests/?host=none", "hosts/?status=good", "pools/?ordering=colour"],
)
def test_filter_values_that_nothing_can_have_are_refused(viewer: APIClient, path: str) -> None:
    response = viewer.get(f"/api/v1/{path}")
    assert (response.status_code, response.json()["code"], len(response.json()["fields"])) == (400, "invalid", 1)
