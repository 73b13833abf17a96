"""Why a volume may not be changed by its backend, as far as the database knows. The agent looks again, on the spot."""

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
    """Whether another host sees a logical volume's group: nobody knows what that one does there."""
    seen = StoragePool.objects.filter(shared_key=image.pool.shared_key).exclude(host=image.host_id)
    if not image.volume or not seen.exists():
        return []
    told = _("Another host sees the volume group of {image}, too. Change the group where it is managed.")
    return [Refusal("shared_pool", told.format(image=image.name))]
