"""A shortened chain names its base so that a guest finds it, whatever symbolic links lead to the pools."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agent.harness import (
    ask,
    at_ready,
    image_info,
    leftovers,
    make_image,
    qemu_img,
    reclaim_args,
    rewrite_args,
    write,
)

pytestmark = pytest.mark.qemu

OWN, OTHER = 0x42, 0x66


def guest_reads(path: Path, pattern: int) -> bool:
    """Whether a guest that is given the image's name alone finds these bytes of the base in it."""
    command: list[str | Path] = ["qemu-io", "-r", "-f", "qcow2", "-c", f"read -P {pattern} 0 64k", path]
    done = subprocess.run(command, capture_output=True)
    return done.returncode == 0 and b"read 65536" in done.stdout and b"Pattern" not in done.stdout


def base_and_middle(folder: Path, base: str = "base.qcow2") -> tuple[Path, Path]:
    """base ← mid in one folder, or as far apart as the name says; the name is relative."""
    middle = folder / "mid.qcow2"
    (folder / base).parent.mkdir(exist_ok=True)
    qemu_img("create", "-q", "-f", "qcow2", folder / base, "4M")
    write(folder / base, OWN, "0", "1M")
    qemu_img("create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", middle)
    write(middle, 7, "2M", "1M")
    return (folder / base).resolve(), middle


def decoy(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    qemu_img("create", "-q", "-f", "qcow2", path, "4M")
    write(path, OTHER, "0", "1M")


def top_on(middle: Path, folder: Path) -> Path:
    qemu_img("create", "-q", "-f", "qcow2", "-b", middle, "-F", "qcow2", folder / "top.qcow2")
    return folder / "top.qcow2"


@pytest.fixture
def linked_images(tmp_path: Path) -> tuple[Path, Path, Path]:
    """top, mid and base; the pool of top is a link into a folder a level deeper."""
    (tmp_path / "templ").mkdir()
    (tmp_path / "big/images").mkdir(parents=True)
    (tmp_path / "images").symlink_to("big/images")
    base, middle = base_and_middle(tmp_path / "templ")
    return top_on(middle, tmp_path / "images"), middle, base


@pytest.mark.parametrize("other", [False, True], ids=["nothing there", "another image there"])
def test_an_image_in_a_linked_pool_stands_on_the_base_and_no_other(
    tmp_path: Path, linked_images: tuple[Path, Path, Path], *, other: bool
) -> None:
    top, middle, base = linked_images
    if other:
        decoy(tmp_path / "big/templ/base.qcow2")
    result = ask("flatten", reclaim_args(top, middle, base, method="rebase", keep=2))
    assert result.get("swapped"), result
    assert image_info(top)["backing-filename"] == str(base)
    assert guest_reads(top, OWN)


@pytest.mark.parametrize("other", [False, True], ids=["nothing there", "another image there"])
def test_the_same_where_the_pool_of_the_image_in_the_middle_is_linked(tmp_path: Path, *, other: bool) -> None:
    (tmp_path / "big/templ").mkdir(parents=True)
    (tmp_path / "images").mkdir()
    (tmp_path / "templ").symlink_to("big/templ")
    base, middle = base_and_middle(tmp_path / "templ", "../bases/base.qcow2")
    assert base == tmp_path / "big/bases/base.qcow2"
    if other:
        decoy(tmp_path / "bases/base.qcow2")
    top = top_on(middle, tmp_path / "images")
    result = ask("flatten", reclaim_args(top, middle, base, method="rebase", keep=2))
    assert result.get("swapped"), result
    assert image_info(top)["backing-filename"] == str(base)
    assert guest_reads(top, OWN)


def test_a_name_that_leads_elsewhere_in_the_moment_of_the_swap_is_not_written(
    tmp_path: Path, linked_images: tuple[Path, Path, Path]
) -> None:
    top, middle, base = linked_images
    way = tmp_path / "big/templ"
    way.symlink_to(tmp_path / "templ")
    inode = top.stat().st_ino
    with at_ready("flatten", reclaim_args(top, middle, base, method="rebase", keep=2)) as agent:
        way.unlink()
        decoy(way / "base.qcow2")
        answer = agent.go()
    assert answer.get("code") == "stale_plan", answer
    assert "../templ/base.qcow2" in answer["detail"]
    assert (top.stat().st_ino, leftovers(top.parent)) == (inode, set())
    assert guest_reads(top, OWN)


def copied(top: Path, base: Path) -> dict[str, object]:
    return reclaim_args(top, base, method="copy")


def repaired(top: Path, base: Path) -> dict[str, object]:
    return rewrite_args(top, base, repair="leaks")


@pytest.mark.parametrize(("verb", "asked"), [("reclaim", copied), ("check", repaired)])
def test_no_rewrite_keeps_a_name_that_leads_elsewhere_by_then(
    tmp_path: Path, verb: str, asked: Callable[[Path, Path], dict[str, object]]
) -> None:
    (tmp_path / "pool").mkdir()
    base, way = tmp_path / "pool/base.qcow2", tmp_path / "way"
    make_image(base)
    way.symlink_to("pool")
    top = make_image(tmp_path / "pool/top.qcow2", base=str(way / "base.qcow2"))
    inode = top.stat().st_ino
    with at_ready(verb, asked(top, base)) as agent:
        way.unlink()
        answer = agent.go()
    assert answer.get("code") == "stale_plan", answer
    assert (top.stat().st_ino, leftovers(top.parent)) == (inode, set())
