"""Files of a guest are looked at in an appliance, which sees nothing but the disk and can do nothing to it."""

import contextlib
import fcntl
import hashlib
import math
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from storage_admin.agent import protocol
from storage_admin.agent.appliance import appliance
from storage_admin.agent.host import locking
from storage_admin.agent.protocol import StoppedError, unb64
from tests.agent.harness import AGENT, Agent, Writer, ask, at_stage, qemu_img, qemu_io, rewrite_args
from tests.agent.recording import RecordingIO, cancel
from tests.harness.filesystems import formatted, sparse_file
from tests.harness.processes import wait_until

pytestmark = pytest.mark.qemu
MIB = 1 << 20
#: What the appliance's command line names, and nothing else does.
CHANNEL = "name=org.libguestfs.channel.0"
SECRET = b"a tenant's own words\n" * 1000


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disk with two partitions: a small Debian, as far as libguestfs looks at it, and an XFS."""
    folder = tmp_path_factory.mktemp("disk")
    root, whole = folder / "root", folder / "disk.raw"
    for name in ("etc", "bin", "home/odd \n name", "usr", "var", "boot"):
        (root / name).mkdir(parents=True)
    (root / "etc/os-release").write_text('ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n')
    (root / "etc/debian_version").write_text("12.1\n")
    (root / "etc/hostname").write_text("guest-1\n")
    (root / "etc/fstab").write_text("/dev/sda1 / ext4 defaults 0 1\n")
    (root / "bin/sh").write_bytes(Path("/bin/sh").read_bytes())
    (root / "home/words").write_bytes(SECRET)
    (root / "home/large").write_bytes(os.urandom(5 * MIB + 3))
    (root / os.fsdecode(b"home/odd-\xff")).write_bytes(b"x")
    (root / "home/link").symlink_to("/etc/hostname")
    (root / "home/out").symlink_to("/../../../../etc/shadow")
    sparse_file(whole, 440 * MIB)
    subprocess.run(["sfdisk", "-q", whole], input=b"2048 200000\n204800 640000 L\n", check=True)
    first, second = folder / "first", folder / "second"
    formatted(first, 200_000 * 512, make=("-d", str(root)))
    formatted(second, 640_000 * 512, "xfs")
    for path, sector in ((first, 2048), (second, 204_800)):
        command = ["dd", f"if={path}", f"of={whole}", "bs=512", f"seek={sector}", "conv=notrunc,sparse"]
        subprocess.run(command, check=True, capture_output=True)
    return whole


@pytest.fixture
def image(pool: Path, disk: Path) -> Path:
    """An overlay, so that the whole chain has to be there."""
    qemu_img("convert", "-O", "qcow2", disk, pool / "base.qcow2")
    qemu_img("create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", pool / "vm.qcow2")
    return pool / "vm.qcow2"


def args_for(image: Path, do: str = "look", **where: str) -> dict[str, Any]:
    return rewrite_args(image, image.parent / "base.qcow2") | {"do": do, **where}


def left(image: Path, agent: int) -> list[str]:
    """What the appliance of an agent, by its process id, has left on this machine."""
    folder = f"{appliance.MARK}{agent}-"
    found = [name for name in os.listdir(appliance.PLACE) if name.startswith(folder)]  # noqa: PTH208
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            opened = [str(path.readlink()) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
            serves = process.name().startswith("qemu-storage") and any(str(image.parent) in path for path in opened)
            if serves or folder in " ".join(process.cmdline()):
                found.append(f"{process.name()} ({process.pid})")
    return found


def machines(folder: str) -> list[psutil.Process]:
    """The appliance's VM, and none of the QEMUs that libguestfs asks for their abilities."""
    lines = {one: " ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])}
    return [one for one, line in lines.items() if CHANNEL in line and folder in line]


def answered(image: Path, args: dict[str, Any], command: Sequence[str] = AGENT) -> tuple[dict[str, Any], bytes]:
    """What an agent answers, and the bytes that it sends; nothing of its appliance is left then."""
    with Agent(command) as agent:
        agent.request("files", args)
        told = agent.answer()
        sent = b"".join(unb64(event["b64"]) for event in agent.events if event["event"] == protocol.DATA)
    assert left(image, agent.process.pid) == []
    return told, sent


#: An agent that leaves nothing to others, and makes a part of the appliance anew: in a copy of its folder, since others
#: start theirs from the real one at any time.
MAKES_ANEW = """
mkdir -p {cache}
cp -a --sparse=always {cache} {own}
rm -f {own}/built/README.fixed
mount --bind {own} {cache}
umask 077
exec "$@"
"""


def test_the_system_its_filesystems_and_its_files_are_told_and_nothing_is_changed(image: Path, tmp_path: Path) -> None:
    before = {path.name: hashlib.sha256(path.read_bytes()).digest() for path in image.parent.iterdir()}
    script = MAKES_ANEW.format(cache=appliance.CACHE, own=tmp_path / "own")
    looked, _ = answered(image, args_for(image), ["unshare", "--mount", "sh", "-ec", script, "sh", *AGENT])
    assert [(one["device"], one["type"]) for one in looked["filesystems"]] == [
        ("/dev/sda1", "ext4"), ("/dev/sda2", "xfs")
    ]  # fmt: skip
    assert all(0 < one["free"] < one["size"] for one in looked["filesystems"])
    (system,) = looked["systems"]
    assert (system["distribution"], system["hostname"], system["root"]) == ("debian", "guest-1", "/dev/sda1")
    listed, _ = answered(image, args_for(image, "list", device="/dev/sda1", path="/home"))
    entries = {one["name"]: one for one in listed["entries"]}
    assert entries.keys() == {"odd \n name", "words", "large", "link", "out", "odd-\\xff"}
    assert (entries["words"]["size"], oct(entries["link"]["mode"])) == (len(SECRET), "0o120777")
    assert {path.name: hashlib.sha256(path.read_bytes()).digest() for path in image.parent.iterdir()} == before


def test_a_file_comes_whole_and_a_link_leads_nowhere_else(image: Path) -> None:
    result, sent = answered(image, args_for(image, "read", device="/dev/sda1", path="/home/words"))
    assert (sent == SECRET, result) == (True, {"bytes": len(SECRET), "sha256": hashlib.sha256(SECRET).hexdigest()})
    # Not before it was used: somebody may have installed packages since it was built, so that it was made anew.
    built = Path(appliance.CACHE, "built/root").stat().st_ino
    out, _ = answered(image, args_for(image, "read", device="/dev/sda1", path="/home/out"))
    assert Path(appliance.CACHE, "built/root").stat().st_ino == built, "made once, and used by all"
    assert out["code"] == "unreadable_inside", "there is no such file in the guest"


def test_what_is_no_folder_of_the_guest_is_not_listed(image: Path) -> None:
    for where in ({"device": "/dev/sda9", "path": "/"}, {"device": "/etc/passwd", "path": "/"}):
        assert answered(image, args_for(image, "list", **where))[0]["code"] == "unreadable_inside", where


def test_what_makes_no_sense_is_refused_before_anything_starts(image: Path) -> None:
    for where in ({}, {"device": "/dev/sda1"}, {"device": "/dev/sda1", "path": "x"}, {"device": "a\0", "path": "/"}):
        began = time.monotonic()
        assert ask("files", args_for(image, "list", **where))["code"] == "invalid", where
        assert time.monotonic() < began + 5
    assert ask("files", args_for(image) | {"do": "remove"})["code"] == "invalid"


def test_the_appliance_has_no_network_and_no_rights_and_ends_with_its_agent(image: Path) -> None:
    here = Path("/proc/self/ns/net").readlink()
    with at_stage("starting", "files", args_for(image)) as agent:
        own = f"{appliance.MARK}{agent.process.pid}-"
        wait_until(lambda: machines(own), 60, "its machine has started")
        (machine,) = machines(own)
        assert machine.uids().real in appliance._USERS
        assert Path(f"/proc/{machine.pid}/ns/net").readlink() != here
        status = Path(f"/proc/{machine.pid}/status").read_text()
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        opened = [str(path.readlink()) for path in Path(f"/proc/{machine.pid}/fd").iterdir()]
        assert not any(str(image.parent) in path for path in opened)
        agent.process.kill()
    gone = agent.process.pid
    wait_until(lambda: not any(name.startswith("qemu") for name in left(image, gone)), 20, "the machine has ended")
    assert "filesystems" in answered(image, args_for(image))[0]
    assert left(image, agent.process.pid) == [], "the next one clears what a killed one left"


def test_a_guest_that_starts_meanwhile_is_not_kept_from_it_and_ends_the_look(image: Path) -> None:
    with at_stage("starting", "files", args_for(image)) as agent:
        time.sleep(1)
        with Writer(image) as guest:
            assert agent.answer()["code"] == "image_in_use"
            assert not guest.refused
            assert guest.process.poll() is None
    assert left(image, agent.process.pid) == []


def test_a_filesystem_that_is_damaged_is_told_as_one(image: Path) -> None:
    base = image.parent / "base.qcow2"
    qemu_io(base, f"write -q -P 0xff {2048 * 512 + 1024} 4096", f"write -q -P 0 {204_800 * 512} 1M")
    looked = ask("files", args_for(image))
    assert all(one["size"] is None for one in looked["filesystems"]), looked
    assert looked["systems"] == []


def test_a_program_that_ended_long_ago_is_not_killed_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, _signal: killed.append(pid))
    with subprocess.Popen(["true"], start_new_session=True) as process:
        process.wait()
        appliance._end(process)
        appliance._end(process, gently=True)
    assert killed == []


