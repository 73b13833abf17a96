"""Reads: hosts and pools, as far as they exist for the actor."""

from typing import Any, TypeVar

from django.db.models import Model, QuerySet
from django.utils.translation import gettext

from storage_admin.accounts.models import Actor
from storage_admin.errors import NotFoundError
from storage_admin.hosts.models import Host, StoragePool

M = TypeVar("M", bound=Model)


def hosts_for(actor: Actor) -> QuerySet[Host]:
    """The hosts that exist for ``actor``: those in a token's scope, else all."""
    return Host.objects.all() if actor.hosts is None else Host.objects.filter(slug__in=actor.hosts)


def host_names() -> dict[str, str]:
    """The names of all hosts by their slugs."""
    return dict(Host.objects.order_by("name").values_list("slug", "name"))


def pools_for(actor: Actor) -> QuerySet[StoragePool]:
    """The pools on those hosts, each with its host."""
    return in_scope(StoragePool.objects.select_related("host").defer("path_bytes"), actor)


def find_pool(pool_id: int) -> StoragePool:
    """The pool with its host, whoever asks.

    Raises:
        NotFoundError: there is none.
    """
    pool = StoragePool.objects.select_related("host").filter(pk=pool_id).first()
    if pool is None:
        raise NotFoundError(gettext("Pool {pool} does not exist.").format(pool=pool_id))
    return pool


def pool_names(actor: Actor) -> list[tuple[int, str]]:
    """Ids and names of these pools, each after its host's."""
    rows = pools_for(actor).order_by("host__name", "name", "id").values_list("pk", "host__name", "name")
    return [(pk, f"{host} / {name}") for pk, host, name in rows]


def in_scope(rows: QuerySet[M], actor: Actor, host: str = "host") -> QuerySet[M]:
    """Only rows whose host is in the actor's scope.

    Args:
        host: the lookup from a row to its host.
    """
    if actor.hosts is None:
        return rows
    lookup: dict[str, Any] = {f"{host}__in": Host.objects.filter(slug__in=actor.hosts).values("pk")}
    return rows.filter(**lookup)
