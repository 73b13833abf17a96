"""What runs in a machine: agents that are loaded already, and who gets in their way at an aimed moment."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

#: What may be done to an agent, each at a port of its own: nothing; it is killed when no file has the image's name, on
#: the way there or back; it waits for a stranger before its last look, before a door, or before it looks who came late;
#: it is killed before it has connected a device, or right after that; its kernel has no Landlock;
#: it holds locks for no minute after a file has lost its name.
HOWS = ("", "die", "die back", "last look", "door", "late", "die taken", "die connected", "no landlock", "soon")
FIRST_PORT = 7000
#: Where a stranger listens: this and the number of the job that is to wait for him.
_STRANGERS, _SERVER = 20_000, "10.9.0.1"


def _reap(*_: Any) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def agents(archive: str) -> None:
    """Each connection is another agent, forked: to load one takes seconds under TCG. Serves for ever."""
    sys.path.insert(0, archive)
    sys.argv[:] = [archive]  # by which each tells its version
    from storage_admin.agent import main  # noqa: PLC0415 (from the archive)

    for verb in main.VERBS:
        main.load(verb)
    signal.signal(signal.SIGCHLD, _reap)
    doors = [socket.create_server(("127.0.0.1", FIRST_PORT + number), backlog=99) for number in range(len(HOWS))]
    while True:
        for door in select.select(doors, [], [])[0]:
            wire, _ = door.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.dup2(wire.fileno(), 0)
                os.dup2(wire.fileno(), 1)
                for one in (wire, *doors):
                    one.close()
                _change(HOWS[doors.index(door)])
                os._exit(main.main())
            wire.close()


def _change(how: str) -> None:
    from storage_admin.agent import main  # noqa: PLC0415
    from storage_admin.agent.host import cgroups, nbd  # noqa: PLC0415
    from storage_admin.agent.programs import confined  # noqa: PLC0415
    from storage_admin.agent.swap import exchange, fence, moment, swap  # noqa: PLC0415

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def taken(*_: Any) -> None:
        raise FileExistsError  # as if somebody had made a file of that name just then

    set_to: dict[str, tuple[Any, str, Any]] = {
        "soon": (fence, "NAMES_KEPT", 1.0), "no landlock": (confined, "means", lambda: confined.NAMESPACES),
        "die connected": (cgroups, "set_free", die),
    }  # fmt: skip
    if how == "die taken":
        place = nbd.take
        setattr(nbd, "take", lambda note: die(place(note)))  # noqa: B010
    elif how in set_to:
        setattr(*set_to[how])
    elif how.startswith("die"):
        setattr(exchange, "link", taken if "back" in how else die)  # noqa: B010 (for type checkers it is another one)
        setattr(exchange, "give" if "back" in how else "link", die)
    elif how:
        places: dict[str, tuple[Any, str]] = {
            "last look": (swap.NewFile, "dress"), "door": (moment, "shut"), "late": (moment, "late"),
        }  # fmt: skip
        where, name = places[how]
        meant, answer, job = getattr(where, name), main.load, list[str]()

        def load(verb: str) -> Any:
            def run(request: Any, io: Any) -> Any:
                job.append(request.job)
                return answer(verb)(request, io)

            return run

        def waits(*args: Any, **named: Any) -> Any:
            for file in Path("/proc/self/fd").iterdir():
                with suppress(OSError):
                    os.fstat(int(file.name))  # what the client knows now is what it remembers for seconds
            with suppress(ConnectionRefusedError), socket.create_connection((_SERVER, _STRANGERS + int(job[0]))) as to:
                to.recv(1)
            return meant(*args, **named)

        setattr(main, "load", load)  # noqa: B010
        setattr(where, name, waits)


def stranger(path: str, job: str) -> None:
    """Writes 4 KiB into a file, without locks, once that job's agent waits for him."""
    with socket.create_server((_SERVER, _STRANGERS + int(job))) as listening:
        listening.settimeout(300)
        print("ready", flush=True)
        with listening.accept()[0]:
            with Path(path).open("r+b") as file:
                file.write(b"s" * 4096)
            print("written", flush=True)


class _Guest:
    """qemu-io, which waits for commands."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(["qemu-io"], stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
        self.says()

    def says(self, line: str = "") -> str:
        """What it answers to a line."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()
        said = b""
        while not said.endswith(b"qemu-io> "):
            chunk = os.read(self.process.stdout.fileno(), 4096)
            assert chunk, said
            said += chunk
        return said.decode()

    def inode(self, folder: str) -> int:
        """Of the file in a folder that it has open."""
        files = Path(f"/proc/{self.process.pid}/fd").iterdir()
        return next(file.stat().st_ino for file in files if str(file.readlink()).startswith(folder))


def guest(path: str, journal: str, step: str, delay: str, stays: str) -> None:
    """Opens an image so many seconds after a job's journal says a step, and writes; it may stay until the job ends.

    Says what became of it; times are in seconds since the exchange began.
    """
    qemu, times, began, said = _Guest(), dict[str, float](), 0.0, ""
    local = Path(journal).with_name(Path(path).name)

    def watch() -> None:
        with suppress(FileNotFoundError):
            while "done" not in times:
                for found in set(re.findall(r'"step":"(\w+)"', Path(journal).read_text())) - set(times):
                    times[found] = time.monotonic()
                time.sleep(0.002)
        times.setdefault("done", time.monotonic())

    while not Path(journal).exists():
        time.sleep(0.002)
    watching = threading.Thread(target=watch)
    watching.start()
    while not {step, "done"} & set(times):
        time.sleep(0.002)
    time.sleep(float(delay))
    while not began or (stays == "tries" and "open" in said):
        began = time.monotonic()
        said = qemu.says(f"open -o driver=raw {path}\n")
    opened = time.monotonic()
    let_in = "open" not in said
    told: dict[str, Any] = {"let_in": let_in, "nameless": "No such file" in said}
    if let_in:
        inode = qemu.inode(str(Path(path).parent))
        wrote = qemu.says("write -P 0x77 512k 64k\n")
        told["wrote"] = "wrote 65536" in wrote and "failed" not in qemu.says("flush\n")
        if stays != "stays":
            qemu.says("close\n")
    watching.join()
    if let_in:
        told["named"] = local.stat().st_ino == inode
    exchanging = times.get("exchanging", times["done"])
    since = {"opened": opened, "began": began, "done": times["done"]}
    told |= {"fell": began < times["done"] and opened > exchanging}
    told |= {name: round(at - exchanging, 3) for name, at in since.items()}
    print(json.dumps(told), flush=True)
    qemu.process.kill()


if __name__ == "__main__":
    programs: dict[str, Any] = {"agents": agents, "stranger": stranger, "guest": guest}
    programs[sys.argv[1]](*sys.argv[2:])
