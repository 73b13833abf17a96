"""Nodes of Proxmox VE: registered with an API token, and by ssh as well where their images are to be worked on."""

from dataclasses import dataclass
from typing import Any

from storage_admin.accounts.roles import Actor, Role
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts import addresses, registration, secrets
from storage_admin.hosts.errors import InvalidError, UnconfirmedError
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import path_key
from storage_admin.hosts.proxmox import permissions, reader, tls
from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.endpoint import DEFAULT_PORT, Endpoint, Token
from storage_admin.hosts.proxmox.reader import ProxmoxFacts


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


def add_node(actor: Actor, wanted: WantedNode) -> Host:
    """Registers a node. Its API has to answer to the token, and its agent by ssh where that is wanted.

    Raises:
        ForbiddenError, InvalidError, RefusedError: as for :func:`registration.add_ssh_host`.
        UnconfirmedError: nobody known has signed its certificate, or its SSH server's key is not confirmed.
    """
    actor.require_everywhere(Role.ADMIN)
    endpoint = Endpoint(wanted.address, addresses.port(wanted.port, DEFAULT_PORT), wanted.tls_fingerprint)
    token = Token(wanted.token_id, wanted.token_secret)
    ssh = None
    if wanted.by_ssh:
        ssh = registration.checked(
            registration.Wanted(
                wanted.name, wanted.address, wanted.ssh_port, wanted.user, wanted.private_key, wanted.host_key
            )
        )
    host = registration.named(Host(kind=Host.Kind.PROXMOX, transport=Host.Transport.API), wanted.name)
    host.address, host.port = endpoint.address, endpoint.port
    host.token_id, host.token_locked = wanted.token_id, secrets.lock(wanted.token_secret)
    host.tls_fingerprint, host.node = endpoint.fingerprint, wanted.node.strip()
    host.cluster, host.node = _answered(endpoint, token, host.node)
    if ssh is not None:
        host.transport, host.ssh_port, host.user = Host.Transport.API_SSH, ssh.port, ssh.user
        host.host_key, host.private_key_locked = ssh.host_key, ssh.private_key_locked
        registration.try_agent(host)
    return registration.save(actor, host)


def _answered(endpoint: Endpoint, token: Token, node: str) -> tuple[str, str]:
    """The cluster's name and the node's, as the API tells."""
    try:
        with Client(endpoint, token, 30) as client:
            cluster = reader.cluster(client)
    except HostError as error:
        if not endpoint.fingerprint and "certificate" in error.detail:
            raise _unconfirmed(endpoint) from error
        raise RefusedError("host_unreachable", error.detail) from error
    names = [one.name for one in cluster.nodes]
    local = next((one.name for one in cluster.nodes if one.local), names[0] if names else "")
    if node and node not in names:
        raise InvalidError(f"There is no node {node}: it has {', '.join(names)}.", {"node": "Choose one of these."})
    return cluster.name, node or local


def _unconfirmed(endpoint: Endpoint) -> UnconfirmedError:
    try:
        shown = tls.shown_fingerprint(endpoint)
    except HostError as error:
        return UnconfirmedError(error.detail, {})
    return UnconfirmedError(
        f"{endpoint.address} shows a certificate that no known authority has signed, with the fingerprint {shown}. "
        "Compare it with what the node shows under System → Certificates; only if it is equal, confirm it.",
        {"tls_fingerprint": shown, "fingerprint": shown},
    )


def client(host: Host) -> Client:
    """A client of a registered node's API.

    Raises:
        HostError: its token cannot be read.
    """
    endpoint = Endpoint(host.address, host.port or DEFAULT_PORT, host.tls_fingerprint)
    return Client(endpoint, Token(host.token_id, secrets.unlock(host.token_locked)))


def facts_of(host: Host, *, configs: bool) -> ProxmoxFacts:
    """What a node's API tells.

    Raises:
        HostError: it does not answer.
    """
    with client(host) as api:
        return reader.read(api, host.node, configs=configs)


def rights_missing(host: Host) -> list[str]:
    """The rights that the token has not, in sentences; raises HostError."""
    with client(host) as api:
        return [right.sentence for right in permissions.read(api).all_missing()]


def sync_storages(host: Host, facts: ProxmoxFacts) -> None:
    """Makes the storages that are no folders pools that are only shown, with their space as the node tells it.

    Where no agent runs, folders are shown as well.
    """
    only_shown = host.transport == Host.Transport.API
    kept = []
    for storage in facts.storages:
        if not storage.enabled or not storage.holds_images or (storage.is_folder and not only_shown):
            continue
        path = f"proxmox:{storage.name}".encode()
        values: dict[str, Any] = {
            "name": storage.name, "kind": storage.kind, "source": StoragePool.Source.PROXMOX,
            "path": storage.path or f"{storage.type} {storage.group or storage.name}", "path_bytes": b"",
            "capacity_bytes": storage.total_bytes, "available_bytes": storage.available_bytes,
            "network": storage.shared, "state": "ok" if storage.active else "missing",
            "state_detail": "" if storage.active else "The node cannot reach it now.",
            "owners_unknown": "Its volumes are not read by an agent: nothing in it is changed.",
        }  # fmt: skip
        if storage.shared:
            values["shared_key"] = f"proxmox:{facts.cluster or host.slug}:{storage.name}"
        StoragePool.objects.update_or_create(host=host, path_key=path_key(path), defaults=values)
        kept.append(path_key(path))
    shown = StoragePool.objects.filter(host=host, source=StoragePool.Source.PROXMOX, path_bytes=b"")
    shown.exclude(path_key__in=kept).delete()
