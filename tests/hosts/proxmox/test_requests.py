"""Every request that the product sends is one of Proxmox VE's own schema, in each parameter, by the rights named."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from storage_admin.agent.protocol import HELD_LOCK, HostError
from storage_admin.hosts.proxmox import actions, changes, limits, permissions, reader, snapshots, tasks
from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.config import GuestRef, read_config, read_snapshots, set_config, unset_config
from storage_admin.hosts.proxmox.permissions import FEATURES
from tests.harness.proxmox import schema
from tests.harness.proxmox.recordings import Recorder, Request
from tests.harness.proxmox.world import FREE_VM, TOPS, Guest, lab

FREE, CLONE, CONTAINER = GuestRef("pve1", 120), GuestRef("pve1", 121), GuestRef("pve1", 300, "container")
RUNS, ON_BTRFS = GuestRef("pve1", 122), GuestRef("pve1", 124, "container")
LINKED = "store:101/base-101-disk-0.qcow2/121/vm-121-disk-0.qcow2"
ROOT = "root"


def _limits(api: Client) -> None:
    for number, name in enumerate(limits.KEYS):
        changes.set_limits(api, FREE, f"scsi{number % 2}", {name: 50 << 20})
        changes.set_limits(api, FREE, f"scsi{number % 2}", {name: None})


def _move(api: Client) -> None:
    config = read_config(api, FREE)
    actions.move_disk(api, config, "scsi0", "s2", format="raw", delete_source=True, bandwidth_bytes_sec=50 << 20)
    actions.move_disk(api, read_config(api, FREE), "scsi1", "s2")
    actions.move_disk(api, read_config(api, CONTAINER), "rootfs", "s2", bandwidth_bytes_sec=1)


def _follow(api: Client) -> None:
    upid = actions.resize(api, read_config(api, FREE), "scsi0", 10 << 30)
    tasks.follow(api, upid, interval=0)
    stopped = actions.resize(api, read_config(api, FREE), "scsi0", 11 << 30)
    tasks._Task(api, stopped, lambda _: None, lambda _: None).stop()


def _lock(api: Client) -> None:
    config = read_config(api, FREE)
    api.put(*FREE.path, "config", params={"lock": HELD_LOCK, "digest": config.digest})
    unset_config(api, read_config(api, FREE), "lock")


def _snapshots(api: Client) -> None:
    for guest in (GuestRef("pve1", 100), CONTAINER):
        list(read_snapshots(api, read_config(api, guest)))


def _keep(api: Client) -> None:
    for guest in (RUNS, ON_BTRFS):
        assert snapshots.can(api, guest)
        tasks.follow(api, snapshots.create(api, guest, "now", "Created by Storage Admin."), interval=0)
        assert "now" in [one.name for one in snapshots.of(api, guest)]
        tasks.follow(api, snapshots.delete(api, guest, "now"), interval=0)


def _roll_back(api: Client) -> None:
    for guest in (GuestRef("pve1", 123), ON_BTRFS):
        tasks.follow(api, snapshots.roll_back(api, guest, "before"), interval=0)


#: What is done, by whose right: a feature's, what the inventory needs, or root's.
DONE: dict[str, tuple[tuple[str, ...], Callable[[Client], Any]]] = {
    "a node is read": (
        ("storages", "guests", "images", "cluster"), lambda api: reader.read(api, "pve1", folders=True),
    ),
    "states are read": (("storages", "guests", "cluster"), lambda api: reader.read(api, "pve1", configs=False)),
    "snapshots are read": (("guests",), _snapshots),
    "rights are read": ((), lambda api: permissions.denied(api, "guests", "/vms", ["100", "300"])),
    "limits are set": (("guests", "limits"), _limits),
    "a clone is named anew": (
        ("guests", "flatten"), lambda api: changes.repoint(api, CLONE, LINKED, "store:121/vm-121-disk-0.qcow2"),
    ),
    "disks are moved": (("guests", "move"), _move),
    "a disk is enlarged": (("guests", "resize"), _follow),
    "a snapshot is made and deleted": (("guests", "snapshot"), _keep),
    "a snapshot is gone back to": (("guests", "rollback"), _roll_back),
    "a guest is trimmed": (("trim",), lambda api: actions.trim(api, RUNS)),
    "a guest is locked": ((ROOT,), _lock),
    "a drive is written back": (
        ("guests", "limits"), lambda api: set_config(api, read_config(api, FREE), {"scsi1": "local-lvm:vm-120-disk-1"}),
    ),
}  # fmt: skip


def _node(*features: str) -> Recorder:
    """The node, with a token that may do what these features say they need."""
    world = lab()
    world.guests["vm", 120] = Guest("vm", 120, FREE_VM)
    world.guests["vm", 122] = Guest("vm", 122, "agent: 1\n", running=True, trims=[{"path": "/", "trimmed": 1}])
    world.guests["vm", 121] = Guest("vm", 121, f"scsi0: {LINKED},size=10G\nunused0: {LINKED}\n")
    world.guests["vm", 123] = Guest("vm", 123, "parent: before\n\n[before]\nsnaptime: 1760600000\n")
    text = "parent: before\nrootfs: btr:124/subvol-124-disk-0.subvol\n\n[before]\nsnaptime: 1760600000\n"
    world.guests["container", 124] = Guest("container", 124, text)
    world.rights = {path: {} for path in TOPS}
    for need in (need for name in features if name != ROOT for need in FEATURES[name].needs):
        world.rights[need.scope][need.rights[0]] = 1
    world.root = ROOT in features
    return Recorder(world)


def _made(name: str) -> list[Request]:
    features, do = DONE[name]
    node = _node(*features)
    do(cast("Client", node))
    return node.made


MADE = {(request.call, *sorted(request.given.items())): request for name in DONE for request in _made(name)}
VALUES = {
    (request.call, parameter, value): None
    for request in MADE.values()
    for parameter, value in request.given.items()
    if parameter != "digest"
}


@pytest.mark.parametrize("request_made", MADE.values(), ids=lambda one: one.call)
def test_a_request_as_a_whole_passes_the_schema(request_made: Request) -> None:
    assert schema.wrong(request_made.call, request_made.given, request_made.in_path) == {}


@pytest.mark.parametrize(("call", "parameter", "value"), VALUES)
def test_a_parameter_is_one_of_the_schema_and_has_its_type(call: str, parameter: str, value: str) -> None:
    found = schema.find(schema.parameters(call), parameter)
    assert found is not None
    assert schema.wrong_value(found, value) == ""


@pytest.mark.parametrize("call", schema.load()["calls"])
def test_every_call_of_the_schema_here_is_one_that_is_made(call: str) -> None:
    assert call in {request.call for request in MADE.values()}


@pytest.mark.parametrize("name", [name for name, (features, _) in DONE.items() if features and ROOT not in features])
def test_without_the_rights_that_are_named_it_is_refused_or_tells_less(name: str) -> None:
    _, do = DONE[name]
    told: Any = None
    node, code = _node(), ""
    try:
        told = do(cast("Client", node))
    except HostError as error:
        code = error.code
    assert code == "right_missing" or bool(getattr(told, "missing", None)) or len(node.made) < len(_made(name))


@pytest.mark.parametrize("feature", FEATURES)
def test_every_right_that_is_named_is_one_of_proxmox_ve(feature: str) -> None:
    known = {
        right
        for call in schema.load()["calls"].values()
        for right in call.get("check", ["", ""])[1].split("|")
        if right
    } | {"Datastore.Allocate", "VM.Backup", "VM.Monitor"}  # of lists that are filtered, and of Proxmox VE 8
    named = FEATURES[feature]
    needs = (*named.needs, *([named.instead] if named.instead else []))
    assert {right for need in needs for right in need.rights} <= known
