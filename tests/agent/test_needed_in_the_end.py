"""What has come to need an image while a job was at work is found under the locks, right before its name goes."""

from pathlib import Path
from typing import Any

import pytest

from tests.agent.aside import pool_of
from tests.agent.harness import ask, at_ready, heard, leftovers, qemu_img, reclaim_args, stamp, undo_args, write
from tests.agent.test_replace import KEPT, replace_args
from tests.agent.test_shrink import GPT, args_for, disk
from tests.harness.filesystems import new_folder

pytestmark = pytest.mark.qemu


def pools(*folders: Path) -> list[dict[str, str]]:
    return [pool_of(folder) for folder in folders]


def ask_late(verb: str, args: dict[str, Any], job: str, base: Path, form: str = "qcow2") -> dict[str, Any]:
    """Does a request, and makes an overlay in the moment before the last word."""
    with at_ready(verb, args, job=job) as agent:
        qemu_img("create", "-q", "-f", "qcow2", "-b", base.name, "-F", form, base.with_name("top.qcow2"))
        return agent.go()


def test_a_conversion_leaves_an_overlay_its_base(pool: Path, image: Path) -> None:
    was = stamp(image)
    answer = ask_late("convert", replace_args(image, form="raw", pools=pools(pool)), "j1", image)
    assert answer.get("code") == "has_overlays", answer
    assert (stamp(image), leftovers(pool)) == (was, set())
    assert not (pool / "vm.raw").exists()


@pytest.mark.parametrize("late", [False, True])
def test_an_overlay_keeps_the_end_of_its_base_and_reads_as_before(pool: Path, late: bool) -> None:
    folder = new_folder(pool / "pool")
    image = disk(folder / "vm.raw", GPT, 64 << 20)
    asked = args_for(image, None, "raw") | {"pools": pools(folder)}
    was = stamp(image)
    if not late:
        qemu_img("create", "-q", "-f", "qcow2", "-b", image.name, "-F", "raw", folder / "top.qcow2")
    answer = ask_late("shrink", asked, "j1", image, "raw") if late else ask("shrink", asked)
    assert answer.get("code") == "has_overlays", answer
    assert (stamp(image), leftovers(folder)) == (was, set())


def test_an_overlay_keeps_a_base_whose_filesystems_nobody_trims(pool: Path, image: Path) -> None:
    qemu_img("create", "-q", "-f", "qcow2", "-b", image.name, "-F", "qcow2", pool / "top.qcow2")
    asked = args_for(image, None, "qcow2") | {"pools": pools(pool)}
    assert ask("sparsify", asked)["code"] == "has_overlays"


def split_vmdk(folder: Path) -> list[Path]:
    """Its extents; the descriptor is beside them."""
    folder.mkdir(exist_ok=True)
    options = ["-f", "vmdk", "-o", "subformat=twoGbMaxExtentSparse"]
    qemu_img("create", "-q", *options, folder / "split.vmdk", "5G")
    return sorted(folder.glob("split-s*.vmdk"))


def test_the_extents_of_a_split_vmdk_stand_on_nothing(pool: Path, image: Path) -> None:
    assert len(split_vmdk(pool)) == 3
    extent, *_ = split_vmdk(pool / "other")
    extent.write_bytes(b"QFI\xfb" + bytes(100))  # a guest may write anything into its disk
    answer = ask("convert", replace_args(image, form="raw", pools=pools(pool, pool / "other")))
    assert answer.get("swapped"), answer


def test_an_extent_that_no_descriptor_names_may_stand_on_the_image(pool: Path, image: Path) -> None:
    split_vmdk(pool)
    (pool / "split.vmdk").unlink()
    assert ask("convert", replace_args(image, form="raw", pools=pools(pool)))["code"] == "guests_unknown"


def test_an_extent_is_needed_by_its_descriptor(pool: Path, image: Path) -> None:
    (pool / "flat.vmdk").write_text(
        '# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType="monolithicFlat"\n'
        f'RW 16384 FLAT "{image.name}" 0\n'
    )
    assert ask("convert", replace_args(image, form="raw", pools=pools(pool)))["code"] == "has_overlays"


def test_a_conversion_that_is_refused_has_written_nothing(pool: Path, image: Path) -> None:
    (pool / "other").mkdir()
    qemu_img("create", "-q", "-f", "qcow2", "-b", image, "-F", "qcow2", pool / "other/top.qcow2")
    answer, events = heard("convert", replace_args(image, form="raw", pools=pools(pool, pool / "other")))
    assert answer["code"] == "has_overlays"
    assert not [event for event in events if event.get("stage") == "copying"]


def test_where_name_and_format_stay_nobody_is_asked_for(pool: Path, image: Path) -> None:
    args = replace_args(image, form="qcow2", options={"cluster_size": "2M"}, pools=pools(pool))
    assert ask_late("convert", args, "j1", image).get("swapped")


def test_a_forced_undo_leaves_an_overlay_what_it_reads(pool: Path, image: Path) -> None:
    assert ask("reclaim", reclaim_args(image))["swapped"]
    write(image, 0x77, "0", "1M")
    was = stamp(image)
    args = undo_args(image, force=True, pools=pools(pool))
    answer = ask_late("undo", args, "u1", image)
    assert answer.get("code") == "has_overlays", answer
    assert (stamp(image), leftovers(pool)) == (was, KEPT)
    assert ask("undo", args, job="u2")["code"] == "has_overlays"
    (pool / "top.qcow2").unlink()
    assert ask("undo", args, job="u3").get("inode")


def test_the_undo_of_a_conversion_leaves_an_overlay_its_base(pool: Path, image: Path) -> None:
    assert ask("convert", replace_args(image, form="raw")).get("swapped")
    new = pool / "vm.raw"
    answer = ask_late("undo", undo_args(new, pools=pools(pool)), "u1", new, "raw")
    assert answer.get("code") == "has_overlays", answer
    assert new.exists()
    assert not image.exists()
