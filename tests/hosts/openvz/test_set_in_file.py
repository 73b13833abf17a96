"""Setting a priority without vzctl: the configuration is edited, and nothing of it is lost."""

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.openvz import Effect, NotSetError, set_priority
from storage_admin.hosts.shells import Done, LocalShell
from storage_admin.hosts.ssh import SshShell
from tests.harness.filesystems import immutable, new_file, new_folder, new_program
from tests.harness.openvz import OpenVZHost
from tests.harness.sshd import sshd
from tests.hosts.openvz.conftest import WatchedShell, give
from tests.working import fails_as

CONTENT = (
    b'# \xff\xfe odd bytes\r\nHOSTNAME="a b"\n\n  IOPRIO="4"\nDESCRIPTION="$(touch /x) `id` \'"\nLAST="no newline"'
)
SYNC = 'sync "$1"'


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_the_value_changes_and_it_counts_from_the_next_start(bare: OpenVZHost) -> None:
    path = bare.add("200", CONTENT, "running")
    done = give(bare, "200", 7)
    assert path.read_bytes() == CONTENT.replace(b'"4"', b'"7"')
    assert (done.by, done.effect, done.before.priority, done.now.priority) == ("file", Effect.NEXT_START, 4, 7)
    assert (done.was_listed, done.state, done.notes) == (False, "unknown", ())
    assert names(bare.conf) == ["200.conf"]


def test_vzlist_where_it_is_has_its_word(host: OpenVZHost) -> None:
    host.add("200", state="running")
    host.remove("vzctl")
    done = give(host, "200", 7)
    assert (done.by, done.state, done.listed, done.effect) == ("file", "running", 7, Effect.NEXT_START)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o660])
def test_mode_and_owner_are_kept(bare: OpenVZHost, mode: int) -> None:
    path = bare.add("200", CONTENT)
    os.chown(path, 1234, 4321)
    path.chmod(mode)
    give(bare, "200", 7)
    after = path.stat()
    assert (stat.S_IMODE(after.st_mode), after.st_uid, after.st_gid) == (mode, 1234, 4321)


def test_what_says_it_already_is_not_written(bare: OpenVZHost) -> None:
    path = bare.add("200", CONTENT)
    before = path.stat()
    done = give(bare, "200", 4)
    assert (done.as_asked, path.stat().st_ino, path.stat().st_mtime_ns) == (True, before.st_ino, before.st_mtime_ns)


def test_every_one_of_several_lines_says_it(bare: OpenVZHost) -> None:
    path = bare.add("200", 'IOPRIO="1"\nA="x"\nIOPRIO="2"\n')
    done = give(bare, "200", 7)
    assert (done.before.priority, done.now.priority, done.now.lines) == (2, 7, ('IOPRIO="7"', 'IOPRIO="7"'))
    assert path.read_text() == 'IOPRIO="7"\nA="x"\nIOPRIO="7"\n'


def test_without_a_configuration_none_is_made(bare: OpenVZHost) -> None:
    with pytest.raises(RefusedError, match="no configuration on this host") as refused:
        give(bare, "200", 7)
    assert (refused.value.code, names(bare.conf)) == ("stale_plan", [])


def test_proxmox_s_folder_is_used_where_openvz_s_does_not_have_it(bare: OpenVZHost) -> None:
    (bare.folder / "pve").mkdir()
    path = bare.folder / "pve" / "200.conf"
    path.write_text('IOPRIO="4"\n')
    bare.add("201")
    done = give(bare, "200", 7)
    assert (done.path, path.read_text()) == (str(path), 'IOPRIO="7"\n')


def test_a_link_is_not_followed(bare: OpenVZHost, tmp_path: Path) -> None:
    victim = new_file(tmp_path / "victim", 'IOPRIO="4"\n')
    (bare.conf / "200.conf").symlink_to(victim)
    with pytest.raises(RefusedError, match="is a link") as refused:
        give(bare, "200", 7)
    assert (refused.value.code, victim.read_text()) == ("hard_linked", 'IOPRIO="4"\n')
    assert (bare.conf / "200.conf").is_symlink()


