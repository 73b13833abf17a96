"""Drive strings of Proxmox VE's configurations, read and written back without losing anything.

The form is that of PVE::JSONSchema's property strings: options ``key=value`` with commas between them, of which one may
leave out its key (``file`` of a VM's drive, ``volume`` of a container's mount point). The value without a key mostly
comes first and need not. Values hold no commas; there is no quoting.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

#: Kinds of guests.
VM, CONTAINER = "vm", "container"

#: Drives of VMs, with the numbers that Proxmox VE 9 takes; ``vmstate`` is the saved memory, and a bare volume id.
VM_DRIVES = {"ide": 4, "sata": 6, "scsi": 31, "virtio": 16, "efidisk": 1, "tpmstate": 1, "unused": 256}
CONTAINER_DRIVES = {"mp": 256, "unused": 256}
_NUMBERED = re.compile(r"([a-z]+)(\d{1,4})")

#: Keys of the volume itself. ``volume`` is another name for ``file`` in VMs.
_VOLUME_KEYS = ("file", "volume")
_TRUE = frozenset({"1", "on", "yes", "true"})
_FALSE = frozenset({"0", "off", "no", "false"})
_SIZE = re.compile(r"(\d{1,40})(\.\d{1,40})?(?:([KMGT])(?:iB)?)?", re.ASCII)
_UNITS = {None: 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclass(frozen=True)
class Drive:
    """A drive string.

    Args:
        parts: key and value of each option in order; the key is empty where there is none.
    """

    parts: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a drive string.

        Raises:
            ValueError: it is none, names no volume, or says something twice.
        """
        parts: list[tuple[str, str]] = []
        for part in text.split(","):
            if not part.strip():
                continue  # as Proxmox VE does
            key, equals, value = part.partition("=")
            if equals and not (key and value):
                raise ValueError(f"{part!r} is not an option")
            parts.append((key, value) if equals else ("", part))
        keys = ["file" if key in ("", *_VOLUME_KEYS) else key for key, _ in parts]
        if len(set(keys)) != len(keys):
            raise ValueError("an option occurs twice")
        if "file" not in keys:
            raise ValueError("it names no volume")
        return cls(tuple(parts))

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" if key else value for key, value in self.parts)

    @property
    def volume(self) -> str:
        """A volume id, an absolute path, ``none``, ``cdrom``, or an id that ends in ``cloudinit``."""
        return next(value for key, value in self.parts if key in ("", *_VOLUME_KEYS))

    def option(self, key: str, default: str = "") -> str:
        """The value of an option."""
        return next((value for known, value in self.parts if known == key), default)

    def flag(self, key: str) -> bool | None:
        """An option that is on or off; ``None`` where it is not set, or neither."""
        value = self.option(key).lower()
        return True if value in _TRUE else False if value in _FALSE else None

    @property
    def size_bytes(self) -> int | None:
        """The size that the definition notes, in bytes: it may be missing, or out of date."""
        return parse_size(self.option("size"))

    @property
    def is_cdrom(self) -> bool:
        """Whether it is an optical drive, cloud-init's included."""
        return self.option("media") == "cdrom" or self.volume == "cdrom"

    @property
    def is_empty(self) -> bool:
        """Whether no file or device is named: nothing in the drive, or this node's own optical drive."""
        return self.volume in ("none", "cdrom")

    def with_volume(self, volume: str) -> Self:
        """The same drive on another volume.

        Raises:
            ValueError: that is not allowed in a drive string.
        """
        _check("file", volume)
        bare = "=" not in volume  # else it would be read as an option
        return type(self)(
            tuple(
                (key or ("" if bare else "file"), volume) if key in ("", *_VOLUME_KEYS) else (key, value)
                for key, value in self.parts
            )
        )

    def with_options(self, changes: Mapping[str, str | None]) -> Self:
        """The same drive with some options changed, those that are ``None`` taken out; new ones come last.

        Raises:
            ValueError: a key or a value is not allowed in a drive string.
        """
        for key, value in changes.items():
            if not re.fullmatch(r"[a-z][a-z0-9_-]*", key) or key in _VOLUME_KEYS:
                raise ValueError(f"{key!r} is not an option")
            _check(key, value)
        kept = [(key, changes.get(key, value)) for key, value in self.parts]
        known = {key for key, _ in kept}
        added = [(key, value) for key, value in changes.items() if key not in known]
        return type(self)(tuple((key, value) for key, value in (*kept, *added) if value is not None))


def parsed(text: str) -> Drive | None:
    """A drive string; ``None`` where it is none."""
    try:
        return Drive.parse(text)
    except ValueError:
        return None


def volume_of(text: str) -> str:
    """The volume that a drive string names; empty where it is none."""
    drive = parsed(text)
    return drive.volume if drive is not None else ""


def _check(key: str, value: str | None) -> None:
    if value is not None and (not value.strip() or "," in value or not value.isprintable()):
        raise ValueError(f"{key}={value!r} is not allowed in a drive string")


def parse_size(text: str) -> int | None:
    """Bytes of a size such as ``32G``, ``1.5G``, ``528K`` or ``4 GiB`` without its space; ``None`` where it is none."""
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    shift = _UNITS[found[3]]
    # Exact: a size in T with a fraction needs more digits than a float has.
    fraction = found[2][1:] if found[2] else ""
    return (int(found[1] + fraction) << shift) // int(10 ** len(fraction))


def is_drive(key: str, kind: str) -> bool:
    """Whether a key of a configuration names a volume, as Proxmox VE 9 has them.

    Args:
        kind: :data:`VM` or :data:`CONTAINER`.
    """
    if key == ("vmstate" if kind == VM else "rootfs"):
        return True
    found = _NUMBERED.fullmatch(key)
    return found is not None and int(found[2]) < (VM_DRIVES if kind == VM else CONTAINER_DRIVES).get(found[1], 0)


def looks_like_drive(key: str) -> bool:
    """Whether a key may name a volume in some version of Proxmox VE, whatever its number."""
    found = _NUMBERED.fullmatch(key)
    return key in ("vmstate", "rootfs") or (found is not None and found[1] in (*VM_DRIVES, *CONTAINER_DRIVES))
