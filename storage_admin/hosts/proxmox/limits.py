"""I/O limits of a VM's drives: bytes and operations a second here, ``mbps_rd`` and the like in Proxmox VE.

Its "megabytes" are MiB (PVE::QemuServer::Blockdev multiplies by 1,048,576), with fractions. The keys ``bps_rd`` and
``bps_wr`` exist too, but what its code makes of them is 0, so they are no limit; next to ours they are an error.
"""

from collections.abc import Mapping
from decimal import Context, Decimal, InvalidOperation

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import INVALID, RefusedError
from storage_admin.hosts.proxmox.drives import Drive

MIB = Decimal(1024 * 1024)
_EXACT = Context(prec=60)
#: Our names, and Proxmox VE's.
KEYS = {
    "read_bytes_sec": "mbps_rd",
    "write_bytes_sec": "mbps_wr",
    "read_iops_sec": "iops_rd",
    "write_iops_sec": "iops_wr",
}
#: qemu takes no more (throttle.h, THROTTLE_VALUE_MAX).
LARGEST = 1_000_000_000_000_000
#: Below this a guest's disk stands still for its operating system.
SMALLEST_BYTES = 1024


def of(drive: Drive) -> dict[str, int]:
    """The limits that a drive has, by our names; without those that are not set."""
    found = {}
    for name, key in KEYS.items():
        value = _number(drive.option(key))
        if value:
            found[name] = int(_EXACT.multiply(value, MIB)) if key.startswith("mbps") else int(value)
    return {name: value for name, value in found.items() if value}


def check(wanted: Mapping[str, int | None]) -> None:
    """Refuses what is no limit; raises RefusedError(``invalid``)."""
    for name, value in wanted.items():
        if name not in KEYS:
            raise RefusedError(
                INVALID,
                _("There is no limit named {name}. Available limits: {keys}.").format(name=name, keys=", ".join(KEYS)),
            )
        if value is None or value == 0:
            continue
        least = SMALLEST_BYTES if name.endswith("bytes_sec") else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
            sentence = _("{name} must be a whole number from {least} to {largest}, or 0 for no limit.")
            raise RefusedError(INVALID, sentence.format(name=name, least=least, largest=LARGEST))


def changed(drive: Drive, wanted: Mapping[str, int | None]) -> Drive:
    """The drive with these limits, everything else as it was.

    Args:
        wanted: by our names; 0 or ``None`` takes a limit away, and what is not named stays.

    Raises:
        RefusedError: ``invalid``: such a limit cannot be, alone or together with what the drive has.
    """
    check(wanted)
    changes: dict[str, str | None] = {}
    for name, value in wanted.items():
        key = KEYS[name]
        _check_fits(drive, key, value or 0)
        changes[key] = text(key, value) if value else None
        if key.startswith("mbps"):
            changes[key.removeprefix("m")] = None
        if not value:
            # A burst without its limit is no valid drive any more.
            changes |= dict.fromkeys((f"{key}_max", *_lengths(key)), None)
    return drive.with_options(changes)


def _lengths(key: str) -> tuple[str, str]:
    plain = key.removeprefix("m")
    return f"{plain}_max_length", f"{plain}_length"


def _check_fits(drive: Drive, key: str, value: int) -> None:
    both = key.split("_", maxsplit=1)[0]
    if value and _number(drive.option(both)):
        raise RefusedError(
            INVALID,
            _(
                "The drive has a combined limit for reading and writing ({both}={option}). QEMU supports either "
                "combined or separate limits. Remove the combined limit in Proxmox VE first."
            ).format(both=both, option=drive.option(both)),
        )
    burst = _number(drive.option(f"{key}_max"))
    if value and burst and _EXACT.multiply(burst, MIB if key.startswith("mbps") else Decimal(1)) < value:
        raise RefusedError(
            INVALID,
            _(
                "The drive's burst limit ({key}_max={option}) would be below the new limit. Raise the burst "
                "limit in Proxmox VE first."
            ).format(key=key, option=drive.option(f"{key}_max")),
        )


def text(key: str, value: int) -> str:
    """A limit as Proxmox VE's key has it: no exponent, and exact: a fraction of 2**20 has at most 20 decimals."""
    if not key.startswith("mbps"):
        return str(value)
    return format(_EXACT.divide(Decimal(value), MIB).normalize(_EXACT), "f")


def _number(text: str) -> Decimal | None:
    try:
        value = Decimal(text) if text else None
    except InvalidOperation:
        return None
    # Above what qemu takes there is no limit either: it would not start with it.
    return value if value is not None and value.is_finite() and 0 < value <= LARGEST else None
