"""What a volume's backend knows it by, and why it may not be changed by that, as far as the database knows.

The agent looks again, on the spot.
"""

from typing import Any

from django.db.models import Q, QuerySet
from django.utils.translation import gettext as _

from images.models import Image
from images.rewrite import neighbours, refusals
from storage_admin.agent.protocol import b64
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.plan_and_progress import Refusal


def for_change(image: Image) -> list[Refusal]:
    """What stands against its backend changing it. Who has it open, the backend tells for sure, whoever is known."""
    needless = {"format_undeclared", "guests_unknown"}
    if image.pool.kind == StoragePool.Kind.RBD:
        needless.add("shared_pool")  # Ceph knows of all hosts
    found = [*refusals.for_pool(image.pool, {image.pool.kind}), *refusals.of_itself(image)]
    return [
        *refusals.reachable(image.host), *seen_elsewhere(image), *(one for one in found if one.code not in needless),
        *_of_snapshots(image),
    ]  # fmt: skip


def _of_snapshots(image: Image) -> list[Refusal]:
    """Snapshots of LVM that have blocks of their own: of those in one thin pool each volume stands alone."""
    is_thick = image.pool.kind == StoragePool.Kind.LVM
    if not is_thick and image.pool.kind != StoragePool.Kind.LVMTHIN:
        return []
    if is_thick and image.backing_id is not None:
        told = _("{image} is a snapshot with blocks of its own, which cannot be changed without its origin.")
        return [Refusal("unsupported_pool", told.format(image=image.name))]
    above = [one for one in neighbours.of(image).above if one.backing_id == image.pk]
    return has_snapshots(image) if any(is_thick or one.pool_id != image.pool_id for one in above) else []


def has_snapshots(image: Image) -> list[Refusal]:
    """Refuses what its snapshots would not survive."""
    told = _("Snapshots stand on the volume {image}. Delete them first.")
    return [Refusal("has_overlays", told.format(image=image.name))]


def for_look(image: Image) -> list[Refusal]:
    """What stands against a look at what it holds."""
    gone = {"stale_plan", "set_aside", "busy"}
    return [
        *refusals.without_agent(image.host), *refusals.silent(image.pool),
        *(one for one in refusals.of_itself(image) if one.code in gone),
    ]  # fmt: skip


def seen_elsewhere(image: Image) -> list[Refusal]:
    """Whether another host may change a volume's storage: nobody knows what that one does there."""
    return elsewhere(image.pool, image.name) if image.volume else []


def elsewhere(pool: StoragePool, what: str) -> list[Refusal]:
    """Whether another host may change a pool's storage, as the backend says, or has it; ``what`` of it is to be
    changed, or made there.
    """
    if why := (pool.volume_facts or {}).get("not_alone"):
        told = _("The storage of {image} cannot be changed from this host: {why}. Change it where it is managed.")
        return [Refusal("shared_pool", told.format(image=what, why=why))]
    if not _others_with(pool).exists():
        return []
    told = _("Another host has the storage of {image}, too. Change the volume where its storage is managed.")
    return [Refusal("shared_pool", told.format(image=what))]


def _others_with(pool: StoragePool) -> QuerySet[StoragePool]:
    """Other hosts' pools that lie in the same volume group or ZFS pool, or are the same Ceph pool."""
    key = pool.shared_key
    same = Q(shared_key=key)
    if pool.kind in {StoragePool.Kind.LVM, StoragePool.Kind.LVMTHIN}:
        group = key.partition("/")[0]  # without the name of the thin pool
        same = Q(shared_key=group) | Q(shared_key__startswith=f"{group}/")
    if pool.kind == StoragePool.Kind.ZFS:
        same = Q(shared_key__startswith=f"{' '.join(key.split(' ')[:2])} ")  # without the name of the dataset
    others = StoragePool.objects.filter(same).exclude(host=pool.host_id)
    if pool.kind == StoragePool.Kind.RBD and pool.host.cluster:
        others = others.exclude(host__cluster=pool.host.cluster)  # its guests are known on each of its nodes
    return others


def place(image: Image) -> dict[str, Any]:
    """What a volume's own backend knows it by."""
    if image.pool.kind == StoragePool.Kind.RBD:
        pool = image.pool.path.partition(" ")[2]
        name = bytes(image.path_bytes).removeprefix(f"rbd:{pool}/".encode())
        return {"pool": pool, "name_b64": b64(name), "size": image.virtual_size, "id": image.volume.get("id", "")}
    if image.pool.kind == StoragePool.Kind.ZFS:
        return {"dataset": dataset(image.path), "origin": dataset(image.backing_path)}
    return image.volume_place


def dataset(path: str) -> str:
    """The volume of ZFS that a device is, as ZFS calls it; of what is no such device, nothing."""
    prefix = "/dev/zvol/"
    return path.removeprefix(prefix).replace("+", " ") if path.startswith(prefix) else ""
