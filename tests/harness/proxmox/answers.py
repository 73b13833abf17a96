"""How each call of the schema is answered, after Proxmox VE's own code; whatever it is not told it does not know."""

import re
from collections.abc import Callable
from typing import Any

from tests.harness.proxmox import changes, confs
from tests.harness.proxmox.confs import DRIVE
from tests.harness.proxmox.world import TOPS, ApiDeathError, Guest, Task, World

Given = dict[str, str]
Answer = Callable[[World, Given], Any]
CALLS: dict[str, Answer] = {}


def call(name: str) -> Callable[[Answer], Answer]:
    """Has a function answer a call of the schema."""

    def note(answer: Answer) -> Answer:
        CALLS[name] = answer
        return answer

    return note


@call("GET /version")
def version(world: World, given: Given) -> Any:
    return world.version


@call("GET /access/permissions")
def permissions(world: World, given: Given) -> Any:
    if "path" in given:
        return {given["path"]: _effective(world, given["path"])}
    found = {path: _effective(world, path) for path in {*TOPS, *world.rights}}
    return {path: rights for path, rights in found.items() if rights}


def _effective(world: World, path: str) -> dict[str, int]:
    if path in world.rights:
        return world.rights[path]
    above = path
    while above not in world.rights and above != "/":
        above = above.rpartition("/")[0] or "/"
    return {right: 1 for right, below in world.rights.get(above, {}).items() if below}


@call("GET /cluster/status")
def cluster_status(world: World, given: Given) -> Any:
    return world.cluster_status


@call("GET /nodes")
def nodes(world: World, given: Given) -> Any:
    return world.nodes


@call("GET /storage")
def storages(world: World, given: Given) -> Any:
    return [one for one in world.storages if _sees(world, one["storage"])]


@call("GET /nodes/{node}/storage")
def node_storages(world: World, given: Given) -> Any:
    return [one for one in world.statuses if _sees(world, one["storage"])]


def _sees(world: World, storage: str) -> bool:
    return world.has(f"/storage/{storage}", "Datastore.Audit|Datastore.AllocateSpace")


@call("GET /nodes/{node}/storage/{storage}/content")
def content(world: World, given: Given) -> Any:
    name = given["storage"]
    defined = next((one for one in world.storages if one["storage"] == name), None)
    status = next((one for one in world.statuses if one["storage"] == name), {})
    if defined is None:
        raise ApiDeathError(500, f"storage '{name}' does not exist\n")
    if defined.get("disable"):
        raise ApiDeathError(500, f"storage '{name}' is disabled\n")
    if world.node not in re.split(r"[,; ]", defined.get("nodes", world.node)):
        raise ApiDeathError(500, f"storage '{name}' is not available on node '{world.node}'\n")
    if name in world.broken:
        raise ApiDeathError(*((500, world.broken[name]) if world.broken[name] else (596, "")))
    if not status.get("active"):
        raise ApiDeathError(500, f"storage '{name}' is not online\n")
    kinds = [given["content"]] if "content" in given else ["images", "rootdir", "iso", "import"]
    return [one for one in world.volumes.get(name, []) if one["content"] in kinds and _may_see(world, name, one)]


def _may_see(world: World, storage: str, volume: dict[str, Any]) -> bool:
    """PVE::Storage::check_volume_access: images silently vanish for who may not change their guest's disks, and backups
    for who may not make any.
    """
    if world.has(f"/storage/{storage}", "Datastore.Allocate"):
        return True
    if volume["content"] == "backup":
        may = "vmid" in volume and world.has(f"/vms/{volume['vmid']}", "VM.Backup")
        return may and world.has(f"/storage/{storage}", "Datastore.AllocateSpace")
    if volume["content"] not in ("images", "rootdir"):
        return True
    return world.has(f"/storage/{storage}", "Datastore.Audit") and world.has(f"/vms/{volume['vmid']}", "VM.Config.Disk")


@call("GET /nodes/{node}/qemu")
def vms(world: World, given: Given) -> Any:
    return [_row(guest, given) for guest in _visible(world, "vm")]


@call("GET /nodes/{node}/lxc")
def containers(world: World, given: Given) -> Any:
    return [_row(guest, given) for guest in _visible(world, "container")]


def _visible(world: World, kind: str) -> list[Guest]:
    return [one for one in world.guests.values() if one.kind == kind and world.has(f"/vms/{one.vmid}", "VM.Audit")]


def _row(guest: Guest, given: Given) -> dict[str, Any]:
    row: dict[str, Any] = {
        "vmid": guest.vmid, "name": guest.name, "status": "running" if guest.running else "stopped",
        "cpu": 0, "mem": 0, "uptime": 0,
    }  # fmt: skip
    if guest.conf.now.get("lock"):
        row["lock"] = guest.conf.now["lock"]
    if given.get("full") == "1":
        row["qmpstatus"] = guest.qmp or ("running" if guest.running else "stopped")
        if guest.running and guest.qemu:
            row["running-qemu"] = guest.qemu
    return row


