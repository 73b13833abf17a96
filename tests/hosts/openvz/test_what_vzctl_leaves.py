"""What vzctl leaves behind where it fails, or says that it did not: as the real 4.11.1 does, read again each time."""

import os
import stat
from pathlib import Path

import pytest

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.openvz import AbsentError, NotSetError, containers, listing, set_priority
from storage_admin.hosts.openvz.vzctl import WAITS, was_cut_short
from tests.harness.filesystems import new_file, new_program
from tests.harness.openvz import OpenVZHost
from tests.hosts.openvz.conftest import give
from tests.hosts.openvz.test_set_in_file import fill

CONTENT = b'HOSTNAME="a"\nIOPRIO="4"\nONBOOT="yes"\n'
#: More than any kernel gives out.
NOBODY = 2**22 + 1


@pytest.mark.parametrize("content", [CONTENT, b'ONBOOT="yes"\n', b'IOPRIO="4"\n'])
def test_a_configuration_that_vzctl_emptied_is_put_back_with_owner_and_mode(host: OpenVZHost, content: bytes) -> None:
    path = host.add("200", content, "running")
    os.chown(path, 1234, 4)
    path.chmod(0o640)
    host.switch("full")
    with pytest.raises(NotSetError, match=r"only a part of .*restored.*the kernel already uses 7") as failed:
        give(host, "200", 7)
    after = path.stat()
    assert (path.read_bytes(), failed.value.lost) == (content, b"")
    assert (stat.S_IMODE(after.st_mode), after.st_uid, after.st_gid) == (0o640, 1234, 4)
    assert host.in_kernel("200") == 7


def test_behind_a_link_too(host: OpenVZHost) -> None:
    path = host.add("200", CONTENT)
    real = path.rename(host.folder / "private" / "200" / "ve.conf")
    path.symlink_to(real)
    host.switch("full")
    with pytest.raises(NotSetError, match="was restored"):
        give(host, "200", 7)
    assert (path.is_symlink(), real.read_bytes()) == (True, CONTENT)


def test_what_cannot_be_put_back_is_kept(host: OpenVZHost) -> None:
    path = host.add("200", CONTENT)
    host.switch("full")
    new_program(host.bin / "dd", "#!/bin/sh\necho No space left on device\nexit 1\n")
    with pytest.raises(NotSetError, match=r"could not be restored.*No space left") as failed:
        give(host, "200", 7)
    assert (path.read_bytes(), failed.value.lost) == (b"", CONTENT)


def test_without_room_vzctl_is_not_asked(host: OpenVZHost, small_filesystem: Path) -> None:
    path = new_file(small_filesystem / "200.conf", CONTENT)
    fill(small_filesystem / "filler")
    with pytest.raises(RefusedError, match="bytes free") as refused:
        set_priority(host.shell, "200", 7, folders=(str(small_filesystem),))
    assert (refused.value.code, path.read_bytes(), host.calls("vzctl")) == ("not_enough_space", CONTENT, [])


@pytest.mark.parametrize(
    ("before", "now", "cut"),
    [
        (CONTENT, b"", True),
        (b'A="1"\n' * 1000, b'A="1"\n' * 682 + b'A="1', True),
        (CONTENT, CONTENT, False),
        (CONTENT, b'HOSTNAME="a"\nIOPRIO="7"\n', False),
        (CONTENT, b'IOPRIO="7"\n', False),
        (CONTENT, b'HOSTNAME="b"\n', False),
    ],
)
def test_what_is_cut_short_is_told_from_what_somebody_changed(before: bytes, now: bytes, cut: bool) -> None:
    assert was_cut_short(before, now) is cut


def test_owner_and_group_are_kept(host: OpenVZHost) -> None:
    path = host.add("200", CONTENT)
    os.chown(path, 0, 4)
    path.chmod(0o640)
    done = give(host, "200", 7)
    after = path.stat()
    assert (stat.S_IMODE(after.st_mode), after.st_uid, after.st_gid) == (0o640, 0, 4)
    assert done.notes == (f"vzctl set the owner and mode of {path} to 0:0 644. They were reset to 0:4 640.",)


def test_a_hard_link_that_vzctl_breaks_is_told(host: OpenVZHost) -> None:
    path = host.add("200", CONTENT)
    other = host.folder / "second"
    other.hardlink_to(path)
    (note,) = give(host, "200", 7).notes
    assert f"{path} was one of 2 hard links" in note
    assert (other.read_bytes(), b'IOPRIO="7"' in path.read_bytes()) == (CONTENT, True)


