"""Packed images become images: archives, compressed files, parts; what is damaged or hostile leaves nothing behind."""

import gzip
import hashlib
import io
import lzma
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import NO_RESERVE, ask, image_info, leftovers, location, make_image, qemu_img, write
from tests.harness.filesystems import new_file

pytestmark = pytest.mark.qemu
MIB = 1 << 20


def image(pool: Path) -> Path:
    path = make_image(pool / "disk.qcow2", "16M")
    for at in range(1, 12, 2):
        write(path, 0x20 + at, f"{at}M", "1M")
    return path


def args_for(source: Path, name: str = "new.qcow2", **more: Any) -> dict[str, Any]:
    target = location(source.parent / name) | {"format": name.rpartition(".")[2]}
    return {"source": location(source), "target": target, "reserve": NO_RESERVE, **more}


def archive(pool: Path, disk: bytes, *, manifest: str | None = "", name: str = "disk1.vmdk") -> Path:
    """An OVA as VirtualBox and ovftool write it: descriptor, manifest, disk."""
    path = pool / "vm.ova"
    digest = hashlib.sha256(disk).hexdigest()
    told = f"SHA256(vm.ovf)= {'0' * 64}\nSHA256({name})= {digest}\n" if manifest == "" else manifest
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for member, content in (
            ("vm.ovf", b"<Envelope/>"),
            ("vm.mf", told.encode() if told is not None else None),
            (name, disk),
        ):
            if content is not None:
                entry = tarfile.TarInfo(member)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return path


def stream_optimized(source: Path) -> bytes:
    path = source.parent.parent / "disk.vmdk"
    qemu_img("convert", "-O", "vmdk", "-o", "subformat=streamOptimized", source, path)
    return path.read_bytes()


def _zstd(content: bytes) -> bytes:
    return subprocess.run(["zstd", "-q", "-c"], input=content, capture_output=True, check=True).stdout


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "two members": lambda content: gzip.compress(content[:MIB]) + gzip.compress(content[MIB:]),
    "xz": lzma.compress,
    "zst": _zstd,
    "plain": bytes,
}


@pytest.mark.parametrize("how", PACKERS)
def test_a_compressed_image_comes_out_as_it_was(pool: Path, how: str) -> None:
    before = image(pool)
    packed = new_file(pool / "packed", PACKERS[how](before.read_bytes()))
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    result = ask("unpack", args_for(packed, sha256=digest))
    assert result.get("virtual_size") == 16 * MIB, result
    assert result["content_sha256"] == hashlib.sha256(before.read_bytes()).hexdigest()
    assert (pool / "new.qcow2").read_bytes() == before.read_bytes()
    assert (pool / "new.qcow2").stat().st_mode & 0o777 == 0o600
    assert leftovers(pool) == set()


@pytest.mark.parametrize("form", ["qcow2", "raw", "vdi"])
def test_the_disk_of_an_archive_becomes_an_image_of_any_format(pool: Path, form: str) -> None:
    before = image(pool)
    result = ask("unpack", args_for(archive(pool, stream_optimized(before)), f"new.{form}"))
    assert (result.get("virtual_size"), result.get("packed")) == (16 * MIB, "ova"), result
    assert image_info(pool / f"new.{form}", form)["virtual-size"] == 16 * MIB
    qemu_img("compare", "-f", "qcow2", "-F", form, before, pool / f"new.{form}")
    assert leftovers(pool) == set()


@pytest.mark.parametrize("names", [("001", "002", "003"), ("aa", "ab", "ac"), ("part1", "part2", "part3")])
def test_parts_are_read_one_after_the_other(pool: Path, names: tuple[str, ...]) -> None:
    before = image(pool).read_bytes()
    packed = gzip.compress(before)
    third = len(packed) // 3 + 1
    for number, name in enumerate(names):
        (pool / f"disk.gz.{name}").write_bytes(packed[number * third : (number + 1) * third])
    result = ask("unpack", args_for(pool / f"disk.gz.{names[0]}"))
    assert result.get("packed_bytes") == len(packed), result
    assert (pool / "new.qcow2").read_bytes() == before


def test_a_part_that_is_missing_or_a_number_that_is_none_is_no_shorter_image(pool: Path) -> None:
    before = image(pool).read_bytes()
    for name, content in (("d.001", before[:MIB]), ("d.002", before[MIB : 2 * MIB]), ("d.004", before[2 * MIB :])):
        (pool / name).write_bytes(content)
    assert ask("unpack", args_for(pool / "d.001"))["code"] == "invalid"
    # Numbered backups are no parts: the first one alone is read.
    for number in (1, 2, 10):
        (pool / f"backup.{number}").write_bytes(before)
    result = ask("unpack", args_for(pool / "backup.1"))
    assert (result.get("parts"), result.get("packed_bytes")) == (1, len(before)), result


