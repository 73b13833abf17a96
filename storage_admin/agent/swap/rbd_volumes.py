"""Protocol V on images of Ceph (docs/volumes.md): the journal is a key of the image's metadata.

A client goes on with an image that gets another name, and the name is two entries in the pool: the image's own and one
in the pool's directory. A client that dies between them leaves both names with the one image; the directory counts.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from storage_admin.agent.host import rbd
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.agent.swap.journal import parse_name
from storage_admin.agent.swap.volumes import Journal, Place, Volume, change

is_atomic = False
#: What is copied to another image names another id than that image's own, and counts for nothing.
KEY = "storage-admin:aside"
ETC_PVE = "/etc/pve"
_NAME = re.compile(r"(?!-)[a-zA-Z0-9_.+-]{1,255}\Z", re.ASCII)
#: ``d`` stands where its deletion has begun.
_JOURNAL = re.compile(r"([0-9a-zA-Z]{1,64})\.([0-9a-zA-Z]+)\.([ad])\.(.+)")
#: What the object of a name holds: the length of the id, and that.
_NUMBER = re.compile(rb".{4}([0-9a-zA-Z]+)", re.DOTALL)
#: A client looks a name up, and only then is it seen: seconds for one that did so right before the rename.
_ARRIVES = 2.0
#: Seconds for a command, for the removal of an image of terabytes, and for Ceph to sum up what a pool has.
_SECONDS, _LONG, _SUMMED = 120.0, 86_400.0, 20.0
#: Exit codes of ``rbd``: there is no such image; it has watchers, or snapshots.
_MISSING, _REFUSED = 2, {16, 39}


@dataclass(frozen=True)
class RbdImage(Volume):
    """An image as Ceph tells it now.

    Args:
        options: of ``rbd``, by which its pool is asked.
        features: operations that other images or programs have on it.
        is_mirrored: another cluster has a copy.
    """

    options: tuple[str, ...]
    features: tuple[str, ...]
    is_mirrored: bool


def lock_name(group: str) -> str:
    return f"rbd-{group.replace('/', '-')}"


def check(place: Place) -> None:
    pool, _, namespace = place.group.partition("/")
    if not all(map(_NAME.match, (pool, namespace or pool, place.name))):
        raise RefusedError(INVALID, "that is no image of Ceph that Proxmox VE could have made")


def refuse_shared(place: Place, io: AgentIO) -> None:
    """A pool is shared by its nature; who may change it, the controller knows. It has to be the one of the plan.

    Raises:
        RefusedError: ``stale_plan``.
        HostError: Ceph does not answer.
    """
    _options(place, io)


def _options(place: Place, io: AgentIO) -> tuple[str, ...]:
    """By which the place's pool is asked."""
    for one in rbd.named(ETC_PVE):
        if one.name == place.group and _json(["ceph", *one.access, "fsid"], io)["fsid"] == place.group_id:
            return tuple(one.options)
    raise RefusedError("stale_plan", f"this host no longer has the Ceph pool {place.group} of the plan; scan it")


def _json(command: Sequence[str], io: AgentIO) -> Any:
    told = _ask(command, io)
    if told is None:
        raise HostError(f"{command[0]} does not find what it was asked for")
    return told


def _ask(command: Sequence[str], io: AgentIO) -> Any:
    """An answer; ``None`` where Ceph has no such image."""
    done = tools.run_to_end([*command, "--format=json"], io)
    return None if done.exit_code == _MISSING else rbd.answer_of(done, command[0])


def groups(places: Sequence[Place], io: AgentIO) -> set[str]:  # noqa: ARG001 (of another pool, no volume is told)
    """As of :class:`Backend`: :func:`there` refuses a pool that this host does not have."""
    return {place.group_id for place in places}


