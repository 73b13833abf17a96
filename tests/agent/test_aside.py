"""Images that are set aside, restored and deleted: by the real agent, on real files."""

import os
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent import protocol
from storage_admin.agent.protocol import RefusedError, Request, unb64
from storage_admin.agent.scan.records import fingerprint
from storage_admin.agent.swap import exchange, settle
from storage_admin.agent.swap.journal import Journal
from storage_admin.agent.verbs import aside
from tests.agent.aside import ASIDE, JOURNAL, aside_args, back_args, delete_args
from tests.agent.harness import (
    Writer,
    ask,
    at_ready,
    heard,
    held_open,
    leftovers,
    make_image,
    recover_args,
    recovered,
    stamp,
    undo_args,
    write,
)
from tests.agent.recording import GoIO, request
from tests.harness.filesystems import immutable, loop_device, new_folder
from tests.working import create

pytestmark = pytest.mark.qemu


def test_an_image_set_aside_has_another_name_and_nothing_else_of_it_changes(image: Path) -> None:
    os.chown(image, 107, 107)
    image.chmod(0o640)
    os.setxattr(image, "user.note", b"mine")
    before, content = image.stat(), image.read_bytes()
    answer = ask("set_aside", aside_args(image))
    assert (answer["held_bytes"], answer["inode"]) == (before.st_blocks * 512, before.st_ino)
    assert unb64(answer["aside_b64"]) == ASIDE.encode()
    aside = image.parent / ASIDE
    assert {path.name for path in image.parent.iterdir()} == {ASIDE, JOURNAL}
    after = aside.stat()
    assert (after.st_ino, after.st_mode, after.st_uid, after.st_gid, after.st_mtime_ns, after.st_nlink) == (
        before.st_ino, before.st_mode, 107, 107, before.st_mtime_ns, 1,
    )  # fmt: skip
    assert os.getxattr(aside, "user.note") == b"mine"
    assert aside.read_bytes() == content
    assert recovered(image.parent) == ["kept"]


def test_it_is_restored_under_its_own_name(image: Path) -> None:
    before, content = stamp(image), image.read_bytes()
    ask("set_aside", aside_args(image))
    answer = ask("restore_aside", back_args(image), job="j2")
    assert (answer["inode"], answer["after_bytes"], answer["aside_of"]) == (before.inode, before.allocated_size, "j1")
    assert {path.name for path in image.parent.iterdir()} == {image.name}
    assert (image.read_bytes(), image.stat().st_nlink, stamp(image).mtime_ns) == (content, 1, before.mtime_ns)
    assert recovered(image.parent) == []
    assert ask("restore_aside", back_args(image), job="j3")["code"] == "aside_missing"


def test_it_is_deleted_for_good(image: Path) -> None:
    before = image.stat()
    ask("set_aside", aside_args(image))
    answer = ask("delete_aside", delete_args(image, before.st_ino), job="j2")
    assert (answer["before_bytes"], answer["freed_bytes"]) == (before.st_blocks * 512,) * 2
    assert list(image.parent.iterdir()) == []


@pytest.mark.parametrize("name", [b"-f", b"nbd:x", b"a,b.img", b"new\nline", b"\xff\xfe.qcow2", b"\x1b[2J", b"x" * 255])
def test_whatever_its_name_is_it_comes_back_under_that(tmp_path: Path, name: bytes) -> None:
    path = Path(os.fsdecode(bytes(tmp_path) + b"/" + name))
    path.write_bytes(b"content" * 1000)
    assert ask("set_aside", aside_args(path))["held_bytes"]
    assert leftovers(tmp_path) == {ASIDE, JOURNAL}
    ask("restore_aside", back_args(path), job="j2")
    assert [bytes(one.name.encode("utf-8", "surrogateescape")) for one in tmp_path.iterdir()] == [name]
    assert path.read_bytes() == b"content" * 1000


