"""``kill -9`` of the agent while an overlay is merged into its base: a guest reads the same through the overlay at each
moment, and a recovery finishes what was begun.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from storage_admin.agent.protocol import b64
from tests.agent.harness import (
    Agent,
    ask,
    at_stage,
    kept,
    leftovers,
    link,
    make_image,
    qemu_img,
    qemu_io,
    recover_args,
    write,
)
from tests.agent.test_commit import args_for, same
from tests.agent.test_rebase import overlay
from tests.chance import night
from tests.faults.test_full_disk import disk, fill
from tests.faults.test_kills import run_to_death, wait_until_gone
from tests.faults.test_power_cuts import Power, cut_after, power
from tests.faults.trials import WHEN, Trials, steps
from tests.harness.filesystems import new_file

__all__ = ["disk", "power"]

pytestmark = [pytest.mark.faults, pytest.mark.qemu]
MIB = 1 << 20


class Pair:
    """A base with data, and an overlay that hides some of it."""

    def __init__(self, folder: Path, form: str = "qcow2", size: int = 8) -> None:
        self.pool = folder / "pool"
        self.pool.mkdir(parents=True)
        self.base, self.overlay, self.form = self.pool / f"base.{form}", self.pool / "vm.qcow2", form
        if form == "raw":
            self.base.write_bytes(os.urandom(size * MIB))
        else:
            make_image(self.base, f"{size}M")
        overlay(self.overlay, self.base, f"{size}M", form)
        for at in range(0, size, 2):
            write(self.overlay, 0x40 + at % 64, f"{at}M", "1M")
        self.before = kept(self.overlay, folder)

    def look(self) -> None:
        """What a guest reads, whatever has become of the base."""
        assert same(self.overlay, "qcow2", self.before)
        if self.form == "qcow2":
            # Clusters that a crash has left to nobody are all that may be wrong.
            done = subprocess.run(["qemu-img", "check", "-f", "qcow2", self.base], capture_output=True)
            assert done.returncode in {0, 3}, done.stdout

    @property
    def merged(self) -> bool:
        return same(self.base, self.form, self.before)

    def merge(self, job: str) -> dict[str, str]:
        """As the controller names it."""
        return {"job": job, "overlay_b64": b64(bytes(self.overlay)), "base_b64": b64(bytes(self.base))}

    def recover(self) -> list[tuple[str, bool]]:
        """How each job was settled, and whether something is said of it."""
        rows = ask("recover", recover_args(self.pool) | {"merges": [self.merge("j1")]}, job="r1")["recovered"]
        return [(row["outcome"], bool(row["detail"])) for row in rows]


@pytest.mark.parametrize("when", WHEN)
def test_whatever_step_it_dies_at_the_overlay_reads_as_before_and_the_base_in_the_end(
    tmp_path: Path, when: str
) -> None:
    merged = set()
    for at in steps(stride=1):
        pair = Pair(tmp_path / str(at))
        died = run_to_death("commit", args_for(pair.overlay, pair.base), "j1", at, when)
        pair.look()
        if died is None:
            break
        merged.add(pair.merged)
        found = pair.recover()
        print(f"step {at} {when}: {died}: {found}")
        # Where the journal had no whole line, nothing was begun.
        assert found in ([], [("reverted", False)], [("reverted", True)])
        pair.look()
        assert pair.merged or found != [("reverted", True)]
        assert leftovers(pair.pool) == set()
        assert "code" not in ask("commit", args_for(pair.overlay, pair.base), job="j2")
        assert pair.merged
    assert merged == {True, False}


@pytest.mark.parametrize("form", ["qcow2", "raw"])
def test_a_kill_at_any_moment_leaves_a_base_that_a_recovery_finishes(tmp_path: Path, form: str) -> None:
    trials = Trials("F1", f"merge into a {form} base", points=100 if night() else 3)
    for trial in trials:
        with trial:
            pair = Pair(trial.folder(tmp_path), form, size=64)
            with at_stage("merging", "commit", args_for(pair.overlay, pair.base, form=form)) as agent:
                time.sleep(trial.rng.random() * 0.12)
                tools = psutil.Process(agent.process.pid).children(recursive=True)
                os.kill(agent.process.pid, signal.SIGKILL)
                wait_until_gone(tools)
            pair.look()
            trial.note("whole" if pair.merged else "half")
            found = pair.recover()
            assert found in ([], [("reverted", True)]), found
            assert pair.merged
            pair.look()
            assert leftovers(pair.pool) == set()


def test_a_power_cut_leaves_a_base_that_a_recovery_finishes(power: Power) -> None:
    trials = Trials("F2", "power cuts while an overlay is merged", points=50 if night() else 3)
    for trial in trials:
        with trial:
            form = trial.rng.choice(["qcow2", "raw"])
            with power.on(256) as folder:
                pair = Pair(folder / "here", form, size=32)
                subprocess.run(["sync", "-f", pair.pool], check=True)
                asked = args_for(pair.overlay, pair.base, form=form)
                cut_after(trial.rng.uniform(0.1, 0.9), power, "commit", asked)
            with power.on_again():
                pair.look()
                trial.note("merged" if pair.merged else "not merged")
                begun = leftovers(pair.pool) != set()
                found = pair.recover()
                assert found in ([], [("reverted", False)], [("reverted", True)]), found
                assert pair.merged or not begun or not found[0][1]
                pair.look()
                assert leftovers(pair.pool) == set()


def test_a_cancel_or_a_dashboard_that_goes_away_stops_nothing_that_has_begun(tmp_path: Path) -> None:
    pair = Pair(tmp_path, size=64)
    with at_stage("merging", "commit", args_for(pair.overlay, pair.base)) as agent:
        agent.say("cancel")
        while (event := agent.next()) is not None and event["event"] != "error":
            pass
        assert event is not None
        assert event["code"] == "cancelled"
    assert pair.merged
    pair.look()
    assert leftovers(pair.pool) == set()


def test_a_recovery_waits_while_somebody_uses_the_images_and_says_what_is_gone(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    died = run_to_death("commit", args_for(pair.overlay, pair.base), "j1", 6, "after")
    assert died is not None
    assert leftovers(pair.pool) == {".sa-j1.journal"}
    with pair.overlay.open("r+b"):
        assert pair.recover() == [("busy", True)]
    moved = pair.pool / "elsewhere"
    pair.base.rename(moved)
    assert pair.recover() == [("failed", True)]
    assert leftovers(pair.pool) == {".sa-j1.journal"}
    moved.rename(pair.base)
    assert pair.recover() == [("reverted", True)]
    assert pair.merged


def test_without_the_controllers_word_nothing_is_written_again(tmp_path: Path) -> None:
    """Its guest may have been led to the base since, and have written there what the overlay does not hold."""
    pair = Pair(tmp_path)
    assert run_to_death("commit", args_for(pair.overlay, pair.base), "j1", 6, "after") is not None
    write(pair.base, 0x33, "0", "4M")
    before = pair.base.read_bytes()
    for told, outcome in (
        ({}, "busy"),
        ({"merges": [pair.merge("j2")]}, "busy"),
        ({"merges_over": ["j1"]}, "reverted"),
    ):
        rows = ask("recover", recover_args(pair.pool) | told, job="r1")["recovered"]
        assert [row["outcome"] for row in rows] == [outcome], told
    assert pair.base.read_bytes() == before
    assert leftovers(pair.pool) == set()


def test_a_journal_that_names_other_files_than_the_controller_leads_to_none_of_them(tmp_path: Path) -> None:
    """Whoever owns the folder may call a file of root's that he has filled a journal."""
    pair, other = Pair(tmp_path / "one"), Pair(tmp_path / "other")
    qemu_img("create", "-q", "-f", "qcow2", "-b", other.base, "-F", "qcow2", pair.overlay)
    write(pair.overlay, 0x66, "0", "8M")
    before = other.base.read_bytes()
    names = [(pair.overlay, "qcow2"), (other.base, "qcow2")]
    links = [{**link(path, form=form), "inode": path.stat().st_ino} for path, form in names]
    records = [
        {"step": "started", "job": "j1", "name_b64": b64(b"vm.qcow2"), "commit": True},
        {"step": "chain", "links": links},
    ]
    journal = pair.pool / ".sa-j1.journal"
    journal.touch(0o600)
    journal.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert pair.recover() == [("failed", True)]
    assert other.base.read_bytes() == before


def test_a_full_disk_ends_the_merge_and_the_next_recovery_finishes_it(tmp_path: Path, disk: Path) -> None:
    pair = Pair(disk / "here")
    noise = new_file(tmp_path / "noise", os.urandom(2 * MIB))
    qemu_io(pair.overlay, f"write -q -s {noise} 3M 2M")
    pair.before = kept(pair.overlay, tmp_path)
    ballast = fill(disk, 512 << 10)
    asked = args_for(pair.overlay, pair.base)
    assert ask("commit", asked)["code"] == "not_enough_space"
    assert leftovers(pair.pool) == set()  # refused before anything was begun
    ballast.unlink()
    with Agent() as agent:
        agent.request("commit", asked, "j1")
        agent.until("space")
        os.kill(agent.process.pid, signal.SIGSTOP)
        ballast = fill(disk, 64 << 10)
        os.kill(agent.process.pid, signal.SIGCONT)
        assert agent.answer()["code"] == "not_enough_space"
    pair.look()
    assert pair.recover() == [("failed", True)]
    ballast.unlink()
    pair.look()
    assert pair.recover() == [("reverted", True)]
    assert pair.merged
