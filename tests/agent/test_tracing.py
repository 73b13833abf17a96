"""A trace tells of every program and file, also of those whose calls strace has cut in two."""

from pathlib import Path

from tests.agent.tracing import Trace

LINES = """\
7 openat(AT_FDCWD, "/proc/self/clear_refs", O_WRONLY) = 3</proc/7/clear_refs>
7 execve("/usr/bin/one", ["one"], 0x1 /* 9 vars */) = 0
8 execve("/usr/bin/two", ["two"], 0x1 /* 9 vars */ <unfinished ...>
9 openat(AT_FDCWD, "/srv/a", O_RDONLY <unfinished ...>
8 <... execve resumed>) = 0
9 <... openat resumed>) = 4</srv/b>
9 execve("/usr/bin/none", ["none"], 0x1 /* 9 vars */ <unfinished ...>
9 <... execve resumed>) = -1 ENOENT (No such file or directory)
8 openat(AT_FDCWD, "/srv/killed", O_RDONLY <unfinished ...>
"""


def test_calls_that_are_cut_in_two_count_as_whole(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(LINES)
    seen = Trace.read(tmp_path / "trace")
    assert seen.started == {"one", "two"}
    assert {b"/srv/a", b"/srv/b", b"/srv/killed"} <= seen.opened
