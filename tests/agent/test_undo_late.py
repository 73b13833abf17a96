"""An undo on NFS, where the last names of both files go after the job has written down when these were changed."""

import json
import os
from pathlib import Path

import pytest

from storage_admin.agent.swap import moment
from storage_admin.agent.swap.journal import Stamp
from tests.agent.harness import ask, make_image, reclaim_args, undo_args, write

pytestmark = pytest.mark.qemu


def reclaimed(folder: Path, *, late: bool) -> Path:
    """An image as a job leaves it there; both files get another time of change afterwards, as by a name that goes."""
    path = make_image(folder / "vm.qcow2")
    assert ask("reclaim", reclaim_args(path))["swapped"]
    journal = folder / ".sa-j1.journal"
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    assert all("late" not in one for one in records)
    told = [one | {"late": True} if late and one["step"] == "done" else one for one in records]
    journal.write_text("".join(json.dumps(one) + "\n" for one in told))
    for name in ("vm.qcow2", ".sa-j1.orig"):
        os.link(folder / name, folder / "more")
        (folder / "more").unlink()
    return path


def test_names_that_go_late_are_no_change(tmp_path: Path) -> None:
    assert ask("undo", undo_args(reclaimed(tmp_path, late=True)), job="u1").get("code") is None


def test_elsewhere_they_are(tmp_path: Path) -> None:
    assert ask("undo", undo_args(reclaimed(tmp_path, late=False)), job="u1")["code"] == "undo_written_to"


def test_what_a_guest_has_written_is_still_seen(tmp_path: Path) -> None:
    path = reclaimed(tmp_path, late=True)
    write(path, 0x55, "0", "64k")
    assert ask("undo", undo_args(path), job="u1")["code"] == "undo_written_to"


def test_an_undo_copy_does_not_go_by_itself_where_that_cannot_be_told(tmp_path: Path) -> None:
    path = reclaimed(tmp_path, late=True)
    assert ask("discard_undo", undo_args(path), job="d1")["code"] == "undo_kept"


@pytest.mark.parametrize(("done_to", "is_known"), [("", True), ("new", False), ("old", False), ("links", False)])
def test_times_of_change_are_known_once_the_last_name_has_gone_and_nobody_has_changed_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done_to: str, is_known: bool
) -> None:
    monkeypatch.setattr(moment, "PASSING_OPENER", 0.2)
    new, old = tmp_path / "new", tmp_path / "old"
    for file in (new, old):
        file.write_bytes(b"data")
    os.link(new, tmp_path / "late")
    files = [os.open(file, os.O_RDWR) for file in (new, old)]
    folder = os.open(tmp_path, os.O_RDONLY)
    done = moment.TakenOver(*(Stamp.of(os.fstat(file)) for file in files))
    if done_to != "links":
        (tmp_path / "late").unlink()
    if done_to in {"new", "old"}:
        (tmp_path / done_to).write_bytes(b"more data")
    closed = moment.closed(done, folder, b"new", *files)
    assert (closed is not None) == is_known
    if closed is not None:
        assert closed.came.ctime_ns == new.stat().st_ctime_ns > done.came.ctime_ns
    for one in (*files, folder):
        os.close(one)
