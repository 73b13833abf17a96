"""Linked clones of Proxmox VE that are flattened: their VMs name the image by another volume id then.

``store:100/base-100-disk-0.qcow2/101/vm-101-disk-0.qcow2`` and ``store:101/vm-101-disk-0.qcow2`` are one file; the
first id says that it stands on a base. The configuration is changed right before the swap, by compare-and-set on what
it was when the work began, so that what Proxmox VE refuses leaves image and configuration as they were. Wherever that
is cut off, either id leads to the file, and the file is whole: an overlay on its base, or flat. What the ids are to be
in the end, the job owes (``repoint_due``, :mod:`images.rewrite.repointing`).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from django.utils.translation import gettext as _

from images.models import Image
from images.rewrite import neighbours
from storage_admin.accounts.models import SYSTEM, audit
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts import asking, transport
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox import changes, hidden, registration
from storage_admin.hosts.proxmox.client import Api
from storage_admin.hosts.proxmox.config import PATHS, Config, GuestRef, read_config, read_snapshots
from storage_admin.hosts.proxmox.drives import VM, Drive
from storage_admin.hosts.proxmox.errors import NotThereError
from storage_admin.hosts.proxmox.permissions import require
from storage_admin.hosts.proxmox.pvesh import Pvesh
from storage_admin.hosts.proxmox.volumes import own_id
from storage_admin.jobs import claims
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Refusal

#: What stands in the way now and goes by itself.
PASSING = frozenset({"guest_locked", "busy", "guest_running"})


@dataclass(frozen=True)
class Naming:
    """A VM that names an image by the id of a linked clone.

    Args:
        node: that has it.
        old, new: the ids before and after.
        digest: of its configuration when the work began.
    """

    uid: str
    name: str
    node: str
    old: str
    new: str
    digest: str = ""


def is_linked(disk: GuestDisk) -> bool:
    """Whether a definition names the disk by the id of a linked clone."""
    return bool(disk.volume) and own_id(disk.volume) != disk.volume


def refusals(image: Image, *, down_to_base: bool) -> list[Refusal]:
    """What stands against flattening an image that VMs name so, as far as the database knows.

    Args:
        down_to_base: it is to stand on another base then.
    """
    found = []
    for disk in _linked(image):
        guest, code = disk.guest, "guest_records_chain"
        if guest.kind != Guest.Kind.VM or disk.only_in:
            first = _(
                "Delete that snapshot or revert that change first, or move the disk to another storage, which makes a "
                "full copy."
            )
            told = (
                _("The image is a linked clone that section {section} of {guest} uses ({volume}).")
                if disk.only_in
                else _("The image is a linked clone that {guest} uses ({volume}).")
            )
            told = f"{told} {first}"
        elif disk.target.startswith("unused"):
            told = _(
                "The image is {target} of {guest}, not a drive. Attach it to a bus (qm set {uid} --scsi1 {volume}), "
                "then flatten it. Or remove it from the VM."
            )
        elif disk.target in guest.waiting:
            code = "stale_plan"
            told = _(
                "A pending change of {target} of {guest} takes effect at the next start. Start the guest or revert the "
                "change, then scan the host."
            )
        elif disk.volume.rpartition("/")[2].startswith("base-"):
            code, told = "immutable", _("The image is a disk of {guest}, a template. Proxmox VE protects its disks.")
        elif down_to_base:
            told = _(
                "The image is a linked clone that {guest} uses. It can only be flattened completely: leave down_to out."
            )
        elif not _has_a_way(image.host):
            told = _(
                "The image is a linked clone that {guest} uses ({volume}), and the configuration of the guest cannot "
                "be changed from here. Give {host} an API token, or an SSH account that is root."
            )
        else:
            continue
        sentence = told.format(
            section=disk.only_in,
            guest=guest.name_for(image.host_id),
            target=disk.target,
            volume=disk.volume,
            uid=guest.uid,
            host=image.host.name,
        )
        found.append(Refusal(code, sentence))
    return found


def against_replacing(image: Image) -> list[Refusal]:
    """What stands against putting a whole copy in the image's place by another way than flattening."""
    return [
        Refusal(
            "guest_records_chain",
            _("The image is a linked clone that {guest} uses ({volume}). Flatten the image first.").format(
                guest=disk.guest.name_for(image.host_id), volume=disk.volume
            ),
        )
        for disk in _linked(image)[:1]
    ]


def warnings(image: Image) -> list[str]:
    """What happens to the configurations."""
    return [
        _(
            "The configuration of {guest} will name the disk {target} as {volume}. An undo restores the old name."
        ).format(guest=disk.guest.name_for(image.host_id), target=disk.target, volume=own_id(disk.volume))
        for disk in _linked(image)
    ]


def commands(image: Image) -> list[list[str]]:
    """What is done to the configurations, as an admin would type it."""
    return [["qm", "set", disk.guest.uid, f"--{disk.target}", f"{own_id(disk.volume)},…"] for disk in _linked(image)]


def _linked(image: Image) -> list[GuestDisk]:
    return [disk for disk in neighbours.of(image).own_disks if is_linked(disk)]


def _has_a_way(host: Host) -> bool:
    by_command = transport.is_here(host) or host.transport in (Host.Transport.SSH, Host.Transport.API_SSH)
    return bool(host.token_id) or by_command


@contextlib.contextmanager
def _api(host: Host) -> Iterator[Api]:
    """The API of a host's node: by its token, else by the command that root has there."""
    if host.token_id:
        with registration.client(host) as client:
            yield client
    else:
        yield Pvesh(transport.shell(host), host.name)


def _node(host: Host) -> str:
    return host.node or str(asking.ask(host, "pve", {}).get("node") or "")


