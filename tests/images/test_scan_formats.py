"""A scan of images in the formats that hosts other than qemu's own like: what becomes rows."""

import os
import struct
from pathlib import Path

import pytest

from images.models import Image
from images.rewrite import refusals
from tests.agent.harness import overwrite
from tests.working import create, image_at, scan, this_machine

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor")]


def codes(path: Path) -> list[str]:
    return [refusal.code for refusal in refusals.for_rewrite(image_at(path))]


def test_a_vhdx_image_is_listed_with_what_its_header_says(tmp_path: Path) -> None:
    plain = create(tmp_path / "plain.vhdx", form="vhdx")
    fixed = create(tmp_path / "fixed.vhdx", "10M", "-o", "subformat=fixed,block_size=1M", form="vhdx")
    assert scan(this_machine(tmp_path))["images"] == 2
    image = image_at(plain)
    assert (image.state, image.format, image.declared_format) == ("ok", "vhdx", "vhdx")
    assert (image.virtual_size, image.cluster_size, image.encrypted) == (8 << 20, 8 << 20, False)
    assert image.from_header("subformat") == "dynamic"
    image = image_at(fixed)
    assert (image.virtual_size, image.cluster_size) == (10 << 20, 1 << 20)
    assert image.from_header("subformat") == "fixed"
    assert codes(fixed) == []


def test_a_vhdx_image_with_a_broken_header_is_damaged(tmp_path: Path) -> None:
    path = create(tmp_path / "disk.vhdx", form="vhdx")
    overwrite(path, 192 << 10, b"R")
    scan(this_machine(tmp_path))
    image = image_at(path)
    assert (image.state, image.virtual_size, image.encrypted) == ("unreadable", None, None)
    assert "region table is damaged" in image.state_detail
    assert codes(path) == ["dirty_or_corrupt"]


def test_a_chain_of_qed_images_is_linked(tmp_path: Path) -> None:
    base = create(tmp_path / "base.qcow2")
    top = tmp_path / "top.qed"
    create(top, form="qed", base="base.qcow2")
    scan(this_machine(tmp_path))
    image = image_at(top)
    assert (image.state, image.format, image.chain_depth, image.backing) == ("ok", "qed", 2, image_at(base))
    assert (image.virtual_size, image.cluster_size) == (8 << 20, 1 << 16)
    # QED can only say of a raw base what it is.
    assert image.backing_format == ""
    assert image_at(base).orphan is False


def test_a_qed_image_that_was_not_closed_is_refused(tmp_path: Path) -> None:
    path = create(tmp_path / "disk.qed", form="qed")
    overwrite(path, 16, struct.pack("<Q", 2))
    scan(this_machine(tmp_path))
    assert image_at(path).from_header("dirty") is True
    assert codes(path) == ["dirty_or_corrupt"]


def test_a_luks_volume_is_listed_as_encrypted(tmp_path: Path) -> None:
    path = luks(tmp_path / "disk.luks", payload_sector=4096, file_size=(2 << 20) + (8 << 20))
    scan(this_machine(tmp_path))
    image = image_at(path)
    assert (image.state, image.format, image.encrypted) == ("ok", "luks", True)
    assert image.virtual_size == 8 << 20
    assert image.from_header("encryption") == "luks (aes-256-xts-plain64)"
    assert codes(path) == ["encrypted"]


def luks(path: Path, payload_sector: int, file_size: int) -> Path:
    """A header as cryptsetup writes it (LUKS On-Disk Format Specification 1.2.3): qemu takes seconds to make one."""
    words = (b"aes", b"xts-plain64", b"sha256")
    head = struct.pack(">6sH32s32s32sII20s32sI40s", b"LUKS\xba\xbe", 1, *words, payload_sector, 64, b"", b"", 1000, b"")
    for number in range(8):
        head += struct.pack(">II32sII", 0x00AC71F3 if number == 0 else 0x0000DEAD, 1000, b"", 8 + 504 * number, 4000)
    path.write_bytes(head)
    os.truncate(path, file_size)
    return path


def test_hostile_headers_of_every_kind_end_no_scan(tmp_path: Path) -> None:
    magics = {"vhdx": b"vhdxfile", "qed": b"QED\0", "luks": b"LUKS\xba\xbe\0\1", "2.luks": b"LUKS\xba\xbe\0\2"}
    for name, magic in magics.items():
        (tmp_path / f"short.{name}").write_bytes(magic)
        (tmp_path / f"ones.{name}").write_bytes(magic + b"\xff" * 300_000)
        (tmp_path / f"noise.{name}").write_bytes(magic + os.urandom(300_000))
    create(tmp_path / "good.qcow2")
    assert scan(this_machine(tmp_path))["images"] == 13
    states = set(Image.objects.exclude(name="good.qcow2").values_list("state", "virtual_size"))
    assert states == {("unreadable", None)}
    assert image_at(tmp_path / "good.qcow2").state == "ok"