def test_another_file_under_its_name_is_left_alone(image: Path) -> None:
    content = image.read_bytes()
    ask("set_aside", aside_args(image))
    image.write_bytes(b"somebody else's")
    answer = ask("restore_aside", back_args(image), job="j2")
    assert answer["code"] == "target_exists"
    assert image.read_bytes() == b"somebody else's"
    assert (image.parent / ASIDE).read_bytes() == content
    assert recovered(image.parent) == ["kept"]
    image.rename(image.parent / "moved")
    assert ask("restore_aside", back_args(image), job="j3")["aside_of"] == "j1"
    assert image.read_bytes() == content


@pytest.mark.parametrize("mode", ["r", "w"])
def test_an_image_in_use_keeps_its_name(image: Path, mode: str) -> None:
    with Writer(image, read_only=mode == "r"):
        assert ask("set_aside", aside_args(image))["code"] == "image_in_use"
    with image.open("rb"):
        assert ask("set_aside", aside_args(image))["code"] == "image_in_use"
    assert {path.name for path in image.parent.iterdir()} == {image.name}


def test_an_image_behind_a_loop_device_keeps_its_name(tmp_path: Path) -> None:
    path = create(tmp_path / "left.raw", form="raw")
    args = aside_args(path)
    with loop_device(path):
        assert ask("set_aside", args)["code"] == "image_in_use"
    assert path.exists()


def test_an_overlay_that_no_scan_has_seen_is_found_on_the_spot(image: Path, tmp_path: Path) -> None:
    other = new_folder(tmp_path / "other")
    create(other / "top.qcow2", base=image)
    assert ask("set_aside", aside_args(image, other))["code"] == "has_overlays"
    assert image.exists()
    (other / "top.qcow2").rename(other / ".sa-j9.orig")
    assert ask("set_aside", aside_args(image, other))["code"] == "has_overlays"


def test_a_data_file_of_another_image_is_needed(tmp_path: Path) -> None:
    data = tmp_path / "data.raw"
    create(tmp_path / "top.qcow2", "8M", "-o", f"data_file={data}")
    assert ask("set_aside", aside_args(data))["code"] == "has_overlays"
    assert ask("set_aside", aside_args(tmp_path / "top.qcow2"))["code"] == "external_data_file"


def test_files_that_were_read_since_they_changed_are_not_opened_again(image: Path) -> None:
    top = create(image.parent / "top.qcow2", base=image.name)
    args = aside_args(image)
    args["pools"][0]["known_b64"] = protocol.b64(fingerprint(bytes(top), top.stat()))
    assert "held_bytes" in ask("set_aside", args)


def test_what_was_changed_since_the_plan_keeps_its_name(image: Path) -> None:
    args = aside_args(image)
    write(image, 1, "0", "64k")
    assert ask("set_aside", args)["code"] == "stale_plan"
    args = aside_args(image)
    image.rename(image.parent / "old")
    make_image(image)
    assert ask("set_aside", args)["code"] == "stale_plan"
    image.unlink()
    assert ask("set_aside", args)["code"] == "stale_plan"
    assert leftovers(image.parent) == set()


def test_a_file_with_two_names_a_link_and_a_protected_one_are_refused(image: Path) -> None:
    os.link(image, image.parent / "second")
    assert ask("set_aside", aside_args(image))["code"] == "hard_linked"
    (image.parent / "second").unlink()
    link = image.parent / "link.qcow2"
    link.symlink_to(image)
    assert ask("set_aside", aside_args(link))["code"] == "outside_pool"
    link.unlink()
    with immutable(image):
        assert ask("set_aside", aside_args(image))["code"] == "immutable"
    assert ask("set_aside", aside_args(image, children_known=False))["code"] == "guests_unknown"
    assert {path.name for path in image.parent.iterdir()} == {image.name}


def test_without_a_go_nothing_has_happened(image: Path) -> None:
    with at_ready("set_aside", aside_args(image)) as agent:
        agent.say(protocol.CANCEL)
        assert agent.answer(go=False)["code"] == protocol.CANCELLED
    assert {path.name for path in image.parent.iterdir()} == {image.name}
    ask("set_aside", aside_args(image))
    for verb, args in (("restore_aside", back_args(image)), ("delete_aside", delete_args(image, stamp_of(image)))):
        with at_ready(verb, args, job="j2") as agent:
            agent.say(protocol.CANCEL)
            assert agent.answer(go=False)["code"] == protocol.CANCELLED
        assert {path.name for path in image.parent.iterdir()} == {ASIDE, JOURNAL}
        assert recovered(image.parent) == ["kept"]


