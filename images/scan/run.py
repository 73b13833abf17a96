"""A scan, from the agent's events to rows.

Rows are written in batches as they come; a new image is not listed, and nothing is called vanished, before the last
transaction (:meth:`ScanRun.finish`). A scan that dies on the way leaves what the last whole one found.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from typing import Any

from django.db import connection, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from images.models import Image
from images.orphans import host_facts as world
from images.rewrite import attached, holding, record, space
from images.scan import bulk_write, from_volumes, hypervisors, same_storages, shared_storages
from images.scan import rows as scan_rows
from images.scan.hypervisors import Told
from images.scan.known import of_strangers, standing_on_others
from images.scan.rows import inode
from storage_admin.agent.protocol import unb64
from storage_admin.guests import services as guests
from storage_admin.guests.models import Guest
from storage_admin.hosts import services as hosts
from storage_admin.hosts import silence, transport
from storage_admin.hosts.libvirt.reader import LibvirtFacts
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import path_key, raw
from storage_admin.hosts.proxmox import by_api_alone
from storage_admin.hosts.proxmox.reader import ProxmoxFacts
from storage_admin.jobs.models import Job

#: Rows that are written at once, and keys that stand in one query.
BATCH, AT_ONCE = 2000, 500
FINGERPRINT = 16
#: What libvirt tells of.
DOMAINS = (Guest.Kind.DOMAIN,)

#: What a scan writes of a pool; the rest of its row belongs to admins.
SCANNED_OF_POOL = (
    "state", "state_detail", "last_scanned", "capacity_bytes", "available_bytes", "reserved_bytes", "filesystem",
    "network", "shared_key", "fs_key", "root", "kind", "others_count", "others_bytes", "undo_bytes", "leftovers",
    "owners_unknown", "volume_facts", "space_seen", "mount", "known_since",
)  # fmt: skip


@dataclass
class ScanRun:
    """What one scan has gathered so far."""

    job: Job
    pools: dict[int, StoragePool]
    libvirt: LibvirtFacts | None
    libvirt_error: str
    asked: list[bytes]
    others: Sequence[Told] = ()
    at: datetime = field(default_factory=timezone.now)
    host_facts: dict[str, Any] = field(default_factory=dict)
    pool_facts: list[dict[str, Any]] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)
    images_read: int = 0
    new_pools: bool = False
    #: What hypervisors told of volumes that are no files, by their backend, until the agent has told of these.
    held: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    opened: list[tuple[str, str, str]] = field(default_factory=list)  #: device, inode, why: volumes that are in use
    volume_claims: list[world.Claimed] = field(default_factory=list)
    _batch: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        #: The scan's time as the database takes it.
        self.stamp: Any = connection.ops.adapt_datetimefield_value(self.at)

    @property
    def leftovers(self) -> int:
        """Journals of jobs in the pools, whether they are at work, keep an undo copy or were interrupted."""
        return sum(facts.get("leftovers", 0) for facts in self.pool_facts)

    def counted(self, what: str) -> dict[int, int]:
        """How many ``asides`` or ``undo_copies`` lie in each pool that could be walked, by the pool's id."""
        return {facts["id"]: facts.get(what, 0) for facts in self.pool_facts if facts["state"] == "ok"}

    def take(self, event: dict[str, Any]) -> None:
        """Takes one event of the scan.

        Raises:
            ValueError: it is none of a scan's.
        """
        match event["event"]:
            case "image":
                self._batch.append(scan_rows.row_of(event, self.job.pk, self.stamp))
                self.images_read += 1
                if len(self._batch) >= BATCH:
                    self._write_batch()
                    self._batch.clear()
            case "host":
                self.host_facts = event
            case "pool":
                self.pool_facts.append(event)
            case "volumes":
                self._take_volumes(event)
            case "seen":
                self.seen = event
                for one in chain.from_iterable(self.held.values()):
                    self.take(one)
            case other:
                raise ValueError(f"a scan does not know the event {other!r}")

    def hold(self, event: dict[str, Any]) -> None:
        """Takes an event of a pool that hypervisors told of; the agent may know better what is in it."""
        pool = self.pools.get(event["pool"] if event["event"] == "image" else event["id"])
        if pool is not None and pool.kind in from_volumes.KINDS:
            self.held.setdefault(from_volumes.KINDS[pool.kind], []).append(event)
        else:
            self.take(event)

    def _take_volumes(self, event: dict[str, Any]) -> None:
        guests = [
            *(one for told in self.others for one in told.guests),
            *(self.libvirt.domains if self.libvirt else ()),
        ]
        declared = {disk.path: disk.format for guest in guests for disk in guest.disks if disk.path}
        told = from_volumes.Told(self.job.host, event, declared)
        self.pools |= told.sync()
        self.opened += told.opened()
        for one in told.events(self.held.pop(event["backend"], [])):
            self.take(one)
        self.volume_claims += told.claims

    def _write_batch(self) -> None:
        """Writes what has gathered; known paths are updated, new ones inserted unlisted.

        The batch stays as it is: the transaction that it is written in may be rolled back and tried again.
        """
        if not self._batch:
            return
        with transaction.atomic():
            # An admin may have removed a pool since the scan began; nothing of it is written then.
            there = set(self._pools_that_are_there().values_list("pk", flat=True))
            moved = rewritten_since(self.job.host_id, self.at)
            rows = [row for row in self._batch if row[0] in there and row[-1] not in moved]
            scan_rows.upsert(self.job.host_id, self.stamp, rows)

    def _pools_that_are_there(self) -> QuerySet[StoragePool]:
        return StoragePool.objects.select_for_update().filter(pk__in=self.pools).order_by("pk")

    def finish(self) -> dict[str, Any]:
        """Makes the scan the truth: links, what vanished, guests, totals. Call it in the job's last transaction.

        It may be called again where that transaction was rolled back.
        """
        host = Host.objects.select_for_update().get(pk=self.job.host_id)
        self._write_batch()
        pools = {pool.pk: pool for pool in self._pools_that_are_there()}
        self.pool_facts = [unmounted_is_missing(pools.get(facts["id"]), facts) for facts in self.pool_facts]
        changed = Image.every.filter(host=host, changed_scan__gt=host.resolved_scan).exists()
        vanished = self._mark_vanished()
        changed |= self._probe_answers() | self._record_host(host) | self._record_guests(host)
        changed |= self._record_pools(pools) | self._record_holds(host, pools)
        if told := {facts["id"] for facts in self.pool_facts if facts.get("mount")}:
            same_storages.settle(host, told)
        silence.tell(host)
        changed |= world.record_claims(host, self._claims()) | bool(shared_storages.shared(host))
        if host.cluster:
            # Guests of other nodes may have been started or stopped, which use what is listed here.
            shared_storages.settle(host)
            changed |= host.by_api_alone
        changed = changed or vanished > 0 or world.kept_otherwise(host)
        if changed:
            bulk_write.forget_old_estimates(host)
            bulk_write.resolve_host(host)
            bulk_write.add_samples(host, self.at)
            host.resolved_scan = self.job.pk
            host.save(update_fields=["resolved_scan"])
            space.write_totals(pools.values())
        else:
            known = [pool.allocated_bytes is not None and pool.last_scanned is not None for pool in pools.values()]
            space.write_totals(pool for pool, is_known in zip(pools.values(), known, strict=True) if not is_known)
        bulk_write.sample_pools(pools.values(), self.at)
        holding.note_seen(self.job.host_id, self.job.pk)
        images = sum(pool["images"] for pool in self.pool_facts)
        return {
            "images": images,
            "read": self.images_read,
            "unchanged": images - self.images_read,
            "vanished": vanished,
        }

    def _claims(self) -> list[world.Claimed]:
        """What is told of things that are neither images nor guests here, and may need an image."""
        told = [*self.volume_claims, *(world.claim_of_disk(one) for one in self.seen.get("outside", []))]
        for other in self.others:
            if other.proxmox is not None:
                told += world.claims_of_cluster(other.proxmox)
        told += [world.claim_of_blind(unb64(path)) for facts in self.pool_facts for path in facts.get("blind_b64", [])]
        return told

    def _mark_vanished(self) -> int:
        vanished, unread = 0, Image.every.filter(host=self.job.host_id).exclude(changed_scan=self.job.pk)
        for facts in self.pool_facts:
            prints = vanished_prints(facts)
            for start in range(0, len(prints), AT_ONCE):
                rows = Image.every.filter(pool=facts["id"], fingerprint__in=prints[start : start + AT_ONCE])
                # A file that changed has a new fingerprint: this scan has written its row already.
                rows = rows.exclude(changed_scan=self.job.pk)
                rows.filter(listed=False).delete()  # it came and went between two scans, the first of which died
                vanished += mark_gone(rows, self.at, unread)
        return vanished

    def _probe_answers(self) -> bool:
        """Bases outside of every pool that came or went since their overlay was read."""
        told = {
            path_key(path): inode(*answer) if answer else ""
            for path, answer in zip(self.asked, self.seen.get("probe", []), strict=False)
            if answer is not None  # else the host could not tell, and what was known stays
        }
        keys, moved = list(told), dict[str, str]()
        for start in range(0, len(keys), AT_ONCE):
            rows = standing_on_others(self.job.host_id).filter(backing_key__in=keys[start : start + AT_ONCE])
            known = rows.values_list("backing_key", "backing_found").distinct()
            moved |= {below: told[below] for below, found in known if told[below] != found}
        for below, found in moved.items():
            Image.every.filter(host=self.job.host_id, backing_key=below).update(backing_found=found)
        return bool(moved)

    def _record_host(self, host: Host) -> bool:
        facts, before = self.host_facts, host.owners_unknown
        unknown = " ".join(told.unknown for told in self.others if told.unknown)
        if transport.by_libvirt_alone(host):
            capabilities = {key: value for key, value in facts.items() if key != "event"}
            silence.host_answered(host, self.at, capabilities, "", (Host.Status.OK, ""))  # its guests are known
            return before != ""
        api = next((told.proxmox for told in self.others if told.proxmox is not None), None)
        if host.by_api_alone and api is not None:
            by_api_alone.answered(host, self.at, api, unknown)
            return before != unknown
        if host.transport == Host.Transport.PLAIN:
            tools = {name: there for told in self.others for name, there in told.tools.items()}
            silence.host_answered(host, self.at, {"plain": True, "libvirt": "absent", "tools": tools}, unknown)
            return before != unknown
        if facts.get("proxmox") and Guest.Kind.VM not in {kind for told in self.others for kind in told.kinds}:
            unknown = "Proxmox VE runs on this host. The next scan reads its guests."
        elif self.libvirt is None and facts.get("libvirt") == "present":
            unknown = self.libvirt_error or "libvirt is installed here and has guests, but does not answer."
            unknown += " Start it (systemctl start libvirtd), then scan the host."
        capabilities = {name: value for name, value in facts.items() if name not in {"event", "proxmox_storages"}}
        capabilities |= {name: self.seen[name] for name in ("busy_complete",) if name in self.seen}
        capabilities |= attached.as_told_since(host, self.at) if "attached_at" in host.capabilities else {}
        capabilities["libvirt"] = "present" if self.libvirt is not None else facts.get("libvirt")
        if api is not None and host.token_id:
            known = host.capabilities.get("missing_rights", [])
            capabilities["missing_rights"] = known if api.api_away else by_api_alone.rights(api.missing)
            capabilities["api_away"] = api.api_away
        silence.host_answered(host, self.at, capabilities, unknown)
        # A hypervisor that was not known of when this scan began is asked by the next one, at once.
        self.new_pools |= hypervisors.were_missed(host, self.others)
        for storage in facts.get("proxmox_storages", []) if api is None else ():
            self.new_pools |= _add_proxmox_storage(host, str(storage["name"]), str(storage.get("path") or ""))
        return unknown != before

    def _record_guests(self, host: Host) -> bool:
        answers = dict(zip(self.asked, self.seen.get("probe", []), strict=False))
        inodes = {path: (str(found[0]), str(found[1])) for path, found in answers.items() if isinstance(found, list)}
        changed = False
        for told in self.others:
            if told.answered:  # else what was known stays, with the time it was seen
                changed |= guests.record_guests(host, told.kinds, told.guests, inodes, self.at, told.hidden)
        if self.libvirt is not None or self.host_facts.get("libvirt") != "present":
            domains = self.libvirt.domains if self.libvirt is not None else ()
            changed |= guests.record_guests(host, DOMAINS, domains, inodes, self.at)
        return changed

    def _record_pools(self, pools: dict[int, StoragePool]) -> bool:
        changed = False
        for facts in self.pool_facts:
            pool = pools.get(facts["id"])
            if pool is None:
                continue
            owners_before = pool.owners_unknown
            pool.state, pool.state_detail = facts["state"], facts.get("detail") or ""
            if was_not_entered(facts):
                pool.capacity_bytes = pool.available_bytes = pool.reserved_bytes = pool.space_seen = None
                # The rest is as it was when it was last there.
                gone = ("state", "state_detail", "capacity_bytes", "available_bytes", "reserved_bytes", "space_seen")
                pool.save(update_fields=gone)
                continue
            if facts["state"] == "ok":
                pool.last_scanned = self.at
            pool.take_space(facts, self.at)
            pool.filesystem, pool.network = facts.get("filesystem") or "", bool(facts.get("network"))
            pool.root = facts.get("root")
            pool.shared_key, pool.fs_key = facts.get("shared_key") or "", facts.get("fs_key") or ""
            pool.mount = facts.get("mount") or {}
            pool.known_since = pool.known_since or pool.last_scanned
            folder = (
                StoragePool.Kind.NFS if pool.filesystem.partition(" ")[0] in {"nfs", "nfs4"} else StoragePool.Kind.DIR
            )
            pool.kind = facts.get("kind", folder)
            others = facts.get("others") or {}
            pool.others_count, pool.others_bytes = others.get("count", 0), others.get("bytes", 0)
            pool.undo_bytes = facts.get("undo_bytes", 0)
            pool.leftovers = of_strangers(facts.get("own_files", []))
            pool.owners_unknown, pool.volume_facts = facts.get("owners_unknown") or "", facts.get("volume_facts")
            if pool.network and not pool.all_hosts_registered and "kind" not in facts:
                where = "is exported by NFS" if pool.is_exported else f"is on a network filesystem ({pool.filesystem})"
                pool.owners_unknown = f"The folder {where}. Hosts that are not registered here may use its images."
            # Not the whole row: what an admin has set since the scan began is theirs.
            pool.save(update_fields=SCANNED_OF_POOL)
            changed |= pool.owners_unknown != owners_before
        return changed

    def _record_holds(self, host: Host, pools: dict[int, StoragePool]) -> bool:
        """Who has which image open; of a folder that could not be walked, nothing new is known."""
        walked = [facts["id"] for facts in self.pool_facts if not was_not_entered(facts) and facts["id"] in pools]
        busy = [(str(dev), str(number), why) for dev, number, why in self.seen.get("busy", [])]
        return bulk_write.set_held(Image.every.filter(host=host, pool__in=walked), [*busy, *self.opened])


