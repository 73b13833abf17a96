"""The last backups of the guests that images belong to: of those that use one, else of the one that its name says."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime

from django.utils.translation import gettext as _

from images.models import Image
from images.orphans.evidence import number_of
from storage_admin.guests.backups import Known
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.models import PoolSample
from storage_admin.jobs.plan_and_progress import LastBackup

_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


def of_images(images: Collection[Image]) -> dict[int, list[LastBackup]]:
    """The last backup of each guest that an image belongs to, by the image's id, the one that helps least first.

    An image is not in it where nobody could tell of any backup. Three queries, whatever their number, if their uses
    are fetched.
    """
    used = {image.pk: image.disks for image in images}
    disks = {pk: [disk for disk in own if disk.guest.kind != Guest.Kind.DOMAIN] for pk, own in used.items()}
    numbers = {image.pk: number_of(image.name, image.path) for image in images if not used[image.pk]}
    hosts = {image.host_id for image in images if disks[image.pk] or numbers.get(image.pk)}
    if not hosts:
        return {}
    uids = {disk.guest.uid for own in disks.values() for disk in own} | set(numbers.values())
    known = Known(hosts | {disk.guest.host_id for own in disks.values() for disk in own}, uids)
    found = dict[int, list[LastBackup]]()
    for image in images:
        told = dict[str, LastBackup | None]()
        # A guest of another host may not exist for whoever reads this: it is told of by its number.
        for disk in sorted(disks[image.pk], key=lambda one: (one.guest.host_id != image.host_id, not one.in_backups)):
            told.setdefault(disk.guest.uid, _of_disk(known, image, disk))
        if number := numbers.get(image.pk):
            told[number] = _of_number(known, image, number)
        if some := [one for one in told.values() if one is not None]:
            found[image.pk] = some
    _note_later(images, found)
    return {pk: sorted(some, key=_help) for pk, some in found.items()}


def read(images: Collection[Image]) -> None:
    """Keeps with each row what :func:`of` would ask for."""
    found = of_images(images)
    for image in images:
        vars(image)["read_backups"] = found.get(image.pk, [])


def of(image: Image) -> list[LastBackup]:
    """As :func:`of_images`, for one image: as it was read with it, else as it is known now."""
    told: list[LastBackup] | None = vars(image).get("read_backups")
    return of_images([image]).get(image.pk, []) if told is None else told


def of_image(image: Image, guests: Collection[int] = ()) -> tuple[LastBackup, ...]:
    """The last backups for a plan on an image: of its own guests, and of others that it affects.

    Args:
        guests: ids of those.
    """
    vars(image).setdefault("read_uses", list(image.uses.select_related("disk__guest")))
    own = of_images([image]).get(image.pk, [])
    mine = {disk.guest_id for disk in image.disks}
    others = () if mine.issuperset(guests) else Guest.objects.filter(pk__in=guests).exclude(pk__in=mine)
    rows = [guest for guest in others if guest.kind != Guest.Kind.DOMAIN and guest.host_id == image.host_id]
    known = Known({image.host_id}, {guest.uid for guest in rows}) if rows else None
    told = [known.of_number(guest.host_id, guest.uid, guest.name, guest.kind) for guest in rows] if known else []
    return tuple(sorted([*own, *(one for one in told if one is not None)], key=_help))


def _help(last: LastBackup) -> tuple[bool, datetime]:
    """What helps least comes first: none at all, one without the disk, an old one."""
    return (last.included is True, last.at or _BEGINNING)


def _of_disk(known: Known, image: Image, disk: GuestDisk) -> LastBackup | None:
    guest = disk.guest
    if not known.are_together(image.host_id, guest.host_id):
        return None
    name = guest.name if guest.host_id == image.host_id else ""
    last = known.of_number(image.host_id, guest.uid, name, guest.kind)
    if last is None or last.at is None:
        return last
    if disk.in_backups is not False:
        return replace(last, included=disk.in_backups)
    told = _("This disk ({target}) is not part of the backups of {guest}.")
    why = told.format(target=disk.target, guest=last.guest)
    return replace(last, included=False, detail=f"{why} {last.detail}".strip())


def _of_number(known: Known, image: Image, number: str) -> LastBackup | None:
    last = known.of_number(image.host_id, number)
    if last is None or last.at is None:
        return last
    why = _("No guest uses the image: whether that backup contains it is not known.")
    return replace(last, detail=f"{why} {last.detail}".strip())


def _note_later(images: Collection[Image], found: dict[int, list[LastBackup]]) -> None:
    """Says of which images a scan between the backup and the first one that saw them had found nothing yet."""
    late = [
        (image, last)
        for image in images
        for last in found.get(image.pk, ())
        if last.included and last.at is not None and image.first_seen > last.at
    ]
    if not late:
        return
    scans: dict[int, list[datetime]] = defaultdict(list)
    rows = PoolSample.objects.filter(
        pool__in={image.pool_id for image, __ in late}, at__gte=min(last.at for __, last in late if last.at)
    )
    for pool, at in rows.order_by("at").values_list("pool", "at"):
        scans[pool].append(at)
    for image, last in late:
        before = scans[image.pool_id]
        place = bisect_left(before, last.at) if last.at else len(before)
        if place < len(before) and before[place] < image.first_seen:
            why = _("The image was first seen after that backup, which may not contain it.")
            changed = replace(last, included=None, detail=f"{why} {last.detail}".strip())
            found[image.pk] = [changed if one == last else one for one in found[image.pk]]
