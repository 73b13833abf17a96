"""A file that is mounted by itself has one more name: whoever uses that would go on with the old content."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.host import special_mounts
from storage_admin.agent.protocol import RefusedError
from storage_admin.agent.rewrite import chain as links
from storage_admin.agent.rewrite.chain import Chain, Planned
from tests.agent.aside import aside_args, delete_args
from tests.agent.harness import ask, at_ready, held_open, leftovers, link, make_image, reclaim_args, undo_args
from tests.agent.test_convert import convert_args
from tests.agent.test_in_place import reclaim as reclaim_in_place
from tests.harness.filesystems import mounted, new_file, new_folder
from tests.harness.processes import running

pytestmark = pytest.mark.qemu


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where it is mounted."""
    (tmp_path / "other").mkdir()
    return new_file(tmp_path / "other/disk.img")


@contextlib.contextmanager
def container(script: str, *argv: Path) -> Iterator[str]:
    """A process with mounts of its own; it has done what the script says. Its number."""
    shell = ["sh", "-ec", f"{script}\necho done\nread end || :", "sh", *map(str, argv)]
    with running(["unshare", "-m", "--propagation", "private", *shell], b"done\n") as process:
        yield str(process.pid)


def where(path: Path) -> str | None:
    with held_open(path) as fd:
        return special_mounts.mounted_at(fd)


def refused(answer: dict[str, Any], *words: object) -> None:
    assert answer.get("code") == "hard_linked", answer
    assert all(str(word) in answer["detail"] for word in words), answer["detail"]


def test_an_image_that_is_mounted_on_another_file_keeps_its_inode(image: Path, place: Path) -> None:
    inode = image.stat().st_ino
    with mounted(image, place):
        refused(ask("reclaim", reclaim_args(image)), image, place)
        assert (image.stat().st_ino, leftovers(image.parent)) == (inode, set())
    assert ask("reclaim", reclaim_args(image))["swapped"]


def test_one_that_is_mounted_in_a_container_is_refused_with_its_process(image: Path, place: Path) -> None:
    with container('mount --bind "$1" "$2"', image, place) as pid:
        assert not image.samefile(place)
        refused(ask("reclaim", reclaim_args(image)), place, f"process {pid} (sh)")
        assert leftovers(image.parent) == set()
    assert where(image) is None


def test_a_mount_that_came_while_the_copy_was_made_ends_the_job(image: Path, place: Path) -> None:
    inode = image.stat().st_ino
    with at_ready("reclaim", reclaim_args(image)) as agent, mounted(image, place):
        refused(agent.go(), place)
    assert (image.stat().st_ino, leftovers(image.parent)) == (inode, set())


def test_what_does_not_replace_the_file_may_go_on(image: Path, place: Path) -> None:
    with mounted(image, place):
        assert reclaim_in_place(image)["freed_bytes"] > 0
        target = image.with_name("vm.vmdk")
        assert ask("convert", convert_args(image, to=target, form="vmdk"))["swapped"]
        assert image.samefile(place)
    assert target.exists()


def test_a_mounted_base_is_no_hindrance_to_its_overlay(image: Path, place: Path) -> None:
    top = make_image(image.with_name("top.qcow2"), base=str(image))
    with mounted(image, place):
        assert ask("reclaim", reclaim_args(top, image))["swapped"]


@pytest.mark.parametrize("inside", [True, False], ids=["in a container", "here"])
def test_a_mount_of_a_name_that_is_gone_is_known_by_its_inode(image: Path, place: Path, inside: bool) -> None:
    second = image.with_name("second")
    os.link(image, second)
    script = 'mount --bind "$1" "$2"'
    with container(script, second, place) if inside else mounted(second, place):
        second.unlink()
        assert image.stat().st_nlink == 1
        assert str(place) in str(where(image))


def test_a_mount_that_cannot_be_looked_at_is_known_by_its_name(image: Path, place: Path, tmp_path: Path) -> None:
    """Another mount lies over it, and the file was renamed there since."""
    moved = new_folder(tmp_path / "moved")
    with container('mount --bind "$1" "$2"; mount -t tmpfs none "${2%/*}"', image, place):
        assert str(place) in str(where(image))
        os.link(image, moved / image.name)
        image.unlink()
        assert str(place) in str(where(moved / image.name))
        (moved / image.name).rename(moved / "b.qcow2")
        assert where(moved / "b.qcow2") is None, "it is not told of another name"


