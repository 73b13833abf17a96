"""What is asked of libvirt on a host around a job: states, a start, another file for a guest's disk."""

import json
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

from django.conf import settings

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.libvirt_disks import Edit, Edited
from storage_admin.hosts.libvirt_uri import uri_of
from storage_admin.hosts.models import Host

#: Seconds until a question is given up, until a start is, and until a definition is.
STATES_TIMEOUT, START_TIMEOUT, DEFINE_TIMEOUT = 20.0, 120.0, 20.0


def states(host: Host) -> dict[str, str]:
    """The state of every domain on a host, by its uid, in the words of ``libvirt_query.STATES``.

    Raises:
        HostError: libvirt does not answer; the argument says why.
    """
    answer = _run(host, ["libvirt_states"], STATES_TIMEOUT)
    return {str(uid): str(state) for uid, state in answer["states"].items()}


def start(host: Host, uid: str) -> str:
    """Starts a domain by its uid.

    Returns:
        ``started``, or ``running already``.

    Raises:
        HostError: it was not started, or not within the time limit; the argument says why.
    """
    return str(_run(host, ["libvirt_start", uid], START_TIMEOUT)["outcome"])


def repoint(host: Host, uid: str, edits: list[Edit], *, write: bool, forward: bool = True) -> list[Edited]:
    """Leads disks of a domain that is off to other files, in its definition.

    Args:
        write: define it; else only look whether it could be.
        forward: refuse where libvirt keeps something that names the old files, such as snapshots.

    Returns:
        The disks that were, or would be, changed: those that lead to their new files already are not among them.

    Raises:
        RefusedError: ``stale_plan``: it runs, or its definition is not what the edits say.
        HostError: libvirt does not answer, or refuses it; the argument says why.
    """
    request = {
        "uid": uid, "edits": [asdict(edit) for edit in edits], "write": write, "forward": forward,
        "until": time.time() + DEFINE_TIMEOUT / 2,
    }  # fmt: skip
    answer = _run(host, ["libvirt_repoint"], DEFINE_TIMEOUT, json.dumps(request).encode())
    if "contradiction" in answer:
        raise RefusedError("stale_plan", f"The guest's definition cannot be changed: {answer['contradiction']}.")
    return [Edited(**disk) for disk in answer["disks"]]


def _run(host: Host, words: list[str], seconds: float, sent: bytes = b"") -> dict[str, Any]:
    with uri_of(host) as uri:
        if uri is None:
            raise HostError(f"No libvirt listens on {host.name}.")
        return _asked(uri, words, seconds, sent)


def _asked(uri: str, words: list[str], seconds: float, sent: bytes) -> dict[str, Any]:
    module, *arguments = words
    command = [sys.executable, "-m", f"storage_admin.hosts.{module}", uri, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=seconds, check=False, cwd=settings.BASE_DIR, input=sent
        )
    except subprocess.TimeoutExpired:
        raise HostError(f"libvirt did not answer within {seconds:.0f} s.") from None
    if done.returncode != 0:
        raise HostError(f"libvirt could not be asked: {done.stderr.decode('utf-8', 'replace').strip()[-300:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise HostError(f"libvirt said: {answer['error']}")
    return answer
