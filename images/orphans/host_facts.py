"""What is known of a host beside its images and its guests' disks, gathered from the database for :mod:`evidence`.

And what a scan was told of guests of other nodes and of disks outside of the pools (:class:`images.models.Claim`).
"""

from typing import Any, NamedTuple

from images.live.follow import doubted
from images.models import Claim, Image
from images.orphans.evidence import NAMED, READS_ON, Blind, Needs, World, bases_in_ids
from images.scan import shared_storages
from images.scan.rows import inode
from storage_admin.agent.formats import NAMING
from storage_admin.agent.protocol import unb64
from storage_admin.agent.scan.records import described_names
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.models import Host
from storage_admin.hosts.names import display
from storage_admin.hosts.proxmox.reader import ProxmoxFacts
from storage_admin.jobs.models import Job


def could_have_guests(host: Host) -> bool:
    """Whether a hypervisor was found on a host: elsewhere nobody could need an image, which is no news."""
    facts = host.capabilities
    tools = facts.get("tools") or {}
    return bool(
        facts.get("libvirt") == "present" or facts.get("proxmox") or facts.get("proxmox_version") or tools.get("vzctl")
    )


def of(host: Host) -> World:
    """All that may speak for or against an image of the host being an orphan."""
    guests = list(
        Guest.objects.filter(host=host, kind__in=["vm", "container"]).values_list("kind", "uid", "name", "lock")
    )
    hidden = f"The open files of some processes on {host.name} could not be read. Run the agent as root."
    claims = _claims(host)
    return World(
        asked=_asked(host),
        needs=_needs(host, claims),
        unread=_unread(host),
        unseen=hidden if host.capabilities.get("busy_complete") is False else "",
        elsewhere=claims[Claim.Kind.NUMBER],
        busy={
            uid: f"Its name is that of a disk of {name} ({kind} {uid}), which is locked ({lock}). The disk may be "
            "in creation."
            for kind, uid, name, lock in guests
            if lock
        },
        doubted=doubted(host),
        numbers={uid: f"{name} ({kind} {uid})" for kind, uid, name, _ in guests},
    )


def needs(host: Host) -> Needs:
    """What the images of a host say, those that share a storage with it, and its guests' disks elsewhere."""
    return _needs(host, _claims(host))


def _needs(host: Host, claims: dict[str, dict[str, str]]) -> Needs:
    return Needs(
        paths=_needed_paths(host),
        files=_parts(host) | claims[Claim.Kind.FILE],
        described=_described(host),
        kept=_kept(host),
        blind=_blind(host),
        unseen=" ".join(claims[Claim.Kind.ANY].values()),
    )


def _claims(host: Host) -> dict[str, dict[str, str]]:
    """The sentences of the host's claims by their keys, for each kind."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in Claim.Kind}
    for kind, key, why in Claim.objects.filter(host=host).values_list("kind", "key", "why"):
        found[kind][key] = why
    return found


def _asked(host: Host) -> str:
    facts, count = host.capabilities, dict[str, int]()
    for kind in host.guests.values_list("kind", flat=True):
        count[kind] = count.get(kind, 0) + 1
    told = []
    if facts.get("libvirt") == "present":
        told.append(
            f"libvirt on {host.name} was queried: none of its {count.get('domain', 0)} guests uses it, and neither "
            "does any of their snapshots or saved states."
        )
    vms, containers = count.get("vm", 0), count.get("container", 0)
    if facts.get("proxmox"):
        told.append(
            f"The files of Proxmox VE on {host.name} were read: none of {vms} VMs and {containers} containers uses "
            "it. Templates, snapshots, pending changes and unused disks were included."
        )
    elif containers:
        told.append(f"vzlist on {host.name} was queried: none of its {containers} containers uses it.")
    return " ".join(told) or f"{host.name} has no hypervisor that could run guests."


def _unread(host: Host) -> str:
    """Which lines of its guests' definitions were not understood, in a sentence; empty where all were."""
    found = [
        f"{line} ({name})"
        for name, lines in host.guests.exclude(unread=[]).values_list("name", "unread")
        for line in lines
    ]
    if not found:
        return ""
    return f"Some lines of guest definitions cannot be interpreted and may use it: {_some(found)}."


def _some(found: list[str]) -> str:
    more = f", and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"{'; '.join(found[:NAMED])}{more}"


def _needed_paths(host: Host) -> dict[str, str]:
    """Shown paths that other images' headers, or the ids of linked clones, name."""
    found = dict(shared_storages.needed_paths(host))
    rows = shared_storages.in_several_files(Image.every.filter(host=host))
    for name, path, header in rows.values_list("name", "path", "header"):
        found |= dict.fromkeys(shared_storages.named_parts(name, path, header), f"{name} keeps its data in it.")
    volumes = GuestDisk.objects.filter(guest__host=host, volume__contains="/")
    return found | bases_in_ids(volumes.values_list("volume", "path", "guest__name"))


