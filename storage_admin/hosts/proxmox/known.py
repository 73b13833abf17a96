"""Which keys and drive options Proxmox VE knows (qemu-server 9.2, pve-container 6): it passes over lines with others.

An older or newer one may know fewer or more: what it answers by the API decides, where that can be asked
(:mod:`~storage_admin.hosts.proxmox.merging`).
"""

import re

from storage_admin.hosts.proxmox import drives
from storage_admin.hosts.proxmox.drives import VM

_BOTH = (
    "arch|cores|cpulimit|cpuunits|description|hookscript|lock|memory|nameserver|net\\d+|onboot|ostype|parent|protection|"
    "searchdomain|snaptime|startup|tags|template"
)
_VM_KEYS = re.compile(
    f"{_BOTH}|acpi|affinity|agent|allow-ksm|amd-sev|args|audio0|autostart|balloon|bios|boot|bootdisk|cicustom|cipassword|"
    "citype|ciupgrade|ciuser|cpu|freeze|hostpci\\d+|hotplug|hugepages|intel-tdx|ipconfig\\d+|ivshmem|keephugepages|"
    "keyboard|kvm|localtime|machine|meta|migrate_downtime|migrate_speed|name|numa|numa\\d+|parallel\\d+|reboot|rng0|"
    "running-nets-host-mtu|runningcpu|runningmachine|scsihw|serial\\d+|shares|smbios1|smp|sockets|spice_enhancements|"
    "sshkeys|startdate|tablet|tdf|usb\\d+|vcpus|vga|virtiofs\\d+|vmgenid|vmstatestorage|watchdog",
    re.ASCII,
)
_CONTAINER_KEYS = re.compile(
    f"{_BOTH}|cmode|console|debug|dev\\d+|entrypoint|env|features|hostname|swap|timezone|tty|unprivileged", re.ASCII
)

_THROTTLE = {
    f"{prefix}{direction}{suffix}"
    for direction in ("", "_rd", "_wr")
    for prefix, suffix in (
        ("bps", ""), ("bps", "_max_length"), ("iops", ""), ("iops", "_max"), ("iops", "_max_length"), ("mbps", ""),
        ("mbps", "_max"),
    )
} | {f"{prefix}_{way}_length" for prefix in ("bps", "iops") for way in ("rd", "wr")}  # fmt: skip
_DRIVE = {
    "aio", "backup", "cache", "detect_zeroes", "discard", "file", "format", "media", "replicate",
    "rerror", "serial", "shared", "size", "snapshot", "volume", "werror", *_THROTTLE,
}  # fmt: skip
#: Options by kind of drive.
_OPTIONS = {
    "ide": _DRIVE | {"model", "ssd", "wwn"},
    "sata": _DRIVE | {"ssd", "wwn"},
    "scsi": _DRIVE | {"iothread", "product", "queues", "ro", "scsiblock", "ssd", "vendor", "wwn"},
    "virtio": _DRIVE | {"iothread", "ro"},
    "efidisk": {"efitype", "file", "format", "ms-cert", "pre-enrolled-keys", "size", "volume"},
    "tpmstate": {"file", "format", "size", "version", "volume"},
    "unused": {"file", "volume"},
    "vmstate": set(),
}
_CHOICES = {
    "aio": {"native", "threads", "io_uring"},
    "cache": {"none", "writethrough", "writeback", "unsafe", "directsync"},
    "discard": {"ignore", "on"},
    "format": {"raw", "qcow", "qed", "qcow2", "vmdk", "cloop"},
    "media": {"cdrom", "disk"},
    "rerror": {"ignore", "report", "stop"},
    "werror": {"enospc", "ignore", "report", "stop"},
}


def is_known(key: str, kind: str) -> bool:
    """Whether a guest of that kind has such an option, drives included."""
    names = _VM_KEYS if kind == VM else _CONTAINER_KEYS
    return names.fullmatch(key) is not None or drives.is_drive(key, kind)


def is_understood(key: str, drive: drives.Drive) -> bool:
    """Whether Proxmox VE would take a VM's drive as it stands: it drops the whole line for one option that it does not.

    Args:
        key: one that names a drive.
    """
    options = _OPTIONS.get(key.rstrip("0123456789"), _DRIVE)
    return all(
        not name or (name in options and value in _CHOICES.get(name, {value}) and _is_size(name, value))
        for name, value in drive.parts
    )


def _is_size(name: str, value: str) -> bool:
    return name != "size" or drives.parse_size(value) is not None
