"""An upload is gathered beside its name, piece by piece; what is cut off, replaced or wrong never gets that name."""

import hashlib
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent import protocol
from storage_admin.agent.protocol import b64
from tests.agent.harness import NO_RESERVE, Agent, ask, at_ready, leftovers, location, make_image, qemu_img

MIB = 1 << 20
PART = ".sa-j1.part"


def content(length: int = 3 * MIB + 77) -> bytes:
    """Bytes of which every second run is zeros."""
    chance = random.Random(20261127)
    return b"".join(
        bytes(256 << 10) if at % 2 else chance.randbytes(256 << 10) for at in range(length // (256 << 10) + 1)
    )[:length]


def place(pool: Path, name: str = "new.raw") -> dict[str, str]:
    return location(pool / name, pool)


def receive_args(pool: Path, size: int, offset: int = 0) -> dict[str, Any]:
    return {"target": place(pool), "size": size, "offset": offset, "reserve": NO_RESERVE}


def send(pool: Path, pieces: Iterable[bytes], offset: int = 0, size: int = 3 * MIB + 77, **more: Any) -> dict[str, Any]:
    """What the agent answers to whoever sends these pieces."""
    waiting = iter(pieces)
    with Agent() as agent:
        agent.request("receive", receive_args(pool, size, offset) | more)
        while (event := agent.next()) is not None:
            if event["event"] == protocol.MORE:
                agent.say(protocol.DATA, b64=b64(next(waiting, b"")))
            if event["event"] == protocol.RESULT:
                return dict(event["data"])
            if event["event"] == protocol.ERROR:
                return event
    raise AssertionError("no answer")


def finish(pool: Path, data: bytes, name: str = "new.raw", **more: Any) -> dict[str, Any]:
    return ask("upload", {"target": place(pool, name), "size": len(data), **more})


def pieces(data: bytes, length: int = MIB) -> list[bytes]:
    return [data[at : at + length] for at in range(0, len(data), length)]


def test_pieces_of_several_agents_become_one_file_with_its_holes(pool: Path) -> None:
    data = content()
    assert send(pool, pieces(data[:MIB])) == {"offset": MIB}
    assert leftovers(pool) == {PART}
    assert send(pool, pieces(data[MIB:]), MIB) == {"offset": len(data)}
    done = finish(pool, data, sha256=hashlib.sha256(data).hexdigest())
    made = pool / "new.raw"
    assert made.read_bytes() == data
    assert (done["sha256"], done["inode"]) == (hashlib.sha256(data).hexdigest(), made.stat().st_ino)
    assert done["after_bytes"] == made.stat().st_blocks * 512 < len(data) * 3 // 4
    assert (made.stat().st_mode & 0o777, made.stat().st_nlink, leftovers(pool)) == (0o600, 1, set())


def test_a_piece_that_is_sent_again_replaces_what_came_of_it(pool: Path) -> None:
    data = content()
    send(pool, pieces(bytes(b ^ 0xFF for b in data[: 2 * MIB])))
    assert send(pool, pieces(data[MIB:]), MIB)["offset"] == len(data)
    assert (pool / PART).read_bytes()[MIB:] == data[MIB:]
    assert send(pool, pieces(data))["offset"] == len(data)
    finish(pool, data)
    assert (pool / "new.raw").read_bytes() == data


def test_what_differs_from_its_digest_does_not_count(pool: Path) -> None:
    data, wrong = content(), hashlib.sha256(b"other").hexdigest()
    send(pool, pieces(data[:MIB]), sha256=hashlib.sha256(data[:MIB]).hexdigest())
    assert send(pool, pieces(data[MIB:]), MIB, sha256=wrong)["code"] == "wrong_digest"
    assert send(pool, pieces(data[MIB:]), MIB)["offset"] == len(data)
    assert finish(pool, data, sha256=wrong)["code"] == "wrong_digest"
    assert not (pool / "new.raw").exists()


def test_more_or_less_than_was_announced_is_refused(pool: Path) -> None:
    data = content()
    assert send(pool, [*pieces(data), b"x"])["code"] == "invalid"
    send(pool, pieces(data[:MIB]))
    assert finish(pool, data)["code"] == "upload_incomplete"
    assert send(pool, pieces(data), 2 * MIB)["code"] == "stale_plan"
    assert send(pool, pieces(data), len(data) + 1)["code"] == "invalid"
    assert leftovers(pool) == {PART}


def test_nonsense_in_place_of_bytes_is_refused(pool: Path) -> None:
    for answer in ({"b64": "%%"}, {"b64": 5}, {}, {"b64": "ä"}):
        with Agent() as agent:
            agent.request("receive", receive_args(pool, 9))
            agent.until(protocol.MORE)
            agent.say(protocol.DATA, **answer)
            assert agent.until(protocol.ERROR)["code"] == "invalid"


def test_a_name_that_is_taken_stays_whose_it_is(pool: Path) -> None:
    data = content()
    (pool / "new.raw").write_bytes(b"somebody's")
    send(pool, pieces(data))
    assert finish(pool, data)["code"] == "target_exists"
    assert (pool / "new.raw").read_bytes() == b"somebody's"
    for name in ("../new.raw", ".sa-j2.new", "x" * 300):
        assert ask("receive", {"target": place(pool, name), "size": 1, "offset": 0})["code"] in {
            "invalid", "outside_pool"
        }, name  # fmt: skip


def test_two_at_once_do_not_mix(pool: Path) -> None:
    with Agent() as first, Agent() as second:
        first.request("receive", receive_args(pool, 9))
        first.until(protocol.MORE)
        second.request("receive", receive_args(pool, 9))
        first.say(protocol.DATA, b64=b64(b"abc"))
        first.until(protocol.MORE)
        first.say(protocol.DATA, b64=b64(b""))
        assert first.until(protocol.RESULT)["data"] == {"offset": 3}
        second.until(protocol.MORE)  # it waited for the first one's end
        second.say(protocol.DATA, b64=b64(b"defgh"))
        second.until(protocol.MORE)
        second.say(protocol.DATA, b64=b64(b""))
        assert second.until(protocol.RESULT)["data"] == {"offset": 5}
    assert (pool / PART).read_bytes() == b"defgh"


@pytest.mark.parametrize("how", ["link", "stranger", "hard link", "pipe"])
def test_what_the_owner_of_the_folder_puts_in_its_place_is_not_written_to(
    pool: Path, tmp_path_factory: pytest.TempPathFactory, how: str
) -> None:
    data, elsewhere = content(), tmp_path_factory.mktemp("elsewhere") / "secret"
    elsewhere.write_bytes(b"secret" * 100)
    elsewhere.chmod(0o600)
    if how == "link":
        (pool / PART).symlink_to(elsewhere)
    elif how == "pipe":
        os.mkfifo(pool / PART, 0o600)
    elif how == "hard link":
        os.link(elsewhere, pool / PART)
    else:
        (pool / PART).write_bytes(b"theirs")
        (pool / PART).chmod(0o666)
    answer = send(pool, pieces(data))
    assert answer["code"] in {"stale_plan", "tool_failed"}, answer
    assert elsewhere.read_bytes() == b"secret" * 100
    assert finish(pool, b"secret" * 100)["code"] in {"stale_plan", "tool_failed"}
    assert ask("forget_upload", {"target": place(pool)}).get("removed") is not True
    assert os.path.lexists(pool / PART)
    assert not (pool / "new.raw").exists()


def test_one_that_was_replaced_while_it_was_read_back_gets_no_name(pool: Path) -> None:
    data = content()
    send(pool, pieces(data))
    with at_ready("upload", {"target": place(pool), "size": len(data)}) as agent:
        (pool / PART).rename(pool / "kept")
        (pool / PART).write_bytes(data[:-1] + b"!")
        (pool / PART).chmod(0o600)
        assert agent.go()["code"] == "stale_plan"
    assert not (pool / "new.raw").exists()


@pytest.mark.qemu
def test_an_image_whose_header_names_another_file_gets_no_name(pool: Path, tmp_path: Path) -> None:
    base = make_image(pool / "base.qcow2", "8M")
    overlay = tmp_path / "overlay.qcow2"
    qemu_img("create", "-f", "qcow2", "-b", str(base), "-F", "qcow2", str(overlay))
    data = overlay.read_bytes()
    send(pool, pieces(data), size=len(data))
    assert finish(pool, data)["code"] == "unsupported_subformat"
    alone = base.read_bytes()
    send(pool, pieces(alone), size=len(alone))
    assert finish(pool, alone)["format"] == "qcow2"


def test_what_was_begun_is_forgotten_and_nothing_else_is(pool: Path) -> None:
    assert ask("forget_upload", {"target": place(pool)}) == {"removed": False}
    send(pool, pieces(content()[:MIB]))
    assert ask("forget_upload", {"target": place(pool)}) == {"removed": True}
    assert leftovers(pool) == set()


def test_a_finish_that_nobody_heard_of_is_told_again(pool: Path) -> None:
    data = content()
    send(pool, pieces(data))
    first = finish(pool, data)
    again = finish(pool, data, inode=first["inode"])
    assert {**again, "seconds": 0} == {**first, "seconds": 0}
    # It was cut off between the two names.
    os.link(pool / "new.raw", pool / PART)
    assert finish(pool, data, inode=first["inode"])["inode"] == first["inode"]
    assert ((pool / "new.raw").stat().st_nlink, leftovers(pool)) == (1, set())
    (pool / "new.raw").unlink()
    (pool / "new.raw").write_bytes(b"another")
    assert finish(pool, data, inode=first["inode"])["code"] == "stale_plan"