def test_a_file_with_another_name_is_refused(bare: OpenVZHost) -> None:
    path = bare.add("200", 'IOPRIO="4"\n')
    (bare.folder / "second").hardlink_to(path)
    with pytest.raises(RefusedError, match="has 2 hard links") as refused:
        give(bare, "200", 7)
    assert (refused.value.code, path.read_text()) == ("hard_linked", 'IOPRIO="4"\n')


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "huge"])
def test_what_is_no_plain_file_is_refused_and_not_waited_for(bare: OpenVZHost, kind: str) -> None:
    path = bare.conf / "200.conf"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    else:
        path.touch()
        os.truncate(path, 2**40)
    with fails_as(RefusedError, "dirty_or_corrupt", "not a regular file"):
        give(bare, "200", 7)
    assert names(bare.conf) == ["200.conf"]


def test_a_file_with_zero_bytes_is_damaged_and_left_alone(bare: OpenVZHost) -> None:
    path = bare.add("200", b"\0" * 4096)
    with pytest.raises(RefusedError, match="damaged") as refused:
        give(bare, "200", 7)
    assert (refused.value.code, path.read_bytes()) == ("dirty_or_corrupt", b"\0" * 4096)


def replaced(path: Path) -> None:
    path.with_name("x").write_text("NEW\n")
    path.with_name("x").rename(path)


def made_a_link(path: Path) -> None:
    path.rename(path.with_name("x"))
    path.symlink_to("x")


def made_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES: dict[str, Callable[[Path], object]] = {
    "written in place": lambda path: path.write_text('IOPRIO="4"\nNEW="line"\n'),
    "emptied": lambda path: path.write_text(""),
    "replaced": replaced,
    "removed": Path.unlink,
    "made a link": made_a_link,
    "made a folder": made_a_folder,
}


