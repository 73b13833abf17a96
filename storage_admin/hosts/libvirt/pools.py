"""The rows of a host's pools that libvirt named."""

from collections.abc import Iterable

from django.db import transaction

from storage_admin.hosts import services
from storage_admin.hosts.libvirt.reader import PoolFacts
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import path_key, shown

#: What we call the types whose volumes are no files in a folder. All others are :attr:`StoragePool.Kind.OTHER`.
KINDS = {"logical": StoragePool.Kind.LVM, "zfs": StoragePool.Kind.ZFS, "rbd": StoragePool.Kind.RBD}


def sync(host: Host, told: Iterable[PoolFacts]) -> dict[str, StoragePool]:
    """Makes the host's pools from libvirt what libvirt told; a pool that an admin registered stays theirs.

    Returns:
        The rows by the pools' names in libvirt.
    """
    rows = {pool.name: _row(host, pool) for pool in told}
    gone = StoragePool.objects.filter(host=host, source=StoragePool.Source.LIBVIRT)
    for left in gone.exclude(pk__in=[row.pk for row in rows.values()]):
        with transaction.atomic():
            Host.objects.select_for_update().get(pk=host.pk)  # no job is submitted meanwhile
            if not services.in_the_way_of_removal(left):
                left.delete()
    return rows


def _row(host: Host, pool: PoolFacts) -> StoragePool:
    path, name = (text.encode("utf-8", "surrogateescape") for text in (pool.path, pool.name))
    if pool.is_folder:
        return services.add_pool(
            host, path.rstrip(b"/") or b"/", StoragePool.Source.LIBVIRT, name=shown(pool.name, 200)
        )
    # Several of these may share a path (/dev), or have none: their name tells them apart, and no path begins like it.
    place = f"rbd {pool.source_name}" if pool.type == "rbd" else pool.path
    row, _ = StoragePool.objects.update_or_create(
        host=host,
        path_key=path_key(b"libvirt pool " + name),
        defaults={
            "name": shown(pool.name, 200), "path": shown(place), "path_bytes": path,
            "source": StoragePool.Source.LIBVIRT, "kind": KINDS.get(pool.type, StoragePool.Kind.OTHER),
        },
    )  # fmt: skip
    return row
