"""Whether a host answers, and its pools: what their rows and an alert say of it, as soon as it is known.

A scan finds them, and so does every job that works on one (:class:`storage_admin.jobs.runner.Silence`).
"""

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Q, QuerySet

from storage_admin.events import services as events
from storage_admin.events.services import Trouble
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import path_key


def fall_silent(host: Host, paths: Collection[bytes], since: datetime) -> list[str]:
    """The pools at these paths do not answer, nor do others on the same network filesystem.

    Returns:
        The names of those at the paths.
    """
    named, pools = _at(host, paths)
    detail = f"It has not answered since {since:%H:%M} UTC. Its images are shown as of the last successful scan."
    with transaction.atomic():
        pools.exclude(state=StoragePool.SILENT).update(state=StoragePool.SILENT, state_detail=detail)
        tell(host)
    return [pool.name for pool in named]


def answer_again(host: Host, paths: Collection[bytes]) -> None:
    """The pools at these paths answer again; the next scan tells what is in them now."""
    __, pools = _at(host, paths)
    with transaction.atomic():
        pools.filter(state=StoragePool.SILENT).update(state="ok", state_detail="")
        tell(host, answered=True)


def _at(host: Host, paths: Collection[bytes]) -> tuple[QuerySet[StoragePool], QuerySet[StoragePool]]:
    """The pools at these paths; and these together with others on the same network filesystems."""
    named = StoragePool.objects.filter(host=host, path_key__in=[path_key(path) for path in paths])
    keys = [key for key in named.filter(network=True).values_list("fs_key", flat=True) if key]
    return named, StoragePool.objects.filter(Q(pk__in=named.values("pk")) | Q(host=host, fs_key__in=keys))


def tell(host: Host, *, answered: bool = False) -> None:
    """Makes the host's state and the alerts what the rows of its pools say.

    Args:
        answered: a pool answers again since the host's state was written.
    """
    silent = list(StoragePool.objects.filter(host=host, state=StoragePool.SILENT).order_by("pk"))
    host.refresh_from_db(fields=["status", "status_detail", "capabilities"])
    if (silent or answered) and host.status != Host.Status.UNREACHABLE:
        host.status, host.status_detail = state_of(host, silent)
        host.save(update_fields=["status", "status_detail"])
    for pool in silent:
        events.raise_alert(trouble(pool))
    for pool in StoragePool.objects.filter(host=host).exclude(state=StoragePool.SILENT).only("pk"):
        events.close_alert(f"{events.POOL_SILENT}:{pool.pk}")


def host_answered(
    host: Host, at: datetime, capabilities: dict[str, Any], owners_unknown: str, state: tuple[str, str] | None = None
) -> None:
    """A scan reached the host: what it found out about it. Which pools do not answer, :func:`tell` adds.

    Args:
        state: of the host, and why it is none better; ``None`` for what :func:`state_of` says.
    """
    host.last_seen, host.capabilities, host.owners_unknown = at, capabilities, owners_unknown
    host.status, host.status_detail = state or state_of(host, [])
    host.save(update_fields=["status", "status_detail", "last_seen", "capabilities", "owners_unknown"])


def answers(host: Host) -> None:
    """A host that did not answer last does so again, if only to a question: its state is what is known of it."""
    if host.status == Host.Status.UNREACHABLE:
        silent = StoragePool.objects.filter(host=host, state=StoragePool.SILENT).order_by("pk")
        host.status, host.status_detail = state_of(host, silent)
        host.save(update_fields=["status", "status_detail"])


def state_of(host: Host, silent: Iterable[StoragePool]) -> tuple[str, str]:
    """The state of a host that answers, and why it is none better."""
    # Where only plain commands run, no image is worked on.
    wanted = () if host.capabilities.get("plain") else ("qemu-img", "setpriv")
    tools = host.capabilities.get("tools", {})
    missing = [tool for tool in wanted if not tools.get(tool)]
    said = [f"Not installed: {', '.join(missing)}. Install qemu-utils and util-linux."] if missing else []
    said += [f"The storage pool {pool.name} does not answer." for pool in silent]
    if away := host.capabilities.get("api_away"):
        said.append(
            f"{away} Images and guests are read over SSH. Data that only the API provides is shown "
            "as of the last successful scan."
        )
    return (Host.Status.DEGRADED if said else Host.Status.OK), " ".join(said)


def trouble(pool: StoragePool) -> Trouble:
    """The alert of a pool that does not answer."""
    return Trouble(
        f"{events.POOL_SILENT}:{pool.pk}", "danger", f"Storage pool {pool} does not answer",
        f"{pool.state_detail} Guests with disks on it are blocked. Check its server and the network. Jobs on its "
        "images wait until it answers, and can be cancelled.",
        pool.host.slug, "pool", pool.pk, str(pool),
    )  # fmt: skip
