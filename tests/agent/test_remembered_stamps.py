"""A client of NFS goes on telling old sizes and times of files that it has open: the last look at them asks anew."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.host.mounts import Mount, Mounts
from storage_admin.agent.protocol import RefusedError
from storage_admin.agent.rewrite.chain import Chain, Planned
from storage_admin.agent.swap import moment
from storage_admin.agent.verbs import aside, undo
from tests.agent.aside import ASIDE, aside_args, delete_args
from tests.agent.harness import ask, leftovers, link, make_image, reclaim_args, undo_args
from tests.agent.recording import GoIO, request
from tests.working import refused_as

pytestmark = pytest.mark.qemu


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each descriptor of a regular file goes on telling what it told first."""
    told: dict[tuple[int, int], os.stat_result] = {}
    fstat, opens = os.fstat, os.open

    def anew(*args: Any, **named: Any) -> int:
        fd = opens(*args, **named)
        told.pop((fd, fstat(fd).st_ino), None)
        return fd

    def remembered(fd: int) -> os.stat_result:
        now = fstat(fd)
        return told.setdefault((fd, now.st_ino), now)

    monkeypatch.setattr(os, "open", anew)
    monkeypatch.setattr(os, "fstat", remembered)
    monkeypatch.setattr(Mounts, "of_descriptor", lambda *_: Mount(1, 1, b"/", b"/", "nfs", b"server:/images"))


def written_before_the_last_look(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has somebody elsewhere write to a file and close it, right before it is looked at for the last time."""
    shut = moment.shut

    def late(*args: Any) -> Any:
        overwrite(path)
        return shut(*args)

    monkeypatch.setattr(moment, "shut", late)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b"somebody's")


@pytest.mark.usefixtures("remembering")
@pytest.mark.parametrize("which", [0, 1])
def test_a_link_of_a_chain(image: Path, which: int) -> None:
    files = [image.with_name("over.qcow2"), image]
    make_image(files[0], base=str(image))
    planned = [Planned.parse(link(file)) for file in files]
    with contextlib.closing(Chain(planned[0], planned[1:])) as chain:
        chain.refuse_stale()
        overwrite(files[which])
        with pytest.raises(RefusedError) as refused:
            chain.refuse_stale()
    assert refused.value.code == "stale_plan"


@pytest.mark.usefixtures("remembering")
def test_an_image_that_is_about_to_be_set_aside(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_before_the_last_look(image, monkeypatch)
    assert refused_as(aside.set_aside, request("set_aside", **aside_args(image)), GoIO()) == "stale_plan"
    assert leftovers(image.parent) == set()


@pytest.mark.usefixtures("remembering")
def test_an_image_that_is_about_to_be_deleted(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inode = image.stat().st_ino
    assert ask("set_aside", aside_args(image))["held_bytes"]
    written_before_the_last_look(image.parent / ASIDE, monkeypatch)
    assert refused_as(aside.delete, request("delete_aside", **delete_args(image, inode)), GoIO()) == "stale_plan"
    assert (image.parent / ASIDE).read_bytes().endswith(b"somebody's")


@pytest.mark.usefixtures("remembering")
@pytest.mark.parametrize("force", [False, True])
def test_an_undo_copy_that_is_about_to_be_removed(image: Path, monkeypatch: pytest.MonkeyPatch, force: bool) -> None:
    copy = image.parent / ".sa-j1.orig"
    assert ask("reclaim", reclaim_args(image, undo_hours=24))["swapped"]
    written_before_the_last_look(copy, monkeypatch)
    asked = request("discard_undo", **undo_args(image, force=force))
    assert refused_as(undo.discard, asked, GoIO()) == "undo_written_to"
    assert copy.read_bytes().endswith(b"somebody's")
