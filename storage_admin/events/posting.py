"""One POST to a webhook: bounded in time and in what is read, never redirected, never to a machine's own link.

``requests`` bounds each wait on the socket; a receiver that sends a byte now and then would hold us for ever. So the
socket is remembered as soon as it is connected, and cut off when the whole thing has taken too long.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.utils import get_environ_proxies
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

from storage_admin.events.addresses import forbidden, without

#: Seconds to connect, for each wait on the socket, and for everything.
CONNECT, READ, WHOLE = 5.0, 10.0, 15.0
#: Characters of the answer's body that are kept.
KEPT = 200
AGENT = "Storage-Admin"
#: ``requests`` lets what ``urllib3`` says of a name, and what Python says of an address, pass as it is.
_FAILURES = (requests.RequestException, HTTPError, OSError, ValueError)


@dataclass(frozen=True)
class Outcome:
    """How it went.

    Args:
        status_code: of the answer, ``None`` where there was none.
        problem: why it does not count as delivered; empty where it does.
    """

    status_code: int | None = None
    problem: str = ""


def quoted(words: str | bytes) -> str:
    """What others said, as one line that can be kept and shown: no database takes a NUL from them, no page an escape.

    Args:
        words: of any length; ``KEPT`` characters are left.
    """
    text = words.decode(errors="replace") if isinstance(words, bytes) else words
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())[:KEPT]


class _ForbiddenAddressError(OSError):
    """The name leads to an address that nothing is sent to."""


class _Line:
    """The socket of a POST that is on its way in this thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.is_cut = False

    def take(self, connected: socket.socket) -> None:
        with self._lock:
            self._socket = connected
        if self.is_cut:
            self.cut()

    def cut(self) -> None:
        self.is_cut = True
        with self._lock:
            if self._socket is not None:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it has ended by itself

    @contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        timer = threading.Timer(seconds, self.cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class _Lines(threading.local):
    now: _Line | None = None


_lines = _Lines()


def _connected(sock: Any, *, proxied: bool) -> None:
    if not proxied and forbidden(str(sock.getpeername()[0])):
        sock.close()
        raise _ForbiddenAddressError
    if _lines.now is not None:
        _lines.now.take(sock)


class _Plain(HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _connected(self.sock, proxied=self.proxy is not None)


class _Secure(HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _connected(self.sock, proxied=self.proxy is not None)


class _PlainPool(HTTPConnectionPool):
    ConnectionCls = _Plain


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _Secure


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _PlainPool, "https": _SecurePool}


class _Session(requests.Session):
    """Redirects are not followed. ``requests`` would read all of one's body even so, into memory, to prepare for it."""

    def get_redirect_target(self, _answer: requests.Response) -> None:
        return None


def post(url: str, body: bytes, headers: dict[str, str]) -> Outcome:
    """Sends the body. Only an answer of the 200s counts as delivered."""
    line = _lines.now = _Line()
    try:
        with _Session() as session, line.at_most(WHOLE):
            session.trust_env = False  # no password out of a .netrc goes to a receiver
            session.mount("http://", _Adapter())
            session.mount("https://", _Adapter())
            answer = session.post(
                url, data=body, headers={"User-Agent": AGENT, "Content-Type": "application/json"} | headers,
                timeout=(CONNECT, READ), allow_redirects=False, stream=True, proxies=get_environ_proxies(url),
                verify=os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE") or True,
            )  # fmt: skip
            # A connection that is cut among the headers looks like an answer that has ended.
            return Outcome(problem=_too_slow()) if line.is_cut else _judged(url, answer)
    except _FAILURES as error:
        return Outcome(problem=_said(error, line))
    finally:
        _lines.now = None


def _too_slow() -> str:
    return f"The response was not complete within {WHOLE:.0f} seconds."


def _judged(url: str, answer: requests.Response) -> Outcome:
    code = answer.status_code
    if 200 <= code < 300:
        return Outcome(code)
    if 300 <= code < 400:
        return Outcome(code, f"The server redirected ({code}). Redirects are not followed; enter the final URL.")
    try:
        raw = next(iter(answer.iter_content(4 * KEPT)), b"")
    except _FAILURES:
        raw = b""
    text = quoted(without(url, raw.decode(errors="replace")))
    return Outcome(code, f"The server answered {code}" + (f": {text}" if text else "."))


def _said(error: Exception, line: _Line) -> str:
    if line.is_cut:
        return _too_slow()
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and len(causes) < 10:
        causes.append(cause if isinstance(cause, Exception) else error)
    if any(isinstance(one, _ForbiddenAddressError) for one in causes):
        return "The host name resolves to a link-local address, which is not allowed."
    if isinstance(error, requests.exceptions.ConnectTimeout):
        return f"No connection within {CONNECT:.0f} seconds."
    if isinstance(error, requests.exceptions.Timeout):
        return f"No response within {READ:.0f} seconds."
    if isinstance(error, requests.exceptions.SSLError):
        return f"TLS failed or the certificate was not accepted: {_last(causes)}"
    if any(isinstance(one, ConnectionRefusedError) for one in causes):
        return "Connection refused."
    if any(isinstance(one, socket.gaierror) for one in causes):
        return "The host name cannot be resolved."
    if isinstance(error, ValueError):
        return "Invalid URL."
    return f"The connection failed: {_last(causes)}"


def _last(causes: list[Exception]) -> str:
    """The innermost error's own words; the outer ones repeat the address, with what stands in its query."""
    inner = next((one for one in reversed(causes) if isinstance(one, OSError) and one.strerror), None)
    return quoted(str(inner.strerror) if inner is not None else type(causes[-1]).__name__)