def test_a_process_with_another_root_does_not_hide_the_mounts_of_its_namespace(
    image: Path, place: Path, tmp_path: Path
) -> None:
    jail = new_folder(tmp_path / "jail")
    # The first process of the namespace sees nothing of the mount, a later one does.
    script = """
mount --bind "$1" "$2"
exec python3 -c '
import os, sys
below = os.fork()
if below:
    os.chroot(sys.argv[1])
    os.write(1, b"done\\n")
    os.waitpid(below, 0)
else:
    sys.stdin.read()
' "$3"
"""
    with container(script, image, place, jail) as pid:
        assert Path(f"/proc/{pid}/root").readlink() == jail
        assert str(place) in str(where(image))


def test_other_files_and_folders_that_are_mounted_are_no_reason(image: Path, place: Path, tmp_path: Path) -> None:
    other = make_image(image.with_name("other.qcow2"))
    shown = new_folder(tmp_path / "shown")
    with mounted(other, place), mounted(image.parent, shown):
        assert where(image) is None
        assert where(shown / image.name) is None
        assert str(place) in str(where(other))
        assert str(place) in str(where(shown / other.name)), "by whatever way it was opened"
        assert str(place) in str(where(place))


def test_an_image_of_the_same_name_elsewhere_is_another_one(image: Path, place: Path, tmp_path: Path) -> None:
    (tmp_path / "twin").mkdir()
    make_image(tmp_path / "twin/vm.qcow2")
    with mounted(tmp_path / "twin/vm.qcow2", place):
        assert where(image) is None
        with mounted(Path(os.devnull), place):
            assert str(place) in str(where(image)), "which of both it is cannot be told any more"


def test_the_images_own_place_may_be_such_a_mount(image: Path, place: Path) -> None:
    with mounted(image, place):
        refused(ask("reclaim", reclaim_args(place)), place)


def test_on_an_overlay_filesystem_too(tmp_path: Path, place: Path) -> None:
    base = new_folder(tmp_path / "tmpfs")
    with mounted(Path("none"), base, "-t", "tmpfs"):
        for name in ("lower", "upper", "work", "all"):
            (base / name).mkdir()
        make_image(base / "lower/vm.qcow2")
        layers = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
        with mounted(Path("none"), base / "all", "-t", "overlay", "-o", layers):
            image = base / "all/vm.qcow2"
            assert where(image) is None
            with mounted(image, place):
                assert str(place) in str(where(image))


def test_where_the_device_of_the_status_is_not_the_filesystems(
    image: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subvolume of btrfs: mountinfo has the device of the whole filesystem. Not every kernel has btrfs."""
    ours = image.stat().st_dev

    def of_subvolume(look: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def looked(*args: Any, **how: Any) -> os.stat_result:
            status = look(*args, **how)
            return os.stat_result([*status[:2], 4711, *status[3:]]) if status.st_dev == ours else status

        return looked

    second = image.with_name("second")
    os.link(image, second)
    with mounted(second, place):
        second.unlink()
        for name in ("stat", "fstat"):
            monkeypatch.setattr(os, name, of_subvolume(getattr(os, name)))
        found = where(image)
        monkeypatch.undo()
    assert str(place) in str(found)


def test_the_check_at_the_end_is_made_for_what_was_refused_at_the_beginning(image: Path, place: Path) -> None:
    with contextlib.closing(Chain(Planned.parse(link(image)), [])) as chain:
        chain.refuse_stale()
        with mounted(image, place):
            chain.refuse_stale()
            links.refuse_unsafe(chain, children_known=True, carried={"hard_linked"})
            chain.refuse_stale()
            with pytest.raises(RefusedError, match="is mounted as a file at"):
                links.refuse_unsafe(chain, children_known=True)
            with pytest.raises(RefusedError, match="is mounted as a file at"):
                chain.refuse_stale()
            chain.refuse_stale(names=False)


def test_a_mounted_image_is_neither_set_aside_nor_deleted(image: Path, place: Path) -> None:
    inode = image.stat().st_ino
    with mounted(image, place):
        refused(ask("set_aside", aside_args(image)), place)
    ask("set_aside", aside_args(image))
    with mounted(image.with_name(".sa-j1.aside"), place):
        refused(ask("delete_aside", delete_args(image, inode), job="j2"), place)
        assert place.stat().st_nlink == 1


def test_an_image_that_was_mounted_since_its_job_is_not_undone_and_neither_is_its_copy_removed(
    image: Path, place: Path
) -> None:
    ask("reclaim", reclaim_args(image, undo_hours=24))
    with mounted(image, place):
        refused(ask("undo", undo_args(image), job="u1"), place)
    with mounted(image.with_name(".sa-j1.orig"), place):
        refused(ask("discard_undo", undo_args(image), job="u2"), place)
    assert ask("undo", undo_args(image), job="u3")["after_bytes"] > 0
