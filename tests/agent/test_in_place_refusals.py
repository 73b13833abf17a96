"""What a reclaim in place refuses, with which code, and that nothing is changed then."""

import os
import struct
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.host.mounts import Mount, Mounts
from storage_admin.agent.protocol import RefusedError
from storage_admin.agent.rewrite import chain as links
from storage_admin.agent.rewrite.chain import Chain
from tests.agent.harness import Writer, ask, link, make_image, number_at, overwrite, same_content, write
from tests.agent.test_in_place import AGENT, copy_of, reclaim
from tests.agent.test_reclaim_refusals import encrypted
from tests.harness.filesystems import immutable, loop_device, loop_filesystem, mounted, new_folder
from tests.working import create, refused_as

pytestmark = pytest.mark.qemu

#: cap_net_raw+ep, revision 2 (linux/capability.h).
CAPABILITIES = struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0)


def refused(code: str, reclaim_it: Callable[[], Any], path: Path) -> str:
    """Expects a refusal, and that the image was not touched; the sentence."""
    before = path.stat()
    with pytest.raises(RefusedError) as caught:
        reclaim_it()
    assert caught.value.code == code, caught.value
    after = path.stat()
    assert (after.st_ctime_ns, after.st_blocks) == (before.st_ctime_ns, before.st_blocks)
    assert len(caught.value.detail) > 20
    return caught.value.detail


def test_an_image_that_a_guest_has_open(image: Path) -> None:
    for read_only in (False, True):
        with Writer(image, read_only=read_only):
            refused("image_in_use", lambda: reclaim(image), image)


def test_the_base_of_a_running_overlay(image: Path, overlay: Path) -> None:
    with Writer(overlay):
        refused("image_in_use", lambda: reclaim(image), image)


@pytest.mark.parametrize(("hold", "code"), [(loop_device, "image_in_use"), (immutable, "immutable")])
def test_an_image_behind_a_loop_device_and_a_protected_one(
    image: Path, hold: Callable[[Path], AbstractContextManager[object]], code: str
) -> None:
    with hold(image):
        refused(code, lambda: reclaim(image), image)


def test_an_image_with_file_capabilities(image: Path) -> None:
    os.setxattr(image, "security.capability", CAPABILITIES)
    refused("unsupported_subformat", lambda: reclaim(image), image)
    assert os.getxattr(image, "security.capability") == CAPABILITIES


def test_an_image_whose_guests_are_not_known(image: Path) -> None:
    refused("guests_unknown", lambda: reclaim(image, children_known=False), image)


def test_an_encrypted_image(tmp_path: Path) -> None:
    path = encrypted(tmp_path / "secret.qcow2")
    refused("encrypted", lambda: reclaim(path), path)


def test_an_external_data_file(tmp_path: Path) -> None:
    path = create(tmp_path / "split.qcow2", "1M", "-o", f"data_file={tmp_path}/data.raw")
    refused("external_data_file", lambda: reclaim(path), path)


@pytest.mark.parametrize("bit", [1, 2], ids=["dirty", "corrupt"])
def test_an_image_that_is_marked_dirty_or_corrupt(image: Path, bit: int) -> None:
    overwrite(image, 79, bytes([bit]))
    refused("dirty_or_corrupt", lambda: reclaim(image), image)


def test_an_image_whose_tables_lie(image: Path) -> None:
    overwrite(image, number_at(image, ">Q", 40), struct.pack(">Q", 1 << 63 | 1 << 50))
    refused("dirty_or_corrupt", lambda: reclaim(image), image)


@pytest.mark.parametrize("form", ["vmdk", "vdi", "vpc"])
def test_a_format_that_keeps_its_own_accounts(tmp_path: Path, form: str) -> None:
    path = create(tmp_path / f"vm.{form}", form=form)
    write(path, 0, "1M", "4M", form)
    assert "Convert it" in refused("unsupported_subformat", lambda: reclaim(path, form=form), path)


def test_a_filesystem_without_holes(tmp_path: Path) -> None:
    with mounted("none", new_folder(tmp_path / "ramfs"), "-t", "ramfs") as place:
        path = make_image(place / "vm.qcow2")
        before = copy_of(path, tmp_path)
        assert "copy" in refused("unsupported_pool", lambda: reclaim(path), path)
        assert same_content(path, before)


@pytest.mark.parametrize("filesystem", ["nfs4", "ceph", "cifs", "ocfs2", "gfs2", "fuse.glusterfs", None])
def test_a_filesystem_that_other_machines_may_have_mounted(
    image: Path, filesystem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The door and the lease of this machine hold up nobody on another one; so where it is not known what it is."""
    mount = Mount(1, 1, b"/", b"/", filesystem, b"nas:/export") if filesystem else None
    monkeypatch.setattr(Mounts, "of_descriptor", lambda self, fd: mount)
    assert "copy" in refused("unsupported_pool", lambda: reclaim(image), image)


def test_an_agent_that_may_keep_no_door(image: Path) -> None:
    """As in a container: root, and without the right to watch who opens a file."""
    before = image.stat()
    command = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", *AGENT]
    answer = ask("in_place", {"image": link(image), "chain": [], "bandwidth": None}, command=command)
    assert answer.get("code") == "guests_unknown", answer
    assert "root on the host itself" in answer["detail"]
    assert image.stat().st_ctime_ns == before.st_ctime_ns
    with Writer(image) as guest:
        assert not guest.refused


def test_a_filesystem_that_is_mounted_only_for_reading(tmp_path: Path) -> None:
    with loop_filesystem(tmp_path, 64) as place:
        path = make_image(place / "vm.qcow2")
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        refused("immutable", lambda: reclaim(path), path)


@pytest.mark.parametrize("form", ["qcow2", "raw"])
def test_an_image_that_changes_after_it_was_looked_at(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody wrote to it and has gone before the door was shut."""
    image, looked = create(tmp_path / f"vm.{form}", form=form), links.Chain.refuse_stale
    write(image, 0, "2M", "4M", form)

    def look_then_write(chain: Chain, **how: Any) -> None:
        looked(chain, **how)
        write(image, 0x71, "3M", "64k", form)

    monkeypatch.setattr(links.Chain, "refuse_stale", look_then_write)
    assert refused_as(reclaim, image, form=form) == "stale_plan"
    command = ["qemu-io", "-r", "-f", form, "-c", "read -P 0x71 3M 64k", str(image)]
    assert b"Pattern verification failed" not in subprocess.run(command, capture_output=True, check=True).stdout
