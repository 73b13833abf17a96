"""Starts the programs that ask libvirt (:mod:`storage_admin.hosts.libvirt.helper`), within a time limit."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError, RefusedError

#: Seconds between two calls of whoever waits for a long answer.
TICK = 0.5


class GoneError(HostError):
    """libvirt ended while it was asked, or cannot be reached: what was asked for may be at work, done, or not begun."""


def command(uri: str, program: str) -> list[str]:
    """The argument list of a program, by its module's name."""
    return [sys.executable, "-m", f"storage_admin.hosts.libvirt.{program}", uri]


def ask(
    uri: str, program: str, seconds: float, request: dict[str, Any] | None = None, *, failed: str = "libvirt said",
    refused: str = "{contradiction}.", tick: Callable[[], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What a program answered.

    Args:
        seconds: after which it is given up.
        request: what it reads.
        failed: how the sentence begins where libvirt says that it does not work.
        refused: the sentence where the domain is not what it is taken for, with a place for ``contradiction``.
        tick: called twice a second; what it raises ends the program.

    Raises:
        RefusedError: ``stale_plan``: the domain is not what it is taken for.
        GoneError: libvirt ended meanwhile, or cannot be reached.
        HostError: no answer, or one that says why there is none.
    """
    answer: dict[str, Any] = json.loads(_said(uri, program, seconds, request, tick))
    if "error" in answer:
        raise (GoneError if answer.get("gone") else HostError)(f"{failed}: {answer['error']}")
    if "contradiction" in answer:
        raise RefusedError("stale_plan", refused.format(**answer))
    return answer


def _said(
    uri: str, program: str, seconds: float, request: dict[str, Any] | None, tick: Callable[[], None] | None
) -> bytes:
    deadline = time.monotonic() + seconds
    rest: bytes | None = b"" if request is None else json.dumps(request).encode()
    with subprocess.Popen(
        command(uri, program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=settings.BASE_DIR,
    ) as started:  # fmt: skip
        try:
            while True:
                left = max(0.0, deadline - time.monotonic())
                try:
                    out, error = started.communicate(rest, left if tick is None else min(left, TICK))
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
            started.kill()
            raise
    _expect_end(started.returncode, error)
    return out


def lines(uri: str, program: str, seconds: float, request: list[str]) -> tuple[list[dict[str, Any]], bool]:
    """The lines that a program has said until its end, or until it is given up.

    Returns:
        The lines, each a document, and whether it came to its end in time.

    Raises:
        HostError: it could not be started, or broke down.
    """
    try:
        done = subprocess.run(
            command(uri, program), capture_output=True, timeout=seconds, check=False, cwd=settings.BASE_DIR,
            input=json.dumps(request).encode(),
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return _documents(error.stdout or b""), False
    _expect_end(done.returncode, done.stderr)
    return _documents(done.stdout), True


def _expect_end(returncode: int, stderr: bytes) -> None:
    if returncode != 0:
        said = stderr.decode("utf-8", "replace").strip()[-300:]
        raise HostError(_("The request to libvirt failed: {stderr}").format(stderr=said))


def _documents(said: bytes) -> list[dict[str, Any]]:
    """The lines that arrived whole."""
    return [json.loads(line) for line in said.split(b"\n")[:-1]]
