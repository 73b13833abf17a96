"""A node of Proxmox VE, read by its API: storages, guests, volumes, and what could not be seen."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.live_facts import StoppedGuest
from storage_admin.hosts.proxmox import backups, guests, permissions, storages, volumes
from storage_admin.hosts.proxmox.backups import Backups, Gap
from storage_admin.hosts.proxmox.client import Api, Client
from storage_admin.hosts.proxmox.config import PATHS, GuestRef, read_config, read_snapshots
from storage_admin.hosts.proxmox.drives import CONTAINER, VM
from storage_admin.hosts.proxmox.errors import ApiError, DeniedError, NoAnswerError, NotThereError
from storage_admin.hosts.proxmox.guests import NOW, PENDING, SNAPSHOT, ProxmoxGuest, Section
from storage_admin.hosts.proxmox.permissions import MissingRight, Permissions
from storage_admin.hosts.proxmox.storages import StorageFacts, integer

HIDDEN_LINES = (
    "The API omits lines of guests' configurations that it does not understand. Connect the node by SSH as well, so "
    "that its files can be read."
)


@dataclass(frozen=True)
class NodeFacts:
    """A node of a cluster.

    Args:
        online: ``None`` where the token may not know.
        local: the one that answers.
        fingerprint: SHA-256 of the certificate that its API shows.
        address: of the cluster's own network; empty where the token may not know.
    """

    name: str
    online: bool | None = None
    local: bool = False
    fingerprint: str = ""
    address: str = ""


@dataclass(frozen=True)
class Cluster:
    """The nodes; ``name`` is empty for a node on its own."""

    name: str
    nodes: tuple[NodeFacts, ...]


@dataclass(frozen=True)
class VolumeFacts:
    """A volume as its storage lists it.

    Args:
        path: empty where it has none of its own on the node.
        format: ``invalid`` where the file is not what its name says.
        size_bytes: virtual size; ``None`` where the storage does not tell.
        parent: as the image's header names it: a relative or absolute path, ``json:…``; never a volume id.
    """

    volume: str
    path: str
    content: str
    format: str
    size_bytes: int | None
    used_bytes: int | None
    vmid: int | None
    parent: str


@dataclass(frozen=True)
class Listing:
    """The volumes of a storage; ``why_incomplete`` is empty where they are all of them."""

    storage: str
    volumes: tuple[VolumeFacts, ...]
    why_incomplete: str = ""


@dataclass(frozen=True)
class ProxmoxFacts:
    """What is known of one node.

    Args:
        cluster: empty for a node on its own.
        storages: of the whole cluster; those that the node does not have are not enabled.
        guests: of this node, or of all nodes where files were read.
        listings: of the storages that were asked for; of those that are no folders always.
        missing: rights that the token has not.
        unknown: sentences, each a reason why it is not known who uses which image.
        hidden: numbers of guests that were known, and that the token may not see any more.
        configured: the storages that the node's own file names, where that was read.
        api_away: why nothing is here of what only the API tells, in sentences; empty where it told, or was not to be
            asked.
        backups: ``None`` where nobody was asked for them.
    """

    node: str
    cluster: str = ""
    version: str = ""
    nodes: tuple[NodeFacts, ...] = ()
    storages: tuple[StorageFacts, ...] = ()
    guests: tuple[ProxmoxGuest, ...] = ()
    listings: tuple[Listing, ...] = ()
    missing: tuple[MissingRight, ...] = ()
    unknown: tuple[str, ...] = ()
    hidden: frozenset[str] = frozenset()
    configured: tuple[StorageFacts, ...] = ()
    api_away: str = ""
    backups: Backups | None = None


def read(client: Client, node: str = "", *, configs: bool = True, folders: bool = False) -> ProxmoxFacts:
    """All that the API tells of a node.

    Args:
        node: its name; empty for the one that answers.
        configs: read each guest's configuration, three calls for each. Without, the guests have their states alone, for
            where their files are read (:func:`~storage_admin.hosts.proxmox.merging.merged`).
        folders: list the volumes of storages that are folders as well, which an agent does better.

    Raises:
        HostError: the API does not answer, or there is no such node.
    """
    version = client.fields("version")
    may = permissions.read(client)
    known = cluster(client)
    name = _chosen(client, known, node)
    unknown = [right.sentence for feature in permissions.INVENTORY for right in may.missing(feature)]
    found = read_storages(client, name)
    by_name = {storage.name: storage for storage in found}
    return ProxmoxFacts(
        node=name,
        cluster=known.name,
        version=str(version.get("version", "")),
        nodes=known.nodes,
        storages=found,
        guests=read_guests(client, name, by_name, unknown) if configs else read_states(client, name),
        listings=tuple(
            list_volumes(client, name, storage, may)
            for storage in found
            if storage.active and storage.holds_images and (folders or not storage.is_folder)
        ),
        missing=may.all_missing(),
        unknown=(*unknown, HIDDEN_LINES),
        backups=backups.read(client, name, found, may),
    )


def with_hidden(client: Client, facts: ProxmoxFacts, storages: Iterable[str], vmids: Iterable[str]) -> ProxmoxFacts:
    """The facts, with what is missing in them because the token may not see it any more.

    Args:
        storages, vmids: names and numbers that were known before, and of which the facts tell nothing.

    Raises:
        HostError: as :meth:`Api.get`.
    """
    may_not, numbers = permissions.denied(client, "storages", "/storage", sorted(storages)), sorted(vmids)
    guests = [right for name in ("guests", "images") for right in permissions.denied(client, name, "/vms", numbers)]
    found = (*may_not, *guests)
    known = facts.backups
    if known is not None and found:
        # What is hidden whole, its backups are hidden with.
        gaps = (*known.gaps, *(Gap(right.sentence, backups.guest_of(right.path)) for right in found))
        known = replace(known, gaps=tuple(dict.fromkeys(gaps)))
    return replace(
        facts,
        backups=known,
        missing=tuple(dict.fromkeys((*facts.missing, *found))),
        unknown=tuple(dict.fromkeys((*facts.unknown, *(one.sentence for one in found if one.feature != "images")))),
        hidden=frozenset(right.path.rpartition("/")[2] for right in guests),
    )


def cluster(client: Client) -> Cluster:
    """The nodes, as far as the token may know; raises HostError."""
    rows = {str(row["node"]): row for row in client.rows("nodes") if row.get("node")}
    try:
        told = client.rows("cluster", "status")
    except DeniedError:
        told = []
    ips = {str(row.get("name")): str(row.get("ip") or "") for row in told if row.get("type") == "node"}
    local = {str(row.get("name")) for row in told if row.get("type") == "node" and str(row.get("local")) == "1"}
    if not told and len(rows) == 1:
        local = set(rows)
    name = next((str(row.get("name") or "") for row in told if row.get("type") == "cluster"), "")
    online = {"online": True, "offline": False}
    nodes = (
        NodeFacts(
            node, online.get(str(row.get("status"))), node in local, str(row.get("ssl_fingerprint") or ""),
            ips.get(node, ""),
        )
        for node, row in sorted(rows.items())
    )  # fmt: skip
    return Cluster(name, tuple(nodes))


def _chosen(client: Client, known: Cluster, node: str) -> str:
    names = [one.name for one in known.nodes]
    if node:
        if node not in names:
            raise ApiError(
                _("{who} does not know a node {node!r}. Its nodes are {names}.").format(
                    who=client.who, node=node, names=", ".join(names) or "hidden"
                )
            )
        return node
    local = [one.name for one in known.nodes if one.local]
    if len(local) != 1:
        raise ApiError(
            _(
                "{who} does not report which of its nodes it is. Choose one of {names}, or grant the token "
                "Sys.Audit on /."
            ).format(who=client.who, names=", ".join(names))
        )
    return local[0]


def read_storages(client: Client, node: str) -> tuple[StorageFacts, ...]:
    """The storages, with their space on that node; raises HostError."""
    status = {str(row.get("storage")): row for row in client.rows("nodes", node, "storage")}
    defined = {one.name: one for one in map(storages.of_definition, client.rows("storage"))}
    for name in status.keys() - defined.keys():
        defined[name] = StorageFacts(name, "")
    return tuple(
        storages.with_status(one, status[name]) if name in status else _elsewhere(one, node)
        for name, one in sorted(defined.items())
    )


def read_room(api: Api, node: str) -> dict[str, StorageFacts]:
    """The storages of a node with their space alone, by their names; raises HostError."""
    rows = api.rows("nodes", node, "storage")
    return {
        str(row.get("storage")): storages.with_status(StorageFacts(str(row.get("storage")), ""), row) for row in rows
    }


def _elsewhere(storage: StorageFacts, node: str) -> StorageFacts:
    return storages.with_status(storage, {"enabled": int(storage.enabled and storage.on(node)), "active": 0})


def list_volumes(client: Client, node: str, storage: StorageFacts, may: Permissions) -> Listing:
    """The volumes of one storage. A broken image makes Proxmox VE refuse its whole storage: then the agent has to look.

    Raises:
        HostError: the API server itself is not there any more.
    """
    try:
        rows = client.rows("nodes", node, "storage", storage.name, "content")
    except NoAnswerError as error:
        if not error.status:
            raise
        return Listing(storage.name, (), _("{detail} Use the agent to read the storage.").format(detail=error.detail))
    except ApiError as error:
        if error.code == "host_unreachable":
            raise
        return Listing(storage.name, (), error.detail)
    except RefusedError as error:
        return Listing(storage.name, (), error.detail)
    found = tuple(
        _volume(row, storage) for row in rows if row.get("volid") and row.get("content") in ("images", "rootdir")
    )
    lacking = may.missing("images", [storage.name])
    return Listing(storage.name, found, " ".join(right.sentence for right in lacking))


def _volume(row: Mapping[str, Any], storage: StorageFacts) -> VolumeFacts:
    name = str(row["volid"])
    return VolumeFacts(
        volume=name,
        path=volumes.path(name, {storage.name: storage}),
        content=str(row.get("content") or ""),
        format=str(row.get("format") or ""),
        size_bytes=integer(row.get("size")),
        used_bytes=integer(row.get("used")),
        vmid=integer(row.get("vmid")),
        parent=str(row.get("parent") or ""),
    )


def read_guests(
    client: Client, node: str, by_name: Mapping[str, StorageFacts], unknown: list[str]
) -> tuple[ProxmoxGuest, ...]:
    """The guests of a node; ``unknown`` grows by those that could not be read. Raises HostError."""
    found = []
    for kind in (VM, CONTAINER):
        for row in _listed(client, node, kind):
            try:
                found.append(read_guest(client, node, kind, row, by_name))
            except NotThereError as error:
                if any(again.get("vmid") == row.get("vmid") for again in client.rows("nodes", node, PATHS[kind])):
                    unknown.append(error.detail)
            except RefusedError as error:
                unknown.append(f"Guest {row.get('vmid')} could not be read. {error.detail}")
    return tuple(found)


def read_states(client: Client, node: str) -> tuple[ProxmoxGuest, ...]:
    """The guests of a node by name, state and lock alone; raises HostError."""
    found = []
    for kind in (VM, CONTAINER):
        for row in _listed(client, node, kind):
            vmid, name = integer(row.get("vmid")), str(row.get("name") or "")
            told = Section(NOW, {"name": name, "hostname": name, "lock": str(row.get("lock") or "")})
            if vmid is not None:
                found.append(guests.build(kind, node, vmid, [told], {}, state=_state(row)))
    return tuple(found)


def read_stopped(api: Api, node: str) -> list[StoppedGuest]:
    """The VMs of a node that QEMU has paused because of an I/O error; which disk has it, nobody tells."""
    rows = api.rows("nodes", node, PATHS[VM], params={"full": 1})
    stopped = [row for row in rows if row.get("qmpstatus") == "io-error"]
    return [StoppedGuest(VM, str(row.get("vmid")), str(row.get("name") or row.get("vmid"))) for row in stopped]


def _state(row: Mapping[str, Any]) -> str:
    return guests.state(str(row.get("status")), str(row.get("qmpstatus") or ""))


def _listed(client: Client, node: str, kind: str) -> list[dict[str, Any]]:
    if kind == CONTAINER:
        return client.rows("nodes", node, PATHS[kind])
    try:
        # With what each qemu says of itself: a guest that is paused runs all the same.
        return client.rows("nodes", node, PATHS[kind], params={"full": 1})
    except HostError:
        return client.rows("nodes", node, PATHS[kind])


def read_guest(
    client: Client, node: str, kind: str, row: Mapping[str, Any], by_name: Mapping[str, StorageFacts]
) -> ProxmoxGuest:
    """One guest.

    Args:
        row: of the list of guests.

    Raises:
        NotThereError: it is gone.
        HostError: as :meth:`Api.get`.
    """
    vmid = integer(row.get("vmid"))
    if vmid is None:
        raise ApiError(_("{who} listed a guest without an ID.").format(who=client.who))
    config = read_config(client, GuestRef(node, vmid, kind))
    waiting = {key: value for key, value in config.next.items() if config.now.get(key) != value}
    waiting["delete"] = ",".join(key for key in config.now if key not in config.next)
    sections = [Section(NOW, config.now), Section(PENDING, waiting)]
    sections.extend(Section(SNAPSHOT, values, name) for name, values in read_snapshots(client, config))
    return guests.build(
        kind,
        node,
        vmid,
        sections,
        by_name,
        state=_state(row),
        digest=config.digest,
        unread=config.raw_lines,
    )