def vanished_prints(facts: dict[str, Any]) -> list[bytes]:
    """The fingerprints of those of a pool's images that are not there any more, as the agent tells of the pool."""
    gone = unb64(facts.get("vanished_b64", ""))
    return [gone[start : start + FINGERPRINT] for start in range(0, len(gone), FINGERPRINT)]


def mark_gone(rows: QuerySet[Image], at: datetime, others: QuerySet[Image]) -> int:
    """Writes that images are not where they were.

    Args:
        others: the images of their host among which those are that stand on them, but for what was read just now.

    Returns:
        How many.
    """
    # Its file may live on under another name, but what stands on it would not find it there.
    others.filter(backing_key__in=rows.values("path_key")).update(backing_found="")
    return rows.update(state=Image.State.MISSING, missing_since=at, in_use=None, orphan=None, held="")


def rewritten_since(host_id: int, at: datetime, but: int = 0) -> set[str]:
    """Keys of the paths of images that a job has rewritten since then, or may be rewriting.

    What the agent read of them may be of the file that stood there before. The job has written what it knows, and asks
    for the scan that reads the rest.

    Args:
        but: id of a job that has not begun to.
    """
    since = Q(finished__gt=at) | Q(state=Job.State.RUNNING)
    jobs = Job.objects.filter(since, host=host_id, rewrites=True).exclude(pk=but)
    images = set(jobs.filter(target_kind="image").values_list("target_id", flat=True))
    undone = jobs.filter(target_kind="job").values_list("target_id", flat=True)
    undone_jobs = Job.objects.filter(pk__in=list(undone), target_kind="image")
    images |= set(undone_jobs.values_list("target_id", flat=True))
    if not images:
        return set()
    moved = {path_key(path) for job in (*jobs, *undone_jobs) if job.kept for path in record.paths_of(job)}
    for key, path in Image.objects.filter(pk__in=images).values_list("path_key", "path_bytes"):
        moved |= {key, path_key(bytes(path))}  # one that is set aside is kept under another key
    return moved