@pytest.mark.parametrize("moment", ["dd of=", "cmp -s"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_somebody_changes_meanwhile_is_theirs(bare: OpenVZHost, change: str, moment: str) -> None:
    path = bare.add("200", 'IOPRIO="4"\n')
    left: list[object] = []

    def interfere() -> None:
        CHANGES[change](path)
        left.append(path.read_bytes() if path.is_file() else None)

    shell = WatchedShell(bare.shell, {moment: interfere})
    with fails_as(RefusedError, "stale_plan", "changed by another program"):
        give(bare, "200", 7, shell)
    assert [path.read_bytes() if path.is_file() else None] == left
    assert not [name for name in names(bare.conf) if ".sa-" in name]


def test_a_file_that_cannot_be_replaced_is_left_alone(bare: OpenVZHost) -> None:
    path = bare.add("200", CONTENT)
    with immutable(path), pytest.raises(RefusedError, match="is protected") as refused:
        give(bare, "200", 7)
    assert (refused.value.code, path.read_bytes(), names(bare.conf)) == ("immutable", CONTENT, ["200.conf"])


def fill(path: Path) -> None:
    """Takes all the room that a filesystem has."""
    with contextlib.suppress(OSError), path.open("wb", 0) as filler:
        while True:
            filler.write(b"x" * 4096)


def test_a_full_filesystem_leaves_the_old_file(bare: OpenVZHost, small_filesystem: Path) -> None:
    path = small_filesystem / "200.conf"
    content = b'IOPRIO="4"\n' + b"#" * 100_000 + b"\n"
    path.write_bytes(content)
    fill(small_filesystem / "filler")
    with pytest.raises(HostError, match=r"was not changed: .*No space left on device"):
        set_priority(bare.shell, "200", 7, folders=(str(small_filesystem),))
    assert path.read_bytes() == content
    assert not [name for name in names(small_filesystem) if ".sa-" in name]


@dataclass
class Breaking(WatchedShell):
    """A connection that breaks at a command: before it runs there, or after."""

    word: str = ""
    ran_there: bool = False

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float = 30.0) -> Done:
        if not any(self.word in one for one in argv):
            return super().run(argv, stdin=stdin, seconds=seconds)
        if self.ran_there:
            super().run(argv, stdin=stdin, seconds=seconds)
        raise HostError("The connection broke.")


@pytest.mark.parametrize("ran_there", [False, True])
@pytest.mark.parametrize("word", ["dd of=", "cmp -s", SYNC])
def test_a_connection_that_breaks_leaves_the_old_file_or_the_new_one(
    bare: OpenVZHost, word: str, ran_there: bool
) -> None:
    path = bare.add("200", CONTENT)
    shell = Breaking(bare.shell, word=word, ran_there=ran_there)
    if word == SYNC:
        assert give(bare, "200", 7, shell).as_asked
    else:
        with pytest.raises(HostError, match="connection broke" + (".*it is unknown" if word == "cmp -s" else "")):
            give(bare, "200", 7, shell)
    swapped = word == SYNC or (word == "cmp -s" and ran_there)
    assert path.read_bytes() == (CONTENT.replace(b'"4"', b'"7"') if swapped else CONTENT)
    assert names(bare.conf) == ["200.conf"]


@pytest.mark.parametrize("shell", ["bash", "busybox"])
def test_other_shells_and_tools_do_the_same(bare: OpenVZHost, shell: str) -> None:
    """Those of old hosts (bash), and the smallest there are."""
    tool = shutil.which(shell)
    assert tool, f"{shell} is not installed"
    tools = ("sh", "stat", "cat", "cp", "dd", "cmp", "mv", "sync", "rm", "chmod") if shell == "busybox" else ("sh",)
    for name in tools:
        (bare.bin / name).symlink_to(tool)
    path = bare.add("200", CONTENT)
    path.chmod(0o640)
    assert give(bare, "200", 7).as_asked
    assert path.read_bytes() == CONTENT.replace(b'"4"', b'"7"')
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    changed = WatchedShell(bare.shell, {"cmp -s": lambda: path.write_text("NEW\n")})
    with pytest.raises(RefusedError, match="changed by another program"):
        give(bare, "200", 6, changed)
    assert (path.read_text(), names(bare.conf)) == ("NEW\n", ["200.conf"])


def test_a_filesystem_on_which_no_mode_can_be_set_is_fine_where_all_files_have_the_same(bare: OpenVZHost) -> None:
    """As with Proxmox's cluster filesystem, on which a file's mode follows from its path."""
    new_program(bare.bin / "cp", '#!/bin/sh\ncat "$2" >"$3"\necho "Operation not permitted" >&2\nexit 1\n')
    path = bare.add("200", CONTENT)
    path.chmod(0o600)
    assert give(bare, "200", 7).as_asked
    path.chmod(0o640)
    with pytest.raises(HostError, match="mode and owner"):
        give(bare, "200", 6)
    assert (path.read_bytes(), names(bare.conf)) == (CONTENT.replace(b'"4"', b'"7"'), ["200.conf"])


def test_a_new_file_that_is_not_what_was_written_never_takes_the_place(bare: OpenVZHost) -> None:
    new_program(bare.bin / "dd", '#!/bin/sh\nhead -c 20 >"${1#of=}"\n')
    path = bare.add("200", CONTENT)
    with pytest.raises(HostError, match="does not contain what was written"):
        give(bare, "200", 7)
    assert (path.read_bytes(), names(bare.conf)) == (CONTENT, ["200.conf"])


def test_tools_that_are_missing_lose_nothing(bare: OpenVZHost) -> None:
    path = bare.add("200", CONTENT)
    for name in ("sh", "stat", "cat", "cp", "dd", "mv", "rm"):
        (bare.bin / name).symlink_to(shutil.which(name) or "")
    scripts = WatchedShell(LocalShell({"PATH": str(bare.bin)}))
    new_program(bare.bin / "cmp", "#!/bin/sh\nexit 127\n")
    with pytest.raises(HostError, match="cmp could not compare"):
        give(bare, "200", 7, scripts)
    assert (path.read_bytes(), names(bare.conf)) == (CONTENT, ["200.conf"])


def test_an_edit_that_did_not_hold_is_no_success(bare: OpenVZHost) -> None:
    path = bare.add("200", CONTENT)
    shell = WatchedShell(bare.shell, {SYNC: lambda: path.write_text('IOPRIO="1"\nA="x"\n')})
    with pytest.raises(NotSetError, match="4 before, 1 now; 7 was requested"):
        give(bare, "200", 7, shell)


def test_nothing_of_a_file_or_a_folder_s_name_is_run(bare: OpenVZHost, tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "$(touch x);`touch x` 'it'\"s\" -n *")
    (folder / "200.conf").write_bytes(CONTENT)
    done = set_priority(bare.shell, "200", 7, folders=(str(folder),))
    assert done.as_asked
    assert not list(tmp_path.rglob("x"))
    assert not Path("x").exists()


@pytest.mark.services
def test_over_ssh_the_same_happens(bare: OpenVZHost, tmp_path: Path) -> None:
    path = bare.add("200", CONTENT)
    with sshd(tmp_path / "sshd") as server:
        done = give(bare, "200", 7, SshShell(server.endpoint()))
    assert done.as_asked
    assert path.read_bytes() == CONTENT.replace(b'"4"', b'"7"')
