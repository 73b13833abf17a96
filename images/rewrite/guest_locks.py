"""Guests of Proxmox VE are locked while a file of theirs gives up its name, where the agent can hold nobody back.

Its hypervisors take no image locks, and on a network's storage no door can be kept before a file. So the ``lock`` of
each guest's configuration is taken, by compare-and-set, as root on the node: every start, on whatever node, asks for
it. What a guest was locked as is kept with the job before that, which owes (``unlock_due``) that the lock goes again. A
lock that is somebody else's is neither taken over nor taken away. :func:`give_back` pays when the job has ended, and
:func:`settle` what was left, after the host was recovered.
"""

import contextlib
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from images.models import Image
from images.rewrite import neighbours
from images.scan import shared_storages
from storage_admin.accounts.models import SYSTEM, audit
from storage_admin.agent.protocol import HELD_LOCK, HostError, RefusedError
from storage_admin.guests.models import OFF_STATES, Guest, GuestDisk
from storage_admin.hosts import transport
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import path_key
from storage_admin.hosts.proxmox import hidden
from storage_admin.hosts.proxmox.client import Api
from storage_admin.hosts.proxmox.config import PATHS, Config, GuestRef, read_config, unset_config
from storage_admin.hosts.proxmox.drives import VM
from storage_admin.hosts.proxmox.errors import NotThereError, guest_locked
from storage_admin.hosts.proxmox.pvesh import Pvesh
from storage_admin.jobs import claims
from storage_admin.jobs.models import Job, JobLog
from storage_admin.jobs.plan_and_progress import Refusal, refuse


@dataclass(frozen=True)
class Kept:
    """A guest that was to be locked.

    Args:
        content: a digest of its configuration without the lock: only where it is still that, the lock is ours.
        taken: whether its lock was surely set by us; it may be without, where nobody was left to say so.
    """

    uid: str
    name: str
    content: str
    taken: bool = False


def are_needed(image: Image) -> bool:
    """Whether nobody else keeps guests away from an image while it is exchanged, or a volume has another name."""
    if not image.host.capabilities.get("proxmox"):
        return False
    if image.is_volume:
        return image.pool.kind == StoragePool.Kind.LVMTHIN and bool(_guests(image))
    return bool(image.pool.network)


def refusals(image: Image, undo_hours: float) -> list[Refusal]:
    """What stands against a swap there, as far as the database knows.

    Args:
        undo_hours: how long the original is kept; an undo keeps the job's file until it is done, for ever so short.
    """
    if not are_needed(image):
        return []
    why = _(
        "{pool} is on network storage, where Proxmox VE takes no image locks. The guests that use {image} must be "
        "locked during the swap"
    ).format(pool=image.pool.name, image=image.name)
    if image.is_volume:
        why = _("The guests that use {image} must be locked while the job renames it").format(image=image.name)
    guests = _guests(image)
    others = [guest for guest in guests if guest.kind != Guest.Kind.VM]
    if not guests:
        told = _("{why}, but no such guest is known. Move the image to local storage first.")
    elif others and image.is_volume:
        told = _("{name} is a container, which cannot be locked. Have it trimmed instead (pct fstrim), also running.")
    elif others:
        told = _("{why}, but {name} is not a VM and cannot be locked. Move its disk to local storage first.")
    elif _is_also_elsewhere(image, {(guest.uid, guest.name) for guest in guests}):
        told = _(
            "{why}, but a guest of another cluster also uses the image and cannot be locked from here. Move the image "
            "to local storage first."
        )
    elif not (transport.is_here(image.host) or image.host.transport in (Host.Transport.SSH, Host.Transport.API_SSH)):
        told = _("{why}, which only root on the node can do. Give {host} an SSH account that is root.")
    elif not undo_hours:
        told = _("{why}. If one of them starts anyway, the original is needed. Keep an undo copy (undo_hours above 0).")
    else:
        return []
    name = others[0].name_for(image.host_id) if others else ""
    return [Refusal("guests_unknown", told.format(why=why, name=name, host=image.host.name))]


def warnings(image: Image) -> list[str]:
    """What becomes of the guests."""
    if not are_needed(image):
        return []
    names = ", ".join(guest.name_for(image.host_id) for guest in _guests(image))
    told = _(
        "Proxmox VE keeps {names} locked ({lock}) for a minute or two while the files are swapped. During that "
        "time it refuses to start them, back them up or take snapshots of them."
    )
    if image.is_volume:
        told = _(
            "Proxmox VE keeps {names} locked ({lock}) while zeros are discarded. During that time it refuses to start "
            "them, back them up or take snapshots of them."
        )
    return [told.format(names=names, lock=HELD_LOCK)]


def asked(image: Image) -> dict[str, Any]:
    """What the agent is told of it."""
    return {"guests": [guest.uid for guest in _guests(image)]} if are_needed(image) else {}


