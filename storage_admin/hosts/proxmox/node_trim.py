"""Trims by a node's own commands, as root there: of containers, which the API does not trim, and VMs without a token.

A trim that is cut off halfway leaves a container locked and mounted. So it is a session of its own on the node, which
goes on when whoever asked for it has gone.
"""

import json
import re

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.live_facts import LONGEST, MOST, Trimmed, trimmed
from storage_admin.hosts.proxmox.config import GuestRef
from storage_admin.hosts.proxmox.drives import CONTAINER
from storage_admin.hosts.shells import Shell

#: Seconds until nobody waits any longer.
SECONDS = 6 * 3600.0
#: A line of ``fstrim -v`` (util-linux), which ``pct fstrim`` runs for each volume of a container.
_LINE = re.compile(r"^(.+): .*\((\d+) bytes\) trimmed", re.MULTILINE)
_LOCKED = re.compile(r"\b(?:CT|VM) is locked \(([\w-]+)\)|can't lock file")


def command(guest: GuestRef) -> list[str]:
    """What trims a guest, as an admin would type it."""
    number = str(guest.vmid)
    return ["pct", "fstrim", number] if guest.kind == CONTAINER else ["qm", "guest", "cmd", number, "fstrim"]


def trim(shell: Shell, guest: GuestRef) -> tuple[Trimmed, ...]:
    """Has a guest's filesystems trimmed, and waits for it.

    Args:
        shell: of its node.

    Raises:
        RefusedError: ``guest_locked``.
        HostError: it failed, with the node's words; or takes longer than anybody waits, then it goes on there.
    """
    done = shell.run(["env", "LC_ALL=C", "setsid", "--fork", "--wait", *command(guest)], seconds=SECONDS)
    said = (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace")
    if done.exit_code != 0:
        if (locked := _LOCKED.search(said)) is not None:
            sentence = _("{guest} is locked by Proxmox VE ({lock}). Wait until the lock is released.")
            raise RefusedError("guest_locked", sentence.format(guest=guest.name, lock=locked[1] or "?"))
        raise HostError(_("{guest} was not trimmed: {words}").format(guest=guest.name, words=done.words()))
    if guest.kind == CONTAINER:
        root = f"/var/lib/lxc/{guest.vmid}/rootfs"
        found = [(path.removeprefix(root) or "/", int(size)) for path, size in _LINE.findall(said)[:MOST]]
        if not found:  # a volume that cannot be mounted: pct says so, and ends as if all were well
            raise HostError(_("{guest} was not trimmed: {words}").format(guest=guest.name, words=done.words()))
        return tuple(Trimmed(path[:LONGEST], size) for path, size in found)
    try:
        told = json.loads(done.stdout)
        return trimmed(told.get("paths") if isinstance(told, dict) else None)
    except ValueError:
        raise HostError(_("The guest agent of {guest} sent an unexpected response.").format(guest=guest.name)) from None
