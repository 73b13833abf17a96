"""What has come to need an image while a job was at work is found under the locks, right before its name goes."""

import os
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.protocol import b64
from tests.agent.harness import Agent, ask, leftovers, make_image, qemu_img, reclaim_args, stamp, undo_args, write
from tests.agent.test_replace import KEPT, replace_args
from tests.agent.test_shrink import GPT, args_for, disk

pytestmark = pytest.mark.qemu


@pytest.fixture
def image(tmp_path: Path) -> Path:
    make_image(tmp_path / "vm.qcow2")
    return tmp_path / "vm.qcow2"


def pools(*folders: Path) -> list[dict[str, str]]:
    return [{"path_b64": b64(os.fsencode(folder)), "kind": "dir", "known_b64": ""} for folder in folders]


def ask_late(verb: str, args: dict[str, Any], job: str, base: Path, form: str = "qcow2") -> dict[str, Any]:
    """Does a request, and makes an overlay in the moment before the last word."""
    with Agent() as agent:
        agent.request(verb, args, job=job)
        agent.until("ready")
        qemu_img("create", "-q", "-f", "qcow2", "-b", base.name, "-F", form, base.with_name("top.qcow2"))
        agent.say("go", generation=1)
        return agent.answer()


def test_a_conversion_leaves_an_overlay_its_base(tmp_path: Path, image: Path) -> None:
    was = stamp(image)
    answer = ask_late("convert", replace_args(image, form="raw", pools=pools(tmp_path)), "j1", image)
    assert answer.get("code") == "has_overlays", answer
    assert (stamp(image), leftovers(tmp_path)) == (was, set())
    assert not (tmp_path / "vm.raw").exists()


@pytest.mark.parametrize("late", [False, True])
def test_an_overlay_keeps_the_end_of_its_base_and_reads_as_before(tmp_path: Path, late: bool) -> None:
    folder = tmp_path / "pool"
    folder.mkdir()
    image = disk(folder / "vm.raw", GPT, 64 << 20)
    asked = args_for(image, None, "raw") | {"pools": pools(folder)}
    was = stamp(image)
    if not late:
        qemu_img("create", "-q", "-f", "qcow2", "-b", image.name, "-F", "raw", folder / "top.qcow2")
    answer = ask_late("shrink", asked, "j1", image, "raw") if late else ask("shrink", asked)
    assert answer.get("code") == "has_overlays", answer
    assert (stamp(image), leftovers(folder)) == (was, set())


def test_an_overlay_keeps_a_base_whose_filesystems_nobody_trims(tmp_path: Path, image: Path) -> None:
    qemu_img("create", "-q", "-f", "qcow2", "-b", image.name, "-F", "qcow2", tmp_path / "top.qcow2")
    asked = args_for(image, None, "qcow2") | {"pools": pools(tmp_path)}
    assert ask("sparsify", asked)["code"] == "has_overlays"


def split_vmdk(folder: Path) -> list[Path]:
    """Its extents; the descriptor is beside them."""
    folder.mkdir(exist_ok=True)
    options = ["-f", "vmdk", "-o", "subformat=twoGbMaxExtentSparse"]
    qemu_img("create", "-q", *options, folder / "split.vmdk", "5G")
    return sorted(folder.glob("split-s*.vmdk"))


def test_the_extents_of_a_split_vmdk_stand_on_nothing(tmp_path: Path, image: Path) -> None:
    assert len(split_vmdk(tmp_path)) == 3
    extent, *_ = split_vmdk(tmp_path / "other")
    extent.write_bytes(b"QFI\xfb" + bytes(100))  # a guest may write anything into its disk
    args = replace_args(image, form="raw", pools=pools(tmp_path, tmp_path / "other"))
    answer = ask("convert", args)
    assert answer.get("swapped"), answer


def test_an_extent_that_no_descriptor_names_may_stand_on_the_image(tmp_path: Path, image: Path) -> None:
    split_vmdk(tmp_path)
    (tmp_path / "split.vmdk").unlink()
    assert ask("convert", replace_args(image, form="raw", pools=pools(tmp_path)))["code"] == "guests_unknown"


def test_an_extent_is_needed_by_its_descriptor(tmp_path: Path, image: Path) -> None:
    (tmp_path / "flat.vmdk").write_text(
        '# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType="monolithicFlat"\n'
        f'RW 16384 FLAT "{image.name}" 0\n'
    )
    assert ask("convert", replace_args(image, form="raw", pools=pools(tmp_path)))["code"] == "has_overlays"


def test_a_conversion_that_is_refused_has_written_nothing(tmp_path: Path, image: Path) -> None:
    (tmp_path / "other").mkdir()
    qemu_img("create", "-q", "-f", "qcow2", "-b", image, "-F", "qcow2", tmp_path / "other/top.qcow2")
    with Agent() as agent:
        agent.request("convert", replace_args(image, form="raw", pools=pools(tmp_path, tmp_path / "other")), job="j1")
        assert agent.answer()["code"] == "has_overlays"
        assert not [event for event in agent.events if event.get("stage") == "copying"]


def test_where_name_and_format_stay_nobody_is_asked_for(tmp_path: Path, image: Path) -> None:
    args = replace_args(image, form="qcow2", options={"cluster_size": "2M"}, pools=pools(tmp_path))
    assert ask_late("convert", args, "j1", image).get("swapped")


def test_a_forced_undo_leaves_an_overlay_what_it_reads(tmp_path: Path, image: Path) -> None:
    assert ask("reclaim", reclaim_args(image))["swapped"]
    write(image, 0x77, "0", "1M")
    was = stamp(image)
    args = undo_args(image, force=True, pools=pools(tmp_path))
    answer = ask_late("undo", args, "u1", image)
    assert answer.get("code") == "has_overlays", answer
    assert (stamp(image), leftovers(tmp_path)) == (was, KEPT)
    assert ask("undo", args, job="u2")["code"] == "has_overlays"
    (tmp_path / "top.qcow2").unlink()
    assert ask("undo", args, job="u3").get("inode")


def test_the_undo_of_a_conversion_leaves_an_overlay_its_base(tmp_path: Path, image: Path) -> None:
    assert ask("convert", replace_args(image, form="raw")).get("swapped")
    new = tmp_path / "vm.raw"
    answer = ask_late("undo", undo_args(new, pools=pools(tmp_path)), "u1", new, "raw")
    assert answer.get("code") == "has_overlays", answer
    assert new.exists()
    assert not image.exists()
