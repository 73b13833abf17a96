"""What a policy asks of the last backups of what it works on, from the database alone."""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Prefetch
from django.utils.translation import gettext as _

from images import backups
from images.models import Image, ImageUse
from images.policies.shape import Rules
from storage_admin.batches import batched
from storage_admin.guests.backups import of_guests
from storage_admin.guests.models import Guest
from storage_admin.jobs.plan_and_progress import LastBackup

#: So many rows are read at once.
_AT_ONCE = 5000


class Backups:
    """The last backups of some images or guests, where the policy asks for any."""

    def __init__(self, rules: Rules, now: datetime, ids: Collection[int]) -> None:
        self._most, self._now = rules.backup_max_days, now
        self._last: dict[int, list[LastBackup]] = {}
        if self._most is None:
            return
        for some in batched(sorted(ids), _AT_ONCE):
            self._last |= _of_images(some) if rules.on_images else _of_guests(some)

    def lacking(self, target_id: int) -> tuple[Any, ...] | None:
        """The code and the facts of a skip, where one that is young enough and has the disk is not known."""
        if self._most is None:
            return None
        last = self._last.get(target_id)
        if not last:
            why = _("Nothing reports backups of it.")
        else:
            why = next((found for one in last if (found := _lacks(one, self._now - timedelta(days=self._most)))), "")
        return ("backup_too_old", self._most, why) if why else None


def _lacks(last: LastBackup, since: datetime) -> str:
    """Why a backup is not one from then on that has the disk, in a sentence; empty where it is."""
    if last.at is None or last.included is not True:
        return last.detail or _("Whether the backup contains the disk is not known.")
    if last.at >= since:
        return ""
    told = _("The last backup of {guest} is of {at:%Y-%m-%d %H:%M} UTC. {detail}")
    return told.format(guest=last.guest, at=last.at, detail=last.detail).strip()


def _of_images(ids: list[int]) -> dict[int, list[LastBackup]]:
    uses = ImageUse.objects.select_related("disk__guest").defer("disk__path_bytes")
    rows = Image.objects.filter(pk__in=ids).only("host_id", "pool_id", "name", "path", "first_seen")
    return backups.of_images(list(rows.prefetch_related(Prefetch("uses", uses, to_attr="read_uses"))))


def _of_guests(ids: list[int]) -> dict[int, list[LastBackup]]:
    rows = Guest.objects.filter(pk__in=ids).prefetch_related("disks")
    return {pk: [last] for pk, last in of_guests(rows).items()}
