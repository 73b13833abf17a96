"""The agent's relay: what it takes for libvirt's socket, and that every byte is carried."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_admin.agent import bundle, relay
from storage_admin.agent.protocol import HostError, decode
from tests.harness.processes import running


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for ``/run/libvirt``."""
    path = tmp_path / "libvirt"
    path.mkdir(mode=0o755)
    monkeypatch.setattr(relay, "FOLDER", str(path))
    return path


@pytest.fixture
def listener(folder: Path) -> Iterator[socket.socket]:
    """Who listens where libvirt does, as root."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "libvirt-sock-ro"))
        made.listen(5)
        made.settimeout(5)
        yield made


def refused(why: str) -> None:
    with pytest.raises(HostError, match=why):
        relay.connected()


def test_without_a_socket_there_is_no_libvirt(folder: Path) -> None:
    assert relay.connected() is None
    folder.rmdir()
    assert relay.connected() is None


def test_the_read_only_socket_of_whichever_daemon_serves_is_taken(folder: Path, listener: socket.socket) -> None:
    made = relay.connected()
    assert made is not None
    assert made.getpeername() == str(folder / "libvirt-sock-ro")
    made.close()
    (folder / "libvirt-sock-ro").rename(folder / "virtqemud-sock-ro")
    again = relay.connected()
    assert again is not None
    again.close()


def test_the_other_socket_is_never_tried(folder: Path, listener: socket.socket) -> None:
    (folder / "libvirt-sock-ro").rename(folder / "libvirt-sock")
    assert relay.connected() is None


def test_a_link_to_the_other_socket_is_refused(folder: Path, listener: socket.socket) -> None:
    (folder / "libvirt-sock-ro").rename(folder / "libvirt-sock")
    (folder / "libvirt-sock-ro").symlink_to("libvirt-sock")
    refused("not a socket of root")


def test_a_file_and_a_pipe_are_refused_and_not_opened(folder: Path) -> None:
    (folder / "libvirt-sock-ro").write_text("x")
    refused("not a socket of root")
    (folder / "libvirt-sock-ro").unlink()
    os.mkfifo(folder / "libvirt-sock-ro")
    refused("not a socket of root")


def test_a_socket_of_somebody_else_is_refused(folder: Path, listener: socket.socket) -> None:
    os.chown(folder / "libvirt-sock-ro", 65534, 65534)
    refused("not a socket of root")


def test_who_listens_has_to_be_root_whoever_the_name_belongs_to(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        "s.bind(sys.argv[1]); s.listen(); print('up', flush=True); sys.stdin.read()"
    )
    there, path = shared_folder, shared_folder / "libvirt-sock-ro"
    there.chmod(0o777)
    with running([sys.executable, "-c", program, path], b"up\n"):
        os.chown(path, 0, 0)
        there.chmod(0o755)
        monkeypatch.setattr(relay, "FOLDER", str(there))
        refused("does not run as root")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_into_which_others_may_write_is_not_believed(folder: Path, listener: socket.socket, mode: int) -> None:
    folder.chmod(mode)
    refused("root alone")


def test_a_folder_of_somebody_else_or_a_link_is_not_believed(
    folder: Path, listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(folder, 65534, 0)
    refused("root alone")
    os.chown(folder, 0, 0)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setattr(relay, "FOLDER", str(tmp_path / "link"))
    refused("not a folder")


def test_a_socket_that_nobody_listens_at_is_told(folder: Path, listener: socket.socket) -> None:
    listener.close()
    refused(r"does not answer at .*refused")


def test_every_byte_arrives_in_both_directions_however_slow_the_other_end_takes_them() -> None:
    ours, near = socket.socketpair()
    far, theirs = socket.socketpair()
    ways = [(near.fileno(), far.fileno()), (far.fileno(), near.fileno())]
    carrying = threading.Thread(target=relay.carry, args=(ways, near.fileno()))
    carrying.start()
    sent = {ours: os.urandom(3 << 20), theirs: os.urandom(5 << 20)}
    got: dict[socket.socket, bytearray] = {ours: bytearray(), theirs: bytearray()}

    def read(one: socket.socket, wanted: int) -> None:
        while len(got[one]) < wanted:
            got[one] += one.recv(1 << 14)
            time.sleep(0.001)

    threads = [threading.Thread(target=one.sendall, args=(sent[one],)) for one in sent]
    threads += [
        threading.Thread(target=read, args=(ours, len(sent[theirs]))),
        threading.Thread(target=read, args=(theirs, len(sent[ours]))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (got[theirs] == sent[ours], got[ours] == sent[theirs]) == (True, True)
    ours.close()
    carrying.join(5)
    assert not carrying.is_alive()
    for end in (near, far, theirs):
        end.close()


def test_what_was_said_before_the_end_is_passed_on() -> None:
    ours, near = socket.socketpair()
    far, theirs = socket.socketpair()
    theirs.sendall(b"x" * 100_000)
    theirs.close()
    got: list[bytes] = []
    reading = threading.Thread(target=lambda: got.extend(iter(lambda: ours.recv(1 << 12), b"")))
    reading.start()
    relay.carry([(near.fileno(), far.fileno()), (far.fileno(), near.fileno())], near.fileno())
    near.close()
    reading.join(10)
    assert len(b"".join(got)) == 100_000


def test_a_controller_that_falls_silent_is_taken_for_gone_whatever_the_other_end_says() -> None:
    _ours, near = socket.socketpair()
    far, theirs = socket.socketpair()
    over = threading.Event()

    def chatter() -> None:
        while not over.wait(0.05):
            theirs.send(b"event")

    talking = threading.Thread(target=chatter)
    talking.start()
    began = time.monotonic()
    relay.carry([(near.fileno(), far.fileno()), (far.fileno(), near.fileno())], near.fileno(), 1.0)
    over.set()
    talking.join()
    assert 1.0 <= time.monotonic() - began < 4


@pytest.mark.parametrize("words", [["libvirt"], ["libvirt-ro", "x"], ["/run/libvirt/libvirt-sock"], ["-c", "x"]])
def test_no_other_argument_starts_it(tmp_path: Path, words: list[str]) -> None:
    built = bundle.build(tmp_path / "agent")
    done = subprocess.run([sys.executable, "-I", str(built.path), *words], input=b"", capture_output=True, timeout=20)
    told = decode(done.stdout.split(b"\n")[0])
    assert (told["event"], told["hash"], "relay" in told) == ("hello", built.hash, False)
