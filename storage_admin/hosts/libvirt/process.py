"""Starts the programs that ask libvirt (:mod:`storage_admin.hosts.libvirt.helper`), within a time limit."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError

#: Seconds between two calls of whoever waits for a long answer.
TICK = 0.5


class GoneError(HostError):
    """libvirt ended while it was asked, or cannot be reached: what was asked for may be at work, done, or not begun."""


def command(uri: str, words: list[str]) -> list[str]:
    """The argument list of a program: its module's name, and what it is given after the URI."""
    module, *arguments = words
    return [sys.executable, "-m", f"storage_admin.hosts.libvirt.{module}", uri, *arguments]


def ask(
    uri: str, words: list[str], seconds: float, sent: bytes = b"", *, failed: str = "libvirt said",
    tick: Callable[[], None] | None = None,
) -> Any:  # fmt: skip
    """What a program answered.

    Args:
        seconds: after which it is given up.
        sent: what it reads.
        failed: how the sentence begins where libvirt says that it does not work.
        tick: called twice a second; what it raises ends the program.

    Raises:
        GoneError: libvirt ended meanwhile, or cannot be reached.
        HostError: no answer, or one that says why there is none.
    """
    said = _said(uri, words, seconds, sent, tick)
    answer = json.loads(said)
    if "error" in answer:
        raise (GoneError if answer.get("gone") else HostError)(f"{failed}: {answer['error']}")
    return answer


def _said(uri: str, words: list[str], seconds: float, sent: bytes, tick: Callable[[], None] | None) -> bytes:
    deadline = time.monotonic() + seconds
    rest: bytes | None = sent
    with subprocess.Popen(
        command(uri, words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=settings.BASE_DIR,
    ) as program:  # fmt: skip
        try:
            while True:
                left = max(0.0, deadline - time.monotonic())
                try:
                    out, error = program.communicate(rest, left if tick is None else min(left, TICK))
                    break
                except subprocess.TimeoutExpired:
                    if time.monotonic() >= deadline:
                        raise HostError(
                            _("libvirt did not answer within {seconds:.0f} s.").format(seconds=seconds)
                        ) from None
                    rest = None  # all of it is on its way
                    if tick is not None:
                        tick()
        except BaseException:
            program.kill()
            raise
    if program.returncode != 0:
        raise HostError(
            _("The request to libvirt failed: {stderr}").format(stderr=error.decode("utf-8", "replace").strip()[-300:])
        )
    return out


def lines(uri: str, words: list[str], seconds: float, sent: bytes = b"") -> tuple[list[dict[str, Any]], bool]:
    """The lines that a program has said until its end, or until it is given up.

    Returns:
        The lines, each a document, and whether it came to its end in time.

    Raises:
        HostError: it could not be started, or broke down.
    """
    try:
        done = subprocess.run(
            command(uri, words), capture_output=True, timeout=seconds, check=False, cwd=settings.BASE_DIR, input=sent
        )
    except subprocess.TimeoutExpired as error:
        return _documents(error.stdout or b""), False
    if done.returncode != 0:
        raise HostError(
            _("The request to libvirt failed: {stderr}").format(
                stderr=done.stderr.decode("utf-8", "replace").strip()[-300:]
            )
        )
    return _documents(done.stdout), True


def _documents(said: bytes) -> list[dict[str, Any]]:
    """The lines that arrived whole."""
    return [json.loads(line) for line in said.split(b"\n")[:-1]]
