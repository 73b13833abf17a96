"""A scan, from the agent's events to rows.

Rows are written in batches as they come; a new image is not listed, and nothing is called vanished, before the last
transaction (:meth:`ScanRun.finish`). A scan that dies on the way leaves what the last whole one found.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import connection, transaction
from django.utils import timezone

from images import scan_rows, writing
from images.models import Image
from images.scan_rows import inode, key
from storage_admin.agent.protocol import b64, unb64
from storage_admin.guests import services as guests
from storage_admin.hosts import services as hosts
from storage_admin.hosts.libvirt_reader import LibvirtFacts
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job

BATCH = 1000
FINGERPRINT = 16


@dataclass
class ScanRun:
    """What one scan has gathered so far."""

    job: Job
    pools: dict[int, StoragePool]
    libvirt: LibvirtFacts | None
    libvirt_error: str
    asked: list[bytes]
    at: datetime = field(default_factory=timezone.now)
    host_facts: dict[str, Any] = field(default_factory=dict)
    pool_facts: list[dict[str, Any]] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)
    images_read: int = 0
    new_pools: bool = False
    _batch: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        #: The scan's time as the database takes it.
        self.stamp: Any = connection.ops.adapt_datetimefield_value(self.at)

    @property
    def leftovers(self) -> int:
        """Journals of jobs in the pools, whether they are at work, keep an undo copy or were interrupted."""
        return sum(facts.get("leftovers", 0) for facts in self.pool_facts)

    def take(self, event: dict[str, Any]) -> None:
        """Takes one event of the scan.

        Raises:
            ValueError: it is none of a scan's.
        """
        match event["event"]:
            case "image":
                self._batch.append(scan_rows.row_of(event, self.job.pk, self.stamp))
                if len(self._batch) >= BATCH:
                    self.write_batch()
            case "host":
                self.host_facts = event
            case "pool":
                self.pool_facts.append(event)
            case "seen":
                self.seen = event
            case other:
                raise ValueError(f"a scan does not know the event {other!r}")

    def write_batch(self) -> None:
        """Writes what has gathered; known paths are updated, new ones inserted unlisted."""
        batch, self._batch = self._batch, []
        self.images_read += len(batch)
        with transaction.atomic():
            scan_rows.upsert(self.job.host_id, self.stamp, batch)

    def finish(self) -> dict[str, Any]:
        """Makes the scan the truth: links, what vanished, guests, totals. Call it in the job's last transaction."""
        self.write_batch()
        host = self.job.host
        changed = Image.every.filter(host=host, changed_scan__gt=host.resolved_scan).exists()
        vanished = self._mark_vanished()
        changed |= self._probe_answers() | self._record_host(host) | self._record_guests(host)
        self._record_pools()
        changed |= writing.set_held(
            host, [(str(dev), str(inode), why) for dev, inode, why in self.seen.get("busy", [])]
        )
        if changed or vanished:
            writing.forget_old_estimates(self.job.pk)
            writing.resolve_host(host)
            writing.add_samples(self.job.pk, self.at)
            host.resolved_scan = self.job.pk
            host.save(update_fields=["resolved_scan"])
            writing.write_totals(self.pools.values())
        writing.sample_pools(self.pools.values(), self.at)
        images = sum(pool["images"] for pool in self.pool_facts)
        return {
            "images": images,
            "read": self.images_read,
            "unchanged": images - self.images_read,
            "vanished": vanished,
        }

    def _mark_vanished(self) -> int:
        vanished = 0
        for facts in self.pool_facts:
            gone = unb64(facts.get("vanished_b64", ""))
            prints = [gone[i : i + FINGERPRINT] for i in range(0, len(gone), FINGERPRINT)]
            for start in range(0, len(prints), 500):
                rows = Image.every.filter(pool=facts["id"], fingerprint__in=prints[start : start + 500])
                # A file that changed has a new fingerprint: this scan has written its row already.
                vanished += rows.exclude(changed_scan=self.job.pk).update(
                    state=Image.State.MISSING, missing_since=self.at, in_use=None, orphan=None, held=""
                )
        return vanished

    def _probe_answers(self) -> bool:
        """Bases outside of every pool that came or went since their overlay was read."""
        changed = 0
        for path, answer in zip(self.asked, self.seen.get("probe", []), strict=False):
            found = inode(*answer) if isinstance(answer, list) else ""
            rows = Image.every.filter(host=self.job.host_id, backing_key=key(path)).exclude(backing_found=found)
            changed += rows.update(backing_found=found)
        return changed > 0

    def _record_host(self, host: Host) -> bool:
        facts, before = self.host_facts, host.owners_unknown
        unknown = ""
        if facts.get("proxmox"):
            unknown = "Proxmox VE runs here, and its guests are not read yet: who uses an image is not known."
        elif self.libvirt is None and facts.get("libvirt") == "present":
            unknown = self.libvirt_error or "libvirt is installed here and has guests, but does not answer."
            unknown += " Start it (systemctl start libvirtd) and scan again."
        capabilities = {name: value for name, value in facts.items() if name not in {"event", "proxmox_storages"}}
        capabilities["libvirt"] = "present" if self.libvirt is not None else facts.get("libvirt")
        hosts.host_answered(host, self.at, capabilities, unknown)
        for storage in facts.get("proxmox_storages", []):
            self.new_pools |= _add_proxmox_storage(host, storage)
        return unknown != before

    def _record_guests(self, host: Host) -> bool:
        if self.libvirt is None:
            if self.host_facts.get("libvirt") == "present":
                return False  # what was known of the guests stays, with the time it was seen
            return guests.record_domains(host, (), {}, self.at)
        answers = dict(zip(self.asked, self.seen.get("probe", []), strict=False))
        inodes = {path: (str(found[0]), str(found[1])) for path, found in answers.items() if isinstance(found, list)}
        return guests.record_domains(host, self.libvirt.domains, inodes, self.at)

    def _record_pools(self) -> None:
        for facts in self.pool_facts:
            pool = self.pools[facts["id"]]
            pool.state, pool.state_detail = facts["state"], facts.get("detail") or ""
            if facts["state"] == "ok":
                pool.last_scanned = self.at
            pool.capacity_bytes, pool.available_bytes = facts.get("capacity_bytes"), facts.get("available_bytes")
            pool.filesystem, pool.network = facts.get("filesystem") or "", bool(facts.get("network"))
            pool.shared_key, pool.fs_key = facts.get("shared_key") or "", facts.get("fs_key") or ""
            pool.kind = StoragePool.Kind.NFS if pool.filesystem in {"nfs", "nfs4"} else StoragePool.Kind.DIR
            others = facts.get("others") or {}
            pool.others_count, pool.others_bytes = others.get("count", 0), others.get("bytes", 0)
            pool.undo_bytes = facts.get("undo_bytes", 0)
            pool.owners_unknown = ""
            if pool.network and not pool.all_hosts_registered:
                pool.owners_unknown = (
                    f"The folder is on a network filesystem ({pool.filesystem}): hosts that are not registered here may "
                    "use its images."
                )
            pool.save()


