"""What changes a guest on the test server, after PVE::API2::Qemu and PVE::QemuServer."""

import re
from typing import Any

from tests.harness.proxmox import confs, schema
from tests.harness.proxmox.confs import DRIVE, Conf, volume_of
from tests.harness.proxmox.world import ApiDeathError, Guest, World

#: Changes of these are applied to a running guest; any other one waits (``vmconfig_update_disk``).
_LIVE = re.compile(r"(m?bps|iops)(_rd|_wr)?(_max)?(_max_length)?")
_BESIDE = ("node", "vmid", "digest", "delete", "force", "skiplock", "revert")


def _check_lock(conf: Conf, kind: str) -> None:
    if conf.now.get("lock"):
        raise ApiDeathError(500, f"{'VM' if kind == 'vm' else 'CT'} is locked ({conf.now['lock']})\n")


def update(world: World, guest: Guest, given: dict[str, str]) -> None:
    """``PUT …/config``: into what waits first, then applied."""
    if world.before_put is not None:
        world.before_put(guest)
    wanted = {key: value for key, value in given.items() if key not in _BESIDE}
    gone = re.split(r"[,; ]+", given["delete"]) if given.get("delete") else []
    if "skiplock" in given and not world.root:
        errors = {"skiplock": "Only root may use this option."}
        raise ApiDeathError(400, "Parameter verification failed.\n", errors)
    if "lock" in (*wanted, *gone) and not world.root:
        raise ApiDeathError(500, "only root can set 'lock' config\n")
    if not wanted and not gone:
        raise ApiDeathError(500, "no options specified\n")
    for key, value in wanted.items():
        _check_drive(world, guest, key, value)
    conf = guest.conf
    if given.get("digest", conf.digest) != conf.digest:
        raise ApiDeathError(500, "checksum mismatch (file change by other user?)\n")
    if given.get("skiplock") != "1":
        _check_lock(conf, guest.kind)
    for key in gone:
        conf.now.pop(key, None)
        conf.pending.pop(key, None)
    for key, value in wanted.items():
        conf.pending[key] = confs.print_drive(key, value) if DRIVE.fullmatch(key) else value
    _apply(guest, conf)
    guest.text = confs.write_vm(conf)
    if world.after_put is not None:
        world.after_put(guest)


def _check_drive(world: World, guest: Guest, key: str, value: str) -> None:
    if not DRIVE.fullmatch(key):
        return
    path = f"/vms/{guest.vmid}"
    found = schema.properties("vm:" + re.sub(r"\d+$", "", key), value)
    for way in ("rd", "wr"):
        if {f"mbps_{way}", "mbps"} <= found.keys() or {f"bps_{way}", f"mbps_{way}"} <= found.keys():
            raise ApiDeathError(400, "Parameter verification failed.\n", {key: "unable to parse drive options"})
        if f"mbps_{way}_max" in found and f"mbps_{way}" not in found:
            raise ApiDeathError(400, "Parameter verification failed.\n", {key: "unable to parse drive options"})
    world.demand(path, "VM.Config.CDROM" if found.get("media") == "cdrom" else "VM.Config.Disk")
    if found["file"].startswith("/"):
        raise ApiDeathError(500, "Only root can pass arbitrary filesystem paths. at line 654\n")


def _apply(guest: Guest, conf: Conf) -> None:
    for key in [key for key in conf.pending if key != "delete"]:
        value, old = conf.pending[key], conf.now.get(key, "")
        if guest.running and not _hotplugged(guest, key, old, value):
            continue
        del conf.pending[key]
        if DRIVE.fullmatch(key) and old:
            _register_unused(guest, conf, volume_of(old))
        conf.now[key] = value
    if conf.pending and all(conf.now.get(key) == value for key, value in conf.pending.items()):
        conf.pending.clear()


def _hotplugged(guest: Guest, key: str, old: str, new: str) -> bool:
    if not guest.hotplug or not DRIVE.fullmatch(key) or not old:
        return False
    form = "vm:" + re.sub(r"\d+$", "", key)
    before, after = schema.properties(form, old), schema.properties(form, new)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    return all(_LIVE.fullmatch(name) for name in changed)


def _register_unused(guest: Guest, conf: Conf, volume: str) -> None:
    """An old volume of the guest's own is kept, also where the new id names the same file: ids are compared as text."""
    owner = re.search(r"(?:^|[:/])(?:vm|base)-(\d+)-[^/]+$", volume)
    if owner is None or int(owner[1]) != guest.vmid:
        return
    if volume not in [value for key, value in conf.now.items() if key.startswith("unused")]:
        free = next(f"unused{i}" for i in range(256) if f"unused{i}" not in conf.now)
        conf.now[free] = volume


def move(world: World, guest: Guest, target: str, given: dict[str, str]) -> str:
    """``move_disk`` and ``move_volume``: refused at once for what can be seen at once."""
    storage = given["storage"]
    world.demand(f"/vms/{guest.vmid}", "VM.Config.Disk")
    world.demand(f"/storage/{storage}", "Datastore.AllocateSpace")
    conf = guest.conf
    _check_lock(conf, guest.kind)
    if given.get("digest", conf.digest) != conf.digest:
        raise ApiDeathError(500, "detected modified configuration - file changed by other user? Try again.\n")
    if target not in conf.now:
        raise ApiDeathError(500, f"disk '{target}' does not exist\n")
    old = volume_of(conf.now[target])
    form = given.get("format") or old.rpartition(".")[2]
    if old.startswith(storage + ":") and old.endswith("." + form):
        raise ApiDeathError(500, "you can't move to the same storage with same format\n")
    if not any(one["storage"] == storage and "images" in one["content"] for one in world.storages):
        raise ApiDeathError(400, "Parameter verification failed.\n", {"storage": "does not support vm images"})
    lines = [f"create full clone of drive {target} ({old})"]
    lines += [f"transferred {part}.0 GiB of 4.0 GiB ({part * 25}.00%)" for part in range(5)]

    def effect() -> None:
        after = guest.conf
        number = next(i for i in range(99) if f"vm-{guest.vmid}-disk-{i}.{form}" not in world.used_names())
        new = f"{storage}:{guest.vmid}/vm-{guest.vmid}-disk-{number}.{form}"
        after.now[target] = after.now[target].replace(old, new)
        if given.get("delete") != "1":
            _register_unused(guest, after, old)
        guest.text = confs.write_vm(after)

    return world.begin("qmmove" if guest.kind == "vm" else "vzmove", str(guest.vmid), lines, effect)


def resize(world: World, guest: Guest, given: dict[str, str]) -> str:
    """``resize``: a task that finds only when it runs that the guest is locked or has changed."""
    world.demand(f"/vms/{guest.vmid}", "VM.Config.Disk")

    def effect() -> Any:
        conf = guest.conf
        if given.get("digest", conf.digest) != conf.digest:
            raise ApiDeathError(500, "checksum mismatch (file change by other user?)\n")
        _check_lock(conf, guest.kind)
        drive = conf.now[given["disk"]]
        world.demand(f"/storage/{volume_of(drive).partition(':')[0]}", "Datastore.AllocateSpace")
        size = f"{int(given['size']) // 1024}K"
        conf.now[given["disk"]] = re.sub(r"size=[^,]+", f"size={size}", drive)
        guest.text = confs.write_vm(conf)

    return world.begin("resize", str(guest.vmid), ["Image resized."], effect)