@call("GET /nodes/{node}/qemu/{vmid}/config")
def vm_config(world: World, given: Given) -> Any:
    return _config(world.guest("vm", int(given["vmid"])), given)


@call("GET /nodes/{node}/lxc/{vmid}/config")
def container_config(world: World, given: Given) -> Any:
    return _config(world.guest("container", int(given["vmid"])), given)


def _config(guest: Guest, given: Given) -> Any:
    conf = guest.conf
    if "snapshot" in given:
        if given["snapshot"] not in conf.snapshots:
            raise ApiDeathError(500, f"snapshot '{given['snapshot']}' does not exist\n")
        name = given["snapshot"]
        return confs.answer(conf.snapshots[name], conf.digest, guest.kind, conf.raw.get(name))
    values = conf.now if given.get("current") == "1" else conf.merged()
    return confs.answer(values, conf.digest, guest.kind, conf.raw.get(""))


@call("GET /nodes/{node}/qemu/{vmid}/snapshot")
def snapshots(world: World, given: Given) -> Any:
    return _snapshots(world.guest("vm", int(given["vmid"])))


@call("GET /nodes/{node}/lxc/{vmid}/snapshot")
def container_snapshots(world: World, given: Given) -> Any:
    rows: list[dict[str, Any]] = _snapshots(world.guest("container", int(given["vmid"])))
    return [{key: value for key, value in row.items() if key != "vmstate"} for row in rows]


def _snapshots(guest: Guest) -> Any:
    conf = guest.conf
    rows: list[dict[str, Any]] = []
    for name, values in conf.snapshots.items():
        row = {
            "name": name, "description": values.get("description", ""), "snaptime": int(values.get("snaptime", 0)),
            "vmstate": int("vmstate" in values),
        }  # fmt: skip
        rows.append(row | ({"parent": values["parent"]} if "parent" in values else {}))
    now = {"name": "current", "description": "You are here!", "digest": conf.digest, "running": int(guest.running)}
    return [*rows, now | ({"parent": conf.now["parent"]} if "parent" in conf.now else {})]


@call("PUT /nodes/{node}/qemu/{vmid}/config")
def set_vm_config(world: World, given: Given) -> Any:
    return changes.update(world, world.guest("vm", int(given["vmid"])), given)


@call("POST /nodes/{node}/qemu/{vmid}/move_disk")
def move_disk(world: World, given: Given) -> Any:
    return changes.move(world, world.guest("vm", int(given["vmid"])), given["disk"], given)


@call("POST /nodes/{node}/lxc/{vmid}/move_volume")
def move_volume(world: World, given: Given) -> Any:
    return changes.move(world, world.guest("container", int(given["vmid"])), given["volume"], given)


@call("PUT /nodes/{node}/qemu/{vmid}/resize")
def resize(world: World, given: Given) -> Any:
    return changes.resize(world, world.guest("vm", int(given["vmid"])), given)


@call("POST /nodes/{node}/qemu/{vmid}/agent/fstrim")
def fstrim(world: World, given: Given) -> Any:
    guest = world.guest("vm", int(given["vmid"]))
    if "agent" not in guest.conf.now:
        raise ApiDeathError(500, "No QEMU guest agent configured\n")
    if not guest.running:
        raise ApiDeathError(500, f"VM {guest.vmid} is not running\n")
    if guest.trims is None:
        raise ApiDeathError(500, "QEMU guest agent is not running\n")
    return {"result": {"paths": guest.trims}}


def _task(world: World, given: Given) -> Task:
    if given["upid"] not in world.tasks:
        raise ApiDeathError(500, "no such task\n")
    return world.tasks[given["upid"]]


@call("GET /nodes/{node}/tasks/{upid}/status")
def task_status(world: World, given: Given) -> Any:
    task = _task(world, given)
    task.step()
    kind, about, user = task.upid.split(":")[5:8]
    row = {
        "upid": task.upid, "node": world.node, "pid": 29295, "pstart": 312987, "starttime": 1795173355, "type": kind,
        "id": about, "user": user.partition("!")[0], "status": "stopped" if task.ended else "running",
    }  # fmt: skip
    return row | ({"exitstatus": task.exit_status} if task.ended else {})


@call("GET /nodes/{node}/tasks/{upid}/log")
def task_log(world: World, given: Given) -> Any:
    task = _task(world, given)
    lines = task.lines[: task.shown] or ["no content"]
    start = int(given.get("start", "0"))
    return [{"n": start + i + 1, "t": line} for i, line in enumerate(lines[start:])][: int(given.get("limit", "50"))]


@call("DELETE /nodes/{node}/tasks/{upid}")
def stop_task(world: World, given: Given) -> Any:
    task = _task(world, given)
    if not task.ended:
        task.exit_status = "interrupted by signal"
        task.end()


def drives_of(values: confs.Values) -> dict[str, str]:
    """The drives of a section, unused ones left out."""
    return {key: value for key, value in values.items() if DRIVE.fullmatch(key)}
