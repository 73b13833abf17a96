"""Starts the programs that ask libvirt (:mod:`storage_admin.hosts.libvirt.helper`), within a time limit."""

import json
import subprocess
import sys
from typing import Any

from django.conf import settings
from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError


def command(uri: str, words: list[str]) -> list[str]:
    """The argument list of a program: its module's name, and what it is given after the URI."""
    module, *arguments = words
    return [sys.executable, "-m", f"storage_admin.hosts.libvirt.{module}", uri, *arguments]


def ask(uri: str, words: list[str], seconds: float, sent: bytes = b"", *, failed: str = "libvirt said") -> Any:
    """What a program answered.

    Args:
        seconds: after which it is given up.
        sent: what it reads.
        failed: how the sentence begins where libvirt says that it does not work.

    Raises:
        HostError: no answer, or one that says why there is none.
    """
    try:
        done = subprocess.run(
            command(uri, words), capture_output=True, timeout=seconds, check=False, cwd=settings.BASE_DIR, input=sent
        )
    except subprocess.TimeoutExpired:
        raise HostError(_("libvirt did not answer within {seconds:.0f} s.").format(seconds=seconds)) from None
    if done.returncode != 0:
        raise HostError(
            _("The request to libvirt failed: {stderr}").format(
                stderr=done.stderr.decode("utf-8", "replace").strip()[-300:]
            )
        )
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise HostError(f"{failed}: {answer['error']}")
    return answer


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
