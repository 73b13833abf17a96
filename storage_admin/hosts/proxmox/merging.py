"""What the API tells of a node, laid over what its files say.

The files have every line, the API has what is true this minute: space, states, rights. What stands in a file and not in
the API's answer about the same file is what Proxmox VE itself passes over.
"""

from dataclasses import replace

from django.utils.translation import gettext as _

from storage_admin.hosts.guest_facts import DiskFacts
from storage_admin.hosts.proxmox.backups import Backups, Gap
from storage_admin.hosts.proxmox.guests import HIDDEN, UNKNOWN, ProxmoxGuest
from storage_admin.hosts.proxmox.permissions import INVENTORY
from storage_admin.hosts.proxmox.reader import HIDDEN_LINES, ProxmoxFacts


def merged(api: ProxmoxFacts, files: ProxmoxFacts) -> ProxmoxFacts:
    """One node's facts from both ways of reading it.

    Args:
        api: of :func:`reader.read`.
        files: of :func:`conffiles.read`, read at about the same time on any node of the same cluster.

    Returns:
        The guests of all nodes: those of others as their files say, since their disks may be on a storage that this
        node shares. What the API could not see for lack of rights, or hides, is no reason any more not to know who uses
        an image; what could not be read of the files is.
    """
    told = {(guest.facts.kind, guest.vmid): guest for guest in api.guests}
    known = {(guest.facts.kind, guest.vmid): guest for guest in files.guests}
    # One that the API has here and a file has elsewhere has just come from there.
    here = {key: replace(guest, node=api.node) for key, guest in known.items() if key in told}
    found = [_guest(told.get(key), here.get(key, guest)) for key, guest in sorted(known.items())]
    # Made since the files were read.
    new = [guest for key, guest in sorted(told.items()) if key not in known]
    found += new
    unread = [
        _("Guest {vmid} was created after its node's files were read. Scan the host again.").format(vmid=one.vmid)
        for one in new
        if not one.facts.digest
    ]
    storages = {one.name: one for one in files.storages} | {one.name: one for one in api.storages}
    return replace(
        api,
        cluster=api.cluster or files.cluster,
        storages=tuple(storages[name] for name in sorted(storages)),
        configured=files.configured,
        guests=tuple(found),
        unknown=tuple(dict.fromkeys((*_left(api), *files.unknown, *unread))),
        backups=_backups(api, [guest for key, guest in known.items() if key not in told]),
    )


def _backups(api: ProxmoxFacts, untold: list[ProxmoxGuest]) -> Backups | None:
    """What the API tells of backups: of a guest here that it does not show, it may not show these either."""
    sentence = _("The API does not show guest {vmid} to the token.")
    gaps = tuple(Gap(sentence.format(vmid=one.vmid), one.vmid) for one in untold if one.node == api.node)
    return None if api.backups is None else replace(api.backups, gaps=(*api.backups.gaps, *gaps))


def _left(api: ProxmoxFacts) -> list[str]:
    lifted = {right.sentence for right in api.missing if right.feature in INVENTORY} | {HIDDEN_LINES}
    return [why for why in api.unknown if why not in lifted]


def _guest(told: ProxmoxGuest | None, file: ProxmoxGuest) -> ProxmoxGuest:
    if told is None:
        return file
    state = told.facts.state if told.facts.state != UNKNOWN else file.facts.state
    if not told.facts.digest:
        return replace(file, facts=replace(file.facts, state=state, lock=told.facts.lock))
    if told.facts.digest != file.facts.digest:
        # One of them is older: nobody can say which lines are passed over, and all that either names is in use.
        both = {(disk.target, disk.only_in, disk.path or disk.volume): disk for disk in told.facts.disks}
        both |= {(disk.target, disk.only_in, disk.path or disk.volume): disk for disk in file.facts.disks}
        unread = tuple(dict.fromkeys((*told.facts.unread, *file.facts.unread)))
        return replace(told, facts=replace(told.facts, state=state, disks=tuple(both.values()), unread=unread))
    shown = {disk.target for disk in told.facts.disks if not disk.only_in} | set(told.options)
    passed_over = [disk for disk in file.facts.disks if not disk.only_in and disk.target not in shown]
    lines = [line for line in file.facts.unread if line.partition(":")[0] not in shown]
    lines += [f"{disk.target}: {disk.volume or disk.path}" for disk in passed_over]
    present = {disk.target for disk in file.facts.disks if not disk.only_in}
    facts = replace(
        file.facts,
        name=told.facts.name,
        state=state,
        lock=told.facts.lock,
        io_limits=told.facts.io_limits,
        disks=tuple(_as_told(disk, shown, present) for disk in file.facts.disks),
        unread=tuple(dict.fromkeys((*lines, *told.facts.unread))),
    )
    return replace(told, facts=facts)


def _as_told(disk: DiskFacts, shown: set[str], present: set[str]) -> DiskFacts:
    """A disk by what Proxmox VE itself makes of its line."""
    if not disk.only_in and disk.target not in shown:
        return replace(disk, only_in=HIDDEN)
    if disk.only_in == HIDDEN and disk.target in shown - present:
        return replace(disk, only_in="")
    return disk
