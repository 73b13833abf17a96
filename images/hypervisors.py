"""Hypervisors beside libvirt that a scan asks for their guests."""

from dataclasses import dataclass, replace

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.guests.models import Guest
from storage_admin.hosts import asking, openvz, proxmox_alone, proxmox_hosts, transport
from storage_admin.hosts.guest_facts import GuestFacts
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox import conffiles
from storage_admin.hosts.proxmox.merging import merged
from storage_admin.hosts.proxmox.reader import ProxmoxFacts
from storage_admin.hosts.proxmox.volumes import own_id, place


@dataclass(frozen=True)
class Told:
    """What one of them told.

    Args:
        kinds: of guests that it has; all of these kinds on the host are among ``guests``.
        unknown: why it is not known which image each of them uses; empty where it is.
        answered: whether it told of any; else what was known of its guests stays.
        proxmox: all that a node of Proxmox VE told.
    """

    kinds: tuple[str, ...]
    guests: tuple[GuestFacts, ...] = ()
    unknown: str = ""
    answered: bool = True
    proxmox: ProxmoxFacts | None = None


def ask(host: Host) -> list[Told]:
    """Asks those that the last scan saw traces of."""
    if has_proxmox(host):
        return [_proxmox(host)]
    return [_containers(host)] if may_have_containers(host) else []


def has_proxmox(host: Host) -> bool:
    """Whether the last scan found Proxmox VE on the host, and its agent can be asked."""
    return bool(host.capabilities.get("proxmox"))


def is_to_be_asked(host: Host) -> bool:
    """Whether the last scan saw traces of any."""
    return has_proxmox(host) or may_have_containers(host)


def may_have_containers(host: Host) -> bool:
    """Whether the last scan saw OpenVZ's tools there, and commands can be run."""
    if host.transport == Host.Transport.PLAIN:
        return True
    tools = host.capabilities.get("tools") or {}
    return bool(tools.get("vzctl")) and (transport.is_here(host) or host.transport == Host.Transport.SSH)


def _containers(host: Host) -> Told:
    kinds = (str(Guest.Kind.CONTAINER),)
    try:
        return Told(kinds, openvz.containers(transport.shell(host)))
    except openvz.AbsentError:
        return Told(kinds)
    except (HostError, RefusedError) as error:
        return Told(kinds, unknown=f"The containers of {host.name} are not known: {error.detail}", answered=False)


def containers_of(host: Host) -> Told:
    """The containers of a host on which nothing but plain commands run.

    Raises:
        HostError: it cannot be reached.
    """
    told = _containers(host)
    if told.unknown:
        raise HostError(told.unknown, "host_unreachable")
    return told


def _facts(host: Host) -> ProxmoxFacts:
    """By the node's files, with what its API tells laid over them where there is a token."""
    if host.transport == Host.Transport.API:
        facts = proxmox_hosts.facts_of(host, configs=True, folders=True)
    else:
        facts = conffiles.read(asking.ask(host, "pve", {}))
        if host.token_id:
            facts = merged(proxmox_hosts.facts_of(host, configs=False), facts)
    if host.token_id:
        proxmox_hosts.sync_storages(host, facts)
    return facts


def is_by_api(host: Host) -> bool:
    """Whether nothing but the API of Proxmox VE can be asked about a host."""
    return proxmox_alone.is_alone(host)


def guests_by_api(host: Host) -> Told:
    """The guests of a node that is reached by its API alone.

    Raises:
        HostError: it does not answer.
    """
    try:
        proxmox_hosts.rights_missing(host)
    except (HostError, RefusedError) as error:
        raise HostError(error.detail, "host_unreachable") from error
    told = _proxmox(host)
    if not told.answered:
        raise HostError(told.unknown, "host_unreachable")
    return told


def _proxmox(host: Host) -> Told:
    """The guests of a node of Proxmox VE by its files, read there by the agent.

    Those of other nodes are among them where their disks are on a storage that this node shares with them.
    """
    kinds = (str(Guest.Kind.VM), str(Guest.Kind.CONTAINER))
    try:
        facts = _facts(host)
    except (HostError, RefusedError) as error:
        return Told(kinds, unknown=f"The guests of Proxmox VE are not known: {error.detail}", answered=False)
    shared = {storage.name for storage in facts.storages if storage.shared}
    storages = {storage.name: storage for storage in facts.storages}
    guests = []
    for guest in facts.guests:
        disks = tuple(
            replace(
                disk,
                path=disk.path or place(disk.volume, storages),
                records_chain=bool(disk.volume) and own_id(disk.volume) != disk.volume,
            )
            for disk in guest.facts.disks
            if guest.node == facts.node or disk.volume.partition(":")[0] in shared
        )
        # What a line that is not understood names may be in what this node shares with that guest's.
        if guest.node == facts.node or disks or (shared and guest.facts.unread):
            guests.append(replace(guest.facts, disks=disks))
    return Told(kinds, tuple(guests), " ".join(facts.unknown), proxmox=facts)