def stamp_of(image: Path) -> int:
    return (image.parent / ASIDE).stat().st_ino


def test_a_guest_that_starts_before_the_go_wins(image: Path) -> None:
    with at_ready("set_aside", aside_args(image)) as agent, Writer(image):
        assert agent.go()["code"] == "image_in_use"
    assert {path.name for path in image.parent.iterdir()} == {image.name}


def test_what_was_written_to_while_it_was_aside_is_restored_and_not_deleted(image: Path) -> None:
    ask("set_aside", aside_args(image))
    write(image.parent / ASIDE, 7, "0", "64k")
    assert ask("delete_aside", delete_args(image, stamp_of(image)), job="j2")["code"] == "stale_plan"
    written = (image.parent / ASIDE).read_bytes()
    ask("restore_aside", back_args(image), job="j3")
    assert image.read_bytes() == written


def test_only_the_very_file_is_deleted(image: Path) -> None:
    inode = image.stat().st_ino
    ask("set_aside", aside_args(image))
    aside = image.parent / ASIDE
    assert ask("delete_aside", delete_args(image, inode + 1), job="j2")["code"] == "stale_plan"
    with Writer(aside):
        assert ask("delete_aside", delete_args(image, inode), job="j2")["code"] in {"image_in_use", "stale_plan"}
    aside.rename(image.parent / "hidden")
    aside.write_bytes(b"another file")
    assert ask("delete_aside", delete_args(image, inode), job="j2")["code"] == "aside_missing"
    assert ask("restore_aside", back_args(image), job="j2")["code"] == "aside_missing"
    assert aside.read_bytes() == b"another file"


def test_a_second_name_that_somebody_gave_it_keeps_its_bytes(image: Path) -> None:
    inode = image.stat().st_ino
    ask("set_aside", aside_args(image))
    os.link(image.parent / ASIDE, image.parent / "kept")
    assert ask("delete_aside", delete_args(image, inode), job="j2")["freed_bytes"] == 0
    assert (image.parent / "kept").stat().st_ino == inode


def test_what_somebody_put_back_or_took_away_by_hand_is_told(image: Path) -> None:
    ask("set_aside", aside_args(image))
    (image.parent / ASIDE).rename(image)
    rows = ask("recover", recover_args(image.parent), job="r1")["recovered"]
    assert [(row["outcome"], row["put_back"]) for row in rows] == [("lost", True)]
    image.unlink()
    rows = ask("recover", recover_args(image.parent) | {"jobs_recorded": ["j1"]}, job="r1")["recovered"]
    assert [(row["outcome"], row["put_back"]) for row in rows] == [("lost", False)]
    assert leftovers(image.parent) == set()


def test_an_undo_is_no_way_to_touch_it(image: Path) -> None:
    ask("set_aside", aside_args(image))
    for verb in ("undo", "discard_undo"):
        assert ask(verb, undo_args(image), job="u1")["code"] == "undo_missing"
    assert leftovers(image.parent) == {ASIDE, JOURNAL}


def test_a_scan_neither_lists_nor_forgets_it(image: Path) -> None:
    ask("set_aside", aside_args(image))
    request = {"pools": [{"id": 1, "path_b64": protocol.b64(bytes(image.parent)), "kind": "dir", "known_b64": ""}]}
    _, events = heard("scan", request, "s1")
    assert not [event for event in events if event["event"] == "image"]
    pool = next(event for event in events if event["event"] == "pool")
    assert (pool["asides"], pool["leftovers"], pool["undo_copies"]) == (1, 1, 0)
    assert pool["aside_bytes"] == (image.parent / ASIDE).stat().st_blocks * 512
    assert pool["others"]["count"] == 0


