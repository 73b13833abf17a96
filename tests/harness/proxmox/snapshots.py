"""Snapshots of VMs on the test server: nearly all that is wrong, only the task finds, in the words of Proxmox VE 9.2.

As measured on Proxmox VE 9.2's own daemons on 2026-11-26: kinds of tasks, their words, what the configuration has
before and afterwards, and that a deletion that fails leaves the VM locked.
"""

import re
import time
from typing import Any

from tests.harness.proxmox import confs
from tests.harness.proxmox.answers import Given, call
from tests.harness.proxmox.confs import DRIVE, Conf, Values
from tests.harness.proxmox.world import ApiDeathError, Guest, World

#: What a snapshot has for itself, and does not give back.
_OWN = ("snaptime", "description", "vmstate", "snapstate")


def _keeps_snapshots(values: Values) -> bool:
    drives = [text for key, text in values.items() if DRIVE.fullmatch(key) and "media=cdrom" not in text]
    return all(re.match(r"store:.+\.qcow2|s2:.+\.qcow2|local-lvm:", text) for text in drives)


def _check_lock(conf: Conf) -> None:
    if conf.now.get("lock"):
        raise ApiDeathError(500, f"VM is locked ({conf.now['lock']})\n")


@call("GET /nodes/{node}/qemu/{vmid}/feature")
def feature(world: World, given: Given) -> Any:
    guest = world.guest("vm", int(given["vmid"]))
    return {"hasFeature": int(_keeps_snapshots(guest.conf.now)), "nodes": [world.node]}


@call("POST /nodes/{node}/qemu/{vmid}/snapshot")
def create(world: World, given: Given) -> Any:
    guest, name = world.guest("vm", int(given["vmid"])), given["snapname"]
    if name in ("current", "pending"):
        raise ApiDeathError(500, f"unable to use snapshot name '{name}' (reserved name)\n")

    def effect() -> None:
        conf = guest.conf
        _check_lock(conf)
        if name in conf.snapshots:
            raise ApiDeathError(500, f"snapshot name '{name}' already used\n")
        if conf.now.get("template") == "1":
            raise ApiDeathError(500, "you can't take a snapshot if it's a template\n")
        if not _keeps_snapshots(conf.now):
            raise ApiDeathError(500, "snapshot feature is not available\n")
        now = {"snaptime": str(int(time.time())), "description": given.get("description", "")}
        kept = {key: value for key, value in conf.now.items() if key != "description" and not key.startswith("unused")}
        conf.snapshots[name] = kept | now
        conf.now["parent"] = name
        guest.text = confs.write_vm(conf)

    drive = guest.conf.now.get("scsi0", "").partition(",")[0]
    return world.begin("qmsnapshot", str(guest.vmid), [f"snapshotting 'drive-scsi0' ({drive})"], effect)


def _named(guest: Guest, name: str) -> Conf:
    conf = guest.conf
    _check_lock(conf)
    if name not in conf.snapshots:
        raise ApiDeathError(500, f"snapshot '{name}' does not exist\n")
    return conf


@call("DELETE /nodes/{node}/qemu/{vmid}/snapshot/{snapname}")
def delete(world: World, given: Given) -> Any:
    guest, name = world.guest("vm", int(given["vmid"])), given["snapname"]

    def effect() -> None:
        conf = _named(guest, name)
        if world.snapshot_fails:
            conf.now["lock"], conf.snapshots[name]["snapstate"] = "snapshot-delete", "delete"
            guest.text = confs.write_vm(conf)
            raise ApiDeathError(500, world.snapshot_fails)
        gone = conf.snapshots.pop(name)
        for values in (conf.now, *conf.snapshots.values()):
            if values.get("parent") == name:
                values.pop("parent")
                values.update({"parent": gone["parent"]} if "parent" in gone else {})
        guest.text = confs.write_vm(conf)

    words = f"deleting snapshot '{name}' by commiting snapshot 'current'"
    lines = [words, "running 'qemu-img commit'", "Image committed."]
    return world.begin("qmdelsnapshot", str(guest.vmid), lines, effect)


@call("POST /nodes/{node}/qemu/{vmid}/snapshot/{snapname}/rollback")
def roll_back(world: World, given: Given) -> Any:
    guest, name = world.guest("vm", int(given["vmid"])), given["snapname"]

    def effect() -> None:
        conf = _named(guest, name)
        if "snapstate" in conf.snapshots[name]:
            raise ApiDeathError(500, "unable to rollback to incomplete snapshot (snapstate = delete)\n")
        guest.running = "vmstate" in conf.snapshots[name]
        unused = {key: value for key, value in conf.now.items() if key.startswith("unused")}
        kept = {key: value for key, value in conf.snapshots[name].items() if key not in _OWN}
        conf.now = kept | unused | {"parent": name}
        guest.text = confs.write_vm(conf)

    return world.begin("qmrollback", str(guest.vmid), [], effect)
