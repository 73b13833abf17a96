"""What stands against setting an image aside, restoring it or deleting it, as far as the database knows."""

from datetime import UTC, datetime, timedelta

from django.utils import timezone
from django.utils.translation import gettext as _

from images.models import Image
from images.rewrite import mount, neighbours, record, refusals, volumes
from storage_admin.guests.models import GuestDisk
from storage_admin.hosts.names import path_key
from storage_admin.jobs.models import Elapsed
from storage_admin.jobs.plan_and_progress import Refusal

#: What was changed so lately may be about to be used.
YOUNG = timedelta(hours=1)


def setting_aside(image: Image) -> list[Refusal]:
    """What stands against setting an image aside, the most fundamental first."""
    return [*_host(image), *_state(image), *_needed(image), *_content(image)]


def restoring(image: Image) -> list[Refusal]:
    """What stands against restoring an image."""
    return [*_host(image), *_not_aside(image)]


def deleting(image: Image) -> list[Refusal]:
    """What stands against deleting an image: also what has come to need it since it was set aside."""
    return [*_host(image), *(_not_aside(image) or [*_grace(image), *_missed(image)])]


def _host(image: Image) -> list[Refusal]:
    kinds = {*refusals.FOLDERS, image.pool.kind if image.volume else ""}
    return [
        *refusals.reachable(image.host), *refusals.for_pool(image.pool, kinds), *mount.against_replacing(image.pool),
        *volumes.seen_elsewhere(image),
    ]  # fmt: skip


def _state(image: Image) -> list[Refusal]:
    match image.state:
        case Image.State.SET_ASIDE:
            return [Refusal("set_aside", _("{image} is already set aside.").format(image=image.name))]
        case Image.State.MISSING | Image.State.DELETED:
            return [Refusal("stale_plan", _("The image is no longer at its path. Scan the host."))]
        case Image.State.MODIFYING:
            return [Refusal("busy", image.state_detail or _("A job is rewriting the image."))]
    return []


def _needed(image: Image) -> list[Refusal]:
    if image.state in Image.NOT_THERE or image.orphan:
        return []
    because = " ".join(map(str, image.orphan_evidence))
    if image.orphan is None:
        because = because or image.pool.owners_unknown or image.host.owners_unknown
        told = _("{why} The image cannot be set aside until its users are known.")
        why = because or _("The image has not been scanned yet.")
        return [Refusal("guests_unknown", told.format(why=why))]
    near = neighbours.of(image)
    user = _("something uses it.")
    if near.guests:
        user = _("Guest {name} uses it.").format(name=near.guests[0].name)
    elif near.above:
        return _overlays(image)
    elif image.in_use:
        told = _("The image is in use ({why}). Stop the program that uses it, then try again.")
        return [Refusal("image_in_use", told.format(why=image.in_use_detail))]
    told = _("{image} is not an orphan: {because}")
    return [Refusal("not_orphan", told.format(image=image.name, because=because or user))]


def _overlays(image: Image) -> list[Refusal]:
    told = _("{name} uses {image} as its backing file.")
    above = neighbours.of(image).above
    return [Refusal("has_overlays", told.format(name=above[0].name, image=image.name))] if above else []


def _content(image: Image) -> list[Refusal]:
    found = []
    if image.from_header("data_file"):
        told = _("The data of the image is in a separate data file, which would stay behind.")
        found.append(Refusal("external_data_file", told))
    if image.from_header("extents"):
        told = _("The image consists of several files. The other files would stay behind.")
        found.append(Refusal("unsupported_subformat", told))
    if image.nlink > 1:
        told = _("The file has {nlink} names (hard links). Its space is freed only when all of them are removed.")
        found.append(Refusal("hard_linked", told.format(nlink=image.nlink)))
    return found


def _not_aside(image: Image) -> list[Refusal]:
    if image.state == Image.State.SET_ASIDE and image.aside_job_id is not None:
        return []
    return [Refusal("aside_missing", _("{image} is not set aside.").format(image=image.name))]


def _grace(image: Image) -> list[Refusal]:
    if step := Elapsed.clock_jump():
        sentence = _(
            "The dashboard's clock was changed by {step:+,.0f} s, so it is not known whether the grace period is over."
        ).format(step=step)
        told = _("{sentence} Correct the clock, then delete {image}.")
        return [Refusal("clock_unsure", told.format(sentence=sentence, image=image.name))]
    if image.aside_until is None or image.aside_until <= timezone.now():
        return []
    until = f"{image.aside_until:%Y-%m-%d %H:%M} UTC"
    told = _("{image} cannot be deleted yet. Its grace period ends at {until}; until then it can be restored.")
    return [Refusal("grace_period", told.format(image=image.name, until=until))]


def _missed(image: Image) -> list[Refusal]:
    """Who has named it, by the name that it had or the one that it has, since it was set aside."""
    aside = f".sa-{image.aside_job.uid}.aside".encode() if image.aside_job is not None else b""
    keys = [path_key(bytes(image.path_bytes)), path_key(record.sibling(image, aside))]
    named = Image.objects.filter(host=image.host_id, backing_key__in=keys)
    overlay = named.exclude(state__in=Image.NOT_THERE).first()
    if overlay is not None:
        told = _("{overlay} needs the image as its backing file. Restore the image.")
        return [Refusal("has_overlays", told.format(overlay=overlay.name))]
    disk = GuestDisk.objects.filter(guest__host=image.host_id, path_key__in=keys).select_related("guest").first()
    if disk is not None:
        told = _("Guest {guest} uses the image again. Restore the image.")
        return [Refusal("not_orphan", told.format(guest=disk.guest.name))]
    return _overlays(image)


def warnings(image: Image) -> list[str]:
    """What an admin should know before setting an image aside."""
    found = []
    changed = changed_at(image)
    if changed is not None and timezone.now() - changed < YOUNG:
        told = _("The image was last changed at {changed:%Y-%m-%d %H:%M} UTC. Somebody may be about to use it.")
        found.append(told.format(changed=changed))
    if neighbours.of(image).has_undo_copy:
        told = _("An earlier job has an undo copy of this image. It cannot be restored while the image is set aside.")
        found.append(told)
    return found


def changed_at(image: Image) -> datetime | None:
    """When its content was last changed; ``None`` where the file claims what is no time."""
    seconds = image.mtime_ns / 1e9
    return datetime.fromtimestamp(seconds, tz=UTC) if 0 < seconds < 32_503_680_000 else None