def there(places: Sequence[Place], io: AgentIO) -> list[RbdImage]:
    """The images of these places, and what is set aside in their pools; no other pool is asked."""
    found = list[RbdImage]()
    for group in sorted({(place.group, place.group_id) for place in places}):
        here = [place for place in places if (place.group, place.group_id) == group]
        options = _options(here[0], io)
        names = set(_json(["rbd", *options, "ls"], io))
        asked = {place.name for place in here} | {name for name in names if _NAME.match(name) and _job(name)}
        found += [_image(name, here[0], options, io) for name in sorted(asked & names)]
    return found


def _job(name: str) -> str:
    """The job that has set an image aside, by its name; empty for another one."""
    told = parse_name(os.fsencode(name))
    return told[0] if told is not None and told[1] == "aside" else ""


def _image(name: str, place: Place, options: tuple[str, ...], io: AgentIO) -> RbdImage:
    one = RbdImage(place.group, name, "", 0, None, False, options, (), False)
    info = _ask(["rbd", *options, "info", f"--image={name}"], io)
    if info is None:
        if not _job(name):
            return one
        gone = _is_name_alone(one, io)
        return replace(one, journal=Journal("", _job(name), *("d", "") if gone else ("a", name)), is_going=gone)
    text = str(_json(["rbd", *options, "image-meta", "list", f"--image={name}"], io).get(KEY, ""))
    told = _JOURNAL.fullmatch(text)
    journal = Journal(text, told[1], told[3], told[4]) if told and told[2] == info["id"] else None
    return replace(
        one, id=str(info["id"]), taken=_taken(one, info, io), journal=journal,
        is_going=journal is not None and journal.before == "d",
        features=tuple(set(map(str, info.get("op_features", ()))) - {"clone-child"}),
        is_mirrored=info.get("mirroring", {}).get("state", "disabled") != "disabled",
    )  # fmt: skip


def _is_name_alone(one: RbdImage, io: AgentIO) -> bool:
    """Whether nothing is left of an image that Ceph does not open: its removal was cut off at the very end.

    Ceph does not open a clone either whose parent's pool is gone. The header goes before the name does.
    """
    told = tools.run_to_end(["rados", *one.options, "get", f"rbd_id.{one.name}", "-"], io)
    if told.exit_code == _MISSING:
        return True
    number = _NUMBER.fullmatch(told.stdout)
    if told.exit_code or number is None:
        raise HostError(f"rados does not tell which image {one.path} is: {told.words()}")
    header = tools.run_to_end(["rados", *one.options, "stat", f"rbd_header.{number[1].decode()}"], io)
    if header.exit_code not in {0, _MISSING}:
        raise HostError(f"rados does not tell whether {one.path} has its header: {header.words()}")
    return header.exit_code == _MISSING


def _taken(one: RbdImage, info: dict[str, Any], io: AgentIO) -> int:
    """What was written, in whole objects, where a map of them tells that at once."""
    if "fast-diff" not in info["features"] or info["flags"]:
        return 0
    told = _json(["rbd", *one.options, "du", f"--image={one.name}"], io)["images"]
    return sum(int(line["used_size"]) for line in told if "snapshot" not in line)


def refuse_used(one: RbdImage, io: AgentIO) -> None:
    """Let an image go that nobody watches or has locked, and nothing is made of."""
    asked = ["rbd", *one.options]
    if _json([*asked, "snap", "ls", "--all", f"--image={one.name}"], io):
        raise RefusedError("has_overlays", f"the image {one.path} has snapshots; delete them first")
    if one.features or one.is_mirrored:
        why = ", ".join((*one.features, *(["mirroring"] if one.is_mirrored else [])))
        raise RefusedError("unsupported_pool", f"the image {one.path} does not stand alone ({why})")
    status = _json([*asked, "status", f"--image={one.name}"], io)
    if "migration" in status:
        raise RefusedError("busy", f"Ceph moves the image {one.path}")
    who = [str(one["address"])[:100] for one in status.get("watchers", ())]
    who += [str(one["locker"])[:100] for one in _json([*asked, "lock", "ls", f"--image={one.name}"], io)]
    if who:
        raise RefusedError("image_in_use", f"the image {one.path} is open in {', '.join(who)}; stop what uses it")


