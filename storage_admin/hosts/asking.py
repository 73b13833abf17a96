"""One short question to the agent on a host, while somebody waits for the answer."""

import contextlib
import time
import uuid
from collections.abc import Callable, Generator
from typing import Any

from django.utils.translation import gettext as _

from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError, RefusedError, Request
from storage_admin.hosts.models import Host
from storage_admin.hosts.session import AgentMissingError, AgentSession
from storage_admin.hosts.transport import agent_bundle, agent_command

#: Seconds for the answer. A path on a disk that answers no more would hold whoever waits, and a web process, for good.
ANSWER_TIMEOUT = 60.0
#: The same where the agent has to start a machine of its own first, which may be a slow one.
APPLIANCE_TIMEOUT = 200.0


def ask(
    host: Host,
    verb: str,
    args: dict[str, Any],
    word: str = "",
    *,
    seconds: float | None = None,
    take: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """What the agent answers.

    Args:
        host: also one that is not saved yet.
        word: what the agent's command line has beside, which a key that can only run the agent cannot say.
        seconds: after which it is given up; without them ``ANSWER_TIMEOUT``.
        take: gets what the agent says before its answer.

    Raises:
        RefusedError: it refuses, or is of another version (``agent_outdated``).
        HostError: the host cannot be reached, the agent has no root rights there, or it gives no answer in time.
    """
    request = Request(verb=verb, job=uuid.uuid4().hex[:16], generation=1, args=args)
    seconds = ANSWER_TIMEOUT if seconds is None else seconds
    with contextlib.closing(_said(host, request, word, seconds, in_all=True)) as events:
        for event in events:
            if event["event"] == protocol.RESULT:
                return dict(event["data"])
            if take is not None:
                take(event)
    raise HostError(_("The agent on {host} ended without an answer.").format(host=host.name), protocol.INTERRUPTED)


def told(
    host: Host,
    verb: str,
    args: dict[str, Any],
    *,
    job: str = "",
    more: Callable[[], bytes] | None = None,
    seconds: float | None = None,
) -> Generator[dict[str, Any], None, None]:
    """All that the agent says, as it comes; the last event is its result. Closing it stops the agent.

    Args:
        job: the id that files on the host are named after; another one each time where it is not given.
        more: gives the next bytes of the file that the agent takes, none at its end; what it raises stops the agent.
        seconds: after which it is given up if it says nothing; without them ``ANSWER_TIMEOUT``.

    Raises:
        RefusedError, HostError: as :func:`ask`, also in the middle; no answer in time is one in which it says nothing.
    """
    request = Request(verb=verb, job=job or uuid.uuid4().hex[:16], generation=1, args=args, roots=host.roots())
    return _said(host, request, "", ANSWER_TIMEOUT if seconds is None else seconds, in_all=False, more=more)


def _said(
    host: Host,
    request: Request,
    word: str,
    seconds: float,
    *,
    in_all: bool,
    more: Callable[[], bytes] | None = None,
) -> Generator[dict[str, Any], None, None]:
    """The agent's events; it has so many seconds in all, or for each. It is installed again where it is gone."""
    try:
        yield from _heard(host, request, word, seconds, in_all=in_all, more=more)
    except AgentMissingError:
        yield from _heard(host, request, word, seconds, in_all=in_all, more=more)


def _heard(
    host: Host, request: Request, word: str, seconds: float, *, in_all: bool, more: Callable[[], bytes] | None
) -> Generator[dict[str, Any], None, None]:
    with agent_command(host, word) as command, AgentSession(command, agent_bundle().hash) as session:
        since = time.monotonic()
        session.send(request)
        for event in session.events():
            if event is None:
                if time.monotonic() > since + seconds:
                    session.give_up()
                    late = _(
                        "The agent on {host} did not answer within {seconds:.0f} s. A disk on that host may be hanging."
                    )
                    raise HostError(late.format(host=host.name, seconds=seconds), "host_unreachable")
                continue
            if event["event"] == protocol.MORE and more is not None:
                session.feed(more())
            since = since if in_all else time.monotonic()
            if event["event"] == protocol.HELLO and event.get("uid") != 0:
                wrong = _("The agent on {host} does not run as root.")
                raise HostError(wrong.format(host=host.name), "host_unreachable")
            if event["event"] == protocol.ERROR:
                _raise(str(event.get("code")), str(event.get("detail")))
            yield event


def _raise(code: str, detail: str) -> None:
    if code in protocol.REFUSALS or code == protocol.INVALID:
        raise RefusedError(code, detail)
    raise HostError(detail, code)
