"""A VHD whose geometry and footer say different sizes is shown as qemu sees it, and is not rewritten."""

import struct
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.formats.vpc import FOOTER_SIZE, checksum
from tests.agent.formats.test_against_qemu import facts_of
from tests.agent.harness import ask, image_info, leftovers, qemu_img, reclaim_args, stamp, write
from tests.agent.test_convert import convert_args
from tests.working import create

pytestmark = pytest.mark.qemu

SIZE = 100 << 20
BY_GEOMETRY = 1003 * 12 * 17 * 512


#: Where a footer says who made the image, and how large it is.
CREATOR, GEOMETRY = slice(28, 32), slice(56, 60)


def footer_with(path: Path, *fields: tuple[slice, bytes]) -> Path:
    """Writes that into the footer of an image, and into the copy of it at the beginning of a dynamic one."""
    with path.open("r+b") as file:
        for place in {0, path.stat().st_size - FOOTER_SIZE}:
            file.seek(place)
            footer = bytearray(file.read(FOOTER_SIZE))
            if footer[:8] == b"conectix":
                for where, content in (*fields, (slice(64, 68), bytes(4))):
                    footer[where] = content
                footer[64:68] = struct.pack(">I", checksum(bytes(footer)))
                file.seek(place)
                file.write(footer)
    return path


@pytest.fixture(params=["dynamic", "fixed"])
def disputed(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """As VirtualBox makes them: data up to the end that the footer says, and a geometry that ends before it."""
    path = create(tmp_path / "disk.vhd", str(SIZE), "-o", f"subformat={request.param},force_size=on", form="vpc")
    write(path, 0x61, "0", "2M", "vpc")
    write(path, 0x62, str(SIZE - 4096), "4096", "vpc")
    return footer_with(path, (CREATOR, b"vbox"), (GEOMETRY, struct.pack(">HBB", 1003, 12, 17)))


def test_it_has_the_size_that_qemu_sees_and_the_other_one_is_told(disputed: Path) -> None:
    facts = facts_of(disputed, "vpc")
    assert facts.virtual_size == image_info(disputed, "vpc")["virtual-size"] == BY_GEOMETRY
    assert facts.other_size == SIZE


@pytest.mark.parametrize("form", ["vpc", "qcow2", "raw"])
def test_no_conversion_leaves_its_end_out(disputed: Path, form: str) -> None:
    was, target = stamp(disputed), disputed.parent / f"other.{form}"
    answer = ask("convert", convert_args(disputed, to=target, form=form, source="vpc"))
    assert_refused(answer)
    assert not target.exists()
    assert (stamp(disputed), leftovers(disputed.parent)) == (was, set())


def test_no_copy_leaves_its_end_out(disputed: Path) -> None:
    was = stamp(disputed)
    assert_refused(ask("reclaim", reclaim_args(disputed, method="copy", format="vpc")))
    assert (stamp(disputed), leftovers(disputed.parent)) == (was, set())


def assert_refused(answer: dict[str, Any]) -> None:
    assert answer.get("code") == "unsupported_subformat", answer
    assert f"{BY_GEOMETRY} bytes by its geometry, {SIZE} by its footer" in answer["detail"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", ["force_size=on", "force_size=off", "force_size=off,subformat=fixed"])
@pytest.mark.parametrize("size", ["1M", "8M", "100M", "10000001", "200G"])
def test_about_images_of_qemu_nobody_disagrees(tmp_path: Path, options: str, size: str) -> None:
    path = create(tmp_path / "disk.vhd", size, "-o", options, form="vpc")
    facts = facts_of(path, "vpc")
    assert (facts.other_size, facts.virtual_size) == (None, image_info(path, "vpc")["virtual-size"])


@pytest.mark.parametrize("creator", [b"win ", b"qem2", b"d2v ", b"tap\0", b"CTXS"])
def test_where_qemu_goes_by_the_footer_an_image_is_copied_to_its_end(tmp_path: Path, creator: bytes) -> None:
    path = create(tmp_path / "disk.vhd", str(SIZE), "-o", "force_size=on", form="vpc")
    write(path, 0, "0", "8M", "vpc")
    write(path, 0x62, str(SIZE - 4096), "4096", "vpc")
    footer_with(path, (CREATOR, creator), (GEOMETRY, struct.pack(">HBB", 1003, 12, 17)))
    assert facts_of(path, "vpc").other_size is None
    qemu_img("convert", "-f", "vpc", "-O", "raw", path, tmp_path / "was.raw")
    result = ask("reclaim", reclaim_args(path, method="copy", format="vpc"))
    assert result.get("swapped"), result
    assert image_info(path, "vpc")["virtual-size"] == SIZE
    assert b"identical" in qemu_img("compare", "-f", "raw", "-F", "vpc", tmp_path / "was.raw", path)
