"""How a tool is run on the hypervisor.

Always from the main thread (the death signal follows the thread that started the tool), in a session of its own, with
standard input closed, under limits where it is a query, and never longer than the lifeline lasts.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, Union

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs.confined import Confinement, Files
from storage_admin.agent.protocol import HostError, RefusedError, display

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
#: Of a list of ten thousand volumes with the parts of each, or of a hundred thousand snapshots on slow disks.
LIST = Limits(cpu_seconds=120, wall_seconds=180.0, output_bytes=32 << 20)


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

    def or_fail(self, sentence: str) -> Finished:
        """Itself, where it ended well; else raises HostError, with a sentence's beginning and :meth:`words`."""
        if self.exit_code:
            raise HostError(f"{sentence} {self.words()}")
        return self


def find(name: str) -> str:
    """The absolute path of a tool.

    Raises:
        RefusedError: ``tool_missing``.
    """
    if (found := find_any(name)) is None:
        raise RefusedError("tool_missing", f"{name} is not installed on this host; install it and try again")
    return found


def find_any(*names: str) -> str | None:
    """The absolute path of the first of these tools that is there, also where PATH leaves out the system's folders.

    Args:
        names: of tools, or absolute paths.
    """
    # By hand: shutil is slow to load, and the agent starts for every job.
    folders = (os.environ.get("PATH", "") + ":" + _SEARCH_PATH).split(":")
    paths = (os.path.join(folder, name) for name in names for folder in folders)
    return next(
        (path for path in paths if os.path.isabs(path) and os.path.isfile(path) and os.access(path, os.X_OK)), None
    )


def run(
    argv: Sequence[Argument],
    io: AgentIO,
    *,
    limits: Limits | None = QUERY,
    idle_io: bool = False,
    files: Files | None = None,
    pass_fds: Sequence[int] = (),
    on_output: Callable[[bytes], None] | None = None,
    watch: Callable[[], None] | None = None,
    shown: Sequence[str] | None = None,
    stdin: int | None = None,
) -> Finished:
    """Run a tool to its end; see :func:`run_all`.

    Args:
        stdin: descriptor of its standard input; without one it has none.
        argv: the tool's name and its arguments.
        on_output: given each piece of its standard output as it comes.
        shown: the command as an admin should read it, instead of ``argv``.
    """
    return run_all(
        [argv],
        io,
        limits=limits,
        idle_io=idle_io,
        files=files,
        pass_fds=pass_fds,
        on_output=None if on_output is None else lambda _, chunk: on_output(chunk),
        watch=watch,
        shown=shown,
        stdin=stdin,
    )[0]


def run_to_end(argv: Sequence[str], io: AgentIO, seconds: float = 60.0, pass_fds: Sequence[int] = ()) -> Finished:
    """Run a short command that is not to be stopped half-way: what the controller says meanwhile is heard after it.

    Args:
        argv: the tool's name and its arguments.
        seconds: after which it is stopped all the same.
        pass_fds: descriptors that it gets: it goes on where this process is killed, and holds what these lock.

    Raises:
        RefusedError: ``tool_missing``.
        HostError: it did not end in that time.
    """
    found = [find(argv[0]), *argv[1:]]
    with _popen(found, pass_fds, None, None) as process:
        running.add(process.pid)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise HostError(f"{argv[0]} does not answer") from error
        finally:
            running.discard(process.pid)
    io.command(list(argv), process.returncode)
    return Finished(process.returncode, out, err)


def run_all(
    commands: Sequence[Sequence[Argument]],
    io: AgentIO,
    *,
    at_once: int = 1,
    limits: Limits | None = QUERY,
    idle_io: bool = False,
    files: Files | None = None,
    pass_fds: Sequence[int] = (),
    on_output: Callable[[int, bytes], None] | None = None,
    watch: Callable[[], None] | None = None,
    shown: Sequence[str] | None = None,
    stdin: int | None = None,
) -> list[Finished]:
    """Run tools to the end of each, some of them at the same time.

    Args:
        commands: each a tool's name and its arguments.
        io: asked every 0.2 s whether to go on; told which command was run.
        at_once: how many run at the same time.
        limits: of a query; ``None`` for a long tool, of which only the end of the output is kept.
        idle_io: run them when nobody else wants the disk.
        files: that they may open as ``/proc/self/fd/N``, and nothing else of this host: to be said of every tool that
            works on a guest's bytes.
        pass_fds: descriptors that they get beside these, and may lead anywhere.
        on_output: given each piece of standard output as it comes, after the number of its command.
        watch: called every 0.2 s; what it raises stops the tools.
        shown: one command as an admin should read it, in place of all of ``commands``.
        stdin: descriptor that is the standard input of them all.

    Returns:
        How each ended, whatever the exit code.

    Raises:
        RefusedError: ``tool_missing``; ``not_confined``, with ``files``.
        StoppedError: the controller stopped the work; the tools are gone by then.
        HostError: one went over a limit; the tools are gone by then.
    """
    waiting = deque(enumerate(commands))
    at_work: list[_Tool] = []
    ended: dict[int, Finished] = {}
    looked = 0.0
    try:
        with selectors.DefaultSelector() as selector:
            while waiting or at_work:
                while waiting and len(at_work) < at_once:
                    number, argv = waiting.popleft()
                    at_work.append(
                        _Tool(number, start(argv, limits, idle_io, files, pass_fds, stdin), limits, selector)
                    )
                for key, _ in selector.select(POLL_INTERVAL):
                    tool: _Tool = key.data
                    chunk = tool.read(key.fd)
                    if chunk and on_output is not None and key.fd == tool.out:
                        on_output(tool.number, chunk)
                for tool in [tool for tool in at_work if tool.silent]:
                    ended[tool.number] = tool.end()
                    at_work.remove(tool)
                now = time.monotonic()
                if now - looked >= POLL_INTERVAL:
                    looked = now
                    _look(io, watch, at_work)
    finally:
        for tool in at_work:
            tool.kill()
        _tell(io, commands, shown, ended, {tool.number for tool in at_work})
    return [ended[number] for number in range(len(commands))]


