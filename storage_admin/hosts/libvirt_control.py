"""What is asked of libvirt on this machine while a job waits for a guest, and after it: states, and a start."""

import json
import subprocess
import sys
from typing import Any

from django.conf import settings

from storage_admin.agent.protocol import HostError

#: Seconds until a question is given up, and until a start is.
STATES_TIMEOUT, START_TIMEOUT = 20.0, 120.0


def states() -> dict[str, str]:
    """The state of every domain on this machine, by its uid, in the words of ``libvirt_query.STATES``.

    Raises:
        HostError: libvirt does not answer; the argument says why.
    """
    answer = _run(["libvirt_states"], STATES_TIMEOUT)
    return {str(uid): str(state) for uid, state in answer["states"].items()}


def start(uid: str) -> str:
    """Starts a domain by its uid.

    Returns:
        ``started``, or ``running already``.

    Raises:
        HostError: it was not started, or not within the time limit; the argument says why.
    """
    return str(_run(["libvirt_start", uid], START_TIMEOUT)["outcome"])


def _run(words: list[str], seconds: float) -> dict[str, Any]:
    module, *arguments = words
    command = [sys.executable, "-m", f"storage_admin.hosts.{module}", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False, cwd=settings.BASE_DIR)
    except subprocess.TimeoutExpired:
        raise HostError(f"libvirt did not answer within {seconds:.0f} s.") from None
    if done.returncode != 0:
        raise HostError(f"libvirt could not be asked: {done.stderr.decode('utf-8', 'replace').strip()[-300:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise HostError(f"libvirt said: {answer['error']}")
    return answer
