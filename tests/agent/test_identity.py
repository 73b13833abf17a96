"""A copy that takes an image's place is the same disk for who knows it by its UUID; one beside it is another."""

import struct
from pathlib import Path

import pytest

from storage_admin.agent.formats.vpc import checksum
from storage_admin.agent.rewrite.vmdk_descriptor import carry_identity
from tests.agent.harness import ask, image_info, overwrite, qemu_img, reads_as, reclaim_args, write
from tests.agent.test_convert import convert_args
from tests.agent.test_replace import replace_args
from tests.agent.test_vhd_sizes import CREATOR, GEOMETRY, footer_with
from tests.harness.filesystems import new_file

pytestmark = pytest.mark.qemu

UUIDS = bytes(range(0x40, 0x60))
COMMENT = b"the accounts' server"
#: Others of a VHD's footer.
TIME, UNIQUE_ID = slice(24, 28), slice(68, 84)


def image(path: Path, form: str, *options: str) -> Path:
    """8 MiB, of which a copy leaves some zeros out."""
    qemu_img("create", "-q", "-f", form, *options, path, "8M")
    write(path, 0x61, "0", "2M", form)
    write(path, 0, "4M", "3M", form)
    return path


def vdi(path: Path) -> Path:
    image(path, "vdi")
    overwrite(path, 0x54, COMMENT)
    overwrite(path, 0x188, UUIDS)
    return path


def vhd(path: Path, subformat: str) -> Path:
    """As VirtualBox makes them where its geometry says the whole size."""
    image(path, "vpc", "-o", f"subformat={subformat},force_size=on")
    own = (TIME, b"time"), (CREATOR, b"vbox"), (UNIQUE_ID, UUIDS[:16])
    return footer_with(path, *own, (GEOMETRY, struct.pack(">HBB", 64, 16, 16)))


def said_by_vdi(path: Path) -> tuple[bytes, bytes]:
    head = path.read_bytes()[:512]
    return head[0x54:0x154].rstrip(b"\0"), head[0x188:0x1A8]


def footers(path: Path) -> list[bytes]:
    content = path.read_bytes()
    found = [part for part in (content[:512], content[-512:]) if part[:8] == b"conectix"]
    assert all(checksum(footer) == int.from_bytes(footer[64:68], "big") for footer in found)
    return found


def identity(footer: bytes) -> tuple[bytes, ...]:
    return tuple(footer[part] for part in (TIME, CREATOR, GEOMETRY, UNIQUE_ID))


def keep_copy(path: Path) -> Path:
    return new_file(path.parent / "was", path.read_bytes())


def test_a_copied_vdi_keeps_its_uuids(tmp_path: Path) -> None:
    path = vdi(tmp_path / "disk.vdi")
    was = keep_copy(path)
    result = ask("reclaim", reclaim_args(path, method="copy", format="vdi"))
    assert result.get("swapped"), result
    assert said_by_vdi(path) == (COMMENT, UUIDS)
    assert reads_as(was, path, "vdi", "vdi")


@pytest.mark.parametrize("subformat", ["dynamic", "fixed"])
def test_a_copied_vhd_keeps_its_unique_id_and_geometry(tmp_path: Path, subformat: str) -> None:
    path = vhd(tmp_path / "disk.vhd", subformat)
    was, said = keep_copy(path), [identity(footer) for footer in footers(path)]
    size = image_info(path, "vpc")["virtual-size"]
    result = ask("reclaim", reclaim_args(path, method="copy", format="vpc"))
    assert result.get("swapped"), result
    assert [identity(footer) for footer in footers(path)] == said
    assert len(said) == {"dynamic": 2, "fixed": 1}[subformat]
    assert image_info(path, "vpc")["virtual-size"] == size
    assert reads_as(was, path, "vpc", "vpc")


def test_what_is_written_beside_an_image_is_another_disk(tmp_path: Path) -> None:
    path = vdi(tmp_path / "disk.vdi")
    assert ask("convert", convert_args(path, to=tmp_path / "other.vdi", form="vdi", source="vdi")).get("swapped")
    assert said_by_vdi(tmp_path / "other.vdi")[1] not in {UUIDS, bytes(32)}
    path = vhd(tmp_path / "disk.vhd", "dynamic")
    args = convert_args(path, to=tmp_path / "other.vhd", form="vpc", source="vpc")
    assert ask("convert", args, job="j2").get("swapped")
    assert UUIDS[:16] not in {footer[UNIQUE_ID] for footer in footers(tmp_path / "other.vhd")}


def test_what_takes_an_images_place_in_the_same_format_is_the_same_disk(tmp_path: Path) -> None:
    path = vdi(tmp_path / "disk.vdi")
    args = replace_args(path, form="vdi", source="vdi")
    assert ask("convert", args).get("swapped")
    assert said_by_vdi(path) == (COMMENT, UUIDS)


@pytest.mark.parametrize(("before", "after"), [("dynamic", "fixed"), ("fixed", "dynamic")])
def test_the_same_for_a_vhd_of_another_subformat(tmp_path: Path, before: str, after: str) -> None:
    path = vhd(tmp_path / "disk.vhd", before)
    was, said = keep_copy(path), identity(footers(path)[0])
    args = replace_args(path, form="vpc", source="vpc", to=path, options={"subformat": after})
    result = ask("convert", args)
    assert result.get("swapped"), result
    assert {identity(footer) for footer in footers(path)} == {said}
    assert len(footers(path)) == {"dynamic": 2, "fixed": 1}[after]
    assert reads_as(was, path, "vpc", "vpc")


def text_of(path: Path) -> bytes:
    return path.read_bytes()[512 : 512 + 20480].split(b"\0", 1)[0]


def test_the_same_for_a_vmdk_whose_other_options_are_its_own(tmp_path: Path) -> None:
    path = image(tmp_path / "disk.vmdk", "vmdk", "-o", "adapter_type=lsilogic")
    said = text_of(path)
    content = next(line for line in said.splitlines() if line.startswith(b"CID="))
    more = b'ddb.uuid.image="01234567-89ab"\nddb.uuid.parent="0"\n'
    overwrite(path, 512, said.replace(content, b"CID=600df00d") + more)
    was = keep_copy(path)
    options = {"subformat": "streamOptimized", "adapter_type": "ide"}
    result = ask("convert", replace_args(path, form="vmdk", source="vmdk", options=options))
    assert result.get("swapped"), result
    lines = text_of(path).splitlines()
    assert {b"CID=600df00d", b'ddb.uuid.image="01234567-89ab"', b'createType="streamOptimized"'} < set(lines)
    assert b'ddb.adapterType = "ide"' in lines
    assert not [line for line in lines if b"uuid.parent" in line]
    assert len([line for line in lines if line.startswith(b"CID=")]) == 1
    assert reads_as(was, path, "vmdk", "vmdk")


def test_what_qemu_left_behind_a_shorter_descriptor_hides_nothing(tmp_path: Path) -> None:
    """A content id with a digit less: qemu writes the text anew, and leaves the end of the longer one behind it."""
    source, target = image(tmp_path / "disk.vmdk", "vmdk"), image(tmp_path / "copy.vmdk", "vmdk")
    for path, more in ((source, b'ddb.uuid.image="01234567-89ab"\n'), (target, b"\0\n")):
        overwrite(path, 512, text_of(path) + more)
    with source.open("rb") as old, target.open("r+b") as new:
        carry_identity(old.fileno(), new.fileno())
    assert b'ddb.uuid.image="01234567-89ab"' in text_of(target).splitlines()