@pytest.mark.parametrize(
    ("switch", "words", "now"),
    [
        ("killed", r"signal 9.*was not changed.*kernel may already use 7", 4),
        ("killed_after_save", r"signal 9.*has 7 now, and had 4 before.*kernel may already use 7", 7),
        ("save_fails", r"exit code 139.*was not changed.*kernel already uses 7", 4),
    ],
)
def test_after_a_failure_all_is_read_again_and_the_kernel_is_not_forgotten(
    host: OpenVZHost, switch: str, words: str, now: int
) -> None:
    host.add("200", CONTENT, "running")
    host.switch(switch)
    with pytest.raises(NotSetError, match=words) as failed:
        give(host, "200", 7)
    outcome = failed.value.outcome
    assert (outcome.now.priority, outcome.listed, host.in_kernel("200")) == (now, now, 7)


def lock(host: OpenVZHost, pid: object) -> Path:
    """vzctl's lock of container 200, held by a process."""
    (host.folder / "lock").mkdir()
    (host.folder / "vz.conf").write_text(f"## Global\nVIRTUOZZO=yes\nLOCKDIR={host.folder}/lock\n")
    path = host.folder / "lock" / "200.lck"
    path.write_text(f"{pid}\n\n")
    return path


def test_an_edit_waits_for_vzctl_s_lock_and_leaves_it_alone(bare: OpenVZHost) -> None:
    path, held = bare.add("200", CONTENT), lock(bare, os.getpid())
    waits: list[float] = []
    with pytest.raises(RefusedError, match=f"Locked by: pid {os.getpid()}, cmdline") as refused:
        set_priority(bare.shell, "200", 7, folders=bare.folders, pause=waits.append)
    assert (refused.value.code, tuple(waits), path.read_bytes()) == ("guest_locked", WAITS, CONTENT)
    assert [one.name for one in held.parent.iterdir()] == ["200.lck"]
    assert [one.name for one in bare.conf.iterdir()] == ["200.conf"]


def test_an_edit_goes_on_once_the_lock_is_given_back(bare: OpenVZHost) -> None:
    bare.add("200", CONTENT)
    held = lock(bare, os.getpid())
    done = set_priority(bare.shell, "200", 7, folders=bare.folders, pause=lambda _: held.unlink())
    assert done.as_asked
    assert list(held.parent.iterdir()) == []


@pytest.mark.parametrize("pid", [NOBODY, "", "x"])
def test_a_lock_that_nobody_holds_counts_for_nothing(bare: OpenVZHost, pid: object) -> None:
    path, held = bare.add("200", CONTENT), lock(bare, pid)
    assert give(bare, "200", 7).as_asked
    assert b'IOPRIO="7"' in path.read_bytes()
    assert list(held.parent.iterdir()) == []


@pytest.fixture
def looping(host: OpenVZHost, monkeypatch: pytest.MonkeyPatch) -> OpenVZHost:
    """A host with a configuration on which vzlist never ends."""
    monkeypatch.setattr(listing, "ALL_SECONDS", 1.0)
    monkeypatch.setattr(listing, "ONE_SECONDS", 10.0)
    host.add("200", CONTENT, "running")
    host.add("201", b"\n")
    return host


def test_one_container_s_fault_costs_that_container(looping: OpenVZHost) -> None:
    looping.add("202", 'HOSTNAME="' + "w" * 40 + '"\nVE_PRIVATE="/vz/$VEID"\n')
    found = {guest.uid: guest for guest in containers(looping.shell, folders=looping.folders)}
    assert (found["200"].state, found["200"].io_priority, found["200"].name) == ("running", 4, "a")
    assert (found["202"].name, found["202"].disks[0].path) == ("w" * 40, "/vz/202")
    assert (found["201"].state, found["201"].unread[0]) == ("unknown", "vzlist 201: exit code 124")
    assert give(looping, "200", 7).listed == 7


def test_where_vzlist_tells_of_none_its_fault_is_told(host: OpenVZHost) -> None:
    host.add("200")
    host.switch("vzlist_fails", "out of memory")
    with pytest.raises(HostError, match="out of memory"):
        containers(host.shell, folders=host.folders)


def test_tools_that_are_gone_leave_the_configurations_to_tell(host: OpenVZHost) -> None:
    host.add("200", CONTENT, "running")
    host.remove("vzctl", "vzlist")
    (guest,) = containers(host.shell, folders=host.folders)
    assert (guest.uid, guest.state, guest.io_priority) == ("200", "unknown", 4)
    (host.conf / "200.conf").unlink()
    with pytest.raises(AbsentError):
        containers(host.shell, folders=host.folders)
