"""Hypervisors beside libvirt that a scan asks for their guests."""

from dataclasses import dataclass

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.guests.models import Guest
from storage_admin.hosts import openvz, transport
from storage_admin.hosts.guest_facts import GuestFacts
from storage_admin.hosts.models import Host


@dataclass(frozen=True)
class Told:
    """What one of them told.

    Args:
        kinds: of guests that it has; all of these kinds on the host are among ``guests``.
        unknown: why it is not known which guests it has; empty where it is.
    """

    kinds: tuple[str, ...]
    guests: tuple[GuestFacts, ...] = ()
    unknown: str = ""


def ask(host: Host) -> list[Told]:
    """Asks those that the last scan saw traces of."""
    return [_containers(host)] if _may_have_containers(host) else []


def _may_have_containers(host: Host) -> bool:
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
        return Told(kinds, unknown=f"The containers of {host.name} are not known: {error.detail}")


def containers_of(host: Host) -> Told:
    """The containers of a host on which nothing but plain commands run.

    Raises:
        HostError: it cannot be reached.
    """
    told = _containers(host)
    if told.unknown:
        raise HostError(told.unknown, "host_unreachable")
    return told
