"""What the API does with drives: moves them, enlarges them, and has them trimmed from inside their guest."""

from typing import Any

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.hosts.live_facts import Trimmed, trimmed
from storage_admin.hosts.proxmox import drives, volumes
from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.config import Config, GuestRef
from storage_admin.hosts.proxmox.drives import CONTAINER, VM, Drive
from storage_admin.hosts.proxmox.errors import RIGHT_MISSING, ApiError, NoAnswerError, NotThereError
from storage_admin.hosts.proxmox.tasks import node_of

FORMATS = ("raw", "qcow2", "vmdk")


def move_disk(
    client: Client,
    config: Config,
    target: str,
    storage: str,
    *,
    format: str = "",  # noqa: A002 (the field's word)
    delete_source: bool = False,
    bandwidth_bytes_sec: int | None = None,
) -> str:
    """Begins to move a drive to another storage; qemu copies where the guest runs.

    Args:
        config: as it was read.
        target: such as ``scsi0`` or ``rootfs``.
        format: of the new image, where the storage knows several; the same where empty.
        delete_source: else the old volume stays, as ``unusedN``.
        bandwidth_bytes_sec: at most; ``None`` for what the cluster's settings say.

    Returns:
        The task's id, for :func:`~storage_admin.hosts.proxmox.tasks.follow`.

    Raises:
        RefusedError: ``guest_locked``, ``stale_plan``; ``invalid``: nothing would move.
        HostError: as :meth:`Api.get`.
    """
    config.check_free()
    check_move(config, target, storage, format)
    is_vm = config.guest.kind == VM
    upid = client.post(
        *config.guest.path,
        "move_disk" if is_vm else "move_volume",
        params={
            "disk" if is_vm else "volume": target,
            "storage": storage,
            "format": format or None,
            "delete": delete_source,
            "digest": config.digest,
            # KiB a second; 0 would mean without any limit.
            "bwlimit": None if bandwidth_bytes_sec is None else max(1, bandwidth_bytes_sec // 1024),
        },
    )
    return started(client, upid)


def check_move(config: Config, target: str, storage: str, format: str) -> Drive:  # noqa: A002 (the field's word)
    """The drive that is to move; raises RefusedError where nothing would, as ``right_missing`` where it is root's."""
    drive = config.drive(target)
    _refuse_path(config, target, drive)
    if format and (format not in FORMATS or config.guest.kind == CONTAINER):
        sentence = _(
            "Choose one of the formats {formats} to move a VM's drive. A container's drive is moved without a format."
        )
        raise RefusedError(INVALID, sentence.format(formats=", ".join(FORMATS)))
    parts = volumes.split(drive.volume)
    if parts is None or drive.is_cdrom:
        raise RefusedError(
            INVALID,
            _("{target} of {guest} is not a volume of a storage.").format(target=target, guest=config.guest.name),
        )
    if parts[0] == storage and (not format or drive.volume.endswith("." + format)):
        sentence = _("{target} of {guest} is already in {storage}, in that format.")
        raise RefusedError(INVALID, sentence.format(target=target, guest=config.guest.name, storage=storage))
    return drive


def _refuse_path(config: Config, target: str, drive: Drive) -> None:
    """A drive that is a path, not a volume of a storage, is root@pam's alone: no token may name it."""
    if drive.volume.startswith("/") and not drive.is_cdrom:
        raise RefusedError(
            RIGHT_MISSING,
            _(
                "{target} of {guest} is the path {volume}. Proxmox VE lets only root@pam change such a drive, "
                "not an API token. Choose another disk, or make the change on the node by hand."
            ).format(target=target, guest=config.guest.name, volume=drive.volume),
        )


def check_resize(config: Config, target: str, size_bytes: int) -> Drive:
    """The drive that is to be enlarged; raises RefusedError(``invalid``, ``unsupported_subformat``, ``right_missing``)
    where it would not be.
    """
    if config.guest.kind != VM:
        raise RefusedError(INVALID, _("Only disks of VMs can be enlarged through the API."))
    drive = config.drive(target)
    _refuse_path(config, target, drive)
    if drive.is_cdrom or not drives.is_drive(target, VM) or target.startswith("unused"):
        raise RefusedError(
            INVALID,
            _("{target} of {guest} is not a disk that can be enlarged.").format(target=target, guest=config.guest.name),
        )
    if drive.volume.endswith((".vmdk", ".subvol")):
        raise RefusedError(
            "unsupported_subformat",
            _(
                "{target} of {guest} is {volume}. Proxmox VE can enlarge only raw and qcow2 images. Move the "
                "disk to one of these formats first."
            ).format(target=target, guest=config.guest.name, volume=drive.volume),
        )
    noted = drive.size_bytes
    if size_bytes <= 0 or (noted is not None and size_bytes <= noted):
        sentence = _("{target} of {guest} has {noted} bytes. Enter a larger size.")
        raise RefusedError(INVALID, sentence.format(target=target, guest=config.guest.name, noted=noted))
    return drive


def resize(client: Client, config: Config, target: str, size_bytes: int) -> str:
    """Begins to enlarge a VM's drive. Proxmox VE never makes one smaller.

    Args:
        size_bytes: the new size.

    Returns:
        The task's id.

    Raises:
        RefusedError: ``guest_locked``, ``stale_plan``; as :func:`check_resize`.
        HostError: as :meth:`Api.get`.
    """
    config.check_free()
    check_resize(config, target, size_bytes)
    upid = client.put(
        *config.guest.path, "resize", params={"disk": target, "size": str(size_bytes), "digest": config.digest}
    )
    return started(client, upid)


def trim(client: Client, guest: GuestRef) -> tuple[Trimmed, ...]:
    """Has the agent inside a VM trim its filesystems, and waits for it.

    Raises:
        RefusedError: ``invalid``: a container; there ``pct fstrim`` does it on the node.
        HostError: no agent answers there; or it takes longer than Proxmox VE waits, then it goes on inside.
    """
    if guest.kind != VM:
        raise RefusedError(INVALID, _("Containers cannot be trimmed through the API. Run pct fstrim on their node."))
    try:
        answer = client.post(*guest.path, "agent", "fstrim")
    except NoAnswerError as error:
        sentence = _("{detail} The trim continues inside {guest}. Check the image later.")
        raise NoAnswerError(sentence.format(detail=error.detail, guest=guest.name), error.code, error.status) from None
    except ApiError as error:
        if error.status != 500 or isinstance(error, NotThereError):
            raise
        raise HostError(
            _("The guest agent of {guest} cannot be reached. {detail}").format(guest=guest.name, detail=error.detail)
        ) from None
    result = answer.get("result") if isinstance(answer, dict) else None
    try:
        return trimmed(result.get("paths") if isinstance(result, dict) else None)
    except ValueError:
        raise HostError(_("The guest agent of {guest} sent an unexpected response.").format(guest=guest.name)) from None


def started(client: Client, upid: Any) -> str:
    """The id of a task that a call has begun; raises ApiError where it answered something else."""
    if not isinstance(upid, str):
        raise ApiError(_("{who} did not start a task, and sent an unexpected response.").format(who=client.who))
    node_of(upid)
    return upid
