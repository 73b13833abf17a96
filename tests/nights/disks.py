"""Disk images as guests see them: made, written to by day, and compared with what their guests wrote."""

import hashlib
import os
import random
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20
_TEXT = b"The quick brown fox jumps over the lazy dog, and nobody has ever asked it why it does so. "


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stderr or done.stdout}"


def allocated_bytes(folder: Path) -> int:
    """What the files of a folder occupy, each inode once."""
    os.sync()  # before that, what is not on disk yet is counted by an estimate
    files = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                about = entry.stat(follow_symlinks=False)
                files[about.st_ino] = about.st_blocks * 512
    return sum(files.values())


@dataclass
class Disk:
    """A guest's disk: the leaf of a chain, or an image of its own."""

    path: Path
    form: str
    size_mib: int
    base: "Disk | None" = None
    overlays: int = 0
    digest: str = ""

    def content(self, scratch: Path) -> str:
        """A digest of all that its guest can read."""
        out = scratch / "content.raw"
        _run("qemu-img", "convert", "-f", self.form, "-O", "raw", self.path, out)
        with out.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        out.unlink()
        return digest

    def allocated(self) -> int:
        os.sync()
        return self.path.stat().st_blocks * 512


@dataclass
class Disks:
    """All disks of one pool, and what was done to them by others than the dashboard."""

    pool: Path
    scratch: Path
    rng: random.Random
    every: list[Disk] = field(default_factory=list)
    #: By how much guests and admins changed what the files occupy, in bytes.
    by_others: int = 0

    def make(self, count: int, sizes_mib: tuple[int, int]) -> None:
        """New disks: most are qcow2 images of their own, some raw, some overlays on one made before."""
        for _ in range(count):
            self._one(self.rng.randint(*sizes_mib))
        for disk in self.every:
            disk.digest = disk.content(self.scratch)

    def _one(self, size_mib: int) -> None:
        bases = [disk for disk in self.every if disk.form == "qcow2" and _depth(disk) < 4]
        base = self.rng.choice(bases) if bases and self.rng.random() < 0.25 else None
        form = "raw" if base is None and self.rng.random() < 0.15 else "qcow2"
        size_mib = base.size_mib if base else size_mib
        path = self.pool / f"vm-{len(self.every) + 100}-disk-0.{form}"
        based = ("-b", base.path.name, "-F", base.form) if base else ()
        _run("qemu-img", "create", "-q", "-f", form, *based, path, f"{size_mib}M")
        disk = Disk(path, form, size_mib, base)
        if base is not None:
            base.overlays += 1
        self.every.append(disk)
        before = disk.allocated()
        self._fill(disk)
        assert disk.allocated() > before

    def _fill(self, disk: Disk) -> None:
        """What an installation leaves: noise, text, and blocks that were deleted, which are zeros."""
        noise, text = self.scratch / "noise", self.scratch / "text"
        noise.write_bytes(self.rng.randbytes(MIB))
        text.write_bytes((_TEXT * (MIB // len(_TEXT) + 1))[:MIB])
        top = disk.size_mib - 1
        places = self.rng.sample(range(top), k=min(top, max(3, top * 2 // 3)))
        commands = []
        for number, place in enumerate(places):
            source = (f"-s {noise}", f"-s {text}", "-P 0")[number % 3]
            commands += ["-c", f"write {source} {place}M 1M"]
        _run("qemu-io", "-f", disk.form, *commands, disk.path)

    def day(self, share: float) -> None:
        """What guests do by day: some write new data, some delete, which leaves zeros behind."""
        leaves = [disk for disk in self.every if not disk.overlays]
        for disk in self.rng.sample(leaves, k=max(1, int(len(leaves) * share))):
            self.write(disk)

    def write(self, disk: Disk) -> None:
        """A guest writes, and shuts down."""
        before = disk.allocated()
        self._fill(disk)
        self.by_others += disk.allocated() - before
        disk.digest = disk.content(self.scratch)

    def added(self) -> None:
        """An admin makes one more guest."""
        before = allocated_bytes(self.pool)
        self._one(self.rng.randint(4, 8))
        self.by_others += allocated_bytes(self.pool) - before
        self.every[-1].digest = self.every[-1].content(self.scratch)

    def verify(self) -> None:
        """Every guest reads what it wrote last."""
        for disk in self.every:
            assert disk.content(self.scratch) == disk.digest, f"{disk.path.name} reads differently to its guest"
            if disk.form != "raw":
                _run("qemu-img", "check", "-q", "-f", disk.form, disk.path)


def _depth(disk: Disk) -> int:
    return 1 + (_depth(disk.base) if disk.base else 0)


class Running:
    """A guest that runs: qemu has its disk open and locked, until it is told to end."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.process = subprocess.Popen(
            ["qemu-io", "-f", disk.form, str(disk.path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    @property
    def refused(self) -> bool:
        """Whether its start was refused, as in the instant in which a job swaps the image."""
        return self.process.poll() is not None

    def end(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(30)
