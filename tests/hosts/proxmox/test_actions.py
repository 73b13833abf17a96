"""Drives moved, enlarged and trimmed by the API."""

import pytest

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.live_facts import Trimmed
from storage_admin.hosts.proxmox import actions, tasks
from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.config import GuestRef, read_config, set_config
from storage_admin.hosts.proxmox.errors import DeniedError
from tests.harness.proxmox.server import ProxmoxServer
from tests.harness.proxmox.world import AUDITOR, FREE_VM, Guest
from tests.working import fails_as, refused_as

TEMPLATE, LOCKED, CONTAINER = GuestRef("pve1", 101), GuestRef("pve1", 102), GuestRef("pve1", 300, "container")


@pytest.fixture
def free(server: ProxmoxServer) -> GuestRef:
    """A VM with two disks and an optical drive that nothing is at work on."""
    server.world.guests["vm", 120] = Guest("vm", 120, FREE_VM)
    return GuestRef("pve1", 120)


def test_a_drive_is_moved_and_the_old_one_kept(server: ProxmoxServer, client: Client, free: GuestRef) -> None:
    upid = actions.move_disk(client, read_config(client, free), "scsi0", "s2", bandwidth_bytes_sec=50 << 20)
    assert server.seen[-1].params["bwlimit"] == "51200"
    tasks.follow(client, upid, interval=0)
    after = read_config(client, free)
    assert after.now["scsi0"] == "s2:120/vm-120-disk-1.qcow2,discard=on,size=8G"
    assert after.now["unused1"] == "store:120/vm-120-disk-0.qcow2"


def test_a_containers_volume_is_moved(server: ProxmoxServer, client: Client) -> None:
    upid = actions.move_disk(client, read_config(client, CONTAINER), "rootfs", "s2")
    assert server.verbs() == ["POST /nodes/pve1/lxc/300/move_volume"]
    assert server.world.tasks[upid].upid == upid


@pytest.mark.parametrize(
    ("target", "storage", "form", "words"),
    [
        ("scsi0", "store", "", "is already in store"), ("scsi0", "store", "qcow2", "is already in store"),
        ("ide2", "s2", "", "is not a volume of a storage"), ("scsi9", "s2", "", "has no drive scsi9"),
        ("scsi0", "s2", "vdi", "formats raw, qcow2, vmdk"), ("digest", "s2", "", "not a volume|no drive"),
    ],
)  # fmt: skip
def test_what_would_not_move_is_refused_before_anything(
    server: ProxmoxServer, client: Client, free: GuestRef, target: str, storage: str, form: str, words: str
) -> None:
    config = read_config(client, free)
    with pytest.raises(RefusedError, match=words) as error:
        actions.move_disk(client, config, target, storage, format=form)
    assert error.value.code == "invalid"
    assert server.verbs() == []


def test_a_locked_guest_is_refused_before_anything(server: ProxmoxServer, client: Client) -> None:
    config = read_config(client, LOCKED)
    for attempt in (
        lambda: actions.move_disk(client, config, "scsi0", "s2"),
        lambda: actions.resize(client, config, "scsi0", 20 << 30),
        lambda: set_config(client, config, {"scsi0": config.now["scsi0"]}),
    ):
        with fails_as(RefusedError, "guest_locked", r"VM 102 is locked by Proxmox VE \(backup\)"):
            attempt()
    assert server.verbs() == []


def test_a_guest_that_is_locked_meanwhile_is_refused_by_proxmox(
    server: ProxmoxServer, client: Client, free: GuestRef
) -> None:
    config = read_config(client, free)
    server.world.guests["vm", 120].text += "lock: snapshot\n"
    with fails_as(RefusedError, "guest_locked", "snapshot"):
        actions.move_disk(client, config, "scsi0", "s2")
    upid = actions.resize(client, config, "scsi0", 9 << 30)
    with pytest.raises(RefusedError):
        tasks.follow(client, upid, interval=0)


def test_a_configuration_that_changed_is_not_written_over(
    server: ProxmoxServer, client: Client, free: GuestRef
) -> None:
    config = read_config(client, free)
    server.world.guests["vm", 120].text += "onboot: 1\n"
    text = server.world.guests["vm", 120].text
    for attempt in (
        lambda: actions.move_disk(client, config, "scsi0", "s2"),
        lambda: tasks.follow(client, actions.resize(client, config, "scsi0", 9 << 30), interval=0),
        lambda: set_config(client, config, {"scsi0": config.now["scsi0"] + ",ssd=1"}),
    ):
        assert refused_as(attempt) == "stale_plan"
    assert server.world.guests["vm", 120].text == text


