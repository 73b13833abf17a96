"""How a tool is run on the hypervisor.

Always from the main thread (the death signal follows the thread that started the tool), in a session of its own, with
standard input closed, under limits where it is a query, and never longer than the lifeline lasts.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, Union

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.pools import display
from storage_admin.agent.protocol import HostError, RefusedError

Argument = Union[str, bytes]

#: Seconds between two looks at the lifeline while a tool runs.
POLL_INTERVAL = 0.2
#: What is kept of a long tool's output, in bytes, from its end.
TAIL_BYTES = 64 * 1024
#: Process ids of the tools that this process runs now; what they have open is in nobody else's use.
running: set[int] = set()
_SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Limits:
    """How much a query may take: bytes of address space, seconds of processor and of wall clock, bytes of output."""

    address_space: int | None = 2 << 30
    cpu_seconds: int | None = 30
    wall_seconds: float | None = 30.0
    output_bytes: int = 4 << 20


QUERY = Limits()


@dataclass(frozen=True)
class Finished:
    """How a tool ended. ``exit_code`` is negative where a signal ended it, as in :mod:`subprocess`."""

    exit_code: int
    stdout: bytes
    stderr: bytes

    def words(self) -> str:
        """The last thing the tool said, for a sentence."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        said = [line for line in lines if not line.startswith(b"Try '")] or lines
        text = display(said[-1][-600:]) if said else "it said nothing"
        return f"signal {-self.exit_code}: {text}" if self.exit_code < 0 else f"exit code {self.exit_code}: {text}"


def find(name: str) -> str:
    """The absolute path of a tool.

    Raises:
        RefusedError: ``tool_missing``.
    """
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":" + _SEARCH_PATH)
    if found is None:
        raise RefusedError("tool_missing", f"{name} is not installed on this host; install it and try again")
    return found


def run(
    argv: Sequence[Argument],
    io: AgentIO,
    *,
    limits: Limits | None = QUERY,
    idle_io: bool = False,
    pass_fds: Sequence[int] = (),
    on_output: Callable[[bytes], None] | None = None,
    watch: Callable[[], None] | None = None,
    shown: Sequence[str] | None = None,
) -> Finished:
    """Run a tool to its end; see :func:`run_together`.

    Args:
        argv: the tool's name and its arguments.
        shown: the command as an admin should read it, instead of ``argv``.
    """
    return run_together(
        [argv],
        io,
        limits=limits,
        idle_io=idle_io,
        pass_fds=pass_fds,
        on_output=on_output,
        watch=watch,
        shown=None if shown is None else [shown],
    )[0]


def run_together(
    commands: Sequence[Sequence[Argument]],
    io: AgentIO,
    *,
    limits: Limits | None = QUERY,
    idle_io: bool = False,
    pass_fds: Sequence[int] = (),
    on_output: Callable[[bytes], None] | None = None,
    watch: Callable[[], None] | None = None,
    shown: Sequence[Sequence[str]] | None = None,
) -> list[Finished]:
    """Run tools at the same time, to the end of each.

    Args:
        commands: each a tool's name and its arguments. All but the first must say less than a pipe holds (64 KiB).
        io: asked every 0.2 s whether to go on; told which command was run.
        limits: of a query; ``None`` for a long tool, of which only the end of the output is kept.
        idle_io: run them when nobody else wants the disk.
        pass_fds: descriptors that they may open as ``/proc/self/fd/N``.
        on_output: given each piece of the first one's standard output as it comes.
        watch: called every 0.2 s; what it raises stops the tools.
        shown: the commands as an admin should read them, instead of ``commands``.

    Returns:
        How each ended, whatever the exit code.

    Raises:
        RefusedError: ``tool_missing``.
        StoppedError: the controller stopped the work; the tools are gone by then.
        HostError: one went over a limit; the tools are gone by then.
    """
    words = [[_text(argument) for argument in argv] for argv in commands] if shown is None else list(map(list, shown))
    processes: list[subprocess.Popen[bytes]] = []
    ended: list[Finished] = []
    try:
        for argv in commands:
            processes.append(_start(argv, limits, idle_io, pass_fds))
            running.add(processes[-1].pid)
        for process in processes:
            stdout, stderr = _follow(process, io, limits, on_output if not ended else None, watch)
            ended.append(Finished(process.wait(), stdout, stderr))
    finally:
        for process in processes[len(ended) :]:
            _kill(process)
        running.difference_update(process.pid for process in processes)
        for command in words[len(ended) : len(processes)]:
            io.command(command, None)
    for command, finished in zip(words, ended):
        io.command(command, finished.exit_code)
    return ended


def _start(
    argv: Sequence[Argument], limits: Limits | None, idle_io: bool, pass_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    command: list[Argument] = [find("setpriv"), "--pdeathsig", "KILL", "--"]
    if limits is not None:
        command.append(find("prlimit"))
        command += [f"--as={limits.address_space}"] if limits.address_space else []
        command += [f"--cpu={limits.cpu_seconds}"] if limits.cpu_seconds else []
        command.append("--")
    if idle_io:
        command += [find("ionice"), "-c3", find("nice"), "-n19"]
    command += [find(_text(argv[0])), *argv[1:]]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        pass_fds=pass_fds,
        env={"PATH": os.environ.get("PATH", "") + ":" + _SEARCH_PATH, "LC_ALL": "C"},
    )


def _follow(
    process: subprocess.Popen[bytes],
    io: AgentIO,
    limits: Limits | None,
    on_output: Callable[[bytes], None] | None,
    watch: Callable[[], None] | None,
) -> tuple[bytes, bytes]:
    """Read what the tool says until it closes both its outputs; return standard output and error."""
    assert process.stdout is not None  # noqa: S101 - both were asked for as pipes
    assert process.stderr is not None  # noqa: S101
    deadline = time.monotonic() + limits.wall_seconds if limits is not None and limits.wall_seconds else None
    looked = 0.0
    kept = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    out = process.stdout.fileno()
    with process.stdout, process.stderr, selectors.DefaultSelector() as selector:
        for descriptor in kept:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(POLL_INTERVAL):
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fd)
                    continue
                kept[key.fd] += chunk
                _bound(kept[key.fd], limits)
                if on_output is not None and key.fd == out:
                    on_output(chunk)
            now = time.monotonic()
            if now - looked < POLL_INTERVAL:
                continue
            looked = now
            io.check()
            if watch is not None:
                watch()
            if deadline is not None and now > deadline:
                raise HostError("a tool took longer than its limit and was stopped")
    error_output = next(bytes(text) for descriptor, text in kept.items() if descriptor != out)
    return bytes(kept[out]), error_output


def _bound(text: bytearray, limits: Limits | None) -> None:
    if limits is None:
        if len(text) > 2 * TAIL_BYTES:
            del text[:-TAIL_BYTES]
    elif len(text) > limits.output_bytes:
        raise HostError("a tool said more than its limit and was stopped")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the tool's whole group, and wait until it is gone."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()  # it is gone already, and waits to be asked how it ended
    process.wait()


def _text(argument: Argument) -> str:
    return display(argument) if isinstance(argument, bytes) else argument
