"""Whether an image is an orphan, and the sentences that say why: from rows alone.

Everything that makes an image look like an orphan that is none is looked at here. What cannot be known is never called
an orphan: then ``orphan`` is ``None`` and the sentence says what stands against it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

#: What Proxmox VE calls the volumes of a guest: those of containers, templates, saved states and snapshots among them.
_NAMED = re.compile(r"(?:snap-.+-|snap_)?(?:vm|base|basevol|subvol)-([1-9][0-9]{0,8})-")
_FOLDER = re.compile(r"/images/([1-9][0-9]{0,8})/[^/]+$")
#: A volume id of a linked clone: ``store:101/base-101-disk-0.qcow2/102/vm-102-disk-0.qcow2``.
_LINKED = re.compile(r"[^:/]+:(\d+)/([^/\s]+)/(\d+)/([^/\s]+)")

#: How many lines, guests or images a sentence names.
NAMED = 3

#: How a plan says that an overlay is affected: it needs the image, and not the other way round.
READS_ON = "uses it as its base, and continues to"
KIND_WORDS = {"domain": "guest", "vm": "VM", "container": "container"}


@dataclass(frozen=True)
class Naming:
    """A guest's disk, as far as its name and section are evidence.

    Args:
        guest: its name, empty for one of another host, which is not told of; ``kind`` and ``uid`` as in
            :class:`storage_admin.guests.models.Guest`.
        only_in: the section of the definition that alone names it.
    """

    guest: str
    target: str = ""
    only_in: str = ""
    kind: str = ""
    uid: str = ""

    @property
    def sentence(self) -> str:
        """What the definition says; empty for a disk that the guest simply has."""
        if not self.guest:
            return "A guest of another host uses it." if self.only_in or self.target.startswith("unused") else ""
        if self.target == "nvram":
            return f"It is the NVRAM of {self._who}."
        if self.target.startswith("unused"):
            return f"It is listed as {self.target} of {self._who}."
        if self.only_in == "pending":
            return f"A pending change of {self._who} uses it."
        if self.only_in == "hidden":
            return f"A line of {self._who} that its hypervisor does not understand uses it ({self.target})."
        if self.only_in == "fleecing":
            return f"A backup of {self._who} created it."
        if self.only_in:
            section = self.only_in if " " in self.only_in else f"the snapshot {self.only_in}"
            return f"It is used only in {section} of {self._who}."
        return ""

    @property
    def _who(self) -> str:
        number = f" ({self.kind} {self.uid})" if self.kind in {"vm", "container"} else ""
        return f"{KIND_WORDS.get(self.kind, 'guest')} {self.guest}{number}"


@dataclass(frozen=True)
class Blind:
    """Images whose headers cannot be read, though such headers may name what they stand on.

    Args:
        names: of each by its id.
    """

    names: Mapping[int, str] = field(default_factory=dict)

    def but(self, image: int) -> str:
        """A sentence about those that are not the image itself; empty where there are none."""
        count = len(self.names) - (image in self.names)
        if not count:
            return ""
        first = [name for one, name in islice(self.names.items(), NAMED + 1) if one != image][:NAMED]
        more = f", and {count - len(first)} more" if count > len(first) else ""
        return (
            "The backing files of these images cannot be read, and one of them may be this image: "
            f"{', '.join(first)}{more}."
        )


@dataclass(frozen=True)
class Needs:
    """Who needs which image of a host as it is, beside the overlays and guests that are linked to its row.

    Args:
        paths, files: who stands on which file or keeps data in it, by shown path and by ``device:inode``.
        described: names of files that a header may mean which describes its base.
        kept: ids of images that something of ours needs (an undo copy).
        blind: the images that cannot be read, and may stand on any.
        unseen: about guests' disks outside of the pools of which is not known what they stand on.

    Each value is a sentence.
    """

    paths: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    described: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[int, str] = field(default_factory=dict)
    blind: Blind = field(default_factory=Blind)
    unseen: str = ""

    def of(self, image: int, path: str, inode: str) -> list[str]:
        """Who surely needs an image, in sentences."""
        found = [self.kept.get(image), self.paths.get(path), self.files.get(inode)]
        return list(dict.fromkeys(filter(None, found)))


@dataclass(frozen=True)
class World:
    """What is known of an image's host beside its images and its guests' disks.

    Args:
        asked: a sentence about who was asked for guests.
        needs: who needs which image.
        unread: about lines of guests' definitions that were not understood; empty where all were.
        unseen: why it is not known what processes have open; empty where it is.
        elsewhere: guests' numbers on other nodes of a cluster, and the sentence.
        busy: numbers of guests of this node that are being made or moved, and the sentence.
        doubted: shown paths of images that may hold a guest's last writes though it does not name them, and the
            sentence.
        numbers: of all guests of this node by their names.
    """

    asked: str
    needs: Needs = field(default_factory=Needs)
    unread: str = ""
    unseen: str = ""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    busy: Mapping[str, str] = field(default_factory=dict)
    doubted: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """What is known of one image.

    Args:
        inode: ``device:inode``.
        namings: the disks that are the image or stand on it.
        has_overlays: whether images stand on it.
        aside: names of those of them that are set aside.
        held: who has it open on the host; empty where nobody.
        owners_unknown: why nobody knows who uses it; empty where it is known.
        perhaps: names of images with overlays which may be this file by another name.
        is_volume: it is no file, and a host's own, or other programs', may be beside it.
        is_looked_at: the scan has seen whether a process has it open.
    """

    id: int
    name: str
    path: str
    inode: str
    namings: Sequence[Naming]
    has_overlays: bool
    aside: Sequence[str]
    held: str
    owners_unknown: str
    perhaps: Sequence[str] = ()
    is_volume: bool = False
    is_looked_at: bool = True


def judge(image: Facts, world: World) -> tuple[bool | None, list[str]]:
    """Whether it is an orphan (``None``: not known), and why."""
    if image.namings or image.has_overlays:
        told = [naming.sentence for naming in image.namings]
        told += [f"{name}, which is set aside, uses it as its backing file." for name in image.aside]
        return False, list(dict.fromkeys(filter(None, told)))
    if needed := world.needs.of(image.id, image.path, image.inode):
        return False, needed
    if image.owners_unknown:
        return None, [image.owners_unknown]
    if image.held:
        return False, []
    number = number_of(image.name, image.path)
    against = [
        world.unread,
        " ".join(filter(None, [world.needs.unseen, world.unseen])),
        world.needs.blind.but(image.id),
        *(
            f"It may be the file of {name}, which has overlays: the folder of {name} cannot be read, and the inode "
            "was the same there. If that folder no longer exists, remove it from the pools."
            for name in image.perhaps[:NAMED]
        ),
        world.needs.described.get(image.name, ""),
        world.doubted.get(image.path, ""),
        world.elsewhere.get(number, ""),
        world.busy.get(number, ""),
    ]
    if image.is_volume:
        against += [_against_volume(number, world)]
    if any(against):
        return None, [sentence for sentence in against if sentence]
    told = [world.asked, "No overlay uses it.", *(["No process has it open."] if image.is_looked_at else [])]
    if number in world.numbers:
        told.append(f"Its name is that of a disk of {world.numbers[number]}, which does not use it.")
    return True, told


def _against_volume(number: str, world: World) -> str:
    """Why nobody knows whether a volume is needed that no guest names, in a sentence; empty where it is known.

    Proxmox VE's guests do not name the volumes of their snapshots, nor what `qm rescan` would list as unused.
    """
    if not number:
        return (
            "Its name is none that Proxmox VE gives to a guest's volume. So the host itself, or another program, may "
            "need it."
        )
    if number in world.numbers:
        return f"Its name is that of a volume of {world.numbers[number]}, which may need it without naming it."
    return ""


def number_of(name: str, path: str) -> str:
    """The number of the guest whose disk an image is by Proxmox VE's way of naming; empty where it says none."""
    folder = _FOLDER.search(path)
    # A snapshot's name may hold what looks like another guest's disk.
    found = folder if folder and name.startswith("snap-") else _NAMED.match(name) or folder
    return found[1] if found else ""


def bases_in_ids(disks: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    """The bases that volume ids of linked clones name, by path, with a sentence.

    Args:
        disks: volume id, shown path and guest's name of each.
    """
    found: dict[str, str] = {}
    for volume, path, guest in disks:
        linked = _LINKED.fullmatch(volume)
        ending = f"/{linked[3]}/{linked[4]}" if linked else ""
        if linked and path.endswith(ending):
            base = f"{path.removesuffix(ending)}/{linked[1]}/{linked[2]}"
            found[base] = f"Guest {guest} uses it as the base of a linked clone."
    return found
