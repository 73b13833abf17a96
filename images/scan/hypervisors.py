"""Hypervisors beside libvirt that a scan asks for their guests."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from django.utils.translation import gettext as _

from images.scan import from_proxmox
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.guests import backups
from storage_admin.guests.models import Guest
from storage_admin.hosts import asking, openvz, transport
from storage_admin.hosts.guest_facts import GuestFacts
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox import conffiles, errors, registration
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
        hidden: uids of guests that it may not be asked about any more: what was known of them stays.
        tools: which of its tools are there, where no agent tells.
    """

    kinds: tuple[str, ...]
    guests: tuple[GuestFacts, ...] = ()
    unknown: str = ""
    answered: bool = True
    proxmox: ProxmoxFacts | None = None
    hidden: frozenset[str] = frozenset()
    tools: dict[str, bool] = field(default_factory=dict)


def ask(host: Host) -> list[Told]:
    """Asks those that the last scan saw traces of; before the first one, whoever is there."""
    if host.has_proxmox or _turns_out_to_have_proxmox(host):
        return [_proxmox(host)]
    if may_have_containers(host):
        return [_containers(host)]
    first = _containers(host) if not host.capabilities and _takes_commands(host) else None
    return [first] if first is not None and first.guests else []


def were_missed(host: Host, asked: Sequence[Told]) -> bool:
    """Whether a scan saw traces of one that it had not asked."""
    kinds = {kind for told in asked for kind in told.kinds}
    return Guest.Kind.VM not in kinds if host.has_proxmox else may_have_containers(host) and not kinds


def _turns_out_to_have_proxmox(host: Host) -> bool:
    """Whether a host that was never scanned is a node of Proxmox VE, as its agent finds it now."""
    if "proxmox" in host.capabilities or host.transport == Host.Transport.PLAIN:
        return False
    try:
        return bool(asking.ask(host, "pve", {}).get("proxmox"))
    except (HostError, RefusedError):
        return False  # the scan itself says what is wrong


def may_have_containers(host: Host) -> bool:
    """Whether the last scan saw OpenVZ's tools there, or containers, and commands can be run."""
    if host.transport == Host.Transport.PLAIN:
        return True
    tools = host.capabilities.get("tools") or {}
    known = tools.get("vzctl") or Guest.objects.filter(host=host, kind=Guest.Kind.CONTAINER).exists()
    return bool(known) and _takes_commands(host)


def _takes_commands(host: Host) -> bool:
    return transport.is_here(host) or host.transport == Host.Transport.SSH


def guests_now(host: Host) -> list[GuestFacts]:
    """What they tell of their guests right now, with nothing read from the database or written to it.

    Raises:
        HostError: they could not be asked.
        RefusedError: the agent there refuses.
    """
    if host.has_proxmox:
        facts = conffiles.read(asking.ask(host, "pve", {}))
        return [guest.facts for guest in facts.guests if guest.node == facts.node]
    return list(containers_of(host).guests) if may_have_containers(host) else []


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
        HostError: it cannot be reached, or does not tell of any.
    """
    kinds, shell = (str(Guest.Kind.CONTAINER),), transport.shell(host)
    try:
        tools = {"vzctl": openvz.has_vzctl(shell)}
        return Told(kinds, openvz.containers(shell), tools=tools)
    except openvz.AbsentError:
        return Told(kinds, tools=tools)
    except HostError as error:
        raise HostError(
            _("The containers of {host} are not known: {detail}").format(host=host.name, detail=error.detail),
            error.code,
        ) from error


def _facts(host: Host) -> ProxmoxFacts:
    """By the node's files, with what its API tells laid over them where there is a token and the API answers."""
    files = None if host.by_api_alone else conffiles.read(asking.ask(host, "pve", {}))
    if files is not None and not host.token_id:
        return files

    def known(facts: ProxmoxFacts) -> tuple[set[str], set[str]]:
        storages, guests = from_proxmox.not_told(host, facts)
        named = {one.name for one in files.storages if one.enabled} if files is not None else set()
        named |= backups.storages_of(host)
        return storages | (named - {one.name for one in facts.storages}), guests

    try:
        facts = registration.facts_of(host, configs=files is None, folders=files is None, known=known)
    except (HostError, RefusedError) as error:
        if files is None:
            raise
        return replace(files, api_away=error.detail)
    if files is not None:
        facts = merged(facts, files)
    registration.sync_storages(host, facts)
    return facts


def guests_by_api(host: Host) -> Told:
    """The guests of a node that is reached by its API alone.

    Raises:
        HostError: it does not answer.
    """
    try:
        return _told_of(_facts(host))
    except (HostError, RefusedError) as error:
        raise HostError(error.detail, errors.of_host(error)) from error


_PROXMOX_KINDS = (str(Guest.Kind.VM), str(Guest.Kind.CONTAINER))


def _proxmox(host: Host) -> Told:
    """The guests of a node of Proxmox VE by its files, read there by the agent."""
    try:
        return _told_of(_facts(host))
    except (HostError, RefusedError) as error:
        return Told(_PROXMOX_KINDS, unknown=f"The guests of Proxmox VE are not known: {error.detail}", answered=False)


def _told_of(facts: ProxmoxFacts) -> Told:
    """The guests among a node's facts.

    Those of other nodes are among them where their disks are on a storage that this node shares with them.
    """
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
    return Told(_PROXMOX_KINDS, tuple(guests), " ".join(facts.unknown), proxmox=facts, hidden=facts.hidden)
