"""Passphrases of encrypted images, and how qemu's tools get them: each by a pipe, and never on a command line."""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable

from storage_admin.agent.folders.pools import held
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import confined, tools
from storage_admin.agent.programs.confined import Files
from storage_admin.agent.protocol import INVALID, Arguments, HostError, RefusedError, display
from storage_admin.agent.qemu.node import SLOW_QUERY, Node, fail

#: Bytes of a passphrase. All of it has to fit into a pipe before anybody reads that.
LONGEST = 512
#: Where files are that no disk holds.
_MEMORY, _PREFIX = "/run", "storage-admin-key-"
#: What qemu says of a passphrase that opens no slot.
_WRONG = b"cannot unlock any keyslot"
_UNTIMED, _TRIES = b"accurate CPU usage", 10
#: ``qemu-img check`` of a format that it does not know how to check; it has opened the image by then.
_NO_CHECK = 63


@dataclass(frozen=True)
class Keys:
    """Passphrases by the ids that command lines name them by. They are in no text that this is shown as."""

    by_id: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, **by_id: str) -> Keys:
        """From what the controller gave.

        Raises:
            RefusedError: ``invalid``: a passphrase is empty, too long, or has characters that none can have.
        """
        for name, passphrase in by_id.items():
            if not 0 < len(passphrase.encode("utf-8", "surrogatepass")) <= LONGEST or not passphrase.isprintable():
                raise RefusedError(INVALID, f"{name} has 1 to {LONGEST} bytes of printable characters")
        return cls(by_id)

    @contextlib.contextmanager
    def handed(self) -> Iterator[Handed]:
        """How the one tool that gets the passphrases is told of them.

        Each comes by a pipe. A tool that is shut into a file system of its own has none: there each is a file of the
        memory's file system, root's alone, and gone with the tool.
        """
        shut_in = confined.means() == confined.NAMESPACES
        arguments: list[tools.Argument] = []
        fds: list[int] = []
        with contextlib.ExitStack() as stack:
            for name, passphrase in self.by_id.items():
                fd = stack.enter_context(_file(passphrase) if shut_in else _pipe(passphrase))
                fds.append(fd)
                arguments += ["--object", f"secret,id={name},file=/proc/self/fd/{fd}"]
            yield Handed(arguments, [] if shut_in else fds, fds if shut_in else [])


@dataclass(frozen=True)
class Handed:
    """Arguments that name passphrases, and descriptors by which a tool reads them, as pipes or as files."""

    objects: list[tools.Argument]
    pipes: list[int]
    read: list[int]

    def with_files(self, files: Files) -> Files:
        """These files, and those."""
        return Files([*files.read, *self.read], files.written)


@contextlib.contextmanager
def _pipe(passphrase: str) -> Iterator[int]:
    out, into = os.pipe()
    with held(out):
        with held(into):
            os.write(into, passphrase.encode("utf-8"))
        yield out


@contextlib.contextmanager
def _file(passphrase: str) -> Iterator[int]:
    for left in glob.glob(f"{_MEMORY}/{_PREFIX}*"):
        # An agent that was killed removes nothing.
        if not os.path.exists(f"/proc/{os.path.basename(left)[len(_PREFIX) :].partition('-')[0]}"):
            os.unlink(left)
    with tempfile.NamedTemporaryFile(prefix=f"{_PREFIX}{os.getpid()}-", dir=_MEMORY) as file:
        file.write(passphrase.encode("utf-8"))
        file.flush()
        yield file.fileno()


@dataclass(frozen=True)
class LockedNode(Node):
    """An encrypted image that qemu is to open with a passphrase of that id."""

    key: str = ""

    @classmethod
    def of(cls, node: Node, key: str) -> LockedNode:
        """The same image with a passphrase."""
        return cls(node.fd, node.format, node.path, node.backing, key)

    def options(self) -> dict[str, Any]:
        if self.format == "luks":
            return super().options() | {"key-secret": self.key}
        return super().options() | {"encrypt": {"format": "luks", "key-secret": self.key}}


def deriving(run: Callable[[], tools.Finished]) -> tools.Finished:
    """Run what derives a key: qemu times that first, and gives up where the clock of a busy machine did not move."""
    for _ in range(_TRIES):
        done = run()
        if not done.exit_code or _UNTIMED not in done.stderr:
            break
    return done


def iter_time(args: Arguments) -> int | None:
    """Milliseconds that it is to take to try a passphrase, from a request; ``None`` for qemu's own choice.

    Raises:
        RefusedError: ``invalid``.
    """
    wanted = args.maybe("iter_time", int)
    if wanted is not None and not 10 <= wanted <= 60_000:
        raise RefusedError(INVALID, "iter_time is 10 to 60,000 milliseconds")
    return wanted


def opens(io: AgentIO, node: Node, passphrase: str) -> bool:
    """Whether a passphrase opens an image.

    Raises:
        HostError: it could not be tried.
    """
    locked = LockedNode.of(node, "sa0")
    with Keys({"sa0": passphrase}).handed() as handed:
        answer = tools.run(
            ["qemu-img", "check", *handed.objects, "-U", "--output=json", locked.argument()],
            io,
            limits=SLOW_QUERY,
            files=handed.with_files(locked.files()),
            pass_fds=handed.pipes,
            shown=["qemu-img", "check", "--object", "secret,…", "-U", display(node.path)],
        )
    if answer.exit_code in {0, 2, 3, _NO_CHECK}:
        return True
    if _WRONG in answer.stderr:
        return False
    return bool(fail("check", answer))


def amend(io: AgentIO, node: Node, keys: Keys, opened_by: str, options: dict[str, str]) -> None:
    """Change the key slots of an image of our own (``qemu-img amend``).

    Args:
        opened_by: id of the passphrase that opens it.
        options: of the amend, without the format's prefix.

    Raises:
        HostError: it fails; the image may be anything then.
    """
    locked = LockedNode.of(node, opened_by)
    prefix = "" if node.format == "luks" else "encrypt."
    given = ",".join(f"{prefix}{name}={value}" for name, value in options.items())
    shown = ["qemu-img", "amend", "--object", "secret,…", "-o", given, display(node.path)]

    def run() -> tools.Finished:
        with keys.handed() as handed:
            return tools.run(
                ["qemu-img", "amend", *handed.objects, "-q", "-o", given, locked.written()],
                io,
                limits=SLOW_QUERY,
                files=handed.with_files(locked.files(written=True)),
                pass_fds=handed.pipes,
                shown=shown,
            )

    done = deriving(run)
    if done.exit_code:
        raise HostError(f"qemu-img amend failed, {done.words()}")
