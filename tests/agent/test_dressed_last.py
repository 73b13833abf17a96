"""The new file is root's alone until nothing speaks against the swap any more, and again where something does."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.host.open_gate import Doors
from storage_admin.agent.protocol import RefusedError
from storage_admin.agent.swap import moment
from storage_admin.agent.swap.swap import Looks, Replacement
from tests.agent.harness import held_open
from tests.agent.recording import GoIO, request
from tests.harness.filesystems import new_file, new_folder
from tests.working import refused_as

OWNER, MODE = 1234, 0o660
ROOTS, OWNERS = (0, 0o600), (OWNER, MODE)
#: The owner, whom the folders above do not stop; says whether he was let in.
OPENER = """
import os, sys
folder = os.open(sys.argv[1], os.O_RDONLY)
os.setgid(1234)
os.setuid(1234)
try:
    os.open(sys.argv[2], os.O_RDWR, dir_fd=folder)
    print("in")
except OSError as error:
    print(error.strerror)
"""


class Swap:
    """A swap in this process; what its last looks see, and who knocks at which door while one of them looks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool = new_folder(folder / "pool")
        self.pool.chmod(0o755)
        self.image = new_file(self.pool / "vm.raw", b"old" * 1000)
        os.chown(self.image, OWNER, OWNER)
        self.image.chmod(MODE)
        self.doors: list[Doors] = []
        self.looks: list[tuple[int, int]] = []
        self.openers: dict[str, subprocess.Popen[str]] = {}
        kept = self.doors

        class Kept(Doors):
            def __init__(self, *files: int) -> None:
                super().__init__(*files)
                kept.append(self)

        monkeypatch.setattr(moment, "Doors", Kept)

    def look(self) -> int:
        """Notes whose the new file is; the number of this look."""
        status = (self.pool / ".sa-job1.new").stat()
        self.looks.append((status.st_uid, stat.S_IMODE(status.st_mode)))
        return len(self.looks)

    def knock(self, name: str) -> None:
        """The owner opens a file, and waits at its door by now."""
        command = [sys.executable, "-c", OPENER, str(self.pool), name]
        self.openers[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        doors = self.doors[-1]
        door = doors._going if name == self.image.name else doors._coming
        assert door is not None
        assert door.knocked(60)

    def said(self, name: str) -> str:
        return self.openers[name].communicate(timeout=60)[0].strip()

    def run(self, last: Any) -> None:
        with (
            held_open(self.pool) as folder,
            held_open(self.image) as original,
            Replacement(folder, b"vm.raw", original, request("reclaim"), 24) as new,
        ):
            os.write(new.new, b"new" * 500)
            new.swap(GoIO(), Looks(lambda: None, last))


@pytest.fixture
def swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swap]:
    one = Swap(tmp_path, monkeypatch)
    yield one
    for opener in one.openers.values():
        opener.kill()
        opener.wait()


def is_as_it_was(swap: Swap) -> bool:
    return [path.name for path in swap.pool.iterdir()] == ["vm.raw"] and swap.image.read_bytes() == b"old" * 1000


def test_what_speaks_against_the_swap_is_seen_before_the_owner_may_open_the_new_file(swap: Swap) -> None:
    def look() -> None:
        swap.look()
        raise RefusedError("stale_plan", "it was written to")

    assert (refused_as(swap.run, look), swap.looks) == ("stale_plan", [ROOTS])
    assert is_as_it_was(swap)


def test_nothing_is_swapped_before_it_was_looked_at_with_the_owners_rights_too(swap: Swap) -> None:
    swap.run(swap.look)
    assert swap.looks == [ROOTS, OWNERS]
    assert swap.image.read_bytes() == b"new" * 500
    status = swap.image.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == OWNERS


def test_where_that_is_refused_who_waits_for_the_new_file_is_turned_away(swap: Swap) -> None:
    def look() -> None:
        if swap.look() == 2:
            swap.knock(".sa-job1.new")
            raise RefusedError("image_in_use", "somebody uses it")

    assert (refused_as(swap.run, look), swap.looks) == ("image_in_use", [ROOTS, OWNERS])
    assert swap.said(".sa-job1.new") == "Operation not permitted"
    assert is_as_it_was(swap)


def test_where_it_is_tried_again_the_new_file_is_roots_alone_meanwhile(swap: Swap) -> None:
    def look() -> None:
        number = swap.look()
        if number == 2:
            swap.knock("vm.raw")
            swap.knock(".sa-job1.new")
        if number == 3:
            assert swap.said("vm.raw") == "in"
            assert swap.said(".sa-job1.new") == "Operation not permitted"

    swap.run(look)
    assert swap.looks == [ROOTS, OWNERS, ROOTS, OWNERS]
    assert swap.image.read_bytes() == b"new" * 500


def test_where_somebody_waits_for_the_image_the_new_file_stays_roots(swap: Swap) -> None:
    def look() -> None:
        number = swap.look()
        if number == 1:
            swap.knock("vm.raw")
        if number == 2:
            assert swap.said("vm.raw") == "in"

    swap.run(look)
    assert swap.looks == [ROOTS, ROOTS, OWNERS]
