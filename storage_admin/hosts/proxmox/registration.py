"""Nodes of Proxmox VE: registered with an API token, and by ssh as well where their images are to be worked on."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from django.utils.translation import gettext as _

from storage_admin.accounts.models import Actor, Role
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.errors import Faults, InvalidError, UnconfirmedError, of_field, require_right
from storage_admin.hosts import addresses, registration, secrets, transport
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import path_key
from storage_admin.hosts.proxmox import by_api_alone, errors, reader, tls
from storage_admin.hosts.proxmox.client import ANSWER_SECONDS, Client
from storage_admin.hosts.proxmox.endpoint import DEFAULT_PORT, Endpoint, Token
from storage_admin.hosts.proxmox.reader import ProxmoxFacts
from storage_admin.hosts.proxmox.storages import StorageFacts

#: Names of storages and numbers of guests.
Known = Callable[[ProxmoxFacts], tuple[Iterable[str], Iterable[str]]]


@dataclass(frozen=True)
class WantedNode:
    """What an admin typed about a node.

    Args:
        node: its name in the cluster; empty for the one that answers.
        port: of its API; ``ssh_port`` is of its SSH server.
        tls_fingerprint: SHA-256 of its certificate; empty where a known authority has signed that.
        host_key, private_key, user: to reach it by ssh as well; without a host key, by the API alone.
    """

    name: str
    address: str
    port: object = None
    token_id: str = ""
    token_secret: str = ""
    tls_fingerprint: str = ""
    node: str = ""
    ssh_port: object = None
    user: str = "root"
    private_key: str = ""
    host_key: str = ""
    by_ssh: bool = False


@dataclass(frozen=True)
class Offer:
    """A node of the cluster, as it can be registered.

    Args:
        address: where its own API is to be asked: what the cluster tells, else that of the node that answers.
        tls_fingerprint: of the certificate that it shows there, as the node that answers tells.
        registered_as: name of the host that it is already; empty for none.
    """

    node: str
    address: str
    tls_fingerprint: str
    online: bool | None
    local: bool
    registered_as: str = ""


def offers(actor: Actor, wanted: WantedNode) -> tuple[Offer, ...]:
    """The nodes of the cluster that an address belongs to, the one that answers first.

    Raises:
        As :func:`add_node`.
    """
    actor.require_everywhere(Role.ADMIN)
    endpoint, token = _access(wanted)
    cluster = _asked(endpoint, token)
    found = []
    for one in cluster.nodes:
        host = _registered(cluster.name, one.name, endpoint)
        own = not one.local and bool(one.address)
        found.append(
            Offer(
                one.name,
                one.address if own else endpoint.address,
                one.fingerprint if own else endpoint.fingerprint,
                one.online,
                one.local,
                host.name if host is not None else "",
            )
        )
    return tuple(sorted(found, key=lambda one: not one.local))


def add_node(actor: Actor, wanted: WantedNode) -> Host:
    """Registers a node. Its API has to answer to the token, and its agent by ssh where that is wanted.

    Raises:
        ForbiddenError, InvalidError, RefusedError: as for :func:`registration.add_ssh_host`.
        UnconfirmedError: nobody known has signed its certificate, or its SSH server's key is not confirmed.
    """
    return registration.save(actor, tried(actor, wanted))


def tried(actor: Actor, wanted: WantedNode, *, known: Host | None = None) -> Host:
    """An unsaved row of a node that has answered in every way that is wanted; raises as :func:`add_node`.

    Args:
        known: the row that this is to become.
    """
    actor.require_everywhere(Role.ADMIN)
    endpoint, token = _access(wanted)
    ssh = None
    if wanted.by_ssh:
        ssh = registration.checked(
            registration.Wanted(
                wanted.name, wanted.address, wanted.ssh_port, wanted.user, wanted.private_key, wanted.host_key
            )
        )
    host = registration.named(Host(kind=Host.Kind.PROXMOX, transport=Host.Transport.API), wanted.name)
    host.address, host.port = endpoint.address, endpoint.port
    host.token_id, host.token_locked = token.token_id, secrets.lock(token.secret)
    host.tls_fingerprint = endpoint.fingerprint
    host.cluster, host.node = _answered(_asked(endpoint, token), wanted.node.strip())
    again = _registered(host.cluster, host.node, endpoint)
    if again is not None and (known is None or again.pk != known.pk):
        sentence = _("The node {node} is already registered as {again}.").format(node=host.node, again=again.name)
        raise of_field("node", sentence)
    if ssh is not None:
        host.transport, host.ssh_port, host.user = Host.Transport.API_SSH, ssh.port, ssh.user
        host.host_key, host.private_key_locked = ssh.host_key, ssh.private_key_locked
        registration.try_agent(host)
    return host


def change_node(actor: Actor, host: Host, values: dict[str, Any]) -> Host:
    """Changes how a node is reached; what is not given stays. It gets ssh where a key of that is given.

    Args:
        values: fields of :class:`WantedNode`.

    Raises:
        As :func:`add_node`.
    """
    actor.require_everywhere(Role.ADMIN)
    has_ssh = host.transport == Host.Transport.API_SSH
    known = WantedNode(
        name=host.name, address=host.address, port=host.port, token_id=host.token_id,
        token_secret=registration.stored(host.token_locked, "token_secret", values),
        tls_fingerprint=host.tls_fingerprint, node=host.node,
        ssh_port=host.ssh_port, user=host.user or "root", host_key=host.host_key,
        private_key=registration.stored(host.private_key_locked, "private_key", values),
        by_ssh=has_ssh or bool(values.get("host_key") or values.get("private_key")),
    )  # fmt: skip
    wanted = replace(known, **values)
    if "token_secret" not in values:
        _refuse_to_carry(host, wanted)
    changed = tried(actor, wanted, known=host)
    if changed.transport == Host.Transport.API_SSH:
        transport.forget_installed(transport.endpoint(changed))
    return registration.changed_to(actor, host, changed)


def _refuse_to_carry(host: Host, wanted: WantedNode) -> None:
    """A stored secret goes to whom it was given for: to another place only where that shows the same certificate."""
    endpoint, __ = _access(wanted)
    same_place = (endpoint.address, endpoint.port) == (host.address, host.port or DEFAULT_PORT)
    if same_place or (endpoint.fingerprint and endpoint.fingerprint == host.tls_fingerprint):
        return
    sentence = _(
        "Enter the token secret again. The saved secret is sent to a new address only if that shows the pinned "
        "certificate."
    )
    raise of_field("token_secret", sentence)


def _access(wanted: WantedNode) -> tuple[Endpoint, Token]:
    """Checked fields; raises InvalidError, which names each that is wrong."""
    faults = Faults()
    with faults:
        endpoint = Endpoint(wanted.address, addresses.port(wanted.port, DEFAULT_PORT), wanted.tls_fingerprint)
    with faults:
        token = Token(wanted.token_id.strip(), wanted.token_secret.strip())
    require_right(faults)
    return endpoint, token


def _registered(cluster: str, node: str, endpoint: Endpoint) -> Host | None:
    """The host that a node is already: by its name in its cluster, or by its address where it is on its own."""
    rows = Host.objects.filter(kind=Host.Kind.PROXMOX, cluster=cluster, node=node)
    return (rows if cluster else rows.filter(address=endpoint.address, port=endpoint.port)).first()


def _asked(endpoint: Endpoint, token: Token) -> reader.Cluster:
    """The cluster, as the API tells."""
    try:
        with Client(endpoint, token, 30) as client:
            return reader.cluster(client)
    except HostError as error:
        if not endpoint.fingerprint and "certificate" in error.detail:
            raise _unconfirmed(endpoint) from error
        raise RefusedError(errors.of_host(error), error.detail) from error


def _answered(cluster: reader.Cluster, node: str) -> tuple[str, str]:
    """The cluster's name and the node's."""
    names = [one.name for one in cluster.nodes]
    local = next((one.name for one in cluster.nodes if one.local), names[0] if names else "")
    if node and node not in names:
        raise InvalidError(
            _("There is no node {node}. The cluster has {names}.").format(node=node, names=", ".join(names)),
            {"node": _("Choose a node of this cluster.")},
        )
    return cluster.name, node or local


def _unconfirmed(endpoint: Endpoint) -> UnconfirmedError:
    try:
        shown = tls.shown_fingerprint(endpoint)
    except HostError as error:
        return UnconfirmedError(error.detail, {})
    return UnconfirmedError(
        _(
            "No trusted CA signed the certificate of {address}. Its fingerprint is {shown}. Compare it with System → "
            "Certificates on the node. Confirm only if the fingerprints match."
        ).format(address=endpoint.address, shown=shown),
        {"tls_fingerprint": shown, "fingerprint": shown},
    )


def client(host: Host, seconds: float = ANSWER_SECONDS) -> Client:
    """A client of a registered node's API; ``seconds`` is what an answer may take.

    Raises:
        HostError: its token cannot be read.
    """
    endpoint = Endpoint(host.address, host.port or DEFAULT_PORT, host.tls_fingerprint)
    return Client(endpoint, Token(host.token_id, secrets.unlock(host.token_locked)), seconds)


def facts_of(host: Host, *, configs: bool, folders: bool = False, known: Known | None = None) -> ProxmoxFacts:
    """What a node's API tells; see :func:`reader.read`.

    Args:
        known: gives, of what was known before, the storages and the numbers of guests that the facts do not tell of.

    Raises:
        HostError: it does not answer.
    """
    with client(host) as api:
        facts = reader.read(api, host.node, configs=configs, folders=folders)
        return facts if known is None else reader.with_hidden(api, facts, *known(facts))


def sync_storages(host: Host, facts: ProxmoxFacts) -> None:
    """Makes the storages that are no folders pools that are only shown, with their space as the node tells it.

    Where no agent runs, folders are shown as well. What the token has no right to see any more is said, and stays, and
    so does what is switched off: its rows go when its definition is gone.
    """
    shown = StoragePool.objects.filter(host=host, source=StoragePool.Source.PROXMOX, path_bytes=b"")
    for storage in facts.storages:
        if _is_shown(host, storage):
            _sync_storage(host, facts, storage)
        else:
            detail = f"{_why_off(host, storage)} {_AS_LAST_SEEN}"
            shown.filter(path_key=_key(storage)).update(state="missing", state_detail=detail)
    untold = shown.exclude(path_key__in=[_key(storage) for storage in facts.storages])
    unseen = [right.sentence for right in facts.missing if right.feature == "storages"]
    if unseen:
        detail = f"{' '.join(unseen)} Until then it is shown as of the last successful scan."
        untold.update(state="unreadable", state_detail=detail)
    else:
        untold.delete()


def _key(storage: StorageFacts) -> str:
    """The key of what stands for the path of a storage that only the API tells of; no path begins like it."""
    return path_key(f"proxmox:{storage.name}".encode())


def _is_shown(host: Host, storage: StorageFacts) -> bool:
    if not storage.enabled or not storage.holds_images:
        return False
    return host.transport == Host.Transport.API or not storage.is_folder


def _why_off(host: Host, storage: StorageFacts) -> str:
    if not storage.holds_images:
        return "Its definition no longer allows disks."
    if storage.enabled:
        return "The agent has not found its folder yet."  # its rows become that folder's then
    return f"It is disabled in Proxmox VE, or not available on the node {host.node}."


_AS_LAST_SEEN = "Its images are shown as of the last successful scan."


def why_away(facts: ProxmoxFacts, storage: StorageFacts) -> tuple[str, str]:
    """The state of a pool whose storage is not known to be active, and why, in sentences."""
    if storage.active is None:
        places = ("/storage", f"/storage/{storage.name}")
        lacking = [one.sentence for one in facts.missing if one.feature == "storages" and one.path in places]
        return "unreadable", f"{' '.join(lacking) or 'The API does not report it.'} {_AS_LAST_SEEN}"
    if storage.is_mountpoint:
        return "missing", f"Nothing is mounted at {storage.path} on the node. Mount it there. {_AS_LAST_SEEN}"
    return "missing", f"The node currently cannot reach it. {_AS_LAST_SEEN}"


def _sync_storage(host: Host, facts: ProxmoxFacts, storage: StorageFacts) -> None:
    state, detail = ("ok", "") if storage.active else why_away(facts, storage)
    values: dict[str, Any] = {
        "name": storage.name, "kind": storage.kind, "source": StoragePool.Source.PROXMOX,
        "path": storage.path or f"{storage.type} {storage.place}", "path_bytes": b"",
        "capacity_bytes": storage.total_bytes, "available_bytes": storage.available_bytes,
        "reserved_bytes": storage.reserved_bytes,
        "network": storage.shared, "state": state, "state_detail": detail,
        "owners_unknown": by_api_alone.nobody_looks(host),
    }  # fmt: skip
    if storage.shared:
        # One storage and one filesystem on all nodes, in every sum.
        values["shared_key"] = values["fs_key"] = f"proxmox:{facts.cluster or host.slug}:{storage.name}"
    StoragePool.objects.update_or_create(host=host, path_key=_key(storage), defaults=values)