@pytest.mark.parametrize(
    ("target", "size"), [("scsi0", 8 << 30), ("scsi0", 1), ("scsi0", -5), ("ide2", 1 << 40), ("unused0", 1 << 40)]
)
def test_nothing_is_made_smaller_or_no_disk_larger(
    server: ProxmoxServer, client: Client, free: GuestRef, target: str, size: int
) -> None:
    assert refused_as(actions.resize, client, read_config(client, free), target, size) == "invalid"
    assert server.verbs() == []


def test_containers_are_enlarged_and_trimmed_elsewhere(server: ProxmoxServer, client: Client) -> None:
    with pytest.raises(RefusedError):
        actions.resize(client, read_config(client, CONTAINER), "rootfs", 1 << 40)
    with pytest.raises(RefusedError, match="pct fstrim"):
        actions.trim(client, CONTAINER)
    assert server.verbs() == []


def test_a_change_that_waits_for_the_next_start_is_not_pushed_aside(
    server: ProxmoxServer, client: Client, free: GuestRef
) -> None:
    server.world.guests[
        "vm", 120
    ].text += "\n[PENDING]\nscsi0: s2:120/vm-120-disk-3.qcow2\nscsi5: s2:120/x.raw\ndelete: scsi1\n"
    config = read_config(client, free)
    for target in ("scsi0", "scsi1", "scsi5"):
        with fails_as(RefusedError, "stale_plan", "is pending until its next start"):
            actions.move_disk(client, config, target, "store")


def test_a_missing_right_is_named(server: ProxmoxServer, client: Client, free: GuestRef) -> None:
    server.world.allow(*AUDITOR, "VM.Config.Disk")
    with pytest.raises(DeniedError, match=r"lacks Datastore.AllocateSpace on /storage/s2\.") as error:
        actions.move_disk(client, read_config(client, free), "scsi0", "s2")
    assert error.value.code == "right_missing"


def test_a_trim_tells_what_each_filesystem_gave_back(server: ProxmoxServer, client: Client, free: GuestRef) -> None:
    guest = server.world.guests["vm", 120]
    guest.running = True
    guest.trims = [
        {"path": "/", "trimmed": 104857600, "minimum": 0},
        {"path": "/boot", "error": "fstrim failed: the discard operation is not supported"},
        {"path": "C:\\"},
    ]
    assert actions.trim(client, free) == (
        Trimmed("/", 104857600, ""),
        Trimmed("/boot", None, "fstrim failed: the discard operation is not supported"),
        Trimmed("C:\\", None, ""),
    )


def test_a_guest_without_its_agent_says_so(server: ProxmoxServer, client: Client, free: GuestRef) -> None:
    with pytest.raises(HostError, match=r"agent of VM 120 cannot be reached\. .*VM 120 is not running"):
        actions.trim(client, free)
    server.world.guests["vm", 120].running = True
    with pytest.raises(HostError, match="QEMU guest agent is not running"):
        actions.trim(client, free)
    with pytest.raises(HostError, match="No QEMU guest agent configured"):
        actions.trim(client, TEMPLATE)
    with pytest.raises(HostError, match=r"999\.conf' does not exist"):
        actions.trim(client, GuestRef("pve1", 999))
    server.world.allow(*AUDITOR)
    with pytest.raises(DeniedError, match=r"VM.GuestAgent.FileSystemMgmt or VM.GuestAgent.Unrestricted on /vms/120"):
        actions.trim(client, free)


def test_a_trim_that_takes_longer_than_proxmox_waits_goes_on(
    server: ProxmoxServer, client: Client, free: GuestRef
) -> None:
    server.wire.append(b"HTTP/1.1 596 Connection timed out\r\nContent-Length: 0\r\n\r\n")
    with pytest.raises(HostError, match="continues inside VM 120"):
        actions.trim(client, free)


def test_an_answer_without_a_task_is_no_beginning(server: ProxmoxServer, client: Client, free: GuestRef) -> None:
    config = read_config(client, free)
    for body in (b'{"data":null}', b'{"data":"nonsense"}', b'{"data":{}}'):
        server.wire.append(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        with pytest.raises(HostError):
            actions.resize(client, config, "scsi0", 9 << 30)
