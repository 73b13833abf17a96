"""Several who want vzctl's lock of a container at once: one has it, whatever somebody who died has left there."""

import os
import subprocess
from pathlib import Path

import pytest

from storage_admin.hosts.openvz.files import _SWAP
from tests.chance import night
from tests.harness.filesystems import new_file, new_program

ROUNDS, RACERS = 50 if night() else 5, 3
#: More than any kernel gives out.
NOBODY = 2**22 + 1
#: Stands for what is done under the lock: says that it is there, and stays for a moment.
CMP = """\
#!/bin/sh
ln "{place}/inside" "{place}/taken" 2>/dev/null || echo two >>"{place}/together"
sleep 0.01
rm -f "{place}/taken"
"""


@pytest.mark.parametrize("left", [None, f"{NOBODY}\n\n", ""])
def test_of_three_at_once_one_has_the_lock_each_time(tmp_path: Path, left: str | None) -> None:
    tools, locks, conf = tmp_path / "bin", tmp_path / "locks", tmp_path / "200.conf"
    for folder in (tools, locks):
        folder.mkdir()
    (tmp_path / "inside").touch()
    new_program(tools / "cmp", CMP.format(place=tmp_path))
    env = {"PATH": f"{tools}:{os.environ['PATH']}"}
    lock, ends = locks / "200.lck", []
    for round_ in range(ROUNDS):
        conf.write_text("old")
        if left is not None:
            lock.write_text(left)
        racers = []
        for number in range(RACERS):
            temp = new_file(tmp_path / f"temp-{number}", f"{round_} {number}")
            words = ["sh", "-c", _SWAP, "sh", str(conf), str(temp), str(lock)]
            racers.append(subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        codes = [racer.wait(60) for racer in racers]
        ends.append(codes)
        assert set(codes) <= {0, 4}, codes
        assert 0 in codes, "somebody gets it"
        assert conf.read_text() in {f"{round_} {number}" for number, code in enumerate(codes) if not code}
        assert list(locks.iterdir()) == []
    assert not (tmp_path / "together").exists(), ends
