"""A network filesystem whose server is away: whoever looks at it waits, and nothing else may wait with it."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from images.models import Image
from storage_admin.accounts.models import SYSTEM
from storage_admin.agent.host import special_mounts
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.protocol import b64
from storage_admin.agent.verbs import scan as verb
from storage_admin.errors import InvalidError
from storage_admin.hosts.models import Host
from storage_admin.hosts.services import register_folder
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.agent.recording import RecordingIO, request
from tests.harness.filesystems import mounted
from tests.harness.processes import Daemon, wait_until
from tests.images.far import answering_again
from tests.working import ADMIN, OPERATOR, create, image_at, run, said, scan, this_machine

pytestmark = [pytest.mark.services, pytest.mark.qemu, pytest.mark.django_db]
pytestmark.append(pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve"))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[str, str]]:
    """Another process that has a file open: its number, and that of its descriptor."""
    user = subprocess.Popen(["tail", "-f", path], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while not (found := [one for one in psutil.Process(user.pid).open_files() if one.path == str(path)]):
            assert time.monotonic() < deadline, "it has not opened the file"
            time.sleep(0.05)
        yield str(user.pid), str(found[0].fd)
    finally:
        user.kill()
        user.wait()


def test_a_storage_that_does_not_answer_keeps_its_numbers_and_holds_up_nothing_else(
    far_host: Host, far_server: Daemon, near: Path
) -> None:
    far = near.parent.parent / "far"
    before = far_host.pools.get(path=str(far))
    with opened(far / "away.qcow2"), answering_again(far_server):
        psutil.Process(far_server.pid).suspend()
        create(near.parent / "later.qcow2")
        began = time.monotonic()
        scan(far_host)
        assert time.monotonic() - began < special_mounts.PATIENCE + 10
        names = set(Image.objects.values_list("name", "state"))
        assert names == {("away.qcow2", "ok"), ("here.qcow2", "ok"), ("later.qcow2", "ok")}
        silent = far_host.pools.get(path=str(far))
        assert (silent.state, silent.capacity_bytes) == ("silent", None)
        assert (silent.fs_key, silent.images_count, silent.allocated_bytes, silent.network) == (
            before.fs_key, 1, before.allocated_bytes, True,
        )  # fmt: skip
        assert "does not answer" in silent.state_detail
        assert silent.last_scanned == before.last_scanned
        assert far_host.pools.get(path=str(near.parent)).state == "ok"

        job = run(services.submit(OPERATOR, "reclaim", image_at(near).pk, {"method": "copy", "undo_hours": 0}))
        assert (job.state, job.error_code) == ("succeeded", "")
        assert time.monotonic() - began < 2 * special_mounts.PATIENCE + 15
        # What there may stand on the image is not known: that is said, and not waited for.
        aside = run(services.submit(ADMIN, "set_aside", image_at(near).pk, {}))
        assert (aside.state, aside.error_code) == ("failed", "guests_unknown")
        assert f"{far} cannot be read: it does not answer" in aside.error_detail
        assert time.monotonic() - began < 3 * special_mounts.PATIENCE + 20

        # What interrupted work has left in other folders is put right.
        left = near.parent / ".sa-0123456789abcdef.new"
        left.touch()
        recovery = run(services.submit(SYSTEM, "recover", far_host.pk, {}))
        assert (recovery.state, left.exists()) == ("succeeded", False)
        assert f"the storage pool {far} does not answer and was skipped" in said(recovery)

        psutil.Process(far_server.pid).resume()
        scan(far_host)
        assert set(far_host.pools.values_list("state", flat=True)) == {"ok"}
    assert not Job.objects.filter(state="running").exists()


def test_images_in_a_bind_mount_of_such_a_filesystem_within_its_pool_are_seen_as_before(
    far_server: Daemon, near: Path, tmp_path: Path
) -> None:
    far, export = tmp_path / "far", tmp_path / "export"
    (export / "other").mkdir()
    (export / "within").mkdir()
    create(export / "other/bound.qcow2")
    host = this_machine(far)
    with mounted(far / "other", far / "within"):
        scan(host)
        assert set(Image.objects.values_list("name", "state")) == {("away.qcow2", "ok"), ("bound.qcow2", "ok")}


def test_a_storage_that_is_mounted_within_a_pool_and_away_holds_up_nothing(
    far_server: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(special_mounts, "PATIENCE", 1.5)
    named = [b64(bytes(tmp_path / "far/away.qcow2"))]  # by a guest
    pool = {"id": 1, "path_b64": b64(bytes(tmp_path)), "kind": "dir"}

    def scanned(known: str) -> RecordingIO:
        io = RecordingIO()
        verb.run(request("scan", pools=[pool | {"known_b64": known}], named_b64=named), io)
        return io

    first = scanned("")
    assert {b"away.qcow2"} == set(first.images())
    assert first.one("pool")["images"] == 2, "as it is exported, and as it is mounted"
    known = b64(b"".join(bytes.fromhex(image["fp"]) for image in first.all("image")))
    with answering_again(far_server):
        psutil.Process(far_server.pid).suspend()
        mounts = Mounts.of_this_machine()
        assert special_mounts.trusted([bytes(tmp_path)], mounts, lambda: None) == set(), "the pool itself answers"
        assert mounts.may_wait(bytes(tmp_path / "far/away.qcow2"))
        second = scanned(known).one("pool")
    assert (second["state"], second["vanished_b64"]) == ("unreadable", ""), "what was not looked at has not vanished"
    assert "far/away.qcow2: it lies on a filesystem that is not scanned" in second["detail"]
    assert scanned(known).one("pool")["state"] == "ok"


def test_a_folder_there_cannot_be_registered_and_holds_no_web_process(
    far_server: Daemon, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(special_mounts, "PATIENCE", 1.5)
    far, host = near.parent.parent / "far", this_machine()
    began = time.monotonic()
    with answering_again(far_server):
        psutil.Process(far_server.pid).suspend()
        with pytest.raises(InvalidError, match="its filesystem does not answer"):
            register_folder(ADMIN, host, str(far))
        assert time.monotonic() - began < 10
        register_folder(ADMIN, host, str(near.parent))
    register_folder(ADMIN, host, str(far))


def test_what_another_process_has_open_there_is_not_looked_at(far_server: Daemon, near: Path) -> None:
    far = near.parent.parent / "far"
    here, there = near.stat().st_dev, far.stat().st_dev
    with opened(far / "away.qcow2") as (pid, number):
        with answering_again(far_server):
            psutil.Process(far_server.pid).suspend()
            assert special_mounts.Descriptors({here}, ()).may_wait(pid, number)
        assert not special_mounts.Descriptors({here, there}, ()).may_wait(pid, number), (
            "its pool answers, and is read anyway"
        )
        with opened(near) as (other, local):
            assert not special_mounts.Descriptors((), ()).may_wait(other, local)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["detached", "in another namespace"])
def test_what_is_open_through_a_mount_that_is_not_seen_here_holds_up_no_scan(
    far_server: Daemon, near: Path, elsewhere: bool
) -> None:
    """`umount --lazy` leaves it to those that have files open there; a container's mounts are its own."""
    far = near.parent.parent / "far"
    host = this_machine(near.parent)
    apart = ["unshare", "--mount", "--propagation", "private"] if elsewhere else []
    user = subprocess.Popen([*apart, "tail", "-f", far / "away.qcow2"], stdout=subprocess.DEVNULL)
    try:
        reader = psutil.Process(user.pid)
        wait_until(lambda: reader.name() == "tail" and reader.open_files(), 10, "the file is open")
        subprocess.run(["umount", "--lazy", far], check=True)
        with near.open("rb"), answering_again(far_server):
            psutil.Process(far_server.pid).suspend()
            waits_for_nothing = threading.Timer(30, psutil.Process(far_server.pid).resume)
            waits_for_nothing.start()
            scan(host)
            assert waits_for_nothing.is_alive(), "the scan went on when the server answered again"
            waits_for_nothing.cancel()
        assert image_at(near).in_use is True
    finally:
        psutil.Process(far_server.pid).resume()
        user.kill()
        user.wait()