def _guests(image: Image) -> list[Guest]:
    return [guest for guest in neighbours.of(image).guests if guest.host_id == image.host_id]


def _is_also_elsewhere(image: Image, known: Collection[tuple[str, str]]) -> bool:
    """Whether another registered node, of another cluster, has a guest with a disk at that place."""
    for pair, path in shared_storages.elsewhere(image):
        disks = GuestDisk.objects.filter(guest__host=pair.other.host_id, path_key=path_key(path))
        vms = disks.filter(guest__kind=Guest.Kind.VM).values_list("guest__uid", "guest__name")
        if any(vm not in known for vm in vms):
            return True
    return False


def take(job: Job, image: Image) -> None:
    """Locks every guest that needs the image, right before the swap; all of them have to be off then.

    Raises:
        RefusedError: ``guest_locked``, ``guest_running``, ``guests_unknown``, ``hidden_lines``; ``stale_plan``: a
            configuration was changed meanwhile, or a change of it waits.
        HostError: Proxmox VE cannot be asked, or refuses.
    """
    if not are_needed(image):
        return
    uids = {guest.uid: guest.name for guest in _guests(image)}
    refuse(refusals(image, 1))
    api = _api(job.host)
    nodes = _all_off(api, uids)
    refs = {uid: GuestRef(nodes[uid], int(uid)) for uid in uids}
    # Those that were locked when the database went away are locked still.
    missing = [uid for uid in uids if not _holds(job, api, refs[uid])]
    configs = {uid: _free(job.host, api, refs[uid], uids[uid]) for uid in missing}
    for uid, config in configs.items():
        _lock(job, api, config, Kept(uid, uids[uid], _content(config)))
    # Not of every node once more: a node tells of the guests whose configuration it has and of no others (vzlist of
    # Proxmox VE), and one that is locked so is moved nowhere. Whoever started before its lock was held shows there.
    _all_off(api, uids, HELD_LOCK, nodes=set(nodes.values()))


def _holds(job: Job, api: Api, guest: GuestRef) -> bool:
    """Whether the lock of a guest is the one that an earlier try of the same job has set."""
    own = [one.content for one in _kept(job) if one.taken and one.uid == str(guest.vmid)]
    if not own:
        return False
    config = read_config(api, guest)
    return config.now.get("lock") == HELD_LOCK and _content(config) in own


def _lock(job: Job, api: Api, config: Config, one: Kept) -> None:
    before = [kept for kept in _kept(job) if kept.uid != one.uid]
    _owe(job, [*before, one])
    try:
        api.put(*config.guest.path, "config", params={"lock": HELD_LOCK, "digest": config.digest})
    except RefusedError:
        _owe(job, before)  # what is there now is somebody else's, also where it is called the same
        raise
    job.kept = job.kept | {"locked": [asdict(kept) for kept in [*before, replace(one, taken=True)]]}
    if read_config(api, config.guest).now.get("lock") != HELD_LOCK:
        raise HostError(
            _("Proxmox VE accepted the lock of {one}, but does not show it. Try again.").format(one=one.name)
        )
    claims.log(job, f"Proxmox VE: {one.name} is locked ({HELD_LOCK})")


def _owe(job: Job, locked: list[Kept]) -> None:
    kept = job.kept | {"locked": [asdict(one) for one in locked]}
    if not job.ours().update(kept=kept, unlock_due=bool(locked)):
        raise RefusedError("stale_plan", _("Another worker has taken over this job."))
    job.kept = kept


def look_again(job: Job) -> None:
    """Whether every guest is still locked and off, after the files were exchanged; raises as :func:`take`.

    Of every node: what root did past the locks meanwhile, may have been done anywhere.
    """
    if locked := _kept(job):
        _all_off(_api(job.host), {one.uid: one.name for one in locked}, HELD_LOCK)


def _api(host: Host) -> Api:
    return Pvesh(transport.shell(host), host.name)


@dataclass(frozen=True)
class _Listed:
    """The VMs of a cluster: the rows of each, with their ``node``, by number; why some node has told of none."""

    rows: dict[str, list[dict[str, Any]]]
    why_not_all: HostError | None = None


def _listed(api: Api, nodes: Collection[str] = ()) -> _Listed:
    """Asks these nodes, or every one."""
    found: dict[str, list[dict[str, Any]]] = {}
    failed = None
    for name in nodes or [str(node.get("node")) for node in api.rows("nodes")]:
        try:
            for row in api.rows("nodes", name, PATHS[VM]):
                found.setdefault(str(row.get("vmid")), []).append(row | {"node": name})
        except HostError as error:
            told = _("Node {name} does not report which of its guests are running: {detail}")
            failed = HostError(told.format(name=name, detail=error.detail), error.code)
    return _Listed(found, failed)


