"""Where a policy looks: a storage that several hosts mount is looked at once, in a listing that the policy means."""

from collections import defaultdict
from dataclasses import dataclass

from images.models import Image
from images.policies.shape import Rules
from images.scan import shared_storages
from storage_admin.hosts.models import StoragePool


@dataclass(frozen=True)
class Places:
    """Ids of pools.

    Args:
        named: those whose images are meant; ``None`` for all.
        again: on the policy's hosts and among its pools, but the same storage as another one of these, which is looked
            at.
        unnamed: the only ones that list a storage which a host of the policy mounts, on hosts that it does not name.
            Jobs run on the host that lists an image: the policy would work there for a host that it was limited to.
    """

    named: frozenset[int] | None
    again: frozenset[int]
    unnamed: frozenset[int]


def places(rules: Rules) -> Places:
    """The pools that a policy with these rules looks at, as the database knows them."""
    named = _named(rules)
    listing = set(
        Image.objects.exclude(state__in=Image.NOT_THERE).order_by().values_list("pool_id", flat=True).distinct()
    )
    storages: dict[str, list[tuple[int, int]]] = defaultdict(list)
    pools = StoragePool.objects.exclude(shared_key="").order_by("pk").values_list("pk", "host_id", "shared_key")
    for pk, host, key in pools:
        if named is None or pk in named:
            storages[key].append((pk, host))
    again: set[int] = set()
    unnamed: set[int] = set()
    for same in storages.values():
        mine = [pk for pk, host in same if not rules.hosts or host in rules.hosts]
        listed = [pk for pk in mine if pk in listing]
        again.update(listed[1:])
        if mine and not listed:
            unnamed.update(pk for pk, _host in same if pk in listing)
    return Places(named, frozenset(again), frozenset(unnamed))


def _named(rules: Rules) -> frozenset[int] | None:
    """The policy's pools, and those that list their images where another node of the cluster does."""
    if not rules.pools:
        return None
    pools = StoragePool.objects.filter(pk__in=rules.pools).select_related("host")
    return frozenset(one for pool in pools for one in (pool.pk, shared_storages.listed_in(pool)))
