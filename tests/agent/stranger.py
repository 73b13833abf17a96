# ruff: noqa: PTH115, PTH118, PTH119, PTH120, PTH208
# Paths are bytes here: names need not be UTF-8.
"""A pool in which strangers have put files, a folder beside it that is not theirs, and what must stay true of both."""

import hashlib
import os
import socket
import stat
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage_admin.agent import protocol
from tests.agent.every_verb import ALL, CLEAN, PLANTED, POOLS, UNDOES, Answer, Crew, plant_undo, pool_request, request
from tests.agent.harness import held_open
from tests.agent.hostile import Hostile, qcow2
from tests.agent.tracing import TOOLS, Trace
from tests.harness.filesystems import new_folder

#: What stands in every file outside of the pool.
CANARY = b"CANARY-6f1d0c2b"
#: What may stand beside an image where that succeeds.
MAKES = {
    "convert": {b"converted.raw", b"converted.qcow2"},
    "create": {b"converted.qcow2"},
    "export": {b"converted.ova"},
}
#: What stands in a folder of the pool and is no file: opening it does something already.
NO_FILES = frozenset({b"fifo", b"device", b"socket"})
#: What changes the image where it succeeds; all else leaves its bytes alone, whatever comes of it.
CHANGES = frozenset(
    {
        *("reclaim compress", "reclaim copy", "flatten rebase", "flatten convert", "convert and replace"),
        *("check leaks", "check all", "grow"),
    }
)


