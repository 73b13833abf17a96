"""Snapshots of guests on the test server, in the words of Proxmox VE 9.2: what is wrong, only the task finds.

As measured on Proxmox VE 9.2's own daemons on 2026-11-26, of containers on a btrfs storage: kinds of tasks, their
words, what the configuration has before and afterwards, and that a deletion that fails leaves the guest locked.
"""

import re
import time
from collections.abc import Callable
from typing import Any

from tests.harness.proxmox import confs
from tests.harness.proxmox.answers import Given, call
from tests.harness.proxmox.confs import DRIVE, Conf
from tests.harness.proxmox.world import ApiDeathError, Guest, World

#: What a snapshot has for itself, and does not give back.
_OWN = ("snaptime", "description", "vmstate", "snapstate")


#: Kinds of tasks, by what is done.
_TASKS = {"vm": "qm", "container": "vz"}
_WHO = {"vm": "VM", "container": "CT"}


def _keeps_snapshots(guest: Guest) -> bool:
    values = guest.conf.now
    if guest.kind == "container":
        volumes = [text for key, text in values.items() if re.fullmatch(r"rootfs|mp\d+", key)]
        return all(re.match(r"(?:btr|tank|local-lvm):", text) for text in volumes)
    drives = [text for key, text in values.items() if DRIVE.fullmatch(key) and "media=cdrom" not in text]
    return all(re.match(r"store:.+\.qcow2|s2:.+\.qcow2|local-lvm:", text) for text in drives)


def _check_lock(guest: Guest) -> None:
    if lock := guest.conf.now.get("lock"):
        raise ApiDeathError(500, f"{_WHO[guest.kind]} is locked ({lock})\n")


def _write(guest: Guest, conf: Conf) -> None:
    guest.text = confs.write_vm(conf) if guest.kind == "vm" else confs.write_container(conf)


def _feature(world: World, guest: Guest) -> Any:
    told: dict[str, Any] = {"hasFeature": int(_keeps_snapshots(guest))}
    return told | ({"nodes": [world.node]} if guest.kind == "vm" else {})


def _create(world: World, guest: Guest, given: Given) -> Any:
    name = given["snapname"]
    if name == "current" or name == ("pending" if guest.kind == "vm" else "vzdump"):
        raise ApiDeathError(500, f"unable to use snapshot name '{name}' (reserved name)\n")

    def effect() -> None:
        conf = guest.conf
        _check_lock(guest)
        if name in conf.snapshots:
            raise ApiDeathError(500, f"snapshot name '{name}' already used\n")
        if conf.now.get("template") == "1":
            raise ApiDeathError(500, "you can't take a snapshot if it's a template\n")
        if not _keeps_snapshots(guest):
            raise ApiDeathError(500, "snapshot feature is not available\n")
        now = {"snaptime": str(int(time.time())), "description": given.get("description", "")}
        kept = {key: value for key, value in conf.now.items() if key != "description" and not key.startswith("unused")}
        conf.snapshots[name] = kept | now
        conf.raw[name] = list(conf.raw.get("", []))
        conf.now["parent"] = name
        _write(guest, conf)

    drive = guest.conf.now.get("scsi0", "").partition(",")[0]
    lines = [f"snapshotting 'drive-scsi0' ({drive})"] if guest.kind == "vm" else []
    return world.begin(f"{_TASKS[guest.kind]}snapshot", str(guest.vmid), lines, effect)


def _named(guest: Guest, name: str) -> Conf:
    conf = guest.conf
    _check_lock(guest)
    if name not in conf.snapshots:
        raise ApiDeathError(500, f"snapshot '{name}' does not exist\n")
    return conf


def _delete(world: World, guest: Guest, given: Given) -> Any:
    name = given["snapname"]

    def effect() -> None:
        conf = _named(guest, name)
        if world.snapshot_fails:
            conf.now["lock"], conf.snapshots[name]["snapstate"] = "snapshot-delete", "delete"
            _write(guest, conf)
            raise ApiDeathError(500, world.snapshot_fails)
        gone = conf.snapshots.pop(name)
        for values in (conf.now, *conf.snapshots.values()):
            if values.get("parent") == name:
                values.pop("parent")
                values.update({"parent": gone["parent"]} if "parent" in gone else {})
        _write(guest, conf)

    words = f"deleting snapshot '{name}' by commiting snapshot 'current'"
    lines = [words, "running 'qemu-img commit'", "Image committed."] if guest.kind == "vm" else []
    return world.begin(f"{_TASKS[guest.kind]}delsnapshot", str(guest.vmid), lines, effect)


def _roll_back(world: World, guest: Guest, given: Given) -> Any:
    name = given["snapname"]

    def effect() -> None:
        conf = _named(guest, name)
        if "snapstate" in conf.snapshots[name]:
            raise ApiDeathError(500, "unable to rollback to incomplete snapshot (snapstate = delete)\n")
        guest.running = "vmstate" in conf.snapshots[name]
        unused = {key: value for key, value in conf.now.items() if key.startswith("unused")}
        kept = {key: value for key, value in conf.snapshots[name].items() if key not in _OWN}
        conf.now, conf.raw[""] = kept | unused | {"parent": name}, list(conf.raw.get(name, []))
        _write(guest, conf)

    return world.begin(f"{_TASKS[guest.kind]}rollback", str(guest.vmid), [], effect)


def _of(kind: str, act: Callable[[World, Guest, Given], Any]) -> Callable[[World, Given], Any]:
    return lambda world, given: act(world, world.guest(kind, int(given["vmid"])), given)


for _kind, _path in (("vm", "/nodes/{node}/qemu/{vmid}"), ("container", "/nodes/{node}/lxc/{vmid}")):
    call(f"GET {_path}/feature")(_of(_kind, lambda world, guest, _given: _feature(world, guest)))
    call(f"POST {_path}/snapshot")(_of(_kind, _create))
    call(f"DELETE {_path}/snapshot/{{snapname}}")(_of(_kind, _delete))
    call(f"POST {_path}/snapshot/{{snapname}}/rollback")(_of(_kind, _roll_back))