@pytest.fixture
def elsewhere(image: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where somebody moves the image right after the last look, to put a file of theirs in its place."""
    moved, move = image.parent / "elsewhere.qcow2", exchange.move

    def after_the_last_look(folder: int, old: bytes, new: bytes) -> bool:
        if old == os.fsencode(image.name):
            image.rename(moved)
            image.write_bytes(b"a stranger's")
        return move(folder, old, new)

    monkeypatch.setattr(exchange, "move", after_the_last_look)
    return moved


def test_a_file_that_takes_the_images_place_after_the_last_look_keeps_the_name(image: Path, elsewhere: Path) -> None:
    content = image.read_bytes()
    with pytest.raises(RefusedError, match="stale_plan"):
        aside.set_aside(request("set_aside", **aside_args(image)), GoIO())
    assert (image.read_bytes(), elsewhere.read_bytes()) == (b"a stranger's", content)
    assert {path.name for path in image.parent.iterdir()} == {image.name, elsewhere.name}
    assert recovered(image.parent) == []


def test_and_gets_it_back_where_the_agent_died_in_that_moment(
    image: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, args = image.read_bytes(), aside_args(image)
    exchanged = exchange.move

    def last_step(folder: int, old: bytes, new: bytes) -> bool:
        exchanged(folder, old, new)
        raise KeyboardInterrupt

    def nothing_more(one: Journal) -> None:
        one.close()
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(exchange, "move", last_step)
        dying.setattr(settle, "settle", nothing_more)
        with pytest.raises(KeyboardInterrupt):
            aside.set_aside(request("set_aside", **args), GoIO())
    assert not image.exists()
    assert recovered(image.parent) == ["reverted"]
    assert (image.read_bytes(), elsewhere.read_bytes()) == (b"a stranger's", content)
    assert {path.name for path in image.parent.iterdir()} == {image.name, elsewhere.name}


def test_a_filesystem_that_cannot_rename_without_replacing_does_it_by_a_link(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode = image.stat().st_ino
    monkeypatch.setattr(exchange, "move", lambda *_: False)
    answer = aside.set_aside(request("set_aside", **aside_args(image)), GoIO())
    assert {path.name for path in image.parent.iterdir()} == {".sa-job1.aside", ".sa-job1.journal"}
    assert answer["inode"] == inode
    assert recovered(image.parent) == ["kept"]


def test_no_name_is_taken_from_another_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    with held_open(tmp_path) as folder:
        with pytest.raises(FileExistsError):
            exchange.move(folder, b"a", b"b")
        with pytest.raises(FileNotFoundError):
            exchange.move(folder, b"c", b"d")
        assert exchange.move(folder, b"a", b"c")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"b": "b", "c": "a"}


def test_a_strangers_file_whose_name_is_taken_again_is_told_of(
    image: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move, moves = exchange.move, []

    def and_takes_the_name_again(folder: int, old: bytes, new: bytes) -> bool:
        moved = move(folder, old, new)
        moves.append(old)
        if len(moves) == 1:
            image.write_bytes(b"a third one")
        return moved

    monkeypatch.setattr(exchange, "move", and_takes_the_name_again)
    content = image.read_bytes()
    with pytest.raises(RefusedError, match="stale_plan"):
        aside.set_aside(request("set_aside", **aside_args(image)), GoIO())
    assert (image.read_bytes(), elsewhere.read_bytes()) == (b"a third one", content)
    (told,) = ask("recover", recover_args(image.parent), job="r1")["recovered"]
    assert (told["outcome"], (image.parent / ".sa-job1.aside").read_bytes()) == ("failed", b"a stranger's")
    assert "move it back by hand" in told["detail"]
    image.unlink()
    assert recovered(image.parent) == ["reverted"]
    assert image.read_bytes() == b"a stranger's"


def test_a_name_comes_back_where_there_are_no_links(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = image.read_bytes()
    aside.set_aside(request("set_aside", **aside_args(image)), GoIO())

    def refused_by_the_filesystem(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused_by_the_filesystem)
    aside.restore(Request("restore_aside", "j2", 1, back_args(image, aside_job="job1")), GoIO())
    assert image.read_bytes() == content
    assert {path.name for path in image.parent.iterdir()} == {image.name}