def _tell(
    io: AgentIO,
    commands: Sequence[Sequence[Argument]],
    shown: Sequence[str] | None,
    ended: dict[int, Finished],
    stopped: set[int],
) -> None:
    """Say what was run, and how it ended; ``None`` for what was stopped."""
    codes = {number: ended[number].exit_code if number in ended else None for number in sorted({*ended, *stopped})}
    if shown is None:
        for number, code in codes.items():
            io.command([_text(argument) for argument in commands[number]], code)
    elif codes:
        # One for all: it was stopped if one was, else what went wrong counts.
        worst = None if stopped else next((code for code in codes.values() if code), 0)
        io.command(list(shown), worst)


def _look(io: AgentIO, watch: Callable[[], None] | None, tools: Sequence[_Tool]) -> None:
    """What is asked every now and then while tools are at work; raises to stop them."""
    io.check()
    if watch is not None:
        watch()
    if any(tool.overdue for tool in tools):
        raise HostError("a tool took longer than its time limit and was stopped")


class _Tool:
    """A tool at work: its process, what it has said, and how long it may take.

    Args:
        number: of its command.
        process: with pipes as both its outputs.
        limits: as of :func:`run_all`.
        selector: its outputs are registered there, with itself as data.
    """

    def __init__(
        self, number: int, process: subprocess.Popen[bytes], limits: Limits | None, selector: selectors.BaseSelector
    ) -> None:
        assert process.stdout is not None  # noqa: S101 - both were asked for as pipes
        assert process.stderr is not None  # noqa: S101
        self.number = number
        self.out = process.stdout.fileno()
        self._process, self._limits, self._selector = process, limits, selector
        self._deadline = time.monotonic() + limits.wall_seconds if limits is not None and limits.wall_seconds else None
        self._said = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        self._open = set(self._said)
        for descriptor in self._said:
            selector.register(descriptor, selectors.EVENT_READ, self)
        running.add(process.pid)

    @property
    def silent(self) -> bool:
        """Whether it has closed both its outputs."""
        return not self._open

    @property
    def overdue(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def read(self, descriptor: int) -> bytes:
        """A piece of what it says; empty where it has closed that output."""
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            self._selector.unregister(descriptor)
            self._open.discard(descriptor)
        said = self._said[descriptor]
        said += chunk
        if self._limits is None:
            if len(said) > 2 * TAIL_BYTES:
                del said[:-TAIL_BYTES]
        elif len(said) > self._limits.output_bytes:
            raise HostError("a tool printed more than its limit and was stopped")
        return chunk

    def end(self) -> Finished:
        """How it ended, once it is silent."""
        code = self._process.wait()
        self._close()
        stdout, stderr = (bytes(said) for said in self._said.values())
        return Finished(code, stdout, stderr)

    def kill(self) -> None:
        """End its whole group, and wait until it is gone."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()  # it is gone already, and waits to be asked how it ended
        self._process.wait()
        self._close()

    def _close(self) -> None:
        running.discard(self._process.pid)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def start(
    argv: Sequence[Argument],
    limits: Limits | None,
    idle_io: bool,
    files: Files | None,
    pass_fds: Sequence[int],
    stdin: int | None,
) -> subprocess.Popen[bytes]:
    """A tool at work, in a session of its own, for who looks after it; arguments and errors as of :func:`run_all`."""
    programs, command = list[str](), list[Argument]()
    if files is None:  # who is confined has it from there; setpriv of Debian 11 ends where it cannot read /proc
        programs.append(find("setpriv"))
        command += [programs[-1], "--pdeathsig", "KILL", "--"]
    if limits is not None:
        programs.append(find("prlimit"))
        command.append(programs[-1])
        command += [f"--as={limits.address_space}"] if limits.address_space else []
        command += [f"--cpu={limits.cpu_seconds}"] if limits.cpu_seconds else []
        command.append("--")
    if idle_io:
        programs += [find("ionice"), find("nice")]
        command += [programs[-2], "-c3", programs[-1], "-n19"]
    programs.append(find(_text(argv[0])))
    command += [programs[-1], *argv[1:]]
    if files is None:
        return _popen(command, pass_fds, None, stdin)
    confinement = Confinement(files, programs)
    try:
        return _popen(command, [*files.fds, *pass_fds], confinement.enter, stdin)
    except subprocess.SubprocessError as error:
        raise HostError("a tool was not started, because it could not be confined") from error
    finally:
        confinement.close()


def _popen(
    command: Sequence[Argument], pass_fds: Sequence[int], first: Callable[[], None] | None, stdin: int | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        pass_fds=pass_fds,
        preexec_fn=first,  # noqa: PLW1509 - it takes no lock that another thread could hold
        env={"PATH": os.environ.get("PATH", "") + ":" + _SEARCH_PATH, "LC_ALL": "C"},
    )


def _text(argument: Argument) -> str:
    return display(argument) if isinstance(argument, bytes) else argument


def compresses_by_zstd(qemu_img: str) -> bool:
    """Whether a qemu-img can (since 5.1, where it was built with it: Debian 11's was not): tried out in memory."""
    fd = os.memfd_create("zstd")
    asked = ["create", "-q", "-f", "qcow2", "-o", "compression_type=zstd", f"/proc/self/fd/{fd}", "1M"]
    try:
        done = subprocess.run(
            [qemu_img, *asked], pass_fds=[fd], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False
        )
        return done.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        os.close(fd)
