"""A scan of VHD images whose geometry and footer say different sizes, and the plans for them."""

import struct
from pathlib import Path

import pytest

from images.rewrite import refusals
from storage_admin.agent.formats.vpc import checksum
from storage_admin.jobs import services
from tests.working import OPERATOR, create, image_at, scan, this_machine

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


def by_virtualbox(path: Path) -> Path:
    """100 MiB by the footer, and a geometry that leaves some of it out."""
    create(path, "100M", "-o", "force_size=on", form="vpc")
    with path.open("r+b") as file:
        footer = bytearray(file.read(512))
        footer[28:32], footer[56:60] = b"vbox", struct.pack(">HBB", 1003, 12, 17)
        footer[64:68] = struct.pack(">I", checksum(bytes(footer)))
        for place, whence in ((0, 0), (-512, 2)):
            file.seek(place, whence)
            file.write(footer)
    return path


@pytest.mark.parametrize(("kind", "options"), [("reclaim", {"method": "copy"}), ("convert", {"format": "qcow2"})])
def test_the_plan_of_a_rewrite_is_refused_and_the_size_is_shown_as_qemu_sees_it(
    tmp_path: Path, kind: str, options: dict[str, str]
) -> None:
    path = by_virtualbox(tmp_path / "disk.vhd")
    scan(this_machine(tmp_path))
    image = image_at(path)
    assert (image.state, image.format, image.virtual_size) == ("ok", "vpc", 1003 * 12 * 17 * 512)
    told = {refusal.code: refusal.detail for refusal in services.plan(OPERATOR, kind, image.pk, options).refusals}
    assert "104,761,344 bytes by its geometry, 104,857,600 by its footer" in told["unsupported_subformat"]


def test_images_of_qemu_are_not_refused(tmp_path: Path) -> None:
    forced = create(tmp_path / "forced.vhd", "100M", "-o", "force_size=on", form="vpc")
    rounded = create(tmp_path / "rounded.vhd", "100M", form="vpc")
    scan(this_machine(tmp_path))
    assert [refusals.for_rewrite(image_at(path)) for path in (forced, rounded)] == [[], []]
