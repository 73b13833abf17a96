"""The real agent as a subprocess, and real images for it to work on."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from storage_admin.agent import protocol
from storage_admin.agent.protocol import RefusedError, b64
from storage_admin.agent.swap.journal import Stamp
from tests.harness.processes import wait_until

ROOT = Path(__file__).resolve().parents[2]
AGENT = [sys.executable, "-m", "storage_admin.agent"]
#: For tools that are scripts.
UNCONFINED = [sys.executable, "-m", "tests.agent.other_confinement", "open"]
P = TypeVar("P", Path, bytes)

NO_RESERVE = {"percent": 0, "bytes": 0}
#: How often an agent is told that its controller lives: five minutes long. What takes longer hangs.
PINGS = 60


class Agent:
    """An agent at work on one request; a controller that says go, unless told otherwise."""

    def __init__(self, command: Sequence[str] = AGENT, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        )
        self.events: list[dict[str, Any]] = []
        self._over = threading.Event()

    @staticmethod
    def python() -> list[str]:
        """The interpreter that the agent runs on."""
        return [sys.executable]

    def say(self, kind: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(protocol.encode(kind, **fields))
            self.process.stdin.flush()
        except BrokenPipeError:
            return  # it has ended; its events tell why

    def request(self, verb: str, args: dict[str, Any], job: str = "j1", generation: int = 1) -> None:
        self.generation = generation
        self.say(protocol.REQUEST, verb=verb, job=job, generation=generation, args=args)
        threading.Thread(target=self._ping, daemon=True).start()

    def _ping(self) -> None:
        """As every controller does: on a machine that is busy a job may take longer than the agent bears silence."""
        for _ in range(PINGS):
            if self._over.wait(protocol.PING_INTERVAL):
                return
            with contextlib.suppress(ValueError, OSError):  # the line is closed
                self.say(protocol.PING)

    def next(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return None
        self.events.append(protocol.decode(line))
        return self.events[-1]

    def until(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Reads on to an event; fails where the agent ends before it."""
        while (event := self.next()) is not None:
            if event["event"] == kind and all(event.get(name) == value for name, value in fields.items()):
                return event
        raise AssertionError(f"no {kind} {fields}; got {self.events[-5:]}; {self.stderr()}")

    def answer(self, go: bool = True) -> dict[str, Any]:
        """Reads to the end: the ``result``'s data, or the ``error`` event."""
        while (event := self.next()) is not None:
            if event["event"] == protocol.READY and go:
                self.say(protocol.GO, generation=self.generation)
            if event["event"] == protocol.RESULT:
                return dict(event["data"])
            if event["event"] == protocol.ERROR:
                return event
        raise AssertionError(f"no answer; got {self.events[-5:]}; {self.stderr()}")

    def go(self) -> dict[str, Any]:
        """Says go to what is ready, and reads to the end."""
        self.say(protocol.GO, generation=self.generation)
        return self.answer()

    def stderr(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode("utf-8", "replace")

    def close(self) -> int:
        self._over.set()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue
        return self.process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ask(verb: str, args: dict[str, Any], job: str = "j1", generation: int = 1, **how: Any) -> dict[str, Any]:
    """One request to an agent of its own, answered with go: the result's data, or the error event."""
    with Agent(**how) as agent:
        agent.request(verb, args, job, generation)
        return agent.answer()


def heard(verb: str, args: dict[str, Any], job: str = "j1", **how: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The same, and all that the agent has told."""
    with Agent(**how) as agent:
        agent.request(verb, args, job)
        return agent.answer(), agent.events


@contextlib.contextmanager
def at_ready(verb: str, args: dict[str, Any], job: str = "j1", generation: int = 1) -> Iterator[Agent]:
    """An agent that has done what it could before it is told to go."""
    with Agent() as agent:
        agent.request(verb, args, job, generation)
        agent.until(protocol.READY)
        yield agent


@contextlib.contextmanager
def at_stage(
    stage: str, verb: str, args: dict[str, Any], command: Sequence[str] = AGENT, job: str = "j1"
) -> Iterator[Agent]:
    """An agent in the midst of its work."""
    with Agent(command) as agent:
        agent.request(verb, args, job)
        agent.until(protocol.PROGRESS, stage=stage)
        yield agent


@contextlib.contextmanager
def held_open(path: str | bytes | Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """A descriptor of a file or a folder, closed in the end."""
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def qemu_img(*argv: str | bytes | Path, cwd: Path | None = None) -> bytes:
    """Runs the real qemu-img."""
    for _ in range(10):
        done = subprocess.run(["qemu-img", *argv], capture_output=True, cwd=cwd)
        # For LUKS it times its key derivation first, and gives up where the machine's clock did not move meanwhile.
        if b"accurate CPU usage" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout


def image_info(path: Path | bytes, form: str = "qcow2") -> dict[str, Any]:
    """What qemu-img says about an image, in use or not."""
    answer: dict[str, Any] = json.loads(qemu_img("info", "-U", "-f", form, "--output=json", path))
    return answer


def same_content(first: Path | bytes, second: Path | bytes, form: str = "qcow2") -> bool:
    """Whether qemu-img finds two images equal."""
    done = subprocess.run(["qemu-img", "compare", "-f", form, "-F", form, first, second], capture_output=True)
    assert done.returncode in {0, 1}, done.stderr
    return done.returncode == 0


def qemu_io(path: Path | bytes, *commands: str, form: str = "qcow2") -> None:
    """Does to an image what a guest would."""
    words = [word for command in commands for word in ("-c", command)]
    subprocess.run(["qemu-io", "-f", form, *words, path], check=True, capture_output=True)


def write(path: Path | bytes, pattern: int, offset: str, length: str, form: str = "qcow2") -> None:
    """Writes a byte over and over into an image, as a guest would."""
    qemu_io(path, f"write -P {pattern} {offset} {length}", form=form)


def reads_as(first: Path | bytes, second: Path | bytes, form: str = "qcow2", second_form: str = "qcow2") -> bool:
    """Whether a guest reads the same from two images, and zeros where one is longer; not where one cannot be read."""
    compare = ["qemu-img", "compare", "-f", form, "-F", second_form, first, second]
    return subprocess.run(compare, capture_output=True).returncode == 0


def kept(path: Path, folder: Path) -> Path:
    """What a guest reads now, in a file of its own."""
    qemu_img("convert", "-O", "qcow2", path, folder / "before.qcow2")
    return folder / "before.qcow2"


def number_at(path: Path, layout: str, offset: int) -> int:
    """A number that stands in a file."""
    with path.open("rb") as file:
        return int(struct.unpack(layout, os.pread(file.fileno(), struct.calcsize(layout), offset))[0])


def overwrite(path: Path, offset: int, content: bytes) -> None:
    """Writes bytes into a file, from there on."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def written_with_its_times_set_back(path: Path) -> None:
    """Writes a byte into a file, as who does not want that to be seen."""
    before = path.stat()
    overwrite(path, before.st_size // 2, b"!")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def make_image(path: P, size: str = "8M", options: str = "", base: str | bytes | None = None) -> P:
    """A qcow2 image with something to win: text that compresses, bytes that do not, allocated zeros."""
    backing = ["-b", base, "-F", "qcow2"] if base is not None else []
    qemu_img("create", "-q", "-f", "qcow2", *(["-o", options] if options else []), *backing, path, size)
    write(path, 0x61, "0", "2M")
    write(path, 0, "3M", "2M")
    write(path, 0x17, "6M", "128k")
    return path


def location(path: Path | bytes, pool: Path | bytes | None = None) -> dict[str, str]:
    """Where a file is, or is to be, and in which pool."""
    raw = os.fsencode(path)
    return {"path_b64": b64(raw), "pool_path_b64": b64(os.fsencode(pool or raw.rpartition(b"/")[0]))}


def link(path: Path | bytes, pool: Path | bytes | None = None, form: str = "qcow2") -> dict[str, Any]:
    """A link as the plan knows it."""
    status = Path(os.fsdecode(path)).stat()
    return {
        **location(path, pool),
        "format": form,
        "dev": status.st_dev,
        "inode": status.st_ino,
        "file_size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def look_at(path: Path, form: str = "qcow2") -> dict[str, Any]:
    """A link of which only its data is looked at."""
    return {name: told for name, told in link(path, form=form).items() if not name.endswith(("_size", "_ns"))}


def reclaim_args(
    path: Path | bytes, *ancestors: Path | bytes, pool: Path | None = None, **changes: Any
) -> dict[str, Any]:
    """The arguments of a reclaim of an image as it is now."""
    return {"method": "compress", **rewrite_args(path, *ancestors, pool=pool, **changes)}


def rewrite_args(
    path: Path | bytes, *ancestors: Path | bytes, pool: Path | None = None, **changes: Any
) -> dict[str, Any]:
    """The arguments of any other verb that takes an image as it is now, with its chain."""
    form = changes.get("format", "qcow2")
    return {
        **link(path, pool, form),
        "virtual_size": image_info(path, form)["virtual-size"],
        "chain": [link(ancestor, pool) for ancestor in ancestors],
        "children_known": True,
        "idle_io": False,
        "reserve": NO_RESERVE,
        **changes,
    }


def undo_args(path: Path | bytes, job: str = "j1", **changes: Any) -> dict[str, Any]:
    """The arguments of an undo."""
    return {**location(path), "undo_job": job, **changes}


def recover_args(pool: Path) -> dict[str, Any]:
    """The arguments of a recovery of one pool."""
    return {"pools": [{"id": 1, "path_b64": b64(os.fsencode(pool)), "kind": "dir"}], "jobs_active": []}


def recovered(pool: Path, **more: Any) -> list[str]:
    """How what jobs have left in a pool is settled."""
    return [row["outcome"] for row in ask("recover", recover_args(pool) | more, job="r1")["recovered"]]


def refusal_of(act: Callable[..., object], *given: Any, error: Any = RefusedError) -> str:
    """The code with which that is refused, or fails with such an error; empty where it is done."""
    try:
        act(*given)
    except error as failed:
        return str(failed.code)
    return ""


def stamp(path: Path) -> Stamp:
    """What changes with a file; the time of the last reading does not count."""
    return Stamp.of(path.stat())


def age(journal: Path, *, boottime: float, wall: float) -> None:
    """Have a job be done so many seconds earlier, by either clock of its host: no clock is touched, but its journal."""
    records = [json.loads(line) for line in journal.read_bytes().splitlines()]
    for record in records:
        if record["step"] == "made":
            record["at"]["boottime"] -= boottime
            record["at"]["wall"] -= wall
    journal.write_text("".join(json.dumps(record) + "\n" for record in records))


def leftovers(folder: Path) -> set[str]:
    """The names of jobs' files in a folder."""
    return {path.name for path in folder.iterdir() if path.name.startswith(".sa-")}


class Writer:
    """A guest's stand-in: qemu-io that holds an image open for writing until it is left.

    Args:
        elsewhere: makes the command one that runs it on another machine.
    """

    def __init__(
        self,
        path: Path | bytes,
        form: str = "qcow2",
        *,
        read_only: bool = False,
        elsewhere: Callable[[str], list[str]] | None = None,
    ) -> None:
        argv = ["qemu-io", *(["-r"] if read_only else []), "-f", form, os.fsdecode(path)]
        if elsewhere is not None:
            argv = elsewhere(shlex.join(argv))
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        # Its prompt comes once the image is open and locked.
        self.said = b""
        done = threading.Event()

        def listen() -> None:
            assert self.process.stdout is not None
            while chunk := os.read(self.process.stdout.fileno(), 4096):
                self.said += chunk
                if b"qemu-io>" in self.said:
                    done.set()
            done.set()

        self._listener = threading.Thread(target=listen)
        self._listener.start()
        assert done.wait(60), "qemu-io does not come up"
        self.refused = self.process.poll() is not None or b"qemu-io>" not in self.said

    def write(self, pattern: int, offset: str, length: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"write -P {pattern} {offset} {length}\nflush\n".encode())
        self.process.stdin.flush()
        wait_until(lambda: b"wrote" in self.said, 20, "it has written")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"quit\n")
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it was refused and has ended
        self.process.wait(20)
        self._listener.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
