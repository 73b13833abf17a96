"""What is asked of libvirt on a host: states, a start, another file for a guest's disk, limits of its I/O."""

import base64
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError
from storage_admin.errors import InvalidError
from storage_admin.hosts.libvirt.disks import Edit, Edited
from storage_admin.hosts.libvirt.io import IoOutcome, checked, outcome
from storage_admin.hosts.libvirt.process import ask
from storage_admin.hosts.libvirt.relay import refuse_to_write, why_read_only
from storage_admin.hosts.libvirt.uri import reached
from storage_admin.hosts.live_facts import StoppedGuest
from storage_admin.hosts.models import Host

#: Seconds until a question is given up, until a start is, until a definition is, and until limits are.
STATES_TIMEOUT, START_TIMEOUT, DEFINE_TIMEOUT, TUNE_TIMEOUT = 20.0, 120.0, 20.0, 30.0


def states(host: Host) -> dict[str, str]:
    """The state of every domain on a host, by its uid, in the words of ``libvirt_domains.STATES``.

    Raises:
        HostError: libvirt does not answer; the argument says why.
    """
    answer = _asked(host, "states", STATES_TIMEOUT)
    return {str(uid): str(state) for uid, state in answer["states"].items()}


def stopped(host: Host) -> list[StoppedGuest]:
    """The domains on a host that QEMU has paused because of an I/O error.

    Raises:
        HostError: as :func:`states`.
    """
    answer = _asked(host, "states", STATES_TIMEOUT)
    return [StoppedGuest("domain", one["uid"], one["name"], one["disks"]) for one in answer["stopped"]]


def start(host: Host, uid: str) -> str:
    """Starts a domain by its uid.

    Returns:
        ``started``, or ``running already``.

    Raises:
        HostError: it was not started, or not within the time limit; the argument says why.
    """
    if why := why_read_only(host):
        raise HostError(why)
    return str(_asked(host, "start", START_TIMEOUT, {"uid": uid})["outcome"])


def repoint(host: Host, uid: str, edits: list[Edit], *, write: bool, forward: bool = True) -> list[Edited]:
    """Leads disks of a domain that is off to other files, in its definition.

    Args:
        write: define it; else only look whether it could be.
        forward: refuse where libvirt keeps something that names the old files, such as snapshots.

    Returns:
        The disks that were, or would be, changed: those that lead to their new files already are not among them.

    Raises:
        RefusedError: ``stale_plan``: it runs, or its definition is not what the edits say; ``tool_missing``: libvirt
            there can only be read.
        HostError: libvirt does not answer, or refuses it; the argument says why.
    """
    request = {"uid": uid, "edits": [asdict(edit) for edit in edits], "write": write, "forward": forward}
    refused = _("The guest's definition cannot be changed: {contradiction}.")
    answer = _changed(host, "repoint", DEFINE_TIMEOUT, request, refused)
    return [Edited(**disk) for disk in answer["disks"]]


def set_io(
    host: Host, uid: str, *, weight: int | None = None, limits: dict[str, dict[str, int]] | None = None,
    live: bool = True, config: bool = True,
) -> IoOutcome:  # fmt: skip
    """Sets what a domain may take of the disks, and reads it again.

    Args:
        weight: its share beside other guests, 1 to 1000; ``None`` leaves it as it is. It counts where the host's I/O
            scheduler weighs (BFQ).
        limits: by disk, of :data:`limits.SETTABLE`, in bytes or operations a second; 0 for none.
        live, config: where: in the running domain, if it runs, and in its definition.

    Raises:
        InvalidError: a value is out of range; nothing was started.
        RefusedError: ``stale_plan``: the domain has no such disk, or does not run, or its host cannot weigh; nothing
            was set. ``tool_missing``: libvirt there can only be read.
        HostError: libvirt does not answer, or does not know it.
    """
    weight, limits = checked(weight, limits)
    if not live and not config:
        raise InvalidError(
            _("Choose where to apply the settings."), {"live": _("Choose the running guest, its definition, or both.")}
        )
    request = {"uid": uid, "weight": weight, "limits": limits, "live": live, "config": config}
    answer = _changed(host, "tune", TUNE_TIMEOUT, request, _("Nothing was set: {contradiction}."))
    return outcome(answer, weight, limits, host.capabilities.get("weighing_disks"))