def write_journal(one: RbdImage, job: str, io: AgentIO, lock: int) -> str:
    """In the image's metadata."""
    made = f"{job}.{one.id}.a.{one.name}"
    _note(one, made, io, lock)
    return made


def _note(one: RbdImage, text: str, io: AgentIO, lock: int) -> None:
    change(["rbd", *one.options, "image-meta", "set", f"--image={one.name}", KEY, text], io, lock)


def hide(one: RbdImage, io: AgentIO, lock: int) -> None:  # noqa: ARG001 (nothing takes an image from its users)
    """Nothing but its name leads to it. Who looked that up before it went has come by now."""
    if one.is_aside:
        time.sleep(_ARRIVES)
        refuse_used(one, io)


def is_taken(place: Place, name: str, io: AgentIO) -> bool:
    return name in _json(["rbd", *_options(place, io), "ls"], io)


def rename(one: RbdImage, name: str, io: AgentIO, lock: int) -> None:
    """What a rename that was cut off has left of this name goes first: it would stand in the way."""
    tidy(one, name, io, lock)
    to = [option.replace("--", "--dest-", 1) for option in one.options if re.match("--(pool|namespace)=", option)]
    change(["rbd", *one.options, "rename", f"--image={one.name}", *to, f"--dest={name}"], io, lock)


def tidy(one: RbdImage, name: str, io: AgentIO, lock: int) -> None:
    """Remove a second name of an image that the pool's directory does not have."""
    if name in _json(["rbd", *one.options, "ls"], io):
        return
    info = _ask(["rbd", *one.options, "info", f"--image={name}"], io)
    if info is not None and info["id"] == one.id:
        change(["rados", *one.options, "rm", f"rbd_id.{name}"], io, lock)
        io.log(f"removed the name {name}, which was left beside {one.path}")


def give_back(one: RbdImage, journal: Journal, io: AgentIO, lock: int) -> None:
    """Only the journal goes, and what a rename that was cut off has left."""
    tidy(one, f".sa-{journal.job}.aside", io, lock)
    change(["rbd", *one.options, "image-meta", "remove", f"--image={one.name}", KEY], io, lock)


def remove(one: RbdImage, journal: Journal, io: AgentIO, lock: int) -> int | None:
    """In steps of Ceph's own, of which the first frees: so it is noted before, and what was cut off goes on with it.

    Ceph refuses an image that has watchers or snapshots.
    """
    before = _stored(one, io)
    if one.id:  # else a name alone is left
        _note(one, f"{journal.job}.{one.id}.d.{journal.own_name}", io, lock)
    done = tools.run_to_end(["rbd", *one.options, "rm", "--no-progress", f"--image={one.name}"], io, _LONG, (lock,))
    if done.exit_code in _REFUSED:
        if not one.is_going:  # else some of it has gone before
            _note(one, f"{journal.job}.{one.id}.a.{journal.own_name}", io, lock)
        raise RefusedError("image_in_use", f"Ceph does not remove the image {one.path}: {done.words()}")
    if done.exit_code:
        raise HostError(f"rbd ended with {done.words()}")
    if not one.id:
        return None
    deadline = time.monotonic() + _SUMMED
    while (after := _stored(one, io)) > before - max(one.taken // 2, 1):
        if time.monotonic() > deadline:
            return None if one.taken else 0
        time.sleep(1)
    # Others may have given up some meanwhile.
    return min(before - after, one.taken) if one.taken else before - after


def _stored(one: RbdImage, io: AgentIO) -> int:
    """What is stored in its pool, as Ceph has summed it up last."""
    access = [option for option in one.options if not re.match("--(pool|namespace)=", option)]
    pools = _json(["ceph", *access, "df"], io)["pools"]
    return next(int(pool["stats"]["stored"]) for pool in pools if pool["name"] == one.group.partition("/")[0])
