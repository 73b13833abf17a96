"""I/O limits and new names of volumes, by compare-and-set and re-read afterwards."""

from typing import Any

import pytest

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.proxmox.changes import LimitsSet, repoint, set_limits
from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.config import GuestRef, read_config
from storage_admin.hosts.proxmox.errors import DeniedError
from tests.harness.proxmox.server import ProxmoxServer
from tests.harness.proxmox.world import AUDITOR, Guest
from tests.working import fails_as, refused_as

VM = GuestRef("pve1", 110)
LINKED, OWN = "store:101/base-101-disk-0.qcow2/130/vm-130-disk-0.qcow2", "store:130/vm-130-disk-0.qcow2"
CLONE = GuestRef("pve1", 130)


@pytest.fixture
def clone(server: ProxmoxServer) -> Guest:
    """A linked clone of the template 101, off."""
    text = (
        "boot: order=scsi0\nmemory: 512\nname: clone\n"
        f"scsi0: {LINKED},discard=on,size=10G\nunused3: store:130/vm-130-disk-9.raw\n"
    )
    server.world.guests["vm", 130] = Guest("vm", 130, text)
    return server.world.guests["vm", 130]


def test_what_else_waits_for_a_drive_goes_on_waiting(server: ProxmoxServer, client: Client) -> None:
    guest = server.world.guests["vm", 110]
    guest.running = True
    guest.text += "\n[PENDING]\nscsi1: tank:vm-110-disk-1,size=1T,cache=writeback\n"
    set_limits(client, VM, "scsi1", {"read_iops_sec": 100})
    assert "cache=writeback" in read_config(client, VM).next["scsi1"]
    assert "iops_rd=100" in read_config(client, VM).next["scsi1"]


def test_limits_that_are_there_already_write_nothing(server: ProxmoxServer, client: Client) -> None:
    done = set_limits(client, VM, "scsi0", {"write_iops_sec": 300, "read_iops_sec": None})
    assert done == LimitsSet(done.before, done.before, waits=False, digest=done.digest)
    assert server.verbs() == []


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("scsi0", {"read_iops_sec": -1}), ("scsi0", {"nonsense": 1}), ("unused0", {"read_iops_sec": 1}),
        ("net0", {"read_iops_sec": 1}), ("scsi9", {"read_iops_sec": 1}), ("digest", {"read_iops_sec": 1}),
        ("scsi0,x", {"read_iops_sec": 1}), ("efidisk0", {"read_iops_sec": 1}),
    ],
)  # fmt: skip
def test_what_cannot_be_limited_is_refused_before_anything(
    server: ProxmoxServer, client: Client, target: str, wanted: dict[str, Any]
) -> None:
    assert refused_as(set_limits, client, VM, target, wanted) == "invalid"
    assert server.verbs() == []


def test_a_change_in_between_is_not_written_over(server: ProxmoxServer, client: Client) -> None:
    def interfere(guest: Guest) -> None:
        guest.text = guest.text.replace("mbps_rd=12.5", "mbps_rd=99")

    server.world.before_put = interfere
    assert refused_as(set_limits, client, VM, "scsi0", {"read_iops_sec": 100}) == "stale_plan"
    assert "mbps_rd=99" in server.world.guests["vm", 110].text
    server.world.before_put = None
    assert refused_as(set_limits, client, VM, "scsi0", {"read_iops_sec": 100}, digest="0" * 40) == "stale_plan"


def test_what_proxmox_makes_of_it_is_what_counts(server: ProxmoxServer, client: Client) -> None:
    original = server.world.guests["vm", 110].text

    class Forgetful(Guest):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, original if name == "text" else value)

    server.world.guests["vm", 110] = Forgetful("vm", 110, original)
    with pytest.raises(HostError, match=r"now reports read_bytes_sec=13107200, write_iops_sec=300 instead of "):
        set_limits(client, VM, "scsi0", {"read_iops_sec": 100})


def test_a_change_loses_the_lines_that_are_hidden(server: ProxmoxServer, client: Client) -> None:
    """Proxmox VE drops the lines that it does not understand whenever it writes a file: see ``hidden.py``."""
    assert "size=10P" in server.world.guests["vm", 107].text
    set_limits(client, GuestRef("pve1", 107), "scsi2", {"read_iops_sec": 5})
    assert "size=10P" not in server.world.guests["vm", 107].text


