"""Rights of a token: what is missing is named, and never taken for an empty storage."""

import re

import pytest

from storage_admin.hosts.proxmox import permissions, reader
from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.errors import DeniedError
from storage_admin.hosts.proxmox.permissions import FEATURES, MissingRight, Permissions
from storage_admin.hosts.proxmox.storages import StorageFacts
from tests.agent.harness import ROOT
from tests.harness.proxmox.server import ProxmoxServer
from tests.harness.proxmox.world import ALL, AUDITOR, TOPS, recorded

STORE = StorageFacts("store", "dir", "/mnt/pve/store", content=("images",))


def everywhere(*rights: str) -> Permissions:
    return Permissions({path: dict.fromkeys(rights, 1) for path in TOPS})


def test_the_rights_of_the_documentation_are_enough() -> None:
    roles = dict(re.findall(r'role add (\w+) --privs "([^"]+)"', (ROOT / "docs" / "proxmox.md").read_text()))
    assert set(roles["StorageAdmin"].split()) == set(ALL)
    assert everywhere(*roles["StorageAdmin"].split()).all_missing() == ()
    read = everywhere(*roles["StorageAdminRead"].split())
    assert [read.missing(feature) for feature in ("storages", "guests", "cluster")] == [(), (), ()]


def test_an_auditor_lacks_the_right_behind_the_images() -> None:
    may = everywhere(*AUDITOR)
    assert may.missing("images") == (MissingRight("images", "/vms", ("VM.Config.Disk",)),)
    assert may.missing("images")[0].sentence == (
        "To list the images of a storage, the API token needs VM.Config.Disk on /vms."
    )
    lacking = {"images", "backups", "limits", "flatten", "move", "resize", "snapshot", "rollback", "trim"}
    assert {right.feature for right in may.all_missing()} == lacking


def test_the_recorded_auditor_is_judged_so() -> None:
    may = Permissions(recorded()["permissions of an auditor"] | {"/storage": {"Datastore.Audit": 1}})
    assert may.missing("guests") == may.missing("storages") == may.missing("cluster") == ()
    assert may.missing("images") != ()


def test_an_empty_listing_is_told_as_what_cannot_be_seen(server: ProxmoxServer, client: Client) -> None:
    server.world.allow(*AUDITOR)
    may = permissions.read(client)
    listing = reader.list_volumes(client, "pve1", STORE, may)
    assert listing.volumes == ()
    assert listing.why_incomplete == "To list the images of a storage, the API token needs VM.Config.Disk on /vms."
    server.world.allow(*ALL)
    listing = reader.list_volumes(client, "pve1", STORE, permissions.read(client))
    assert len(listing.volumes) == 12
    assert listing.why_incomplete == ""


def test_one_who_may_allocate_sees_all_images_without_the_guests_rights(server: ProxmoxServer, client: Client) -> None:
    server.world.allow("Datastore.Allocate", "Datastore.Audit")
    listing = reader.list_volumes(client, "pve1", STORE, permissions.read(client))
    assert (len(listing.volumes), listing.why_incomplete) == (12, "")


def test_a_token_without_any_right_is_told_what_it_needs(server: ProxmoxServer, client: Client) -> None:
    server.world.rights = {}
    facts = reader.read(client)
    assert (facts.storages, facts.guests) == ((), ())
    assert len(facts.unknown) == 3
    assert "Datastore.Audit or Datastore.AllocateSpace on /storage." in facts.unknown[0]
    assert "VM.Audit on /vms." in facts.unknown[1]
    assert {right.feature for right in facts.missing} == FEATURES.keys()


def test_a_right_that_does_not_count_below_is_missing_below() -> None:
    may = Permissions({"/": {"VM.Audit": 0}, "/vms": {"VM.Audit": 0}, "/vms/100": {"VM.Audit": 0}})
    assert may.has("/vms", ["VM.Audit"])
    assert may.has("/vms/100", ["VM.Audit"])
    assert not may.has("/vms/101", ["VM.Audit"])
    assert may.missing("guests") == (MissingRight("guests", "/vms", ("VM.Audit",)),)


def test_a_rule_below_takes_a_right_away() -> None:
    may = Permissions({"/": {}, "/vms": {"VM.Audit": 1}, "/vms/100": {"VM.Console": 1}})
    assert may.missing("guests") == (MissingRight("guests", "/vms/100", ("VM.Audit",)),)


def test_a_right_on_some_guests_alone_leaves_the_others_unseen() -> None:
    may = Permissions({"/vms/100": {"VM.Audit": 1}, "/vms/101": {"VM.Audit": 1}})
    assert may.missing("guests") == (MissingRight("guests", "/vms", ("VM.Audit",)),)


def test_a_top_that_is_left_out_has_no_rights() -> None:
    may = Permissions({"/": {"VM.Audit": 1, "Sys.Audit": 1}})
    assert not may.has("/vms", ["VM.Audit"])
    assert not may.has("/vms/100", ["VM.Audit"])
    assert may.has("/nodes/pve1/x", ["Sys.Audit"]) is False
    assert may.missing("cluster") == ()


def test_older_versions_ask_for_another_right_to_trim() -> None:
    assert everywhere("VM.Monitor").missing("trim") == ()


def test_what_a_job_needs_is_asked_on_its_very_guest(server: ProxmoxServer, client: Client) -> None:
    permissions.require(client, "move", vmid=100, storage="s2")
    server.world.rights["/vms/100"] = {"VM.Audit": 1}
    with pytest.raises(DeniedError, match=r"move disks .* needs VM.Config.Disk on /vms/100\."):
        permissions.require(client, "move", vmid=100, storage="s2")
    server.world.rights["/vms/100"] = {"VM.Config.Disk": 1}
    server.world.rights["/storage/s2"] = {"Datastore.Audit": 1}
    with pytest.raises(DeniedError, match=r"Datastore.AllocateSpace on /storage/s2\.") as error:
        permissions.require(client, "move", vmid=100, storage="s2")
    assert error.value.code == "right_missing"
    server.world.rights["/vms/100"] = {}
    with pytest.raises(DeniedError):
        permissions.require(client, "limits", vmid=100)
