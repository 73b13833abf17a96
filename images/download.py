"""An image's file as an answer of the web server: whole or a range of it, so that a download that broke off goes on."""

import base64
import re
import threading
from collections.abc import Generator, Iterator
from typing import Any

from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.http import content_disposition_header
from django.utils.translation import gettext as _

from images.models import Image
from images.rewrite import refusals
from images.rewrite.neighbours import facts
from storage_admin.accounts.models import Actor, Role, audit
from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts import asking
from storage_admin.jobs.plan_and_progress import Refusal, refuse

#: Downloads and uploads of a web process at once: each takes one of its threads for as long as it lasts.
AT_ONCE = 2
_free = threading.BoundedSemaphore(AT_ONCE)
_RANGE = re.compile(r"bytes=(\d{1,18})?-(\d{1,18})?")
_ZEROS = bytes(1 << 20)


def answer(
    actor: Actor, image: Image, *, wanted: str = "", unless_changed: str = "", body: bool = True
) -> HttpResponseBase:
    """The file of an image that nobody uses, without what it stands on.

    Args:
        wanted: the request's ``Range``; several ranges, or what makes no sense, count as none.
        unless_changed: its ``If-Range``: the range is only sent where the file is still that one.
        body: whether the bytes are sent, or the headers alone.

    Raises:
        ForbiddenError: the actor is no admin.
        RefusedError: somebody uses the image, it is not there, its host does not answer (``host_unreachable``), or too
            many downloads run (``busy``).
    """
    actor.require(Role.ADMIN, image.host.slug)
    refuse(_against(image))
    size, tag = image.file_size or 0, f'"{bytes(image.fingerprint).hex()}"'
    span = _span(wanted, size) if unless_changed in {"", tag} else None
    headers = {
        "Accept-Ranges": "bytes",
        "ETag": tag,
        "Content-Disposition": content_disposition_header(as_attachment=True, filename=image.name) or "attachment",
    }
    if span is not None and span[0] >= span[1]:
        return HttpResponse(status=416, headers=headers | {"Content-Range": f"bytes */{size}"})
    start, end = span or (0, size)
    headers["Content-Length"] = str(end - start)
    if span is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    status, kind = 200 if span is None else 206, "application/octet-stream"
    if not body:
        _sending(actor, image, start, start, told=False).close()  # what speaks against it does so here, too
        return HttpResponse(status=status, headers=headers, content_type=kind)
    return StreamingHttpResponse(_sending(actor, image, start, end), status=status, headers=headers, content_type=kind)


def _sending(actor: Actor, image: Image, start: int, end: int, *, told: bool = True) -> "Sending":
    asked = facts(image) | {"virtual_size": image.virtual_size or 0, "offset": start, "length": end - start}
    about = {"from": start, "bytes": end - start}
    return Sending(actor, image, asking.told(image.host, "send", asked), "image downloaded" if told else "", about)


def _against(image: Image) -> list[Refusal]:
    gone = [Refusal("stale_plan", image.state_detail)] if image.state in Image.NOT_THERE else []
    return [*gone, *refusals.not_a_file(image), *refusals.for_undo(image)]


def _span(wanted: str, size: int) -> tuple[int, int] | None:
    """First byte and the one behind the last, ``None`` for the whole; an empty one where it lies outside."""
    match = _RANGE.fullmatch(wanted.replace(" ", ""))
    if match is None or not any(match.groups()):
        return None
    if match[1] is None:
        return max(size - int(match[2]), 0), size
    start, end = int(match[1]), min(int(match[2]) + 1 if match[2] else size, size)
    return (start, end) if start < size else (size, size)


def take_place() -> None:
    """One of :data:`AT_ONCE`, until :func:`give_place`; raises RefusedError (``busy``) where none is free."""
    if not _free.acquire(blocking=False):
        busy = _("{count} downloads or uploads are running already. Try again when one has ended.")
        raise RefusedError("busy", busy.format(count=AT_ONCE))


def give_place() -> None:
    """Whoever has one gives it back."""
    _free.release()


class Sending:
    """The bytes, as the agent sends them. It is closed by the web server, also where the client goes away.

    Args:
        events: of the agent; closing it stops that.
        what: the entry of the trail when it begins; the end is told of as well. None where it is empty.
        about: what of it the trail has.

    Raises:
        RefusedError: before the first byte; later it, or a HostError, cuts the answer off, which is shorter than
            announced.
    """

    def __init__(
        self,
        actor: Actor,
        image: Image,
        events: Generator[dict[str, Any], None, None],
        what: str,
        about: dict[str, Any],
    ) -> None:
        take_place()
        self._actor, self._image, self._open, self._what = actor, image, True, what
        self._sent, self._events, self._about = 0, events, about
        self._end: dict[str, Any] = {}
        try:
            self._first = self._next()  # what speaks against it is an answer of its own
            if what:
                audit(actor, what, image.name, after={"image": image.pk, **about})
        except HostError as error:
            self.close()
            raise RefusedError("host_unreachable", error.detail) from error
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[bytes]:
        try:
            piece = self._first
            while piece is not None:
                self._sent += len(piece)
                yield piece
                piece = self._next()
        finally:
            self.close()

    def _next(self) -> bytes | None:
        """The next piece; ``None`` at the end."""
        for event in self._events:
            if event["event"] == protocol.RESULT:
                self._end = event["data"]
                return None
            if event["event"] == protocol.DATA and "zeros" in event:
                return _ZEROS[: event["zeros"]]
            if event["event"] == protocol.DATA:
                return base64.b64decode(event["b64"])
        raise HostError(_("The agent ended without an answer."), protocol.INTERRUPTED)

    def close(self) -> None:
        """Ends the agent's work, and says in the trail what was sent."""
        if not self._open:
            return
        self._open = False
        give_place()
        self._events.close()
        if self._what and (self._sent or self._end):
            ended = {"bytes": self._sent, "sha256": self._end.get("sha256")}
            ended |= {"image": self._image.pk, **{name: self._about[name] for name in ("path",) if name in self._about}}
            audit(self._actor, "image download ended", self._image.name, after=ended)
