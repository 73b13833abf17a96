"""Values of creation options: what qemu-img would refuse when a job has begun is refused before there is a plan."""

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from storage_admin.agent.measure.new_image import ON, size_of
from storage_admin.agent.rewrite.conversion import OPTIONS, SUBFORMATS

MIB = 1 << 20
_OFF = frozenset({"off", "no", "false", "n"})
_PREALLOCATED = ("off", "falloc", "full")
#: Options that are one of a few words, by format.
_WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "qcow2": {
        "preallocation": ("off", "metadata", "falloc", "full"),
        "compression_type": ("zlib", "zstd"),
        "compat": ("0.10", "1.1", "v2", "v3"),
    },
    "raw": {"preallocation": _PREALLOCATED},
    "vdi": {"preallocation": _PREALLOCATED},
    "vmdk": {"adapter_type": ("ide", "buslogic", "lsilogic", "legacyESX")},
}
#: Options that are on or off.
_SWITCHES = ("lazy_refcounts", "extended_l2", "compat6", "zeroed_grain", "block_state_zero")


def wrong(form: str, options: dict[str, str]) -> dict[str, str]:
    """What is wrong with the values of a format's creation options, by their names; empty where nothing is."""
    found = {}
    for name, value in options.items():
        if name not in OPTIONS[form]:
            told = gettext("{form} has no such option. Supported options: {options}.")
            found[name] = told.format(form=form, options=", ".join(sorted(OPTIONS[form])))
            continue
        words = tuple(sorted(SUBFORMATS.get(form, ()))) if name == "subformat" else _WORDS.get(form, {}).get(name)
        if words and value not in words:
            found[name] = gettext("choose one of {words}.").format(words=", ".join(words))
        elif name in _SWITCHES and value not in ON | _OFF:
            found[name] = gettext("choose on or off.")
        elif name == "refcount_bits" and value not in {"1", "2", "4", "8", "16", "32", "64"}:
            found[name] = gettext("choose a power of two from 1 to 64.")
        elif name in _SIZES and not _SIZES[name][0](size_of(value)):
            found[name] = str(_SIZES[name][1])
    return found | (_together(options) if not found else {})


def _together(options: dict[str, str]) -> dict[str, str]:
    """What does not go together, where each value does."""
    found: dict[str, str] = {}
    if options.get("compat") in {"0.10", "v2"}:
        newer = {
            "lazy_refcounts": options.get("lazy_refcounts") in ON,
            "extended_l2": options.get("extended_l2") in ON,
            "compression_type": options.get("compression_type") == "zstd",
            "refcount_bits": options.get("refcount_bits", "16") != "16",
        }
        found |= {name: gettext("requires compat 1.1.") for name, needed in newer.items() if needed}
    if options.get("extended_l2") in ON and (size_of(options.get("cluster_size", "64k")) or 0) < 16 << 10:
        found["extended_l2"] = gettext("requires a cluster_size of at least 16k.")
    if options.get("compat6") in ON and "hwversion" in options:
        found["compat6"] = gettext("cannot be combined with hwversion.")
    return found


def _is_cluster(size: int | None) -> bool:
    return size is not None and 512 <= size <= 2 * MIB and not size & (size - 1)


def _is_block(size: int | None) -> bool:
    return size is not None and not size & (size - 1)


def _is_log(size: int | None) -> bool:
    return size is not None and 0 < size < 4096 * MIB


_SIZES = {
    "cluster_size": (_is_cluster, _("choose a power of two from 512 bytes to 2M, such as 64k.")),
    "block_size": (_is_block, _("choose a power of two, such as 16M.")),
    "log_size": (_is_log, _("choose a size below 4G, such as 1M.")),
}
