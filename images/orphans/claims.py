"""What a scan was told of guests of other nodes and of disks outside of the pools (:class:`images.models.Claim`)."""

from typing import Any, NamedTuple

from images.models import Claim
from images.scan.rows import inode
from storage_admin.agent.protocol import unb64
from storage_admin.hosts.models import Host
from storage_admin.hosts.names import display
from storage_admin.hosts.proxmox.reader import ProxmoxFacts


class Told(NamedTuple):
    """A claim: its kind, its key, and who makes it, as a sentence."""

    kind: str
    key: str
    why: str


def of_cluster(facts: ProxmoxFacts) -> list[Told]:
    """Numbers of guests that are on other nodes: a file with such a name may be a disk of one, or left by its move.

    The number stands in the file's name. The guest's name and its node are not told: they may not exist for who reads.
    """
    return [
        Told(
            Claim.Kind.NUMBER,
            str(guest.vmid),
            f"By its name it is a disk of guest {guest.vmid}, which is on another node of the cluster: look there "
            "whether it still needs it.",
        )
        for guest in facts.guests
        if guest.node != facts.node
    ]


def of_disk(told: dict[str, Any]) -> Told:
    """A guest's disk outside of every pool that stands on something."""
    shown, base = display(unb64(told["path_b64"])), told.get("base")
    if base:
        return Told(
            Claim.Kind.FILE,
            inode(*base),
            f"{shown}, a guest's disk outside of every pool, uses it as its backing file.",
        )
    why = f"{shown} is a guest's disk outside of every pool, and its backing file is not known: {told['why']}."
    return Told(Claim.Kind.ANY, display(unb64(told["path_b64"]))[:100], why)


def of_blind(path: bytes) -> Told:
    """An undo copy whose header cannot be read."""
    shown = display(path)
    return Told(Claim.Kind.ANY, shown[-100:], f"The backing file of the undo copy {shown} cannot be read.")


def record(host: Host, told: list[Told]) -> bool:
    """Makes the host's claims these.

    Returns:
        Whether they are others than before.
    """
    wanted = {(one.kind, one.key): one.why for one in told}
    known = {
        (kind, key): (pk, why)
        for pk, kind, key, why in Claim.objects.filter(host=host).values_list("pk", "kind", "key", "why")
    }
    gone = [pk for place, (pk, why) in known.items() if wanted.get(place) != why]
    new = [
        Claim(host=host, kind=kind, key=key, why=why)
        for (kind, key), why in wanted.items()
        if known.get((kind, key), (0, None))[1] != why
    ]
    Claim.objects.filter(pk__in=gone).delete()
    Claim.objects.bulk_create(new)
    return bool(gone or new)