def check(job: Job, image: Image) -> None:
    """Looks at the configurations as they are: before the work, when they are kept with the job, and again after it.

    Raises:
        RefusedError: ``guest_locked``, ``guest_running``, ``has_internal_snapshots``, ``hidden_lines``;
            ``stale_plan``: a configuration was changed since the work began.
        HostError: it cannot be asked, or a right is missing.
    """
    linked = _linked(image)
    if not linked:
        return
    begun = {one["uid"]: one for one in job.kept.get("volumes", [])}
    with _api(image.host) as api:
        node = _node(image.host)
        found = [_looked_at(api, node, disk, begun.get(disk.guest.uid)) for disk in linked]
        if image.host.token_id:
            for one in found:
                require(api, "flatten", vmid=int(one.uid))
    if not begun:
        kept = {"volumes": [asdict(one) for one in found]}
        if not job.ours().update(kept=kept):
            raise RefusedError("stale_plan", _("Another worker has taken over this job."))
        job.kept = kept


def _looked_at(api: Api, node: str, disk: GuestDisk, begun: dict[str, Any] | None) -> Naming:
    guest = disk.guest
    naming = Naming(guest.uid, guest.name, node, disk.volume, own_id(disk.volume))
    try:
        config = read_config(api, _ref(naming))
    except NotThereError as error:
        told = _("{guest} is not on {node}. Flatten its disk on the node where the guest is. {detail}")
        raise RefusedError(
            "guest_records_chain", told.format(guest=guest.name, node=node, detail=error.detail)
        ) from error
    config.check_free(begun["digest"] if begun else "")
    hidden.refuse_dropping(guest.host, api, config, guest.name)
    targets = changes.naming(config, naming.old)
    if not targets:
        raise RefusedError(
            "stale_plan",
            _("{guest} no longer uses {old}. Scan the host, then try again.").format(guest=guest.name, old=naming.old),
        )
    for target in targets:
        config.drive(target)  # that nothing waits to take its place
    _check_off(api, naming)
    for name, values in read_snapshots(api, config):
        if any(_volume(text) in (naming.old, naming.new) for text in values.values()):
            told = _("The snapshot {name} of {guest} uses {old}. Delete the snapshot first.")
            raise RefusedError("has_internal_snapshots", told.format(name=name, guest=guest.name, old=naming.old))
    return Naming(**(asdict(naming) | {"digest": config.digest}))


def _ref(naming: Naming) -> GuestRef:
    return GuestRef(naming.node, int(naming.uid))


def _named(config: Config) -> set[str]:
    return {_volume(text) for values in (config.now, config.next) for text in values.values()}


def _volume(text: str) -> str:
    try:
        return Drive.parse(text).volume
    except ValueError:
        return ""


def _check_off(api: Api, naming: Naming) -> None:
    for row in api.rows("nodes", naming.node, PATHS[VM]):
        if str(row.get("vmid")) == naming.uid and row.get("status") != "stopped":
            told = _("{naming} is running. Shut it down first: its configuration is changed only while it is off.")
            raise RefusedError("guest_running", told.format(naming=naming.name))


def lead_to_the_flat_one(job: Job) -> None:
    """Changes the configurations, right before the swap; they have to be what they were when the work began.

    Raises:
        RefusedError: as :func:`check`.
        HostError: Proxmox VE refuses it.
    """
    if not job.kept.get("volumes"):
        return
    if not job.ours().update(repoint_due=True):
        raise RefusedError("stale_plan", _("Another worker has taken over this job."))
    led = job.kept.setdefault("led", [])
    with _api(job.host) as api:
        for naming in _kept(job):
            # Where the database went away after it was changed, it is not any more what it was when the work began.
            digest = "" if naming.uid in led else naming.digest
            led.append(naming.uid)
            _put(job, api, naming, naming.new, digest=digest)


def put(job: Job, *, flat: bool) -> None:
    """Makes the configurations name the image as it is by now. Those that name it by neither id are left alone.

    Raises:
        RefusedError: one of :data:`PASSING`, or something else that somebody has to look at.
        HostError: it cannot be asked, or refuses.
    """
    refused: list[RefusedError] = []
    with _api(job.host) as api:
        for naming in _kept(job):
            try:
                _put(job, api, naming, naming.new if flat else naming.old)
            except NotThereError:
                claims.log(job, f"{naming.name} is no longer on {naming.node}: its configuration was not changed")
            except RefusedError as error:  # the others are not kept from what is due to them
                refused.append(error)
    if refused:
        raise min(refused, key=lambda one: one.code not in PASSING)


def _kept(job: Job) -> list[Naming]:
    # Jobs of earlier versions kept more.
    return [Naming(**{name: one[name] for name in Naming.__dataclass_fields__}) for one in job.kept["volumes"]]


def _put(job: Job, api: Api, naming: Naming, volume: str, *, digest: str = "") -> None:
    other = naming.old if volume == naming.new else naming.new
    config = read_config(api, _ref(naming))
    if other not in _named(config):
        if digest and digest != config.digest:
            told = _("The configuration of {naming} was changed while the job ran. Scan the host, then try again.")
            raise RefusedError("stale_plan", told.format(naming=naming.name))
        return
    _check_off(api, naming)
    if not digest:  # else it is the configuration that was looked at
        hidden.refuse_dropping(job.host, api, config, naming.name)
    left = changes.repoint(api, _ref(naming), other, volume, digest=digest or config.digest)
    if left:
        told = _("{left} of {naming} still uses {other}, the other id of the same file.")
        raise HostError(told.format(left=", ".join(left), naming=naming.name, other=other))
    what = f"{naming.name} names {volume} now"
    claims.log(job, f"Proxmox VE: {what}")
    audit(SYSTEM, "volume renamed", naming.name, after={"job": job.pk, "before": other, "now": volume})