def _parts(host: Host) -> dict[str, str]:
    """The same files by ``device:inode``: a header may reach them by a link."""
    found: dict[str, str] = {}
    rows = shared_storages.in_several_files(Image.every.filter(host=host)).values_list("name", "dev", "inode", "header")
    for name, dev, number, header in rows:
        parts = set(header.get("parts", [])) - {f"{dev}:{number}"}
        found |= dict.fromkeys(parts, f"{name} keeps its data in it.")
    return found


def _blind(host: Host) -> Blind:
    """Images of the host, and of those that share a storage with it, which cannot be read and may stand on others."""
    hosts = {host.pk, *(pair.other.host_id for pair in shared_storages.shared(host))}
    rows = Image.every.filter(host__in=hosts, missing_since=None, format__in=["", *NAMING]).exclude(unreadable="")
    rows = rows.exclude(state=Image.State.DELETED).order_by("host_id", "pk")
    return Blind(
        {
            pk: name if there == host.pk else "an image of another host that shares the storage"
            for pk, there, name, header in rows.values_list("pk", "host_id", "name", "header")
            if not header.get("alone")
        }
    )


def _described(host: Host) -> dict[str, str]:
    """Last names of files that may be meant where an image describes what it stands on instead of naming it."""
    hosts = {host.pk, *(pair.other.host_id for pair in shared_storages.shared(host))}
    rows = Image.every.filter(host__in=hosts, missing_since=None).exclude(backing_unsafe="").order_by()
    found: dict[str, str] = {}
    for there, name, base in rows.values_list("host_id", "name", "backing_file"):
        # One of another host may not exist for whoever reads the sentence.
        who = name if there == host.pk else "An image of another host that shares the storage"
        why = f"{who} does not name its backing file by a plain path, and may mean this image."
        found |= {one.rpartition("/")[2]: why for one in described_names(base)}
    return found


def kept_otherwise(host: Host) -> bool:
    """Whether undo copies have come or gone since it was last worked out who is an orphan.

    No file need have changed for that: where a window closes, only the copy goes.
    """
    now = _kept(host)
    told = Image.every.filter(host=host, orphan=False, overlays_count=0, orphan_evidence__icontains=_KEPT)
    stale = any(now.get(pk) not in found for pk, found in told.order_by().values_list("pk", "orphan_evidence"))
    return stale or (bool(now) and Image.every.filter(host=host, pk__in=now, orphan=True).exists())


#: How the sentence about an undo copy begins.
_KEPT = "The undo copy of job "


def _kept(host: Host) -> dict[int, str]:
    """Images that an undo copy of a job stands on: without them it could not be put back."""
    jobs = Job.objects.filter(host=host, undo_state=Job.UndoState.AVAILABLE, target_kind="image")
    found: dict[int, str] = {}
    for number, target, plan in jobs.values_list("pk", "target_id", "plan"):
        for affected in plan.get("affected_images", []):
            if affected["id"] != target and affected.get("how") != READS_ON:
                found[affected["id"]] = f"{_KEPT}{number} uses it as its backing file."
    return found


class Claimed(NamedTuple):
    """A claim: its kind, its key, and who makes it, as a sentence."""

    kind: str
    key: str
    why: str


def claims_of_cluster(facts: ProxmoxFacts) -> list[Claimed]:
    """Numbers of guests that are on other nodes: a file with such a name may be a disk of one, or left by its move.

    The number stands in the file's name. The guest's name and its node are not told: they may not exist for who reads.
    """
    return [
        Claimed(
            Claim.Kind.NUMBER,
            str(guest.vmid),
            f"Its name is that of a disk of guest {guest.vmid}, which is on another node of the cluster. Check on "
            "that node whether the guest still uses it.",
        )
        for guest in facts.guests
        if guest.node != facts.node
    ]


def claim_of_disk(told: dict[str, Any]) -> Claimed:
    """A guest's disk outside of every pool that stands on something."""
    shown, base = display(unb64(told["path_b64"])), told.get("base")
    if base:
        return Claimed(
            Claim.Kind.FILE,
            inode(*base),
            f"{shown}, a guest disk outside every pool, uses it as its backing file.",
        )
    why = f"The backing file of {shown}, a guest disk outside every pool, is not known: {told['why']}."
    return Claimed(Claim.Kind.ANY, display(unb64(told["path_b64"]))[:100], why)


def claim_of_blind(path: bytes) -> Claimed:
    """An undo copy whose header cannot be read."""
    shown = display(path)
    return Claimed(Claim.Kind.ANY, shown[-100:], f"The backing file of the undo copy {shown} cannot be read.")


def record_claims(host: Host, told: list[Claimed]) -> bool:
    """Makes the host's claims these.

    Returns:
        Whether they are others than before.
    """
    wanted = set({(one.kind, one.key): one for one in told}.values())
    known = {Claimed(one.kind, one.key, one.why): one.pk for one in Claim.objects.filter(host=host)}
    new, gone = wanted - known.keys(), known.keys() - wanted
    Claim.objects.filter(pk__in=[known[one] for one in gone]).delete()
    Claim.objects.bulk_create(Claim(host=host, **one._asdict()) for one in sorted(new))
    return bool(gone or new)
