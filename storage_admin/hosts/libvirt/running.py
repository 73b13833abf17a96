"""What is asked of libvirt about a guest as it is at this moment, and of its guest agent."""

from collections.abc import Callable
from typing import Any

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError
from storage_admin.hosts.libvirt.process import ask
from storage_admin.hosts.libvirt.relay import refuse_to_write
from storage_admin.hosts.libvirt.uri import listening
from storage_admin.hosts.live_facts import AgentNow, DiskNow, Filesystem, GuestNow, Trimmed, trimmed
from storage_admin.hosts.models import Host

#: Seconds until a look is given up, a trim (as long as the agent may take, and somewhat more), and a disk that grows.
LOOK_TIMEOUT, TRIM_TIMEOUT, GROW_TIMEOUT = 10.0, 3660.0, 120.0


def look(host: Host, uid: str, *, agent: bool = False) -> GuestNow:
    """A domain as it is now.

    Args:
        agent: ask its guest agent as well: what it can do, and its filesystems.

    Raises:
        RefusedError: ``tool_missing``: libvirt there can only be read, which does not let anybody ask an agent.
        HostError: libvirt does not answer, or knows no such domain.
    """
    return guest_now(_asked(host, uid, "look with agent" if agent else "look", LOOK_TIMEOUT))


def guest_now(told: dict[str, Any]) -> GuestNow:
    """What a program told of a domain."""
    commands = told["agent"]["commands"]
    parts: dict[str, Any] = {
        "agent": AgentNow(**told["agent"] | {"commands": None if commands is None else frozenset(commands)}),
        "disks": tuple(DiskNow(**disk | {"chain": tuple(disk["chain"])}) for disk in told["disks"]),
        "filesystems": tuple(Filesystem(**one | {"disks": tuple(one["disks"])}) for one in told["filesystems"]),
        "snapshots": tuple(told["snapshots"]),
        "checkpoints": tuple(told["checkpoints"]),
    }
    return GuestNow(**told | parts)


def trim(host: Host, uid: str, tick: Callable[[], None]) -> tuple[Trimmed, ...]:
    """Has a domain's guest agent trim all filesystems of the guest, and waits for it.

    Args:
        tick: called twice a second; what it raises ends the waiting, and not the trim.

    Raises:
        RefusedError: as of :func:`look`.
        HostError: no agent answers, or it cannot trim.
    """
    told = _asked(host, uid, "trim", TRIM_TIMEOUT, tick)
    try:
        return trimmed(told["trimmed"])
    except ValueError as error:
        raise HostError(_("The guest agent sent an unexpected response: {error}").format(error=error)) from None


def grow(host: Host, uid: str, disk: str, size_bytes: int) -> int:
    """Makes a disk of a running domain larger; one that has the size already stays as it is.

    Returns:
        The size that it has now, in bytes.

    Raises:
        RefusedError: as of :func:`look`.
        HostError: libvirt does not answer, or refuses it: the disk is larger already.
    """
    told = _asked(host, uid, "grow", GROW_TIMEOUT, disk=disk, size_bytes=size_bytes)
    return int(told["virtual_bytes"])


def _asked(
    host: Host, uid: str, what: str, seconds: float, tick: Callable[[], None] | None = None, **more: Any
) -> dict[str, Any]:
    refuse_to_write(host)
    with listening(host) as uri:
        return ask(uri, "guest", seconds, {"uid": uid, "do": what, **more}, tick=tick)
