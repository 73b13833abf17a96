"""The last backup of each guest, as scans were told by storages of Proxmox VE; nothing is asked for it anew."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace
from datetime import UTC, datetime

from django.db.models import Q
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from storage_admin.batches import batched
from storage_admin.guests.models import BackupListing, Guest, GuestBackup
from storage_admin.hosts.models import Host
from storage_admin.hosts.names import shown
from storage_admin.hosts.proxmox.reader import ProxmoxFacts
from storage_admin.jobs.plan_and_progress import LastBackup

_NO_TOKEN = gettext_noop("Only the API of Proxmox VE reports backups. Add an API token to the host.")
#: So many reasons are kept of a host: whoever names its storages may be hostile.
_MOST_GAPS = 100
#: Characters that are kept of what a storage tells.
_LONGEST = 1000


def record(host: Host, facts: ProxmoxFacts, at: datetime) -> None:
    """Makes a host's backups what its node told. Where nobody was asked, what was known stays, and says why.

    Args:
        at: when it told.
    """
    told = facts.backups
    if told is None:
        gaps = [{"detail": shown(facts.api_away or _(_NO_TOKEN), _LONGEST), "uid": ""}]
        BackupListing.objects.update_or_create(host=host, defaults={"gaps": gaps})
        return
    rows = {
        (one.kind, str(one.vmid), datetime.fromtimestamp(one.at, UTC), shown(one.volume, _LONGEST), one.passed_over)
        for one in told.newest
    }
    own = GuestBackup.objects.filter(host=host)
    columns = ("kind", "uid", "at", "volume", "passed_over")
    known = {tuple(values): pk for pk, *values in own.values_list("pk", *columns)}
    gone = [pk for values, pk in known.items() if values not in rows]
    for some in batched(gone, 5000):
        own.filter(pk__in=some).delete()
    new = sorted(rows - known.keys())
    GuestBackup.objects.bulk_create(
        (GuestBackup(host=host, **dict(zip(columns, values, strict=True))) for values in new), batch_size=2000
    )
    gaps = [
        {"detail": shown(one.detail, _LONGEST), "uid": "" if one.vmid is None else str(one.vmid)}
        for one in told.gaps[:_MOST_GAPS]
    ]
    listing = {"at": at, "storages": [shown(name, _LONGEST) for name in told.storages], "gaps": gaps}
    BackupListing.objects.update_or_create(host=host, defaults=listing)


def storages_of(host: Host) -> set[str]:
    """Names of the storages that listed backups at the last scan."""
    listing = BackupListing.objects.filter(host=host).first()
    return set(listing.storages) if listing is not None else set()


class Known:
    """What is known of backups on some hosts: two queries, however many guests are asked about then.

    The nodes of a cluster number their guests together, and a guest may have been backed up before it moved.
    """

    def __init__(self, hosts: Collection[int], uids: Collection[str] | None = None) -> None:
        """Args:

        hosts: ids.
        uids: of the guests that will be asked about; ``None`` for all.
        """
        listings = BackupListing.objects.filter(host__in=hosts).select_related("host").defer("host__capabilities")
        self._listings = {one.host_id: one for one in listings}
        self._rows: dict[tuple[str, str], list[GuestBackup]] = defaultdict(list)
        clusters = {one.host.cluster for one in self._listings.values()} - {""}
        there = Q(host__in=self._listings.keys()) | Q(host__cluster__in=clusters)
        rows = GuestBackup.objects.filter(there).select_related("host").defer("host__capabilities")
        for row in (rows if uids is None else rows.filter(uid__in=uids)) if self._listings else ():
            self._rows[_place(row.host), row.uid].append(row)

    def are_together(self, one: int, other: int) -> bool:
        """Whether the guests of two hosts have their numbers from one cluster, or the hosts are the same."""
        pair = [self._listings.get(one), self._listings.get(other)]
        places = {_place(listing.host) if listing is not None else "" for listing in pair}
        return one == other or (len(places) == 1 and "" not in places)

    def of_guest(self, guest: Guest) -> LastBackup | None:
        """The last backup of a guest, and which of its disks no backup has; ``None`` where nobody could tell."""
        last = self.of_number(guest.host_id, guest.uid, guest.name, guest.kind)
        if last is None or last.at is None:
            return last
        own = [disk for disk in guest.disks.all() if disk.device == "disk" and not disk.only_in]
        own = [disk for disk in own if not disk.target.startswith("unused")]
        lacking = [disk.target for disk in own if disk.in_backups is False]
        included = False if lacking else True if all(disk.in_backups for disk in own) else None
        why = _("Not part of its backups: {disks}.").format(disks=", ".join(lacking)) if lacking else ""
        return replace(last, included=included, detail=f"{why} {last.detail}".strip())

    def of_number(self, host_id: int, uid: str, name: str = "", kind: str = "") -> LastBackup | None:
        """The last backup of a guest by its number, whether there is such a guest or not, and whatever disks it has.

        Args:
            name: of the guest; empty where there is none.
            kind: empty for any.
        """
        listing = self._listings.get(host_id)
        if listing is None:
            return None
        guest = f"{name} ({uid})" if name else uid
        rows = self._rows.get((_place(listing.host), uid), ())
        fitting = [row for row in rows if not kind or row.kind in ("", kind)]
        gaps = " ".join(gap["detail"] for gap in listing.gaps if gap["uid"] in ("", uid))
        if not fitting:
            return LastBackup(guest, detail=_none(guest, listing, gaps))
        last = max(fitting, key=lambda row: row.at)
        told = [_("A newer backup may exist. {why}").format(why=gaps)] if gaps else []
        if last.passed_over:
            failed = ngettext(
                "{count} newer backup failed its verification.",
                "{count} newer backups failed their verification.",
                last.passed_over,
            )
            told.insert(0, failed.format(count=last.passed_over))
        return LastBackup(guest, last.at, last.volume, detail=" ".join(told))


def of_guests(guests: Iterable[Guest]) -> dict[int, LastBackup]:
    """The last backup of each of these guests, by its id, where anybody could tell; disks are to be fetched."""
    rows = [guest for guest in guests if guest.kind != Guest.Kind.DOMAIN]
    if not rows:
        return {}
    known = Known({guest.host_id for guest in rows}, {guest.uid for guest in rows})
    return {guest.pk: last for guest in rows if (last := known.of_guest(guest)) is not None}


def of_one(guest_id: int) -> tuple[LastBackup, ...]:
    """The last backup of the guest of that id, for a plan; none where nobody could tell."""
    return tuple(of_guests(Guest.objects.filter(pk=guest_id).prefetch_related("disks")).values())


def _place(host: Host) -> str:
    return f"cluster {host.cluster}" if host.cluster else f"host {host.pk}"


def _none(guest: str, listing: BackupListing, gaps: str) -> str:
    if gaps:
        return _("It is not known whether there is a backup of {guest}. {why}").format(guest=guest, why=gaps)
    if not listing.storages:
        return _("No backup of {guest} is known: no storage of the host holds backups.").format(guest=guest)
    return _("No backup of {guest} is known on {storages}.").format(guest=guest, storages=", ".join(listing.storages))
