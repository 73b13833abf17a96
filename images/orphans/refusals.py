"""What stands against setting an image aside, restoring it or deleting it, as far as the database knows."""

from datetime import UTC, datetime, timedelta

from django.utils import timezone

from images.models import Image
from images.rewrite import neighbours, refusals
from storage_admin.guests.models import GuestDisk
from storage_admin.hosts.models import Host
from storage_admin.hosts.names import path_key
from storage_admin.jobs import elapsed
from storage_admin.jobs.plans import Refusal

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
    host = image.host
    found = refusals.without_agent(host)
    if host.status == Host.Status.UNREACHABLE:
        found.append(Refusal("host_unreachable", f"{host.name} does not answer: {host.status_detail} Scan it first."))
    return [*found, *refusals.for_pool(image.pool)]


def _state(image: Image) -> list[Refusal]:
    match image.state:
        case Image.State.SET_ASIDE:
            return [Refusal("set_aside", f"{image.name} is already set aside.")]
        case Image.State.MISSING | Image.State.DELETED:
            return [Refusal("stale_plan", "The image is no longer in its place: scan the host again.")]
        case Image.State.MODIFYING:
            return [Refusal("busy", image.state_detail or "A job is rewriting it.")]
    return []


def _needed(image: Image) -> list[Refusal]:
    if image.state in Image.NOT_THERE or image.orphan:
        return []
    because = " ".join(map(str, image.orphan_evidence))
    if image.orphan is None:
        why = because or image.pool.owners_unknown or image.host.owners_unknown or "It was not scanned yet."
        return [Refusal("guests_unknown", f"{why} It is not set aside until it is known who uses it.")]
    near = neighbours.of(image)
    if near.guests:
        named = f"Guest {near.guests[0].name} uses it."
        return [Refusal("not_orphan", f"{image.name} is not an orphan: {because or named}")]
    if near.above:
        return [Refusal("has_overlays", f"{near.above[0].name} uses {image.name} as its backing file.")]
    if image.in_use:
        return [Refusal("image_in_use", f"It is in use ({image.in_use_detail}).")]
    return [Refusal("not_orphan", f"{image.name} is not an orphan: {because or 'something uses it.'}")]


def _content(image: Image) -> list[Refusal]:
    found = []
    if image.from_header("data_file"):
        found.append(Refusal("external_data_file", "Its data is in a separate data file, which would stay behind."))
    if image.from_header("extents"):
        found.append(Refusal("unsupported_subformat", "It consists of several files; the others would stay behind."))
    if image.nlink > 1:
        found.append(
            Refusal("hard_linked", f"The file has {image.nlink} names (hard links): it would be free only without all.")
        )
    return found


def _not_aside(image: Image) -> list[Refusal]:
    if image.state == Image.State.SET_ASIDE and image.aside_job_id is not None:
        return []
    return [Refusal("aside_missing", f"{image.name} is not set aside.")]


def _grace(image: Image) -> list[Refusal]:
    if step := elapsed.jump():
        sentence = f"The dashboard's clock was set by {step:+,.0f} s: it is not known whether the grace period is over."
        return [Refusal("clock_unsure", f"{sentence} Set the clock right, then delete {image.name}.")]
    if image.aside_until is None or image.aside_until <= timezone.now():
        return []
    until = f"{image.aside_until:%Y-%m-%d %H:%M} UTC"
    return [
        Refusal(
            "grace_period",
            f"{image.name} is not deleted: its grace period ends at {until}. Until then it can be restored.",
        )
    ]


def _missed(image: Image) -> list[Refusal]:
    """Who has named it, by the name that it had, since it was set aside."""
    key = path_key(bytes(image.path_bytes))
    overlay = Image.objects.filter(host=image.host_id, backing_key=key).exclude(state__in=Image.NOT_THERE).first()
    if overlay is not None:
        return [Refusal("has_overlays", f"{overlay.name} misses it as its base: restore it.")]
    disk = GuestDisk.objects.filter(guest__host=image.host_id, path_key=key).select_related("guest").first()
    if disk is not None:
        return [Refusal("not_orphan", f"Guest {disk.guest.name} now names it: restore it.")]
    overlays = neighbours.of(image).above
    if overlays:
        return [Refusal("has_overlays", f"{overlays[0].name} uses {image.name} as its backing file.")]
    return []


def warnings(image: Image) -> list[str]:
    """What an admin should know before setting an image aside."""
    found = []
    changed = changed_at(image)
    if changed is not None and timezone.now() - changed < YOUNG:
        found.append(
            f"It was last changed at {changed:%Y-%m-%d %H:%M} UTC, not long ago: somebody may be about to use it."
        )
    if neighbours.of(image).has_undo_copy:
        found.append("An undo copy of an earlier job exists and cannot be restored while the image is set aside.")
    return found


def changed_at(image: Image) -> datetime | None:
    """When its content was last changed; ``None`` where the file claims what is no time."""
    seconds = image.mtime_ns / 1e9
    return datetime.fromtimestamp(seconds, tz=UTC) if 0 < seconds < 32_503_680_000 else None
