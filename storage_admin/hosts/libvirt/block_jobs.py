"""Block jobs of running domains, from the side of whoever wants them (:mod:`storage_admin.hosts.libvirt.block_job`)."""

import contextlib
import json
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import IO, Any, Self

from django.conf import settings
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.libvirt import running
from storage_admin.hosts.libvirt.process import TICK, GoneError, command
from storage_admin.hosts.libvirt.relay import refuse_to_write
from storage_admin.hosts.libvirt.uri import listening
from storage_admin.hosts.live_facts import GuestNow
from storage_admin.hosts.models import Host

#: Seconds without a word after which libvirt counts as silent.
SILENCE = 30.0
#: Seconds until it is tried again to find the job, where libvirt did not answer.
AGAIN = 2.0
_ENDED = gettext_lazy("libvirt ended without an answer.")
_Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Wanted:
    """A block job, as the helper's request has it."""

    uid: str
    disk: str
    op: str
    chain: list[str]
    top: int
    base: int | None
    bytes_per_second: int = 0
    target: dict[str, str] | None = None

    @property
    def result(self) -> list[str]:
        """The chain that there is afterwards."""
        if self.target is not None:
            return [self.target["path"]]
        if self.op == "pull":
            return [self.chain[0], *([] if self.base is None else self.chain[self.base :])]
        return [*self.chain[: self.top], *self.chain[self.base or 0 :]]


@dataclass(frozen=True)
class Ended:
    """How it stands when there is no job any more.

    Args:
        active: whether the guest runs.
        chain: that it has then.
        later: what its definition names for the next start; ``None`` where it has none.
        allocated: what its image occupies, in bytes; ``None`` where libvirt does not tell.
    """

    active: bool
    chain: list[str]
    later: str | None
    allocated: int | None = None


class LostError(Exception):
    """libvirt does not answer: the job may go on."""


class Program:
    """Looks at a domain, and then follows its block job, as its start takes longer than a look. It is started when it
    is first needed, and again after it was lost.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._said: tuple[_Say, Iterator[dict[str, Any] | None]] | None = None
        self._looks = False
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._said, self._looks = None, False
        self._open.close()

    def ask(self, uid: str) -> None:
        """Begins to look at a domain: whoever has more to do does that before :meth:`look` waits for the answer.

        Raises:
            RefusedError, HostError: as :func:`running.look`.
        """
        say, __ = self._started()
        say({"look": uid})
        self._looks = True

    def look(self, uid: str) -> GuestNow:
        """As :func:`running.look`."""
        if not self._looks:
            self.ask(uid)
        self._looks = False
        try:
            __, heard = self._started()
            told = next((document for document in heard if document is not None), {"error": str(_ENDED)})
        except LostError as lost:
            raise HostError(str(lost)) from lost
        if "error" in told:
            raise _error(told["error"], begun=False)
        return running.guest_now(told)

    def follow(
        self, wanted: Wanted, *, start: bool, told: Callable[[dict[str, Any]], None], order: Callable[[str], str]
    ) -> Ended:
        """Starts a block job, or takes it over, and follows it until there is none any more.

        Args:
            start: else it is only followed.
            told: gets ``stage``, ``done`` and ``total``, as often as they are told.
            order: called twice a second with the stage; returns what is to be done: ``abort``, ``pivot``, or nothing.
                What it raises ends the following, and not the job.

        Raises:
            RefusedError: ``stale_plan``: nothing was begun, as the domain is not what it was planned for.
            HostError: libvirt refuses it, and nothing was begun; or it does not know the domain.
            LostError: it does not answer any more.
        """
        with self:
            try:
                say, heard = self._started()
            except GoneError as gone:
                raise LostError(gone.detail) from gone
            say(asdict(wanted) | {"start": start})
            stage = ""
            for document in heard:
                if document is not None:
                    if "contradiction" in document:
                        why = document["contradiction"]
                        raise RefusedError("stale_plan", _("Nothing was changed: {why}.").format(why=why))
                    if "error" in document:
                        raise _error(document["error"], begun=bool(stage) or not start)
                    if "ended" in document:
                        return Ended(**{name: value for name, value in document.items() if name != "ended"})
                    stage = document["stage"]
                    told(document)
                if wish := order(stage):
                    say({"do": wish})
        raise LostError(str(_ENDED))

    def _started(self) -> tuple[_Say, Iterator[dict[str, Any] | None]]:
        if self._said is None:
            refuse_to_write(self._host)
            uri = self._open.enter_context(listening(self._host))
            self._said = self._open.enter_context(_helper(uri))
        return self._said


def _error(said: str, *, begun: bool) -> Exception:
    return LostError(said) if begun else HostError(_("libvirt said: {said}").format(said=said))


@contextlib.contextmanager
def _helper(uri: str) -> Iterator[tuple[_Say, Iterator[dict[str, Any] | None]]]:
    """The helper at work: what says something to it, and what it says; ``None`` where nothing came for a moment."""
    mine, its = socket.socketpair()
    with mine, subprocess.Popen(
        command(uri, "block_job"), stdin=its.fileno(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
        cwd=settings.BASE_DIR,
    ) as program:  # fmt: skip
        its.close()

        def say(document: dict[str, Any]) -> None:
            with contextlib.suppress(OSError):  # it has ended, which is heard
                mine.sendall(json.dumps(document).encode() + b"\n")

        try:
            if program.stdout is not None:
                yield say, _heard(program.stdout)
        finally:
            program.kill()


def _heard(stdout: IO[bytes]) -> Iterator[dict[str, Any] | None]:
    last = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        while True:
            if selector.select(TICK):
                line = stdout.readline()
                if not line:
                    return
                last = time.monotonic()
                yield json.loads(line)
            elif time.monotonic() - last > SILENCE:
                raise LostError(_("libvirt did not answer within {seconds:.0f} s.").format(seconds=SILENCE))
            else:
                yield None