def was_not_entered(facts: dict[str, Any]) -> bool:
    """Whether nothing at all was seen of a pool: it is not there, does not answer, or its folder cannot be opened."""
    by_agent = "kind" not in facts
    unentered = facts["state"] in {"unreadable", StoragePool.SILENT} and facts.get("dev") is None
    return facts["state"] in {"missing", "changed", "not_listed"} or (by_agent and unentered)


def unmounted_is_missing(pool: StoragePool | None, facts: dict[str, Any]) -> dict[str, Any]:
    """A folder that had images, is empty and lies on another filesystem now, is a mount point without its mount."""
    if pool is None or facts["state"] != "ok" or facts["images"] or not pool.images_count:
        return facts
    if not pool.fs_key or pool.told_fs_key == facts.get("fs_key") or "kind" in facts:  # what no agent walks is no mount
        return facts
    detail = "The folder is empty and on another filesystem. Mount the pool again. Its images are shown as last seen."
    return facts | {"state": "missing", "detail": detail, "vanished_b64": ""}


def add_storages(host: Host, facts: ProxmoxFacts) -> None:
    """Makes pools of a node's storages that are folders, so that the scan that is about to begin walks them."""
    for storage in facts.configured:
        if storage.is_folder and storage.on(facts.node):
            _add_proxmox_storage(host, storage.name, storage.path)


def _add_proxmox_storage(host: Host, name: str, path: str) -> bool:
    if not path.startswith("/"):
        return False
    if shared_storages.walked_from_now_on(host, name, path):
        return True
    if StoragePool.objects.filter(host=host, path=path).exists():
        return False
    hosts.add_pool(host, raw(path), StoragePool.Source.PROXMOX, name=name)
    return True
