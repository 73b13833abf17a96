"""Which images (or pools) a policy is for, and the code of why it is not for the others: asked here by all."""

import re
from collections import defaultdict
from collections.abc import Collection
from fnmatch import translate

from django.db.models import Exists, OuterRef

from images.models import Image
from images.policies.scope import reach
from images.policies.shape import Rules
from images.scan import shared_storages
from storage_admin.hosts.models import StoragePool


class Names:
    """Shell patterns, divided by white space; those with ``!`` before them leave names out."""

    def __init__(self, patterns: str) -> None:
        given = patterns.split()
        self._wanted = _any_of([one for one in given if not one.startswith("!")])
        self._unwanted = _any_of([one[1:] for one in given if one.startswith("!")])

    def match(self, name: str) -> bool:
        """Whether the policy is for what has that name."""
        if self._unwanted is not None and self._unwanted.match(name):
            return False
        return self._wanted is None or bool(self._wanted.match(name))


def _any_of(patterns: list[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(translate(one) for one in patterns)) if patterns else None


class Membership:
    """Whether a policy is for an image or a pool, as the database knows hosts and storages when this is made.

    Args:
        rules: the policy's. Where they work on pools, what is asked for is the pool itself.
    """

    def __init__(self, rules: Rules) -> None:
        self._names = Names(rules.name_pattern)
        self._hosts, self._pools = frozenset(rules.hosts), frozenset(rules.pools)
        self._formats = frozenset(rules.formats) if rules.on_images else frozenset()
        self._places = _places(rules)
        self._reached = reach(rules) if rules.target_kind == "guest" else None

    def stranger(self, host: int, pool: int, name: str, form: str = "") -> str:
        """The code of why the policy is not for what is there (see ``NOT_MEANT``); empty where it is."""
        if code := self.elsewhere(pool):
            return code
        if self._hosts and host not in self._hosts:  # a job runs on the image's host, whatever its pool says
            return "other_host"
        if not self._names.match(name):
            return "other_name"
        return "other_format" if self._formats and form not in self._formats else ""

    def strange_guest(self, host: int, pools: Collection[int], name: str) -> str:
        """The same of a guest, whose images are in these pools, which another host may list."""
        if self._reached is not None and host not in self._reached:
            return "other_host"
        if self._pools and self._pools.isdisjoint(pools):
            return "other_pool"
        return "" if self._names.match(name) else "other_name"

    def elsewhere(self, pool: int, state: str = Image.State.OK) -> str:
        """The same, as far as it holds for everything in this state in a pool."""
        return "gone" if state in Image.NOT_THERE else self._places.get(pool, "other_pool")

    def pools(self, code: str) -> list[int]:
        """Ids of the pools for which :meth:`elsewhere` says that code."""
        return [pk for pk, said in self._places.items() if said == code]


def _places(rules: Rules) -> dict[int, str]:
    """Why a policy does not look in a pool, by its id; empty where it does.

    A storage that several hosts mount is looked at once, in a listing that the policy means. One that only hosts list
    which it does not name is not looked at: jobs run on the host that lists an image, so the policy would work there
    for a host that it was limited to.
    """
    named, images = _named(rules), Image.objects.exclude(state__in=Image.NOT_THERE).filter(pool=OuterRef("pk"))
    found: dict[int, str] = {}
    storages: dict[str, list[tuple[int, bool, bool]]] = defaultdict(list)
    pools = StoragePool.objects.order_by("pk").annotate(lists=Exists(images))
    for pk, host, key, lists in pools.values_list("pk", "host_id", "shared_key", "lists"):
        is_ours, is_named = not rules.hosts or host in rules.hosts, named is None or pk in named
        found[pk] = "other_host" if not is_ours else "" if is_named else "other_pool"
        if key and is_named and rules.on_images:
            storages[key].append((pk, is_ours, lists))
    for same in storages.values():
        listed = [pk for pk, is_ours, lists in same if is_ours and lists]
        found |= dict.fromkeys(listed[1:], "listed_elsewhere")
        if not listed and any(is_ours for _pk, is_ours, _lists in same):
            found |= {pk: "lister_not_named" for pk, _is_ours, lists in same if lists}
    return found


def _named(rules: Rules) -> frozenset[int] | None:
    """The policy's pools, and those that list their images where another node of the cluster does; ``None`` for all."""
    if not rules.pools or not rules.on_images:
        return frozenset(rules.pools) or None
    pools = StoragePool.objects.filter(pk__in=rules.pools).select_related("host")
    return frozenset(one for pool in pools for one in (pool.pk, shared_storages.listed_in(pool)))
