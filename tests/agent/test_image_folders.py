"""The agent works where root has said that images are, and nowhere else, whoever asks."""

import contextlib
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent import protocol
from storage_admin.agent.folders import image_folders
from storage_admin.agent.protocol import b64
from tests.agent.every_verb import ALL, POOLS, Crew, plant_aside, plant_undo, pool_request, request
from tests.agent.harness import AGENT, Agent, ask, look_at, qemu_img
from tests.agent.tracing import Trace
from tests.faults.figures import trials_of
from tests.faults.swapper import Swapper, exchange
from tests.harness.filesystems import new_file, new_folder

CANARY = b"a secret of root's that no answer may hold "
NOBODY = 65534


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The list of this test alone; it has the folder ``pool``."""
    path = tmp_path / "etc" / "image-folders"
    path.parent.mkdir(mode=0o755)
    (tmp_path / "pool").mkdir()
    path.write_text(f"# of this test\n\n{tmp_path / 'pool'}\n")
    monkeypatch.setenv(image_folders.VARIABLE, str(path))
    return path


def secret(folder: Path) -> Path:
    """A folder that is not listed, with an image whose data is a secret."""
    folder.mkdir(mode=0o700)
    raw = new_file(folder / "disk.raw", (CANARY * 50_000)[: 2 << 20])
    qemu_img("convert", "-f", "raw", "-O", "qcow2", raw, folder / "disk.qcow2")
    (folder / "storage.cfg").write_bytes(b"dir: stolen\n\tpath /" + CANARY.replace(b" ", b"-") + b"\n")
    return folder


def state(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path)] = (status.st_ino, status.st_mode, status.st_mtime_ns, content)
    return found


def reached(trace: Path, folder: Path) -> set[bytes]:
    """What was opened below a folder."""
    return {path for path in Trace.read(trace).opened if path.startswith(bytes(folder) + b"/")}


@pytest.mark.qemu
@pytest.mark.parametrize("top", ["/", "itself"])
def test_no_verb_reads_or_changes_anything_outside_of_the_listed_folders(lists: Path, tmp_path: Path, top: str) -> None:
    hidden = secret(tmp_path / "secret")
    pool = Path("/") if top == "/" else hidden
    image = bytes(hidden / "disk.qcow2")
    plant_undo(image, CANARY)
    (hidden / "gone.qcow2").write_bytes((hidden / "disk.qcow2").read_bytes())
    before = state(hidden)
    trace = tmp_path / "trace"
    asked: dict[str, tuple[str, dict[str, Any]]] = {how: request(how, image, pool, "qcow2") for how in ALL}
    asked |= {"set_aside": request("set_aside", image, pool, "qcow2")}
    asked |= {verb: (verb, pool_request(verb, pool, [(image, "qcow2")])) for verb in POOLS}
    asked["benchmark"] = ("benchmark", {"pool_path_b64": b64(bytes(pool)), "kind": "sequential", "steps": [{}]})
    into = asked["convert"][1]["target"] | {"path_b64": b64(bytes(hidden / "new.raw")), "format": "raw"}
    with Crew(trace=trace) as crew:
        answers = {how: crew.ask(*one) for how, one in asked.items()}
        # An image of the pool itself, written into the other folder.
        qemu_img("create", "-q", "-f", "qcow2", tmp_path / "pool" / "a.qcow2", "4M")
        verb, args = request("convert", bytes(tmp_path / "pool" / "a.qcow2"), tmp_path / "pool", "qcow2")
        answers["convert into it"] = crew.ask(verb, args | {"target": into})
        plant_aside(bytes(hidden / "gone.qcow2"))
        after_plant = state(hidden)
        for how in ("restore_aside", "delete_aside"):
            answers[how] = crew.ask(*request(how, bytes(hidden / "gone.qcow2"), pool, "qcow2"))
    told = {how: answer.code for how, answer in answers.items()}
    looks = {"scan", "look", "recover", "folder", "sample"}
    assert {how: code for how, code in told.items() if code != "folder_not_listed"} == dict.fromkeys(looks, "") | {
        "benchmark": protocol.INVALID
    }
    for how in ("scan", "look"):
        assert [event["state"] for event in answers[how].events if event["event"] == "pool"] == ["not_listed"]
    assert answers["recover"].result["unread"] == [1]
    assert answers["sample"].result == {"analyzed": 0, "failed": 1}
    assert answers["folder"].result["refusal"]
    assert CANARY.decode() not in "".join(answer.text() for answer in answers.values())
    assert {path: facts for path, facts in before.items() if "gone" not in path and "planted.journal" not in path} == {
        path: facts for path, facts in state(hidden).items() if path in before and "gone" not in path
        and "planted.journal" not in path
    }  # fmt: skip
    assert state(hidden) == after_plant
    assert reached(trace, hidden) == set()


@pytest.mark.qemu
def test_a_scan_opens_no_file_that_a_request_only_calls_a_guests_disk(lists: Path, tmp_path: Path) -> None:
    hidden = secret(tmp_path / "secret")
    qemu_img(
        "create", "-q", "-f", "qcow2", "-b", CANARY.decode().strip(), "-F", "raw", "-u", hidden / "over.qcow2", "1M"
    )
    args = pool_request("scan", tmp_path / "pool")
    args["named_b64"] = [b64(bytes(hidden / name)) for name in ("over.qcow2", "disk.qcow2")]
    with Crew(trace=tmp_path / "trace") as crew:
        answer = crew.ask("scan", args)
    assert answer.code == ""
    assert CANARY.decode().strip() not in answer.text()
    assert reached(tmp_path / "trace", hidden) == set()


@pytest.mark.parametrize("name", ["etc_pve", "root"])
def test_proxmox_is_read_where_it_is_and_nowhere_else(tmp_path: Path, name: str) -> None:
    (tmp_path / "storage.cfg").write_bytes(CANARY)
    command = ["env", "-u", image_folders.VARIABLE, *AGENT]
    for verb in ("pve", "scan") if name == "etc_pve" else ("pve",):
        args: dict[str, Any] = {name: str(tmp_path)} | ({"pools": []} if verb == "scan" else {})
        answer = ask(verb, args, command=command)
        assert answer["code"] == "folder_not_listed"


def test_a_folder_is_added_only_by_an_agent_that_was_started_to_do_so(lists: Path, tmp_path: Path) -> None:
    new = new_folder(tmp_path / "new")
    args: dict[str, Any] = {"path_b64": b64(bytes(new)), "add": True, "never_b64": [b64(bytes(tmp_path / "data"))]}
    before = lists.read_text()
    assert ask("folder", args)["code"] == "folder_not_listed"
    assert ask("folder", args, command=[*AGENT, "libvirt-ro-not", "x"])["code"] == "folder_not_listed"
    assert lists.read_text() == before
    assert ask("folder", {"path_b64": args["path_b64"]})["refusal"]
    for _ in range(2):
        assert ask("folder", args, command=[*AGENT, image_folders.ALLOW])["refusal"] == ""
    assert lists.read_text() == f"{before}!{tmp_path / 'data'}\n{new}\n"
    assert ask("folder", {"path_b64": b64(bytes(new))})["refusal"] == ""


@pytest.mark.parametrize(
    "path",
    [
        "/", "/etc", "/etc/ssh", "/usr", "/usr/local/lib", "/bin", "/boot", "/proc", "/sys", "/dev", "/dev/shm", "/run",
        "/run/user", "/root", "/var", "/var/lib", "/var/lib/dpkg", "/var/lib/libvirt", "/var/lib/libvirt/qemu",
        "/var/log", "/var/spool/cron", "/home", "/srv", "/tmp", "/opt", "/mnt",
    ],
)  # fmt: skip
def test_a_folder_of_the_system_is_never_one_of_images(lists: Path, path: str) -> None:
    lists.write_text(f"/\n{path}\n")
    assert image_folders.forbidden(os.path.realpath(path).encode())


@pytest.mark.parametrize(
    "path", [b"/var/lib/libvirt/images", b"/var/lib/libvirt/images/x", b"/var/lib/vz", b"/mnt/pve/nas"]
)
def test_the_folders_of_hypervisors_need_no_line(lists: Path, path: bytes) -> None:
    assert image_folders.is_listed(path)
    assert not image_folders.forbidden(path)


def test_what_is_excluded_counts_more_than_what_is_listed(lists: Path, tmp_path: Path) -> None:
    lists.write_text(f"{tmp_path}\n!{tmp_path / 'a' / 'b'}\n")
    forbidden = {
        name: bool(image_folders.forbidden(bytes(tmp_path / name))) for name in ("a", "a/b", "a/b/c", "a/d", "e")
    }
    assert forbidden == {"a": True, "a/b": True, "a/b/c": True, "a/d": False, "e": False}


@pytest.mark.parametrize("what", ["file writable", "file of another user", "folder writable", "a link"])
def test_a_list_that_others_could_have_written_is_not_heeded(lists: Path, tmp_path: Path, what: str) -> None:
    pool = bytes(tmp_path / "pool")
    assert image_folders.is_listed(pool)
    if what == "file writable":
        lists.chmod(0o666)
    elif what == "file of another user":
        os.chown(lists, NOBODY, NOBODY)
    elif what == "folder writable":
        lists.parent.chmod(0o777)
    else:
        lists.rename(tmp_path / "other")
        lists.symlink_to(tmp_path / "other")
    assert not image_folders.is_listed(pool)
    answer = ask("folder", {"path_b64": b64(pool)})
    assert str(lists) in answer["refusal"]


def test_the_folder_that_the_agent_was_put_into_is_never_one_of_images(tmp_path: Path) -> None:
    from storage_admin.agent import bundle  # noqa: PLC0415

    data = tmp_path / "data"
    (data / "images").mkdir(parents=True)
    packed = bundle.build(data / "agent")
    for folder in (data, data / "images", tmp_path):
        answer = ask("folder", {"path_b64": b64(bytes(folder))}, command=[*Agent.python(), "-I", str(packed.path)])
        assert answer["forbidden"]


# Links, and other folders in a pool's place


@contextlib.contextmanager
def swapping(one: Path, other: Path) -> Iterator[None]:
    """Somebody who exchanges two names as fast as he can; in the end they are as before."""
    with Swapper(random.Random(), [(one, other)], pause=0) as somebody:
        yield
    if somebody.exchanges % 2:
        assert exchange(one, other)


@pytest.mark.qemu
@pytest.mark.faults
def test_a_pools_folder_that_becomes_a_link_again_and_again_leads_nowhere_else(tmp_path: Path) -> None:
    hidden = secret(tmp_path / "secret")
    bobs = tmp_path / "bobs"
    pool = new_folder(bobs / "pool", parents=True)
    os.chown(bobs, NOBODY, NOBODY)
    os.chown(pool, NOBODY, NOBODY)
    (pool / "disk.qcow2").write_bytes((hidden / "disk.qcow2").read_bytes())
    (bobs / "link").symlink_to(hidden)
    os.chown(bobs / "link", NOBODY, NOBODY, follow_symlinks=False)
    before = state(hidden)
    ways = [*ALL, "set_aside", *sorted(POOLS)]
    tries = max(trials_of("links"), 1)
    asked = []
    for number in range(tries):
        how = ways[number % len(ways)]
        image = bytes(pool / "disk.qcow2")
        if how in POOLS:
            asked.append((how, pool_request(how, pool, [(image, "qcow2")])))
        elif how.startswith("check") or how in {"undo", "discard_undo"} or number % 2:
            # As a plan would be that was made while the link stood there.
            asked.append(request(how, bytes(hidden / "disk.qcow2"), hidden, "qcow2"))
            asked[-1][1].update(path_b64=b64(image), pool_path_b64=b64(bytes(pool)))
        else:
            asked.append(request(how, image, pool, "qcow2"))
    with Crew(trace=tmp_path / "trace") as crew:
        assert crew.ask(*request("analyze sample", bytes(pool / "disk.qcow2"), pool, "qcow2")).code == ""
        for verb, args in asked:
            with swapping(pool, bobs / "link"):
                answer = crew.ask(verb, args)
            assert answer.code != protocol.BUG, answer.detail
            assert CANARY.decode() not in answer.text()
            if not (pool / "disk.qcow2").exists() or (pool / "disk.qcow2").stat().st_size == 0:
                (pool / "disk.qcow2").write_bytes((hidden / "disk.qcow2").read_bytes())
    assert reached(tmp_path / "trace", pool)
    assert reached(tmp_path / "trace", hidden) == set()
    assert state(hidden) == before


def test_a_link_of_roots_own_is_followed_and_one_of_others_is_not(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "link").symlink_to("images")
    args = {"pools": [{"id": 1, "path_b64": b64(bytes(tmp_path / "link")), "kind": "dir"}]}
    assert pool_state(args) == "ok"
    os.chown(tmp_path / "link", NOBODY, NOBODY, follow_symlinks=False)
    assert pool_state(args) == "changed"
    os.chown(tmp_path / "link", 0, 0, follow_symlinks=False)
    assert pool_state(args) == "ok"
    tmp_path.chmod(0o777)
    assert pool_state(args) == "changed"


def pool_state(args: dict[str, Any], roots: dict[str, Any] | None = None) -> str:
    return str(pool_event(args, roots)["state"])


def pool_event(args: dict[str, Any], roots: dict[str, Any] | None = None) -> dict[str, Any]:
    with Agent() as agent:
        agent.say(protocol.REQUEST, verb="scan", job="j1", generation=1, args=args, roots=roots or {})
        agent.answer()
    return next(event for event in agent.events if event["event"] == "pool")


def test_another_folder_in_a_pools_place_is_told_and_not_worked_in(tmp_path: Path) -> None:
    pool = new_folder(tmp_path / "pool")
    (pool / "disk.raw").write_bytes(bytes(4096))
    args = {"pools": [{"id": 1, "path_b64": b64(bytes(pool)), "kind": "dir"}]}
    event = pool_event(args)
    kept = {b64(bytes(pool)): event["root"]}
    assert pool_state(args, kept) == "ok"
    pool.rename(tmp_path / "before")
    pool.mkdir()
    (pool / "disk.raw").write_bytes(bytes(4096))
    assert pool_state(args, kept) == "changed"
    with Agent() as agent:
        look = look_at(pool / "disk.raw", "raw")
        agent.say(protocol.REQUEST, verb="analyze", job="j1", generation=1, args=look, roots=kept)
        assert agent.answer()["code"] == "pool_changed"
    pool.rename(tmp_path / "after")
    (tmp_path / "before").rename(pool)
    assert pool_state(args, kept) == "ok"


def test_a_restart_of_the_machine_makes_no_pool_another_one(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    path = b64(bytes(tmp_path / "pool"))
    args = {"pools": [{"id": 1, "path_b64": path, "kind": "dir"}]}
    root = pool_event(args)["root"]
    lasting = root | {"boot": "before", "lasts": True}
    # What does not outlast a restart is not compared across one; where only the device's numbers were known, neither.
    assert (
        pool_state(args, {path: root | {"boot": "before", "lasts": False, "filesystem": "fs::9:9", "inode": 1}}) == "ok"
    )
    assert pool_state(args, {path: lasting}) == "ok"
    if root["lasts"]:
        assert pool_state(args, {path: lasting | {"inode": root["inode"] + 1}}) == "changed"
    assert pool_state(args, {path: root | {"inode": root["inode"] + 1}}) == "changed"
