"""Why a volume may not be changed by its backend, as far as the database knows. The agent looks again, on the spot."""

from django.db.models import Q, QuerySet
from django.utils.translation import gettext as _

from images.models import Image
from images.rewrite import refusals
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
    ]  # fmt: skip


def for_look(image: Image) -> list[Refusal]:
    """What stands against a look at what it holds."""
    gone = {"stale_plan", "set_aside", "busy"}
    return [
        *refusals.without_agent(image.host), *refusals.silent(image.pool),
        *(one for one in refusals.of_itself(image) if one.code in gone),
    ]  # fmt: skip


def seen_elsewhere(image: Image) -> list[Refusal]:
    """Whether another host has a volume's storage: nobody knows what that one does there."""
    if not image.volume or not _others_with(image).exists():
        return []
    told = _("Another host has the storage of {image}, too. Change the volume where its storage is managed.")
    return [Refusal("shared_pool", told.format(image=image.name))]


def _others_with(image: Image) -> QuerySet[StoragePool]:
    """Other hosts' pools that are the same volume group or Ceph pool, or lie in the same ZFS pool."""
    key = image.pool.shared_key
    same = Q(shared_key=key)
    if image.pool.kind == StoragePool.Kind.ZFS:
        same = Q(shared_key__startswith=f"{' '.join(key.split(' ')[:2])} ")  # without the name of the dataset
    others = StoragePool.objects.filter(same).exclude(host=image.host_id)
    if image.pool.kind == StoragePool.Kind.RBD and image.host.cluster:
        others = others.exclude(host__cluster=image.host.cluster)  # its guests are known on each of its nodes
    return others
