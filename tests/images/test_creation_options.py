"""What the plan says of creation options is what qemu-img says of them."""

import subprocess
from pathlib import Path

import pytest

from images.kinds.creation import wrong

pytestmark = pytest.mark.qemu

_SIZES = (
    "3k",
    "512",
    "511",
    "1k",
    "64k",
    "64K",
    "65536",
    "2M",
    "4M",
    "0",
    "0x10000",
    "1.5k",
    "0.5k",
    "512b",
    "k",
    "-1",
)
_SWITCH = ("on", "off", "true", "false", "yes", "no", "1", "0", "maybe")
VALUES: dict[str, dict[str, tuple[str, ...]]] = {
    "qcow2": {
        "cluster_size": _SIZES,
        "preallocation": ("off", "metadata", "falloc", "full", "on", "FULL"),
        "compression_type": ("zlib", "zstd", "gzip"),
        "lazy_refcounts": _SWITCH,
        "extended_l2": _SWITCH,
        "refcount_bits": ("1", "2", "8", "16", "64", "128", "3", "0", "x"),
        "compat": ("0.10", "1.1", "v2", "v3", "2", "3"),
    },
    "raw": {"preallocation": ("off", "falloc", "full", "metadata", "on")},
    "vdi": {"preallocation": ("off", "falloc", "full", "metadata", "on")},
    "vmdk": {"adapter_type": ("ide", "buslogic", "lsilogic", "legacyESX", "scsi", "IDE"), "compat6": _SWITCH,
             "zeroed_grain": _SWITCH, "hwversion": ("4", "11")},
    "vhdx": {"block_size": ("0", "1M", "3M", "16M", "x"), "log_size": ("1M", "3M", "1.5M", "0", "4G", "512k"),
             "block_state_zero": _SWITCH},
}  # fmt: skip
SINGLE = [(form, {name: value}) for form, names in VALUES.items() for name, values in names.items() for value in values]
TOGETHER = [
    ("qcow2", {"extended_l2": "on", "cluster_size": "8k"}),
    ("qcow2", {"extended_l2": "on", "cluster_size": "16k"}),
    ("qcow2", {"extended_l2": "off", "cluster_size": "8k"}),
    ("qcow2", {"extended_l2": "on", "compat": "0.10"}),
    ("qcow2", {"lazy_refcounts": "on", "compat": "v2"}),
    ("qcow2", {"lazy_refcounts": "off", "compat": "v2"}),
    ("qcow2", {"compression_type": "zstd", "compat": "0.10"}),
    ("qcow2", {"compression_type": "zlib", "compat": "0.10"}),
    ("qcow2", {"refcount_bits": "8", "compat": "0.10"}),
    ("qcow2", {"refcount_bits": "16", "compat": "0.10"}),
    ("vmdk", {"compat6": "on", "hwversion": "7"}),
    ("vmdk", {"compat6": "off", "hwversion": "7"}),
]


def taken(folder: Path, form: str, options: dict[str, str]) -> bool:
    given = ",".join(f"{name}={value}" for name, value in options.items())
    made = ["qemu-img", "create", "-q", "-f", form, "-o", given, str(folder / "made"), "8M"]
    return subprocess.run(made, capture_output=True, check=False).returncode == 0


def test_each_value_and_each_pair_is_refused_where_qemu_img_refuses_it(tmp_path: Path) -> None:
    differ = [
        (form, options)
        for form, options in SINGLE + TOGETHER
        if taken(tmp_path, form, options) == bool(wrong(form, options))
    ]
    assert differ == []


def test_all_that_is_wrong_is_said_at_once() -> None:
    said = wrong("qcow2", {"cluster_size": "3k", "refcount_bits": "3", "compat": "1.1", "lazy_refcounts": "2"})
    assert sorted(said) == ["cluster_size", "lazy_refcounts", "refcount_bits"]
