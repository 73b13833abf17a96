"""A mail server on the loopback that speaks as much of SMTP (RFC 5321) as a mail needs, and keeps what it got."""

import email
import email.policy
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import EmailMessage
from typing import Any


@dataclass
class Mailbox:
    """What came. ``refused`` are addresses that get a 550; ``later`` is how many mails get a 451 first; another
    ``greeting`` than that of a mail server is all that it says.
    """

    refused: set[str] = field(default_factory=set)
    later: int = 0
    greeting: bytes = b"220 mailbox"
    got: list[tuple[list[str], EmailMessage]] = field(default_factory=list)
    port: int = 0


@contextmanager
def mailbox(**settings: Any) -> Iterator[Mailbox]:
    """A mail server that listens as long as the context lasts."""
    box = Mailbox(**settings)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            recipients: list[str] = []
            self.wfile.write(box.greeting + b"\r\n")
            for line in self.rfile if box.greeting.startswith(b"220") else ():
                verb = line.strip().split(b" ")[0].upper()
                address = line.partition(b"<")[2].partition(b">")[0].decode()
                if verb == b"RCPT" and address in box.refused:
                    self._say("550 no such user")
                elif verb == b"RCPT":
                    recipients.append(address)
                    self._say("250 ok")
                elif verb == b"DATA":
                    self._take(recipients)
                    recipients = []
                elif verb == b"QUIT":
                    self._say("221 bye")
                    return
                else:
                    self._say("250 ok")

        def _take(self, recipients: list[str]) -> None:
            self._say("354 go on")
            lines = []
            for line in self.rfile:
                if line == b".\r\n":
                    break
                lines.append(line.removeprefix(b".") if line.startswith(b"..") else line)
            if box.later:
                box.later -= 1
                self._say("451 not now")
                return
            message = email.message_from_bytes(b"".join(lines), _class=EmailMessage, policy=email.policy.default)
            box.got.append((recipients, message))
            self._say("250 taken")

        def _say(self, line: str) -> None:
            self.wfile.write(line.encode() + b"\r\n")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    box.port = server.server_address[1]
    try:
        yield box
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