def test_what_killed_agents_left_is_removed_and_nothing_else() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    made = {}
    for what, pid, owner in (
        ("before it was another user's", ended.pid, 0), ("of a dead one", ended.pid, appliance._USERS[0]),
        ("of a living one", os.getpid(), 0), ("of somebody else", ended.pid, 1000),
    ):  # fmt: skip
        folder = Path(appliance.PLACE, f"{appliance.MARK}{pid}-{owner}")
        folder.mkdir()
        (folder / "file").touch()
        os.chown(folder, owner, owner)
        made[what] = folder
    try:
        appliance.clear()
        assert {what for what, folder in made.items() if folder.exists()} == {"of a living one", "of somebody else"}
    finally:
        for folder in made.values():
            shutil.rmtree(folder, ignore_errors=True)


def test_who_waits_for_an_appliance_that_another_agent_makes_hears_that_it_is_to_stop(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as theirs, (tmp_path / "lock").open("w") as ours:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with pytest.raises(StoppedError):
            locking.take_file(ours.fileno(), math.inf, RecordingIO(cancel).check)
        fcntl.flock(theirs, fcntl.LOCK_UN)
        locking.take_file(ours.fileno(), math.inf, RecordingIO(cancel).check)
        with pytest.raises(BlockingIOError):
            fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