def test_a_missing_right_to_change_is_named(server: ProxmoxServer, client: Client) -> None:
    server.world.allow(*AUDITOR)
    with pytest.raises(DeniedError, match=r"lacks VM.Config.Disk or .* on /vms/110\."):
        set_limits(client, VM, "scsi0", {"read_iops_sec": 100})


def test_a_device_that_only_root_may_name_is_told(client: Client) -> None:
    with pytest.raises(HostError, match="Only root can pass arbitrary filesystem paths"):
        set_limits(client, GuestRef("pve1", 100), "scsi2", {"read_iops_sec": 100})


# Linked clones that were flattened


def test_a_flattened_clone_is_named_anew_and_nothing_is_left(
    server: ProxmoxServer, client: Client, clone: Guest
) -> None:
    assert repoint(client, CLONE, LINKED, OWN) == ()
    config = read_config(client, CLONE)
    assert config.now["scsi0"] == f"{OWN},discard=on,size=10G"
    assert {key: value for key, value in config.now.items() if key.startswith("unused")} == {
        "unused3": "store:130/vm-130-disk-9.raw"
    }
    assert LINKED not in clone.text
    assert all(one.params.get("digest") for one in server.seen if one.verb == "PUT")
    assert all("delete" not in one.params for one in server.seen)


def test_a_change_that_was_cut_off_is_finished_by_asking_again(
    server: ProxmoxServer, client: Client, clone: Guest
) -> None:
    clone.text = clone.text.replace(LINKED, OWN) + f"unused0: {LINKED}\n"
    assert repoint(client, CLONE, LINKED, OWN) == ()
    assert LINKED not in clone.text
    changes = len(server.verbs())
    assert repoint(client, CLONE, LINKED, OWN) == ()
    assert len(server.verbs()) == changes


def test_a_clone_that_changed_in_between_is_left_alone(server: ProxmoxServer, client: Client, clone: Guest) -> None:
    def interfere(guest: Guest) -> None:
        guest.text += "onboot: 1\n"

    server.world.before_put = interfere
    assert refused_as(repoint, client, CLONE, LINKED, OWN) == "stale_plan"
    assert LINKED in clone.text
    assert refused_as(repoint, client, CLONE, LINKED, OWN, digest="0" * 40) == "stale_plan"


@pytest.mark.parametrize(
    ("added", "code"),
    [
        ("lock: migrate\n", "guest_locked"),
        (f"parent: before\n\n[before]\nscsi0: {LINKED},size=10G\nsnaptime: 1\n", "has_internal_snapshots"),
        ("\n[PENDING]\nscsi0: store:130/vm-130-disk-5.raw\n", "stale_plan"),
        ("\n[PENDING]\ndelete: scsi0\n", "stale_plan"),
    ],
)
def test_a_clone_that_cannot_be_named_anew_is_refused(
    server: ProxmoxServer, client: Client, clone: Guest, added: str, code: str
) -> None:
    clone.text += added
    before = clone.text
    assert refused_as(repoint, client, CLONE, LINKED, OWN) == code
    assert clone.text == before
    assert server.verbs() == []


def test_a_clone_that_runs_is_told(server: ProxmoxServer, client: Client, clone: Guest) -> None:
    clone.running = True
    with pytest.raises(HostError, match="Check that the guest is shut down"):
        repoint(client, CLONE, LINKED, OWN)


@pytest.mark.parametrize(
    ("old", "new"),
    [(LINKED, "store:131/vm-131-disk-0.qcow2"), (LINKED, "s2:130/vm-130-disk-0.qcow2"), ("/dev/sdb", "/dev/sdc")],
)
def test_two_names_of_different_files_are_refused(
    server: ProxmoxServer, client: Client, clone: Guest, old: str, new: str
) -> None:
    with pytest.raises(RefusedError, match="not two names of the same file"):
        repoint(client, CLONE, old, new)
    assert server.seen == []


def test_a_drive_that_is_gone_is_a_stale_plan(client: Client, clone: Guest) -> None:
    clone.text = "name: clone\n"
    with fails_as(RefusedError, "stale_plan", "no longer has a drive"):
        repoint(client, CLONE, LINKED, OWN)
