"""A guest's configuration by the API: what holds now and what waits, both from one state of its file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import INVALID, RefusedError
from storage_admin.hosts.proxmox.client import Api, Params
from storage_admin.hosts.proxmox.drives import CONTAINER, VM, Drive
from storage_admin.hosts.proxmox.errors import changed_meanwhile, guest_locked

#: What the API calls the kinds of guests.
PATHS = {VM: "qemu", CONTAINER: "lxc"}
#: How often a configuration is read that changes while it is read.
_TRIES = 4


@dataclass(frozen=True)
class GuestRef:
    """Which guest.

    Args:
        kind: ``vm`` or ``container``.
    """

    node: str
    vmid: int
    kind: str = VM

    @property
    def path(self) -> tuple[str | int, ...]:
        """Of its calls."""
        return ("nodes", self.node, PATHS[self.kind], self.vmid)

    @property
    def name(self) -> str:
        """For a sentence."""
        return f"{'VM' if self.kind == VM else 'Container'} {self.vmid}"

    @property
    def tool(self) -> str:
        """What changes it on its node's command line."""
        return "qm" if self.kind == VM else "pct"

    @property
    def file(self) -> str:
        """Its configuration, below its node's folder."""
        return f"{'qemu-server' if self.kind == VM else 'lxc'}/{self.vmid}.conf"


@dataclass(frozen=True)
class Config:
    """A guest's configuration at one moment.

    Args:
        now: what holds.
        next: what is to hold from the next start; the same where nothing waits.
        digest: of the file that both come from.
        raw_lines: what a container passes to LXC as it is, and may name a file.
    """

    guest: GuestRef
    now: Mapping[str, str]
    next: Mapping[str, str]
    digest: str
    raw_lines: tuple[str, ...] = ()

    def drive(self, target: str) -> Drive:
        """A drive as it is to be from the next start.

        Raises:
            RefusedError: ``invalid``: there is none, or it cannot be read; ``stale_plan``: another volume waits to take
                its place.
        """
        if target not in self.now and target not in self.next:
            raise RefusedError(
                INVALID, _("{guest} has no drive {target}.").format(guest=self.guest.name, target=target)
            )
        if target not in self.now or target not in self.next:
            raise self._waits(target)
        try:
            drive, present = Drive.parse(self.next[target]), Drive.parse(self.now[target])
        except ValueError as error:
            sentence = _("The drive {target} of {guest} cannot be read: {error}.")
            raise RefusedError(INVALID, sentence.format(target=target, guest=self.guest.name, error=error)) from error
        if drive.volume != present.volume:
            raise self._waits(target)
        return drive

    def _waits(self, target: str) -> RefusedError:
        return RefusedError(
            "stale_plan",
            _(
                "A change to the drive {target} of {guest} is pending until its next start. Start the guest, or "
                "revert the change, then try again."
            ).format(target=target, guest=self.guest.name),
        )

    def check_free(self, digest: str = "") -> None:
        """Lets a change go on.

        Args:
            digest: of the configuration that the change was planned for; empty where any will do.

        Raises:
            RefusedError: ``guest_locked``, ``stale_plan``.
        """
        if self.now.get("lock"):
            raise guest_locked(self.guest.name, self.now["lock"])
        if digest and digest != self.digest:
            raise changed_meanwhile()


def read_config(client: Api, guest: GuestRef) -> Config:
    """A guest's configuration.

    Raises:
        RefusedError: ``stale_plan``: it changes faster than it can be read.
        HostError: as :meth:`Api.get`.
    """
    for __ in range(_TRIES):
        now = client.fields(*guest.path, "config", params={"current": 1})
        following = client.fields(*guest.path, "config")
        if now.get("digest") == following.get("digest"):
            return Config(guest, _texts(now), _texts(following), str(now.get("digest") or ""), tuple(_raw_lines(now)))
    raise changed_meanwhile()


def set_config(client: Api, config: Config, changes: Mapping[str, str]) -> Config:
    """Sets some keys, provided that the configuration is still as it was read.

    Args:
        config: as it was read.
        changes: new values by key.

    Returns:
        The configuration, read anew.

    Raises:
        RefusedError: ``guest_locked``, ``stale_plan``.
        HostError: Proxmox VE refuses the change, or cannot be asked any more: then look again what holds.
    """
    config.check_free()
    client.put(*config.guest.path, "config", params={**changes, "digest": config.digest})
    return read_config(client, config.guest)


def unset_config(client: Api, config: Config, key: str) -> Config:
    """Takes a key away although the guest is locked, provided that the configuration is as it was read: root's alone.

    Returns and raises as :func:`set_config`.
    """
    params: Params = {"delete": key, "skiplock": True, "digest": config.digest}
    client.put(*config.guest.path, "config", params=params)
    return read_config(client, config.guest)


def read_snapshots(client: Api, config: Config) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The name and the values of each snapshot.

    Raises:
        HostError: as :meth:`Api.get`.
    """
    guest = config.guest
    for row in client.rows(*guest.path, "snapshot"):
        name = str(row.get("name"))
        if name != "current":
            yield name, _texts(client.fields(*guest.path, "config", params={"snapshot": name}))


def _texts(config: Mapping[str, Any]) -> dict[str, str]:
    plain = {key: str(value) for key, value in config.items() if isinstance(value, str | int | float)}
    return plain | dict(_of_lxc(config))


def _of_lxc(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a container passes to LXC as it is; a key may be there several times."""
    for entry in config.get("lxc") or ():
        if isinstance(entry, list) and len(entry) == 2:
            yield str(entry[0]), str(entry[1])


def _raw_lines(config: Mapping[str, Any]) -> Iterator[str]:
    return (f"{key}: {value}" for key, value in _of_lxc(config) if "/" in value)