def _add_proxmox_storage(host: Host, storage: dict[str, Any]) -> bool:
    path = str(storage.get("path") or "")
    if not path.startswith("/") or StoragePool.objects.filter(host=host, path=path).exists():
        return False
    hosts.add_pool(host, path.encode("utf-8", "surrogateescape"), StoragePool.Source.PROXMOX, name=str(storage["name"]))
    return True


def sync_libvirt_pools(host: Host, facts: LibvirtFacts) -> None:
    """Makes the host's pools from libvirt what libvirt told; a pool that an admin registered stays theirs."""
    told = {pool.path.rstrip("/").encode("utf-8", "surrogateescape"): pool for pool in facts.pools}
    for path, pool in told.items():
        hosts.add_pool(host, path, StoragePool.Source.LIBVIRT, name=pool.name)
    gone = StoragePool.objects.filter(host=host, source=StoragePool.Source.LIBVIRT)
    gone.exclude(path_key__in=[key(path) for path in told]).delete()


def known_fingerprints(pool: StoragePool) -> str:
    """The fingerprints of a pool's images as they travel: 16 bytes each."""
    known: Iterable[Any] = (
        Image.every.filter(pool=pool).exclude(state=Image.State.MISSING).values_list("fingerprint", flat=True)
    )
    return b64(b"".join(map(bytes, known)))


def probe_paths(host: Host) -> list[bytes]:
    """Paths of bases that are no images of ours: whether they exist is asked at every scan."""
    rows = Image.every.filter(host=host, backing__isnull=True, backing_unsafe="").exclude(backing_key="")
    return sorted({bytes(path) for path in rows.values_list("backing_path_bytes", flat=True)[:5000]})