@dataclass
class Scene:
    """Folders ``pool`` and ``outside`` beneath one folder."""

    folder: Path
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    asked: int = 0

    def __post_init__(self) -> None:
        self.pool, self.outside, self.scratch = (self.folder / name for name in ("pool", "outside", "scratch"))
        for place in (self.pool, self.outside, self.scratch):
            place.mkdir(parents=True)
        (self.outside / "shadow").write_bytes((b"root:$6$" + CANARY + b"\n").ljust(64, b"x") * 2048)
        secret = bytearray(qcow2())
        secret[5 * 4096 : 6 * 4096] = CANARY.ljust(64, b"y") * 64
        (self.outside / "secret.qcow2").write_bytes(secret)
        self._outside = fingerprints(self.outside)

    def place(self, number: int, image: Hostile) -> Path:
        """A folder of the pool with the image, the files beside it, and links to what is outside."""
        folder = new_folder(self.pool / f"{number:03d}")
        (folder / "link-to-shadow").symlink_to(self.outside / "shadow")
        (folder / "link-to-secret.qcow2").symlink_to("../../outside/secret.qcow2")
        (folder / "linked-folder").symlink_to(self.outside)
        (folder / "a-folder").mkdir()
        os.mkfifo(folder / "fifo")
        os.mknod(folder / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
        with socket.socket(socket.AF_UNIX) as one, held_open(folder) as here:
            one.bind(f"/proc/self/fd/{here}/socket")
        for name, content in image.beside.items():
            (folder / name).write_bytes(content)
        path = folder / image.name
        path.write_bytes(image.content)
        return path

    def each(self, crew: Crew, path: bytes, form: str, *, hows: Sequence[str] = ALL) -> dict[str, Answer]:
        """Ask verbs for one image, each time as it was in the beginning, and check what each leaves.

        Returns:
            The answers, by what was asked.
        """
        return {how: self.one(crew, how, path, form) for how in hows}

    def whole_pool(self, crew: Crew, images: Sequence[tuple[bytes, str]]) -> dict[str, Answer]:
        """Ask the verbs that look at a whole pool or at many images; nothing in it changes by them."""
        before = self._pool()
        answers = {verb: crew.ask(verb, pool_request(verb, self.pool, images)) for verb in sorted(POOLS)}
        for verb, answer in answers.items():
            assert answer.code == "", f"{verb}: {answer.detail}"
            assert CANARY.decode() not in answer.text(), verb
        assert self._pool() == before
        return answers

    def _pool(self) -> dict[str, dict[bytes, str]]:
        return {place: fingerprints(Path(place)) for place, _, _ in os.walk(self.pool)}

    def one(self, crew: Crew, how: str, path: bytes, form: str) -> Answer:
        """Ask one verb for an image, and check what it leaves; afterwards the image is as it was."""
        image, folder = Path(os.fsdecode(path)), Path(os.fsdecode(os.path.dirname(path)))
        before = fingerprints(folder)
        if how in UNDOES:
            plant_undo(path, image.read_bytes())
        verb, args = request(how, path, self.pool, form)
        written = _bases(args, folder) if how == "commit" else {image} if how in CHANGES else set()
        kept = {one: one.read_bytes() for one in {image, *written}}
        answer = crew.ask(verb, args)
        self.asked += 1
        counts = self.outcomes.setdefault(how, {})
        counts[answer.code or "done"] = counts.get(answer.code or "done", 0) + 1
        self._judge(how, answer, image, before, {os.fsencode(one.name) for one in written})
        for left in [*folder.glob(f".sa-{PLANTED}.*"), *folder.glob(f".sa-{crew.last_job}.*")]:
            left.unlink()
        for made in folder.glob("converted.*"):
            made.unlink()
        for one, content in kept.items():
            one.write_bytes(content)
        return answer

    def _judge(self, how: str, answer: Answer, image: Path, before: dict[bytes, str], written: set[bytes]) -> None:
        assert answer.code in CLEAN | {""}, f"{how} of {image}: {answer.detail}"
        assert CANARY.decode() not in answer.text(), how
        own = {f".sa-{job}.{kind}".encode() for job in (PLANTED, answer_job(answer)) for kind in ("journal", "orig")}
        after = fingerprints(image.parent)
        new = after.keys() - before.keys()
        changed = {name for name in before if before[name] != after.get(name)}
        if answer.code:
            assert changed == set(), f"{how} said {answer.code} and changed {changed}"
            assert not {name for name in new if PLANTED.encode() not in name}, (
                f"{how} said {answer.code} and left {new}"
            )
            return
        assert new <= own | MAKES.get(how.partition(" ")[0], set()), f"{how} left {new}"
        assert changed <= written, f"{how} changed {changed}"
        for name in new:
            assert not holds_canary(image.parent / os.fsdecode(name)), f"{how} put the canary into {name!r}"
        assert not image.exists() or not holds_canary(image), how

    def check_outside(self, trace: Path | None = None, *, appliance: bool = False) -> None:
        """Nothing outside of the pool was touched or, by what strace wrote, opened; nobody was called, no shell ran;
        but for what belongs to an ``appliance`` that was to start.
        """
        assert fingerprints(self.outside) == self._outside
        if trace is None:
            return
        seen = Trace.read(trace, appliance=appliance)
        outside = seen.outside(self.pool)
        no_files = {path for path in seen.opened if os.path.basename(path) in NO_FILES}
        assert not outside, outside
        assert not no_files, no_files
        assert not seen.connected, seen.connected
        assert seen.started <= TOOLS, seen.started

    def report(self, what: str, began: float) -> None:
        """Print how many requests there were, how long they took, and how they ended."""
        print(f"{what}: {self.asked} requests in {time.monotonic() - began:.0f} s")
        for how, counts in self.outcomes.items():
            print(f"  {how}: {counts}")


def answer_job(answer: Answer) -> str:
    """The job whose undo copy an answer names; empty where it names none."""
    undo = answer.result.get("undo") if isinstance(answer.result, dict) else None
    return str(undo["path"]).split(".")[1].removeprefix("sa-") if undo else "-"


def fingerprints(folder: Path) -> dict[bytes, str]:
    """What each name of a folder stands for: of a file its bytes, mode and owner, of all else what it is."""
    found = {}
    for name in os.listdir(os.fsencode(folder)):
        path = os.path.join(os.fsencode(folder), name)
        status = os.lstat(path)
        content = b""
        if stat.S_ISREG(status.st_mode):
            content = b"".join(b"%d" % offset + part for offset, part in data_of(path))
        elif stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        about = (status.st_mode, status.st_uid, status.st_rdev, status.st_size if content else 0)
        found[name] = f"{about} {hashlib.blake2b(content).hexdigest()}"
    return found


def data_of(path: bytes) -> list[tuple[int, bytes]]:
    """The blocks of a file that are not zeros, by their offsets: a few of them may make it a terabyte long."""
    found, at = [], 0
    with held_open(path, os.O_RDONLY | os.O_NOFOLLOW) as fd:
        size = os.fstat(fd).st_size
        while at < size:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:
                break  # nothing but a hole up to the end
            at = os.lseek(fd, start, os.SEEK_HOLE)
            blocks = [(offset, os.pread(fd, min(4096, at - offset), offset)) for offset in range(start, at, 4096)]
            found += [(offset, block) for offset, block in blocks if block.strip(b"\0")]
    return found


def _bases(args: dict[str, Any], folder: Path) -> set[Path]:
    """The files of a folder that a request says an image stands on."""
    named = {folder / os.fsdecode(os.path.basename(protocol.unb64(one["path_b64"]))) for one in args["chain"]}
    return {one for one in named if one.is_file() and not one.is_symlink()}


def holds_canary(path: Path) -> bool:
    """Whether a file, or what is packed in an appliance, has bytes of what is outside of the pool."""
    if path.suffix == ".ova":
        with tempfile.TemporaryDirectory() as name, tarfile.open(path) as packed:
            packed.extractall(name)
            disks = list(Path(name).glob("*.vmdk"))
            assert disks
            for disk in disks:  # compressed
                subprocess.run(["qemu-img", "convert", "-f", "vmdk", disk, disk.with_suffix(".raw")], check=True)
            return any(map(holds_canary, Path(name).iterdir()))
    return any(CANARY in part for _, part in data_of(bytes(path)))


assert protocol.BUG not in CLEAN
