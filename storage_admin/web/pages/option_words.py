"""How the options of a rewrite are called on its page, and their values."""

from django.utils.translation import gettext_lazy as _

from storage_admin.words import Translatable

#: Words of options that are one of a few.
CHOICES: dict[str, tuple[Translatable, dict[str, Translatable]]] = {
    "format": (_("Target format"), {}),
    "method": (_("Method"), {"auto": _("auto (recommended)")}),
    "packing": (
        _("Packing"),
        {
            "zstd": _("zstd: the image file"),
            "gzip": _("gzip: the image file"),
            "ova": _("OVA: for another hypervisor"),
        },
    ),
    "compression": (_("Compression"), {"auto": _("auto: zstd if available")}),
    "repair": (
        _("Repair"),
        {
            "none": _("none: check only"),
            "leaks": _("leaks: unreferenced clusters"),
            "all": _("all: leaks and errors (admin)"),
        },
    ),
    "which": (
        _("Bitmaps"),
        {"stale": _("stale: not closed, of no use any more"), "all": _("all, also those that backup tools need")},
    ),
    "when_running": (
        _("If a guest is running"),
        {"refuse": _("refuse"), "wait": _("wait until it is shut down")},
    ),
}
#: Words of options that are yes or no.
SWITCHES: dict[str, tuple[Translatable, dict[str, Translatable]]] = {
    "replace": (
        _("Original image"),
        {"false": _("keep unchanged"), "true": _("replace, keep as undo copy")},
    ),
    "accept_unproven": (
        _("If nothing proves that it is the file"),
        {"false": _("refuse"), "true": _("check its filesystems, take it if they are sound (admin)")},
    ),
    "accept_checkpoints": (
        _("Bitmaps of checkpoints of libvirt"),
        {"false": _("refuse"), "true": _("remove them all the same")},
    ),
    "libvirt_secret": (
        _("Secret of libvirt that a guest opens it with"),
        {"true": _("give it the new passphrase"), "false": _("leave unchanged")},
    ),
    "overwrite": (
        _("If the device holds something"),
        {"false": _("refuse"), "true": _("overwrite it")},
    ),
    "repoint_guest": (
        _("libvirt guests that use it"),
        {"false": _("leave unchanged"), "true": _("switch to the copy")},
    ),
}
SPARING = {"": _("host default"), "true": _("yes"), "false": _("no")}
STARTING = {"false": _("keep the guest off"), "true": _("start the guest again")}

#: Fields in other units than their options.
OPTIONS = {
    "bandwidth_mib": "bandwidth_bytes_sec", "size_gib": "size_bytes", "part_mib": "part_bytes",
    "memory_mib": "memory_bytes",
}  # fmt: skip
#: Options that are written: name, word, hint.
TEXTS = (
    ("base", _("New backing file"), _("Full path of an image on this host.")),
    ("device", _("Device"), _("Path on this host, such as /dev/vg/volume.")),
    ("size_gib", _("New size (GiB)"), _("As the guest sees it.")),
    ("wait_hours", _("Maximum wait (hours)"), _("Applies when waiting for a guest. Default: 24.")),
    ("target_name", _("New name"), _("Default: the image's name, with the extension of its format.")),
    ("part_mib", _("Size of a part (MiB)"), _("Leave it empty for one file.")),
    ("cpus", _("Processors"), _("Of the guest that an OVA describes. Default: 1.")),
    ("memory_mib", _("Memory (MiB)"), _("Of the guest that an OVA describes. Default: 2048.")),
    ("format_options", _("Format options"), _("qemu-img syntax: cluster_size=64k,compression_type=zstd")),
)