def test_what_follows_a_packed_file_is_not_taken_for_a_part_of_it(pool: Path) -> None:
    before = image(pool).read_bytes()
    for how in ("gz", "xz", "zst"):
        packed = new_file(pool / f"disk.{how}", PACKERS[how](before) + b"GARBAGE" * 1000)
        assert ask("unpack", args_for(packed))["code"] == "dirty_or_corrupt", how
    assert leftovers(pool) == set()


def _bomb(kind: bytes, size: int) -> bytes:
    header = bytearray(tarfile.TarInfo("name").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = kind
    header[124:136] = b"\x80" + size.to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize("name", ["a long name", "a long attribute", "names on names", "many members", "no checksum"])
def test_an_archive_that_is_made_to_eat_memory_is_refused(pool: Path, name: str) -> None:
    path = pool / "vm.ova"
    content = {
        "a long name": _bomb(b"L", 20 << 30),
        "a long attribute": _bomb(b"x", 20 << 30),
        "names on names": _bomb(b"L", 512).ljust(1024, b"n") * 5000,
        "many members": _bomb(b"0", 0) * 5000,
        "no checksum": _bomb(b"0", 0)[:148] + b"0000000\0" + _bomb(b"0", 0)[156:],
    }[name]
    path.write_bytes(content)
    os.truncate(path, 21 << 30)
    assert ask("unpack", args_for(path))["code"] == "dirty_or_corrupt"


def test_zeros_become_holes(pool: Path) -> None:
    packed = new_file(pool / "disk.gz", gzip.compress(bytes(64 * MIB) + b"\x01" * MIB))
    result = ask("unpack", args_for(packed, "new.raw"))
    assert (result.get("virtual_size"), result.get("after_bytes")) == (65 * MIB, MIB), result


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [_cut, _flipped])
@pytest.mark.parametrize("how", ["gz", "xz", "zst", "ova"])
def test_what_is_damaged_is_refused_and_leaves_nothing(pool: Path, how: str, harm: Callable[[Path], None]) -> None:
    before = image(pool)
    packed = pool / f"disk.{how}"
    if how == "ova":
        archive(pool, stream_optimized(before)).rename(packed)
    else:
        packed.write_bytes(PACKERS[how](before.read_bytes()))
    harm(packed)
    assert ask("unpack", args_for(packed))["code"] in {"dirty_or_corrupt", "invalid"}
    assert not (pool / "new.qcow2").exists()
    assert leftovers(pool) == set()


def test_what_names_other_files_or_is_not_what_it_is_called_is_refused(pool: Path) -> None:
    secret, evil, packed = pool.parent / "secret", pool / "evil.qcow2", pool / "packed"
    secret.write_bytes(b"secret" * 1000)
    qemu_img("create", "-q", "-f", "qcow2", "-b", secret, "-F", "raw", evil)
    packed.write_bytes(gzip.compress(evil.read_bytes()))
    assert ask("unpack", args_for(packed))["code"] == "unsupported_subformat"
    packed.write_bytes(gzip.compress(image(pool).read_bytes()))
    assert ask("unpack", args_for(packed, "new.raw"))["code"] == "format_mismatch"
    descriptor = f'# Disk DescriptorFile\nversion=1\ncreateType="monolithicFlat"\nRW 8 FLAT "{secret}" 0\n'
    told = archive(pool, descriptor.encode().ljust(4096, b"\n"))
    assert ask("unpack", args_for(told))["code"] == "unsupported_subformat"
    link = pool / "link"
    link.symlink_to(secret)
    assert ask("unpack", args_for(link))["code"] == "outside_pool"
    assert not list(pool.glob("new.*"))
    assert leftovers(pool) == set()


def test_a_manifest_a_digest_and_the_choice_of_a_disk_are_minded(pool: Path) -> None:
    before = image(pool)
    disk = stream_optimized(before)
    for line in (f"SHA256(disk1.vmdk)= {'0' * 64}\n", f"SHA1 (disk1.vmdk) = {'0' * 40}\n"):
        wrong = archive(pool, disk, manifest=line)
        assert ask("unpack", args_for(wrong))["code"] == "dirty_or_corrupt"
    assert ask("unpack", args_for(archive(pool, disk), member="other.vmdk"))["code"] == "invalid"
    assert ask("unpack", args_for(archive(pool, disk), sha256="0" * 64))["code"] == "dirty_or_corrupt"
    assert ask("unpack", args_for(archive(pool, disk), sha256="xyz"))["code"] == "invalid"
    assert "code" not in ask("unpack", args_for(archive(pool, disk, manifest=None), member="disk1.vmdk"))
    assert ask("unpack", args_for(archive(pool, disk)))["code"] == "target_exists"


def test_what_is_still_written_to_is_not_taken(pool: Path) -> None:
    packed = new_file(pool / "disk.gz", gzip.compress(image(pool).read_bytes()))
    with packed.open("r+b"):
        assert ask("unpack", args_for(packed))["code"] == "image_in_use"
    assert ask("unpack", args_for(pool / "nothing.gz"))["code"] == "stale_plan"
