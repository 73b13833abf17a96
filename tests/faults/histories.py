"""What happens to an image while the undo copy of its rewrite waits: what guests do, and what loses its data.

Guests' writes are those of qemu-io, where its filesystem has data. Time is told in seconds before now.
"""

import os
import random
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.agent.harness import Writer, age, ask, heard, qemu_img, qemu_io, reads_as, reclaim_args, undo_args
from tests.harness.filesystems import new_file, new_folder

SIZE = 24 << 20
BLOCK = 4096
#: Times at which a guest is known to have run: around now, or long before.
NOW, BEFORE = [[3600.0, 0.0]], [[40_000.0, 3600.0]]
DAY = 25 * 3600.0


def disk(path: Path, rng: random.Random) -> Path:
    """A raw disk with an ext4 filesystem on which some files are."""
    folder = new_folder(path.with_suffix(".files"))
    for number in range(12):
        (folder / f"{number}").write_bytes(rng.randbytes(rng.randrange(200_000, 900_000)))
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", folder, path, f"{SIZE >> 10}k"], check=True)
    return path


@dataclass
class History:
    """One image that was reclaimed, and what came then.

    Args:
        folder: an empty one, for it alone.
        rng: what draws.
        form: the image's format.
    """

    folder: Path
    rng: random.Random
    form: str
    #: What the guest would read, as a raw file.
    content: Path = field(init=False)
    image: Path = field(init=False)
    #: What the controller knows.
    used: list[list[float]] | None = field(default_factory=lambda: list(NOW))
    seen: list[list[int]] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    running: ExitStack = field(default_factory=ExitStack)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.content = disk(self.folder / "content", self.rng)
        (self.folder / "pool").mkdir()
        self.image = self.folder / "pool" / f"vm.{self.form}"
        qemu_img("convert", "-f", "raw", "-O", self.form, self.content, self.image)
        used = set(self.blocks)
        free = [at for at in range(0, SIZE, 1 << 20) if used.isdisjoint(range(at, at + (1 << 20), BLOCK))]
        qemu_io(self.image, *(f"write -q -P 0 {at} 1M" for at in free), form=self.form)
        self.rewrite("j1")

    def rewrite(self, job: str) -> None:
        """A job of ours rewrites the image, and keeps the one before for a day."""
        method = self.rng.choice(["compress", "copy"]) if self.form == "qcow2" else "copy"
        result = ask("reclaim", reclaim_args(self.image, format=self.form, method=method), job=job)
        if result.get("swapped"):
            self.jobs.append(job)
        else:
            assert self.jobs, result  # the second time there may be nothing to win

    @property
    def blocks(self) -> list[int]:
        """Where the guest's filesystem has data."""
        content = self.content.read_bytes()
        return [at for at in range(0, SIZE, BLOCK) if content[at : at + BLOCK].strip(b"\0")]

    def write(self, share: float) -> None:
        """The guest writes to a share of what it has, and to some of what it had not."""
        has = self.blocks
        places = self.rng.sample(has, max(1, int(share * len(has))))
        places += [self.rng.randrange(SIZE // BLOCK) * BLOCK for _ in range(len(places) // 10)]
        commands = []
        with self.content.open("r+b") as content:
            for at in sorted(set(places)):
                byte = self.rng.randrange(1, 256)
                commands.append(f"write -q -P {byte} {at} {BLOCK}")
                os.pwrite(content.fileno(), bytes([byte]) * BLOCK, at)
        qemu_io(self.image, *commands, form=self.form)

    def fill(self, raw: Path) -> None:
        """The guest writes all of its disk anew."""
        qemu_img("convert", "-n", "-f", "raw", "-O", self.form, raw, self.image)

    def another(self) -> Path:
        """A disk of somebody else, of the same size and format."""
        raw = disk(self.folder / "other", random.Random(self.rng.random()))
        qemu_img("convert", "-f", "raw", "-O", self.form, raw, self.folder / "another")
        return self.folder / "another"

    def expire(self, job: str) -> dict[str, Any]:
        """The undo window of a job closes: what the agent answers who asks it to remove the copy."""
        journal = self.image.parent / f".sa-{job}.journal"
        age(journal, boottime=DAY, wall=DAY)
        asked = {"format": self.form, "by_itself": True, "used": self.used, "seen": self.seen}
        answer, events = heard("discard_undo", undo_args(self.image, job, **asked), "d" + job)
        self.said += [str(event["text"]) for event in events if event["event"] == "log"]
        self.running.close()
        return answer

    def kept(self, job: str) -> bool:
        """Whether the undo copy is there."""
        return (self.image.parent / f".sa-{job}.orig").exists()

    def intact(self) -> bool:
        """Whether the image is what its guest made of it, to the byte."""
        return reads_as(self.content, self.image, "raw", self.form)


def untouched(_: History) -> None:
    """Nobody was there."""


def light(one: History) -> None:
    one.write(one.rng.uniform(0.001, 0.05))


def daily(one: History) -> None:
    one.write(one.rng.uniform(0.05, 0.15))


def heavy(one: History) -> None:
    one.write(one.rng.uniform(0.2, 0.35))


def runs_now(one: History) -> None:
    one.write(0.02)
    one.running.enter_context(Writer(one.image, one.form))


def several_times(one: History) -> None:
    for _ in range(3):
        one.write(0.03)
        status = one.image.stat()
        one.seen.append([status.st_ino, status.st_mtime_ns, status.st_ctime_ns])


def owner_changed(one: History) -> None:
    """Its guest's manager gives it to the guest's user, and back."""
    os.chown(one.image, 65534, 65534)
    one.write(0.02)
    os.chown(one.image, 0, 0)


def rewritten_again(one: History) -> None:
    one.write(0.2)
    qemu_io(one.image, "write -z 20M 1M", form=one.form)
    with one.content.open("r+b") as content:
        os.pwrite(content.fileno(), bytes(1 << 20), 20 << 20)
    one.rewrite("j2")
    one.write(0.02)


#: What guests do, the more frequent more often.
NORMAL: list[Callable[[History], None]] = [
    light, daily, untouched, runs_now, several_times, heavy, owner_changed, rewritten_again, light, daily,
]  # fmt: skip


def moved_into_place(one: History) -> None:
    one.another().replace(one.image)


def backup_moved_into_place(one: History) -> None:
    """Byte for byte the same, and yet not what the job made."""
    new_file(one.folder / "backup", one.image.read_bytes()).replace(one.image)


def created_over(one: History) -> None:
    one.used = list(BEFORE)
    qemu_img("create", "-q", "-f", one.form, one.image, str(SIZE))


def created_over_while_a_guest_runs(one: History) -> None:
    qemu_img("create", "-q", "-f", one.form, one.image, str(SIZE))


def installed_anew(one: History) -> None:
    one.fill(disk(one.folder / "fresh", one.rng))


def written_in_full(one: History) -> None:
    one.fill(new_file(one.folder / "noise", one.rng.randbytes(SIZE)))


def emptied(one: History) -> None:
    qemu_io(one.image, f"write -z -u 0 {SIZE}" if one.form == "qcow2" else f"write -z 0 {SIZE}", form=one.form)


def backup_copied_over(one: History) -> None:
    backup = one.image.read_bytes()
    one.write(0.3)
    one.used = list(BEFORE)
    one.image.write_bytes(backup)


def another_copied_over(one: History) -> None:
    one.image.write_bytes(one.another().read_bytes())


def written_while_no_guest_ran(one: History) -> None:
    one.used = list(BEFORE)
    one.write(0.01)


def written_and_its_time_put_back(one: History) -> None:
    one.used = list(BEFORE)
    before = one.image.stat()
    one.write(0.01)
    os.utime(one.image, ns=(before.st_atime_ns, before.st_mtime_ns))


def nobody_knows(one: History) -> None:
    one.used = None
    one.write(0.01)


def seen_changed_before_its_guest_ran(one: History) -> None:
    status = one.image.stat()
    one.seen.append([status.st_ino, status.st_mtime_ns - 20_000 * 10**9, status.st_ctime_ns])
    one.write(0.02)


def of_an_earlier_version(one: History) -> None:
    journal = one.image.parent / ".sa-j1.journal"
    lines = [line for line in journal.read_bytes().splitlines(keepends=True) if b'"made"' not in line]
    journal.write_bytes(b"".join(lines))


def resized(one: History) -> None:
    qemu_img("resize", "-q", "-f", one.form, one.image, "+8M")


def damaged(one: History) -> None:
    os.truncate(one.image, one.image.stat().st_size // 3)


#: What must never cost the copy.
ABNORMAL: list[Callable[[History], None]] = [
    moved_into_place, backup_moved_into_place, created_over, created_over_while_a_guest_runs, installed_anew,
    written_in_full, emptied, backup_copied_over, another_copied_over, written_while_no_guest_ran,
    written_and_its_time_put_back, nobody_knows, seen_changed_before_its_guest_ran, of_an_earlier_version, resized,
    damaged,
]  # fmt: skip
