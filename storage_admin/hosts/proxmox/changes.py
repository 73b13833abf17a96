"""Changes of a VM's drives in its configuration: I/O limits, and the new name of a volume that was flattened."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.hosts.proxmox import limits, volumes
from storage_admin.hosts.proxmox.client import Api
from storage_admin.hosts.proxmox.config import Config, GuestRef, read_config, read_snapshots, set_config
from storage_admin.hosts.proxmox.drives import VM, Drive, is_drive, volume_of


@dataclass(frozen=True)
class LimitsSet:
    """What came of setting I/O limits, by what the configuration says afterwards.

    Args:
        before, after: by our names (:data:`limits.KEYS`), without those that are not set.
        waits: it holds from the next start on, because Proxmox VE could not change the running guest.
        digest: of the configuration now.
    """

    before: Mapping[str, int]
    after: Mapping[str, int]
    waits: bool
    digest: str


def set_limits(
    client: Api,
    guest: GuestRef,
    target: str,
    wanted: Mapping[str, int | None],
    *,
    digest: str = "",
) -> LimitsSet:
    """Sets I/O limits of one drive; whatever else its drive string says stays. A running guest follows at once.

    Args:
        target: such as ``scsi0``.
        wanted: by our names, bytes and operations a second; 0 or ``None`` for no limit; what is not named stays.
        digest: of the configuration that this was planned for; empty where any will do.

    Raises:
        RefusedError: ``guest_locked``, ``stale_plan``, ``invalid``.
        HostError: Proxmox VE refuses it, or says something else afterwards.
    """
    limits.check(wanted)
    config = read_config(client, guest)
    if guest.kind != VM or not is_drive(target, VM) or target.startswith(("unused", "vmstate", "efidisk", "tpmstate")):
        raise RefusedError(
            INVALID, _("{target} of {guest} is not a drive with I/O limits.").format(target=target, guest=guest.name)
        )
    config.check_free(digest)
    drive = config.drive(target)
    before = limits.of(drive)
    made = limits.changed(drive, wanted)
    after = config
    if made != drive:
        after = set_config(client, config, {target: str(made)})
    found = limits.of(after.drive(target))
    if found != limits.of(made):
        raise HostError(
            _(
                "Proxmox VE accepted the limits of {target} of {guest}, but now reports {found} instead of {wanted}."
            ).format(target=target, guest=guest.name, found=_shown(found), wanted=_shown(limits.of(made)))
        )
    holds = limits.of(Drive.parse(after.now[target]))
    return LimitsSet(before, found, holds != found, after.digest)


def _shown(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in found.items()) or "none"


def repoint(client: Api, guest: GuestRef, old: str, new: str, *, digest: str = "") -> tuple[str, ...]:
    """Makes a VM's configuration name a volume by another id of the same file.

    For a linked clone that was flattened: ``store:101/base-101-disk-0.qcow2/102/vm-102-disk-0.qcow2`` has become
    ``store:102/vm-102-disk-0.qcow2``. Proxmox VE takes that for another volume and keeps the old id as ``unusedN``,
    which names the same file; that line is given the new id, too, whereupon Proxmox VE drops it as one in use. Whoever
    was cut off in between calls this again.

    Args:
        old: the id that the configuration has.
        new: of the same file (:func:`volumes.own_id`).
        digest: of the configuration that this was planned for; empty where any will do.

    Returns:
        ``unusedN`` lines that still have the old name, and so name the same file; empty where all is well.

    Raises:
        RefusedError: ``guest_locked``, ``stale_plan``; ``has_internal_snapshots``: a snapshot names
            the volume as well, and the API cannot change that; ``invalid``: these are not one file.
        HostError: Proxmox VE refuses it, or says something else afterwards.
    """
    if guest.kind != VM or volumes.own_id(old) != volumes.own_id(new):
        raise RefusedError(
            INVALID, _("{old} and {new} are not two names of the same file of a VM.").format(old=old, new=new)
        )
    config = read_config(client, guest)
    config.check_free(digest)
    targets = naming(config, old)
    if targets:
        for name in snapshots_with(client, config, old):
            sentence = _("The snapshot {name} of {guest} uses {volume}. Delete the snapshot first.")
            refusal = sentence.format(name=name, guest=guest.name, volume=old)
            raise RefusedError("has_internal_snapshots", refusal)
        config = set_config(client, config, {one: str(config.drive(one).with_volume(new)) for one in targets})
        if naming(config, old) or any(volume_of(config.now.get(one, "")) != new for one in targets):
            raise HostError(
                _(
                    "Proxmox VE accepted the new name of {targets} of {guest}, but does not report it. Check "
                    "that the guest is shut down."
                ).format(targets=", ".join(targets), guest=guest.name)
            )
    elif not naming(config, new):
        raise RefusedError(
            "stale_plan",
            _("{guest} no longer has a drive {old}. Scan the host, then try again.").format(guest=guest.name, old=old),
        )
    for line in _unused(config, old):
        config = set_config(client, config, {line: new})
    return _unused(config, old)


def naming(config: Config, volume: str) -> tuple[str, ...]:
    """The drives that name a volume, now or from the next start; those that are not used are left out."""
    return tuple(
        key
        for key in sorted({*config.now, *config.next})
        if is_drive(key, VM) and not key.startswith(("unused", "vmstate"))
        if volume in (volume_of(config.now.get(key, "")), volume_of(config.next.get(key, "")))
    )


def _unused(config: Config, volume: str) -> tuple[str, ...]:
    return tuple(key for key in sorted(config.now) if key.startswith("unused") and volume_of(config.now[key]) == volume)


def snapshots_with(client: Api, config: Config, volume: str) -> Iterator[str]:
    """The snapshots that name a volume; raises HostError."""
    for name, values in read_snapshots(client, config):
        if any(volume_of(value) == volume for value in values.values()):
            yield name
