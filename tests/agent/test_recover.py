"""What is made of files that a job left behind, from their names and the journal alone."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.protocol import Request, b64
from storage_admin.agent.verbs import recover as verb
from tests.agent.harness import (
    Agent,
    ask,
    at_ready,
    at_stage,
    heard,
    leftovers,
    location,
    make_image,
    reclaim_args,
    recover_args,
    same_content,
    undo_args,
    write,
)
from tests.agent.recording import RecordingIO
from tests.harness.filesystems import new_file, new_folder

pytestmark = pytest.mark.qemu


@pytest.fixture
def image(pool: Path) -> Path:
    return make_image(new_folder(pool / "images") / "vm.qcow2")


def recover(image: Path, **changes: Any) -> list[dict[str, Any]]:
    rows = ask("recover", {**recover_args(image.parent.parent), **changes})["recovered"]
    assert isinstance(rows, list)
    return rows


def killed(image: Path, event: str, **fields: Any) -> None:
    """A reclaim whose agent is killed at an event."""
    with Agent() as agent:
        agent.request("reclaim", reclaim_args(image))
        agent.until(event, **fields)
        agent.process.kill()


def killed_undo(image: Path) -> None:
    with at_ready("undo", undo_args(image), job="u1") as agent:
        agent.process.kill()


def test_nothing_to_recover(image: Path) -> None:
    assert recover(image) == []


@pytest.mark.parametrize("stage", ["copying", "verifying", "syncing", "swapping"])
def test_a_job_that_died_before_the_swap_is_put_back(image: Path, stage: str) -> None:
    before = image.stat()
    killed(image, "progress", stage=stage)
    assert ".sa-j1.new" in leftovers(image.parent)
    (row,) = recover(image)
    assert (row["job"], row["outcome"], row["undo_bytes"]) == ("j1", "reverted", 0)
    assert row["path_b64"] == b64(os.fsencode(image))
    assert (row["inode"], row["before_bytes"]) == (before.st_ino, before.st_blocks * 512)
    assert image.stat().st_mtime_ns == before.st_mtime_ns
    assert leftovers(image.parent) == set()
    assert recover(image) == []


def test_a_finished_job_whose_undo_copy_waits_is_kept(image: Path) -> None:
    result = ask("reclaim", reclaim_args(image))
    kept = leftovers(image.parent)
    (row,) = recover(image)
    assert (row["outcome"], row["undo_bytes"]) == ("kept", result["held_bytes"])
    assert (row["before_bytes"], row["after_bytes"]) == (result["before_bytes"], result["after_bytes"])
    assert leftovers(image.parent) == kept
    assert recover(image) == [row]


def test_a_vanished_undo_copy_is_said_and_its_journal_goes_once_the_swap_is_on_record(image: Path) -> None:
    ask("reclaim", reclaim_args(image))
    new = image.stat().st_ino
    (image.parent / ".sa-j1.orig").unlink()
    for recorded in ([], ["j2"], ["j1"]):
        assert leftovers(image.parent) == {".sa-j1.journal"}
        (row,) = recover(image, jobs_recorded=recorded)
        assert (row["outcome"], row["undo_bytes"], row["inode"], row["put_back"]) == ("lost", 0, new, False)
        assert "removed by someone else" in row["detail"]
    assert leftovers(image.parent) == set()
    assert recover(image) == []


def test_an_undo_copy_that_another_file_stands_for_is_lost_and_that_file_is_left_alone(image: Path) -> None:
    ask("reclaim", reclaim_args(image))
    copy = new_file(image.parent / "other", b"somebody's").rename(image.parent / ".sa-j1.orig")
    (row,) = recover(image, jobs_recorded=["j1"])
    assert (row["outcome"], row["undo_bytes"]) == ("lost", 0)
    assert "another file has its name" in row["detail"]
    assert leftovers(image.parent) == {".sa-j1.orig"}
    assert copy.read_bytes() == b"somebody's"


def test_an_original_that_somebody_put_back_by_hand_is_told_from_one_that_was_deleted(image: Path) -> None:
    original = image.stat().st_ino
    ask("reclaim", reclaim_args(image))
    (image.parent / ".sa-j1.orig").rename(image)
    (row,) = recover(image, jobs_recorded=["j1"])
    assert (row["outcome"], row["put_back"], row["inode"]) == ("lost", True, original)
    assert leftovers(image.parent) == set()


def copy_of(image: Path) -> dict[str, Any]:
    return {"undo_copies": [{"job": "j1", **location(image, image.parent.parent)}]}


def test_an_undo_copy_that_is_gone_together_with_its_journal_is_said_where_it_should_wait(image: Path) -> None:
    ask("reclaim", reclaim_args(image))
    (row,) = recover(image, **copy_of(image))
    assert row["outcome"] == "kept"
    for name in leftovers(image.parent):
        (image.parent / name).unlink()
    assert recover(image) == []
    (row,) = recover(image, **copy_of(image))
    assert (row["job"], row["outcome"], row["inode"]) == ("j1", "lost", image.stat().st_ino)
    assert row["path_b64"] == b64(bytes(image))
    image.unlink()
    (row,) = recover(image, **copy_of(image))
    assert (row["outcome"], row["inode"]) == ("lost", None)
    image.parent.rename(image.parent.parent / "elsewhere")
    assert recover(image, **copy_of(image)) == []


@pytest.mark.parametrize(
    ("error", "outcome"), [(errno.ESTALE, "busy"), (errno.ENOLCK, "failed"), (errno.EIO, "failed")]
)
def test_a_journal_that_cannot_be_taken_keeps_no_other_job_from_its_recovery(
    image: Path, monkeypatch: pytest.MonkeyPatch, error: int, outcome: str
) -> None:
    """ESTALE is what NFS says of a file that another machine has removed: somebody else is recovering the job."""
    other = make_image(image.with_name("other.qcow2"))
    for job, path in (("j1", image), ("j2", other)):
        with at_stage("syncing", "reclaim", reclaim_args(path), job=job) as agent:
            agent.process.kill()
    before, flock = leftovers(image.parent), fcntl.flock

    def lock(fd: int, how: int) -> None:
        if "j1" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(error, os.strerror(error))
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", lock)
    rows = verb.run(Request("recover", "r1", 1, recover_args(image.parent.parent)), RecordingIO())["recovered"]
    assert {row["job"]: row["outcome"] for row in rows} == {"j1": outcome, "j2": "reverted"}
    assert leftovers(image.parent) == {name for name in before if "j1" in name}


def test_a_copy_whose_undo_was_finished_by_recovery_is_not_called_lost(image: Path) -> None:
    ask("reclaim", reclaim_args(image))
    killed_undo(image)
    (image.parent / ".sa-j1.orig").rename(image)
    assert [(row["job"], row["outcome"]) for row in recover(image, **copy_of(image))] == [("u1", "finished")]


@pytest.mark.parametrize("job", ["", "../x", "a" * 41, 7, None])
def test_an_undo_copy_of_no_jobs_id_is_no_argument(image: Path, job: Any) -> None:
    wanted = {"undo_copies": [copy_of(image)["undo_copies"][0] | {"job": job}]}
    assert ask("recover", {**recover_args(image.parent.parent), **wanted})["code"] == "invalid"


def cut_last_record(journal: Path) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    assert b'"done"' in lines[-1]
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])


def test_a_swap_whose_last_record_is_missing_is_finished(image: Path) -> None:
    ask("reclaim", reclaim_args(image))
    new = image.stat().st_ino
    cut_last_record(image.parent / ".sa-j1.journal")
    (row,) = recover(image)
    assert (row["outcome"], row["inode"]) == ("finished", new)
    assert row["undo_bytes"] > 0
    assert recover(image)[0]["outcome"] == "kept"
    assert ask("undo", undo_args(image), job="u1")["inode"] != new


def test_an_undo_after_such_a_recovery_sees_that_a_guest_wrote(image: Path) -> None:
    ask("reclaim", reclaim_args(image))
    cut_last_record(image.parent / ".sa-j1.journal")
    write(image, 0x77, "0", "64k")
    assert recover(image)[0]["outcome"] == "finished"
    assert ask("undo", undo_args(image), job="u1")["code"] == "undo_written_to"


def test_an_image_that_was_linked_but_not_renamed_is_put_back(image: Path) -> None:
    killed(image, "ready")
    os.link(image, image.parent / ".sa-j1.orig")
    before = image.stat().st_ino
    (row,) = recover(image)
    assert (row["outcome"], row["inode"]) == ("reverted", before)
    assert leftovers(image.parent) == set()


def test_the_last_name_of_an_original_is_never_removed(image: Path) -> None:
    killed(image, "ready")
    os.link(image, image.parent / ".sa-j1.orig")
    image.unlink()
    (row,) = recover(image)
    assert row["outcome"] == "failed"
    assert "removed or replaced" in row["detail"]
    assert leftovers(image.parent) == {".sa-j1.orig", ".sa-j1.journal"}
    assert ask("discard_undo", undo_args(image), job="d1")["code"] == "stale_plan"


def test_an_agent_that_is_at_work_is_left_alone(image: Path) -> None:
    with at_ready("reclaim", reclaim_args(image)) as agent:
        (row,) = recover(image)
        assert row["outcome"] == "busy"
        assert agent.go()["swapped"]


def test_a_job_that_is_active_elsewhere_is_left_alone(image: Path) -> None:
    killed(image, "ready")
    assert [row["outcome"] for row in recover(image, jobs_active=["j1"])] == ["busy"]
    assert ".sa-j1.new" in leftovers(image.parent)
    assert [row["outcome"] for row in recover(image, jobs_active=["j2"])] == ["reverted"]


def test_an_interrupted_undo_is_put_back_and_can_be_asked_again(image: Path) -> None:
    ask("reclaim", reclaim_args(image))
    killed_undo(image)
    rows = recover(image)
    assert [(row["job"], row["outcome"], row["undo_of"]) for row in rows] == [
        ("u1", "reverted", "j1"),
        ("j1", "kept", None),
    ]
    assert ask("undo", undo_args(image), job="u2")["undo_of"] == "j1"
    assert leftovers(image.parent) == set()


def test_an_undo_that_died_right_after_the_rename_is_finished(image: Path) -> None:
    original = image.stat().st_ino
    ask("reclaim", reclaim_args(image))
    killed_undo(image)
    (image.parent / ".sa-j1.orig").rename(image)
    (row,) = recover(image)
    assert (row["job"], row["outcome"], row["inode"], row["undo_of"]) == ("u1", "finished", original, "j1")
    assert leftovers(image.parent) == set()


def test_an_empty_temporary_file_without_a_journal_is_removed(image: Path) -> None:
    (image.parent / ".sa-lost.new").touch()
    (row,) = recover(image)
    assert (row["job"], row["outcome"], row["path_b64"]) == ("lost", "reverted", None)
    assert leftovers(image.parent) == set()


def test_a_temporary_file_without_a_journal_that_holds_something_is_kept_and_said(image: Path) -> None:
    (image.parent / ".sa-lost.new").write_bytes(b"x" * 5000)
    (row,) = recover(image)
    assert (row["job"], row["outcome"], row["undo_bytes"]) == ("lost", "failed", 8192)
    assert ".sa-lost.new" in row["detail"]
    assert leftovers(image.parent) == {".sa-lost.new"}


def test_an_undo_copy_without_a_journal_is_kept_and_said(image: Path) -> None:
    (image.parent / ".sa-lost.orig").write_bytes(b"x" * 5000)
    (row,) = recover(image)
    assert (row["job"], row["outcome"]) == ("lost", "failed")
    assert row["undo_bytes"] == 8192
    assert ".sa-lost.orig" in row["detail"]


def by_nobody(path: Path) -> None:
    path.write_text('{"step":"started","job":"evil","name_b64":"' + b64(b"vm.qcow2") + '"}\n')
    os.chown(path, 1000, 1000)


def link_elsewhere(path: Path) -> None:
    path.symlink_to("/etc/hostname")


@pytest.mark.parametrize("plant", [by_nobody, link_elsewhere, lambda path: path.mkdir(), os.mkfifo])
def test_a_journal_that_somebody_else_planted_has_no_effect(image: Path, plant: Callable[[Path], None]) -> None:
    (image.parent / ".sa-evil.new").write_bytes(b"x")
    plant(image.parent / ".sa-evil.journal")
    before = image.read_bytes()
    recover(image)
    assert image.read_bytes() == before
    assert (image.parent / ".sa-evil.journal").is_symlink() or (image.parent / ".sa-evil.journal").exists()


@pytest.mark.parametrize("name", [b"../../etc/passwd", b"/etc/passwd", b"..", b"", b".sa-j1.journal", b"a\0b"])
def test_a_journal_that_names_no_image_touches_nothing(image: Path, name: bytes) -> None:
    journal = image.parent / ".sa-evil.journal"
    stamp = '{"dev":1,"inode":1,"file_size":1,"allocated_size":1,"mtime_ns":1,"ctime_ns":1}'
    journal.write_text(
        f'{{"step":"started","job":"evil","generation":1,"name_b64":"{b64(name)}","original":{stamp},"undo_hours":1}}\n'
    )
    journal.chmod(0o600)
    before = image.read_bytes()
    (row,) = recover(image)
    assert (row["outcome"], row["path_b64"]) == ("reverted", None)
    assert image.read_bytes() == before


def test_an_empty_journal_is_cleared(image: Path) -> None:
    (image.parent / ".sa-torn.journal").touch(mode=0o600)
    (image.parent / ".sa-torn.new").touch()
    assert [row["outcome"] for row in recover(image)] == ["reverted"]
    assert leftovers(image.parent) == set()


def test_a_folder_that_is_a_link_is_not_entered(image: Path, tmp_path: Path) -> None:
    outside = new_folder(tmp_path / "outside")
    (outside / ".sa-lost.new").write_bytes(b"x")
    (image.parent / "link").symlink_to(outside)
    assert recover(image) == []
    assert (outside / ".sa-lost.new").exists()


def test_a_pool_that_is_not_there_is_said_and_the_others_are_recovered(image: Path, tmp_path: Path) -> None:
    killed(image, "ready")
    paths = [tmp_path / "gone", image.parent.parent]
    pools = [{"id": n, "path_b64": b64(os.fsencode(path)), "kind": "dir"} for n, path in enumerate(paths)]
    answer, events = heard("recover", {"pools": pools, "jobs_active": []})
    assert [(row["pool"], row["outcome"]) for row in answer["recovered"]] == [(1, "reverted")]
    assert any("gone" in event.get("text", "") for event in events)


def test_after_a_recovery_the_image_can_be_reclaimed_again(image: Path, tmp_path: Path) -> None:
    before = new_file(tmp_path / "before.qcow2", image.read_bytes())
    killed(image, "progress", stage="copying")
    recover(image)
    assert ask("reclaim", reclaim_args(image))["swapped"]
    assert same_content(image, before)


def test_thousands_of_folders_are_looked_through_without_running_out_of_descriptors(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"vm-{number}").mkdir()
    (tmp_path / "vm-2999" / ".sa-lost.new").write_bytes(b"x")
    rows = ask("recover", recover_args(tmp_path))["recovered"]
    assert [row["job"] for row in rows] == ["lost"]
