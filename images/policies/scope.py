"""Which policies and runs exist for whom: those that reach, or reached, only hosts which the actor sees."""

import json
from collections.abc import Iterable
from dataclasses import replace

from django.db.models import QuerySet, TextField, Value
from django.db.models.fields.json import KT
from django.db.models.functions import Concat
from django.utils.translation import gettext as _

from images.models import Policy, PolicyPick, PolicyRun
from images.policies.shape import TARGETS, Rules
from images.scan import shared_storages
from storage_admin.accounts.models import Actor, ForbiddenError, Role
from storage_admin.errors import NotFoundError
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.selectors import hosts_for, pools_for


def reach(policy: Policy | Rules) -> set[int] | None:
    """Ids of the hosts that a policy works on; ``None`` for all, also those that are added later.

    What it names and is gone is none of them: nothing is left of a policy for removed hosts alone.
    """
    if policy.hosts:
        return set(Host.objects.filter(pk__in=policy.hosts).values_list("pk", flat=True))
    if policy.pools:
        return set().union(*_hosts_of_pools(policy.pools, policy.kind).values())
    return None


def _hosts_of_pools(pools: Iterable[int], kind: str) -> dict[int, set[int]]:
    """The hosts on which jobs of a kind may run that work on pools, or on their images or guests, by the pools' ids.

    Images of a storage that the nodes of a cluster share are listed, and worked on, by any of these; guests of all of
    them have images there.
    """
    found = {}
    for pool in StoragePool.objects.filter(pk__in=pools).select_related("host"):
        others = shared_storages.siblings(pool) if TARGETS.get(kind) != "pool" else []
        found[pool.pk] = {pool.host_id, *(one.host_id for one in others)}
    return found


def hosts_of(actor: Actor) -> frozenset[int] | None:
    """Ids of the hosts that exist for an actor; ``None`` for all."""
    return None if actor.hosts is None else frozenset(hosts_for(actor).values_list("pk", flat=True))


def policies_for(actor: Actor) -> QuerySet[Policy]:
    """The policies that exist for an actor; for one that is limited to some hosts, those that reach no others.

    One of which nothing is left, as all its hosts were removed, exists only for who sees all hosts: nobody can tell
    any more whose hosts these were.
    """
    if actor.hosts is None:
        return Policy.objects.all()
    mine = set(hosts_for(actor).values_list("pk", flat=True))
    there = set(Host.objects.values_list("pk", flat=True))
    own = set(pools_for(actor).values_list("pk", flat=True))
    others = set(StoragePool.objects.exclude(pk__in=own).values_list("pk", flat=True))
    seen = []
    for pk, hosts, pools, kind in Policy.objects.values_list("pk", "hosts", "pools", "kind"):
        reached = there & set(hosts)
        if not hosts and others.isdisjoint(pools):
            reached = set().union(*_hosts_of_pools(own & set(pools), kind).values())
        if reached and reached <= mine:
            seen.append(pk)
    return Policy.objects.filter(pk__in=seen)


def runs_for(actor: Actor, policies: Iterable[Policy]) -> QuerySet[PolicyRun]:
    """The runs of policies that exist for an actor; for one that is limited, those that reached no other hosts.

    What counts are the rules that were kept with a run, not what its policy has become. A host or pool of them that is
    gone was another's, and so was the host of a pick.
    """
    runs, mine = PolicyRun.objects.filter(policy__in=[policy.pk for policy in policies]), hosts_of(actor)
    if mine is None:
        return runs
    own = set(pools_for(actor).values_list("pk", flat=True))
    parts = KT("rules__kind"), Value(";"), KT("rules__hosts"), Value(";"), KT("rules__pools")
    runs, seen = runs.annotate(scope=Concat(*parts, output_field=TextField())), []
    for scope in runs.order_by().values_list("scope", flat=True).distinct():
        kind, *named = scope.split(";")
        hosts, pools = (set(json.loads(ids)) for ids in named)
        if not hosts and pools <= own:
            hosts = set().union(*_hosts_of_pools(pools, kind).values())
        if hosts and hosts <= mine:
            seen.append(scope)
    return runs.filter(scope__in=seen).exclude(pk__in=PolicyPick.objects.filter(host=None).values("run"))


def rules_now(policy: Policy) -> Rules:
    """The rules for a run that begins: without the hosts and pools that are gone, as far as others are left.

    Where none is left they stay: an empty list would mean all.
    """
    rules = Rules.of(policy)
    hosts = set(Host.objects.filter(pk__in=rules.hosts).values_list("pk", flat=True))
    pools = set(StoragePool.objects.filter(pk__in=rules.pools).values_list("pk", flat=True))
    return replace(
        rules,
        hosts=tuple(pk for pk in rules.hosts if pk in hosts) or rules.hosts,
        pools=tuple(pk for pk in rules.pools if pk in pools) or rules.pools,
    )


def policy_for(actor: Actor, policy_id: int) -> Policy:
    """A policy that exists for the actor.

    Raises:
        NotFoundError: there is none of that id, or not for them.
    """
    policy = policies_for(actor).filter(pk=policy_id).first()
    if policy is None:
        raise NotFoundError(_("Policy {policy} does not exist.").format(policy=policy_id))
    return policy


def require_reach(actor: Actor, policy: Policy, role: Role) -> None:
    """Lets the call go on where the actor has the role on every host that the policy works on.

    Raises:
        ForbiddenError: they have not.
    """
    actor.require(role)
    reached = reach(policy)
    if not reached:
        actor.require_everywhere(role)
        return
    for slug in Host.objects.filter(pk__in=reached).values_list("slug", flat=True):
        if not actor.sees(slug):
            raise ForbiddenError(
                _("{actor} is limited to some hosts, and this policy also works on others.").format(actor=actor.name)
            )