def _all_off(api: Api, uids: Mapping[str, str], lock: str = "", nodes: Collection[str] = ()) -> dict[str, str]:
    """Makes sure that guests are off, as these nodes tell, or every one of the cluster; the node of each, by number."""
    listed = _listed(api, nodes)
    if listed.why_not_all is not None:
        told = _("{detail} Try again when the node answers.")
        raise RefusedError("guests_unknown", told.format(detail=listed.why_not_all.detail))
    for uid, name in uids.items():
        rows = listed.rows.get(uid, [])
        if len(rows) != 1:
            told = _("{name} is on {count} nodes of the cluster instead of one. Scan the host, then try again.")
            raise RefusedError("guests_unknown", told.format(name=name, count=len(rows)))
        if rows[0].get("status") not in OFF_STATES:
            told = _("{name} is running on {node}. Shut it down first.")
            raise RefusedError("guest_running", told.format(name=name, node=rows[0]["node"]))
        if lock and rows[0].get("lock") != lock:
            told = _(
                "{name} was unlocked by someone else and may have been started. Make sure that it is off, then try "
                "again."
            )
            raise RefusedError("guests_unknown", told.format(name=name))
    return {uid: str(listed.rows[uid][0]["node"]) for uid in uids}


def _free(host: Host, api: Api, guest: GuestRef, name: str) -> Config:
    """The configuration of a guest that nothing stands against locking."""
    config = read_config(api, guest)
    if config.now.get("lock"):
        raise guest_locked(name, config.now["lock"])
    if config.now != config.next:
        told = _(
            "A pending change of {name} takes effect at its next start. Start the guest or revert the change, "
            "then try again."
        )
        raise RefusedError("stale_plan", told.format(name=name))
    hidden.refuse_dropping(host, api, config, name)
    return config


def _content(config: Config) -> str:
    """A digest of what a configuration says beside its lock."""
    said = {key: value for key, value in config.now.items() if key not in ("lock", "digest")}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _kept(job: Job) -> list[Kept]:
    return [Kept(**one) for one in job.kept.get("locked", [])]


def give_back(job: Job) -> None:
    """Takes the locks away that the job has set, once it has ended and its host is recovered."""
    job.refresh_from_db(fields=["unlock_due", "state", "needs_recovery", "kept"])
    if not job.unlock_due or job.active or job.needs_recovery:
        return
    try:
        api = _api(job.host)
        listed = _listed(api)
        for one in _kept(job):
            for row in listed.rows.get(one.uid, []):
                _unlock(job, api, GuestRef(str(row["node"]), int(one.uid)), one)
            if one.uid not in listed.rows and listed.why_not_all is not None:
                raise listed.why_not_all
    except (HostError, RefusedError) as error:
        _say_once(job, f"a guest may still be locked ({HELD_LOCK}); unlocking is retried: {error.detail}")
        return
    Job.objects.filter(pk=job.pk).update(unlock_due=False)


def _unlock(job: Job, api: Api, guest: GuestRef, one: Kept) -> None:
    with contextlib.suppress(NotThereError):
        config = read_config(api, guest)
        lock = config.now.get("lock")
        if lock is None:
            return
        if lock != HELD_LOCK or _content(config) != one.content:
            _say_once(
                job,
                f"{one.name} has the lock {lock}, which this job did not set; the lock is kept. Check "
                "the guest yourself",
            )
            return
        unset_config(api, config, "lock")
        claims.log(job, f"Proxmox VE: {one.name} is no longer locked")


def _say_once(job: Job, text: str) -> None:
    say_once(job, "guest left locked", text)


def say_once(job: Job, what: str, why: str) -> None:
    """Warns in a job's log and in the audit trail of what is still owed to guests, unless it has been said already."""
    if not job.log_lines.filter(text=why).exists():
        claims.log(job, why, JobLog.Level.WARNING)
        audit(SYSTEM, what, job.target_label, after={"job": job.pk, "why": why})


def settle(host_id: int | None = None, *, but_not: Collection[int] = ()) -> None:
    """Tries again what :func:`give_back` could not do; arguments: see :func:`images.rewrite.wait_for_guests.look`."""
    for job in owing(host_id, but_not).filter(unlock_due=True):
        give_back(job)


def owing(host_id: int | None, but_not: Collection[int]) -> QuerySet[Job]:
    """Jobs that have ended and may owe something to guests, on one host, or on all but some."""
    chosen = Job.objects.exclude(host__in=but_not) if host_id is None else Job.objects.filter(host=host_id)
    ended = chosen.filter(needs_recovery=False).exclude(state__in=Job.ACTIVE)
    # Each would cost its timeout, again and again, while others wait: the scan that reaches it again says so.
    return ended.exclude(host__status=Host.Status.UNREACHABLE).select_related("host")