def test_what_is_mounted_there_is_not_looked_at_to_tell_where_an_image_is_mounted(
    far_server: Daemon, near: Path
) -> None:
    far, export = near.parent.parent / "far", near.parent.parent / "export"
    other = create(near.parent / "other.qcow2")
    (export / "disk").touch()
    (far / "disk").stat()
    with mounted(other, far / "disk"), near.open("rb") as image, other.open("rb") as bound, answering_again(far_server):
        psutil.Process(far_server.pid).suspend()
        began = time.monotonic()
        assert special_mounts.mounted_at(image.fileno()) is None
        assert str(far / "disk") in str(special_mounts.mounted_at(bound.fileno()))
        assert time.monotonic() - began < 5


def test_folders_are_asked_for_a_sign_of_life_all_at_once(far_server: Daemon, near: Path) -> None:
    far = near.parent.parent / "far"
    asked: list[int] = []
    began = time.monotonic()
    paths = [bytes(near.parent), bytes(far), b"/nowhere"]
    assert Mounts.of_this_machine().waits
    with answering_again(far_server):
        psutil.Process(far_server.pid).suspend()
        assert special_mounts.silent(paths, lambda: asked.append(1), 1.5) == {bytes(far)}
        assert 1.4 < time.monotonic() - began < 5
        assert len(asked) > 3
    assert special_mounts.silent(paths, lambda: None, 10) == set()