@dataclass(frozen=True)
class DiskSettings:
    """How a disk is driven, by the names of :data:`disk_settings.NAMES`, and its bus; empty for what is not said.

    Args:
        before, after: in the definition.
        live: in the running guest; ``None`` where it does not run.
        disk: what its target is called afterwards.
        boots_another: whether the firmware would start from another disk then.
        kept: whether the domain has snapshots, or its memory is saved: these know the disk by its name.
        threads: the highest number of an I/O thread that a disk of the domain has.
    """

    before: dict[str, str]
    after: dict[str, str]
    live: dict[str, str] | None
    disk: str
    kept: bool
    boots_another: bool
    threads: int

    @property
    def thread(self) -> str:
        """The number of the disk's own I/O thread: the one that it has, else the next one."""
        return self.before["iothread"] or str(self.threads + 1)


def disk_settings(host: Host, uid: str, disk: str, wanted: dict[str, str], *, write: bool) -> DiskSettings:
    """Reads, and sets, how a disk of a domain is driven, in its definition.

    Args:
        wanted: settings by name, empty for what the definition shall not say.
        write: define it; else only look what would be.

    Raises:
        RefusedError: ``stale_plan``: it has no such disk; ``tool_missing``: libvirt there can only be read.
        HostError: libvirt does not answer, or refuses it.
    """
    request = {"uid": uid, "disk": disk, "set": wanted, "write": write}
    refused = _("Nothing was set: {contradiction}.")
    return DiskSettings(**_changed(host, "disk_settings", DEFINE_TIMEOUT, request, refused))


@dataclass(frozen=True)
class DiskSecret:
    """A secret by which libvirt opens an image; ``value`` is ``None`` where it does not tell it.

    Args:
        left: why it was not given another value, where that was asked for.
    """

    guest: str
    uuid: str
    value: str | None = field(repr=False)
    left: str = ""


def secrets(
    host: Host, path: str, *, set_to: str | None = None, was: str | None = None, define: bool = False
) -> list[DiskSecret]:
    """The secrets that guests' disks on an image name.

    Args:
        set_to: a passphrase that they get, unless another disk names them as well.
        was: the one that they have to have for that.
        define: make one for the image where no guest names any.

    Raises:
        RefusedError: ``tool_missing``: libvirt there can only be read.
        HostError: libvirt does not answer, or refuses it.
    """
    refuse_to_write(host)
    request = {"path": path, "set": _coded(set_to), "was": _coded(was), "define": define}
    answer = _asked(host, "disk_secrets", DEFINE_TIMEOUT, request)
    return [DiskSecret(**one | {"value": _text(one["value"])}) for one in answer["secrets"]]


def _coded(passphrase: str | None) -> str | None:
    return None if passphrase is None else base64.b64encode(passphrase.encode()).decode("ascii")


def _text(value: str | None) -> str | None:
    """A secret's value; none that is no text, as no passphrase can be."""
    try:
        return None if value is None else base64.b64decode(value).decode()
    except UnicodeDecodeError:
        return None


def _changed(host: Host, program: str, seconds: float, request: dict[str, Any], refused: str) -> dict[str, Any]:
    """What a program answers that changes a definition, or a domain, in the first half of its time."""
    refuse_to_write(host)
    return _asked(host, program, seconds, request | {"until": time.time() + seconds / 2}, refused)


def _asked(
    host: Host, program: str, seconds: float, request: dict[str, Any] | None = None, refused: str = "{contradiction}."
) -> dict[str, Any]:
    with reached(host) as uri:
        return ask(uri, program, seconds, request, refused=refused)
