"""Which policies exist for whom: those that reach only hosts which the actor sees."""

from django.db.models import QuerySet

from images.models import Policy
from storage_admin.accounts.roles import Actor, ForbiddenError, Role
from storage_admin.hosts.errors import NotFoundError
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.selectors import hosts_for, pools_for


def reach(policy: Policy) -> set[int] | None:
    """Ids of the hosts that a policy works on; ``None`` for all, also those that are added later."""
    if policy.hosts:
        return set(policy.hosts)
    if policy.pools:
        return set(StoragePool.objects.filter(pk__in=policy.pools).values_list("host_id", flat=True))
    return None


def hosts_of(actor: Actor) -> frozenset[int] | None:
    """Ids of the hosts that exist for an actor; ``None`` for all."""
    return None if actor.hosts is None else frozenset(hosts_for(actor).values_list("pk", flat=True))


def policies_for(actor: Actor) -> QuerySet[Policy]:
    """The policies that exist for an actor; for one that is limited to some hosts, those that reach no others."""
    if actor.hosts is None:
        return Policy.objects.all()
    hosts = set(hosts_for(actor).values_list("pk", flat=True))
    host_of = dict(pools_for(actor).values_list("pk", "host_id"))
    seen = []
    for pk, named, pools in Policy.objects.values_list("pk", "hosts", "pools"):
        reached = set(named) if named else {host_of.get(pool) for pool in pools}
        if reached and reached <= hosts:
            seen.append(pk)
    return Policy.objects.filter(pk__in=seen)


def policy_for(actor: Actor, policy_id: int) -> Policy:
    """A policy that exists for the actor.

    Raises:
        NotFoundError: there is none of that id, or not for them.
    """
    policy = policies_for(actor).filter(pk=policy_id).first()
    if policy is None:
        raise NotFoundError(f"There is no policy {policy_id}.")
    return policy


def require_reach(actor: Actor, policy: Policy, role: Role) -> None:
    """Lets the call go on where the actor has the role on every host that the policy works on.

    Raises:
        ForbiddenError: they have not.
    """
    actor.require(role)
    reached = reach(policy)
    if reached is None:
        actor.require_everywhere(role)
        return
    for slug in Host.objects.filter(pk__in=reached).values_list("slug", flat=True):
        if not actor.sees(slug):
            raise ForbiddenError(f"The {actor.name} is limited to some hosts; this policy works on others too.")
