"""Every option that qemu-img can create, read by our readers and by ``qemu-img info``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.formats import Facts, Reader, UnreadableError, probe, read
from tests.agent import harness
from tests.agent.harness import held_open

pytestmark = pytest.mark.qemu

SECRET = ["--object", "secret,id=key,data=passphrase"]


def qemu_img(*arguments: str | Path, cwd: Path | None = None) -> str:
    return harness.qemu_img(*arguments, cwd=cwd).decode()


def create(path: Path, image_format: str, options: str = "", size: str = "8M", *more: str | Path) -> Path:
    chosen = ["-o", options] if options else []
    secret = SECRET if "key-secret" in options else []
    qemu_img("create", "-q", "-f", image_format, *secret, *chosen, *more, path, *([size] if size else []))
    return path


def info(path: Path, image_format: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(qemu_img("info", "-f", image_format, "--output=json", path))
    return answer


def facts_of(path: Path, declared: str | None = None) -> Facts:
    with held_open(path) as fd:
        return read(fd, path.stat().st_size, os.fsencode(path.name), declared)


def probed(path: Path) -> str:
    with held_open(path) as fd:
        return probe(Reader(fd, path.stat().st_size))


def assert_same(path: Path, image_format: str) -> Facts:
    """Everything that both say is equal, and nothing that qemu says is missing."""
    facts, truth = facts_of(path), info(path, image_format)
    specific = truth.get("format-specific", {}).get("data", {})
    assert facts.format == truth["format"]
    assert facts.virtual_size == truth["virtual-size"]
    if facts.subformat != "twoGbMaxExtentSparse":  # its grain size stands in the extents, which are not opened
        assert facts.cluster_size == truth.get("cluster-size")
    assert facts.encrypted == truth.get("encrypted", False)
    assert facts.dirty == truth["dirty-flag"]
    assert (facts.backing_file or b"").decode() == truth.get("backing-filename", "")
    assert facts.backing_format == truth.get("backing-filename-format")
    if image_format == "qcow2":
        assert_same_qcow2(facts, specific)
        assert [(s.id, s.name, s.size, s.created) for s in facts.snapshots] == [
            (s["id"], s["name"], s["vm-state-size"], s["date-sec"]) for s in truth.get("snapshots", [])
        ]
    if image_format == "vmdk":
        assert facts.subformat == specific["create-type"]
        names = [Path(extent["filename"]).name for extent in specific["extents"]]
        assert [name.decode() for name in facts.extents] == ([] if names == [path.name] else names)
    return facts


def assert_same_qcow2(facts: Facts, specific: dict[str, Any]) -> None:
    assert facts.compat == specific["compat"]
    assert facts.compression == specific["compression-type"]
    assert facts.refcount_bits == specific["refcount-bits"]
    assert facts.lazy_refcounts == specific.get("lazy-refcounts")
    assert facts.extended_l2 == specific.get("extended-l2")
    assert facts.corrupt == specific.get("corrupt", False)
    assert facts.encryption == specific.get("encrypt", {}).get("format")
    assert (facts.data_file or b"").decode() == specific.get("data-file", "")
    assert facts.data_file_raw == (specific["data-file-raw"] if "data-file" in specific else None)
    told = [(one.name, one.granularity, one.in_use, one.enabled) for one in facts.bitmaps]
    assert told == [
        (bitmap["name"], bitmap["granularity"], "in-use" in bitmap["flags"], "auto" in bitmap["flags"])
        for bitmap in specific.get("bitmaps", [])
    ]


QCOW2 = [
    *(f"cluster_size={512 << shift}" for shift in range(13)),
    *(f"refcount_bits={1 << order}" for order in range(7)),
    *(f"preallocation={mode}" for mode in ("off", "metadata", "falloc", "full")),
    "compat=0.10",
    "compat=v3",
    "compat=0.10,cluster_size=2M,preallocation=metadata",
    "lazy_refcounts=on",
    "lazy_refcounts=off",
    "extended_l2=on",
    "extended_l2=on,cluster_size=16k",
    "extended_l2=on,cluster_size=2M",
    "compression_type=zlib",
    "compression_type=zstd",
    "encryption=on,encrypt.key-secret=key",
    "encrypt.format=aes,encrypt.key-secret=key",
    "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10",
    (
        "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10,encrypt.cipher-alg=aes-128,"
        "encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,encrypt.ivgen-hash-alg=sha256,encrypt.hash-alg=sha1"
    ),
]


@pytest.mark.parametrize("options", QCOW2)
def test_reads_every_qcow2_option_as_qemu_does(tmp_path: Path, options: str) -> None:
    path = create(tmp_path / "disk.qcow2", "qcow2", options)
    assert probed(path) == "qcow2"
    assert_same(path, "qcow2")


@pytest.mark.parametrize("size", ["0", "1", "511", "512", "513", "65537", "1T", "8000T"])
def test_reads_every_virtual_size_as_qemu_does(tmp_path: Path, size: str) -> None:
    path = create(tmp_path / "disk.qcow2", "qcow2", "cluster_size=2M", size)
    assert_same(path, "qcow2")


@pytest.mark.parametrize("raw", ["on", "off"])
def test_names_the_external_data_file_and_whether_it_is_raw(tmp_path: Path, raw: str) -> None:
    path = create(tmp_path / "disk.qcow2", "qcow2", f"data_file={tmp_path}/disk.data,data_file_raw={raw}")
    facts = assert_same(path, "qcow2")
    assert facts.data_file == os.fsencode(tmp_path / "disk.data")
    assert facts.data_file_raw is (raw == "on")


@pytest.mark.parametrize("image_format", ["qcow2", "raw", "vmdk", "vdi"])
def test_reads_the_backing_file_and_its_format(tmp_path: Path, image_format: str) -> None:
    create(tmp_path / "base", image_format)
    create(tmp_path / "over.qcow2", "qcow2", "", "", "-b", "base", "-F", image_format)
    facts = assert_same(tmp_path / "over.qcow2", "qcow2")
    assert (facts.backing_file, facts.backing_format) == (b"base", image_format)


def test_reads_a_backing_file_without_a_declared_format(tmp_path: Path) -> None:
    create(tmp_path / "base.qcow2", "qcow2")
    create(tmp_path / "over.qcow2", "qcow2", "", "", "-b", "base.qcow2", "-F", "qcow2")
    # Newer versions of qemu-img do not write this any more: rename the extension to one that nobody knows.
    written = (tmp_path / "over.qcow2").read_bytes()
    (tmp_path / "over.qcow2").write_bytes(written.replace(bytes.fromhex("e2792aca"), b"none", 1))
    facts = assert_same(tmp_path / "over.qcow2", "qcow2")
    assert (facts.backing_file, facts.backing_format) == (b"base.qcow2", None)


def test_reads_a_backing_name_of_1023_bytes(tmp_path: Path) -> None:
    name = ("/" + "d" * 200) * 5 + "/" + "b" * 17
    assert len(name) == 1023
    create(tmp_path / "over.qcow2", "qcow2", "", "8M", "-u", "-b", name, "-F", "qcow2")
    assert facts_of(tmp_path / "over.qcow2").backing_file == name.encode()


def test_lists_snapshots_with_odd_names(tmp_path: Path) -> None:
    path = create(tmp_path / "disk.qcow2", "qcow2")
    for name in ("one", "two words", "drei-äöü-☃", "a,b\\c\"d'", "x" * 255, "<script>alert(1)</script>"):
        qemu_img("snapshot", "-c", name, path)
    qemu_img("snapshot", "-d", "two words", path)
    assert len(assert_same(path, "qcow2").snapshots) == 5


def test_lists_a_hundred_snapshots(tmp_path: Path) -> None:
    path = create(tmp_path / "disk.qcow2", "qcow2", "compat=0.10")
    for number in range(100):
        qemu_img("snapshot", "-c", f"snapshot {number}", path)
    assert len(assert_same(path, "qcow2").snapshots) == 100


def test_lists_persistent_bitmaps(tmp_path: Path) -> None:
    path = create(tmp_path / "disk.qcow2", "qcow2")
    assert facts_of(path).bitmaps == ()
    for name in ("daily", "wöchentlich", "n" * 1023):
        qemu_img("bitmap", "--add", path, name)
    qemu_img("bitmap", "--add", "-g", "1M", "--disable", path, "still")
    assert len(assert_same(path, "qcow2").bitmaps) == 4


VMDK_TYPES = ["monolithicSparse", "monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat", "streamOptimized"]


@pytest.mark.parametrize("subformat", VMDK_TYPES)
@pytest.mark.parametrize("size", ["8M", "5G"])
def test_reads_every_vmdk_subformat_as_qemu_does(tmp_path: Path, subformat: str, size: str) -> None:
    path = create(tmp_path / "disk.vmdk", "vmdk", f"subformat={subformat}", size)
    assert probed(path) == "vmdk"
    facts = assert_same(path, "vmdk")
    parts = {"monolithicFlat": 1, "twoGbMaxExtentSparse": 3, "twoGbMaxExtentFlat": 3}.get(subformat, 0)
    assert len(facts.extents) == (parts if size == "5G" else min(parts, 1))


VMDK_OPTIONS = [
    *(f"adapter_type={adapter}" for adapter in ("ide", "lsilogic", "buslogic", "legacyESX")),
    "hwversion=9",
    "compat6=on",
    "toolsversion=2147483647",
    "zeroed_grain=on",
    "zeroed_grain=on,subformat=streamOptimized",
]


@pytest.mark.parametrize("options", VMDK_OPTIONS)
def test_reads_every_vmdk_option_as_qemu_does(tmp_path: Path, options: str) -> None:
    create(tmp_path / "disk.vmdk", "vmdk", options)
    assert_same(tmp_path / "disk.vmdk", "vmdk")


def test_reads_a_vmdk_with_data_from_convert(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(os.urandom(300_000) + bytes(3_000_000) + os.urandom(50_001))
    for subformat in VMDK_TYPES:
        path = tmp_path / f"{subformat}.vmdk"
        qemu_img("convert", "-f", "raw", "-O", "vmdk", "-o", f"subformat={subformat}", tmp_path / "raw", path)
        facts = assert_same(path, "vmdk")
        assert facts.compression == ("zlib" if subformat == "streamOptimized" else None)


def test_reads_the_parent_of_a_vmdk(tmp_path: Path) -> None:
    create(tmp_path / "base.vmdk", "vmdk")
    create(tmp_path / "over.vmdk", "vmdk", "", "", "-b", tmp_path / "base.vmdk", "-F", "vmdk")
    facts = facts_of(tmp_path / "over.vmdk")
    truth = info(tmp_path / "over.vmdk", "vmdk")
    assert facts.backing_file == truth["backing-filename"].encode() == os.fsencode(tmp_path / "base.vmdk")


@pytest.mark.parametrize("static", ["on", "off"])
@pytest.mark.parametrize("size", ["0", "513", "8M", "100G"])
def test_reads_vdi_as_qemu_does(tmp_path: Path, static: str, size: str) -> None:
    if (static, size) == ("on", "100G"):
        size = "20M"  # a static image takes its size on disk
    path = create(tmp_path / "disk.vdi", "vdi", f"static={static}", size)
    assert probed(path) == "vdi"
    facts = assert_same(path, "vdi")
    assert facts.preallocation == ("metadata" if static == "on" else "off")


@pytest.mark.parametrize("subformat", ["dynamic", "fixed"])
@pytest.mark.parametrize("force_size", ["on", "off"])
@pytest.mark.parametrize("size", ["1M", "8M", "10000001", "200G"])
def test_reads_vpc_as_qemu_does(tmp_path: Path, subformat: str, force_size: str, size: str) -> None:
    path = create(tmp_path / "disk.vhd", "vpc", f"subformat={subformat},force_size={force_size}", size)
    assert facts_of(path).subformat == subformat
    assert_same(path, "vpc")


def test_a_fixed_vhd_under_another_name_is_read_where_it_is_declared(tmp_path: Path) -> None:
    create(tmp_path / "disk", "vpc", "subformat=fixed")
    assert facts_of(tmp_path / "disk").format == "raw"
    assert facts_of(tmp_path / "disk", "vpc").virtual_size == info(tmp_path / "disk", "vpc")["virtual-size"]


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 1_000_000])
def test_rounds_a_raw_file_up_to_sectors_as_qemu_does(tmp_path: Path, size: int) -> None:
    (tmp_path / "disk.raw").write_bytes(bytes(size))
    assert_same(tmp_path / "disk.raw", "raw")


UNREAD = {"qcow": "disk.qcow", "parallels": "disk.hds"}


@pytest.mark.parametrize("image_format", sorted(UNREAD))
def test_says_which_known_format_is_not_read(tmp_path: Path, image_format: str) -> None:
    path = create(tmp_path / UNREAD[image_format], image_format)
    assert probed(path) == image_format
    with pytest.raises(UnreadableError, match=f"looks like {image_format}, a format that"):
        facts_of(path)
