"""Images that are block devices of their hosts, as a scan, a look or a job was told of them last by the host itself.

It stands among what is known of the host (``capabilities``), as :func:`storage_admin.agent.host.nbd.attached` tells it.
"""

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils.translation import gettext as _

from images.models import Image
from storage_admin.accounts.models import Actor
from storage_admin.agent.host import nbd
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts import asking
from storage_admin.hosts.models import Host
from storage_admin.hosts.selectors import hosts_for
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Refusal


@dataclass(frozen=True)
class Attached:
    """A device that an image is attached as, by a job or by somebody else.

    Args:
        device: its name; ``path`` is where it is on the host, ``file`` what its process has open.
        size: in bytes.
        image: ``None`` where no image that is listed is known to be it.
        at, by, job: when, for whom and by which job it was attached; unknown where no job has done it.
    """

    host: Host
    device: str
    path: str
    file: str
    size: int
    writable: bool
    image: Image | None
    at: datetime | None
    by: str
    job: Job | None

    @property
    def ours(self) -> bool:
        """Whether a job has attached it, so that one can detach it."""
        return self.at is not None


def of_image(image: Image) -> Attached | None:
    """The device that a job has attached an image as."""
    found = image.attached
    return _rows([(image.host, found)])[0] if found is not None else None


def listed(actor: Actor) -> list[Attached]:
    """All devices that are connected on the hosts that somebody may see, by host and number."""
    hosts = hosts_for(actor).order_by("name", "pk")
    return _rows([(host, one) for host in hosts for one in host.capabilities.get("attached") or ()])


def _rows(devices: list[tuple[Host, dict[str, Any]]]) -> list[Attached]:
    if not devices:
        return []
    files = Image.objects.filter(host__in={host for host, _told in devices})
    files = files.filter(inode__in=[str(one["inode"]) for _host, one in devices if one["inode"]])
    images = {(image.host_id, image.dev, image.inode): image for image in files}
    jobs = {job.uid: job for job in Job.objects.filter(uid__in=[one["job"] for _host, one in devices if one["job"]])}
    return [
        Attached(
            host=host,
            device=one["device"],
            path=one["path"],
            file=one["file"] or "",
            size=one["size"],
            writable=not one["read_only"],
            image=images.get((host.pk, str(one["dev"]), str(one["inode"]))),
            at=datetime.fromtimestamp(one["at"], UTC) if one["at"] else None,
            by=one["by"] or "",
            job=jobs.get(one["job"]),
        )
        for host, one in devices
    ]


def note(host_id: int, told: dict[str, Any]) -> None:
    """Writes down what an agent tells: ``attached``, and perhaps ``nbd``, as in the answers of its verbs."""
    with transaction.atomic():
        host = Host.objects.select_for_update().get(pk=host_id)
        host.capabilities |= {name: told[name] for name in ("nbd", "attached") if name in told}
        host.capabilities["attached_at"] = time.time()
        host.save(update_fields=["capabilities"])


def as_told_since(host: Host, at: datetime) -> dict[str, Any]:
    """What was noted of a host since then: a scan that began before knows less."""
    if host.capabilities.get("attached_at", 0) < at.timestamp():
        return {}
    return {name: host.capabilities[name] for name in ("nbd", "attached", "attached_at") if name in host.capabilities}


def look(host: Host) -> None:
    """Asks a host what is attached there now; where it does not answer within seconds, what was known stands."""
    if not settings.LOOK_SECONDS or host.by_api_alone:
        return
    try:
        told = asking.ask(host, "attached", {}, seconds=settings.LOOK_SECONDS)
    except (HostError, RefusedError):
        return
    note(host.pk, told)


def against(host: Host) -> list[Refusal]:
    """What keeps a host from attaching images, as far as it was told."""
    told = {
        nbd.MISSING: _(
            "The kernel of {host} has no nbd module, as in containers, so no image can be attached there. Browse the "
            "image's files, trim its filesystems or download it instead."
        ),
        nbd.PARTITIONS: _(
            "The nbd module of {host} was loaded with partitions (max_part), so LVM there would find what is on an "
            "image. Disconnect all nbd devices, then run: rmmod nbd && modprobe nbd max_part=0"
        ),
    }
    code = host.capabilities.get("nbd")
    found = [Refusal(code, told[code].format(host=host.name))] if code in told else []
    if (host.capabilities.get("tools") or {}).get("qemu-nbd") is False:
        missing = _("qemu-nbd is not installed on {host}. Install qemu-utils there, then scan the host.")
        found.append(Refusal("tool_missing", missing.format(host=host.name)))
    return found
