"""An agent that does one request after the other: a process start for each of thousands of them would take minutes.

It runs the verbs as ``main.py`` runs them, with a controller that says go. Standard input has one request a line,
standard output one answer a line: the ``result``, or ``code`` and ``detail``; all events, those of a scan's images
where they are wanted; how long it took and how large the process became. With the argument ``no-appliance`` whatever
would start libguestfs' appliance, which takes half a minute, is refused with :data:`NO_APPLIANCE`.
"""

import json
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from storage_admin.agent import main, protocol
from storage_admin.agent.appliance import appliance
from storage_admin.agent.host import thin
from storage_admin.agent.protocol import HostError, RefusedError, Request, StoppedError
from storage_admin.agent.swap import moment
from storage_admin.agent.verbs import aside_volume, scan
from tests.agent.recording import RecordingIO

MOST_MEMORY_BYTES = 4 << 30
_KIB = 1024
NO_APPLIANCE = "it came as far as the appliance"


class Controller(RecordingIO):
    """Says go, and cancels what takes longer than it may."""

    def __init__(self, limit_seconds: float, *, keep: bool) -> None:
        super().__init__()
        self._deadline = time.monotonic() + limit_seconds
        self._keep = keep

    def emit_raw(self, line: bytes) -> None:
        """Events of images; those of a hostile pool may be large."""
        if self._keep:
            super().emit_raw(line)

    def check(self) -> None:
        if time.monotonic() > self._deadline:
            raise StoppedError(protocol.CANCELLED, "cancelled")

    def progress(self, stage: str, done: int, total: int | None, message: str = "") -> None:
        """Thousands of them say nothing to a test."""

    def wait_for_go(self, generation: int, **made: int | str) -> None:
        self.check()


def no_appliance(*_: object, **__: object) -> NoReturn:
    """In place of :func:`appliance.on`."""
    raise RefusedError("tool_missing", NO_APPLIANCE)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What comes of one request: see ``main.main``, which tells the same things apart."""
    io = Controller(request["limit_seconds"], keep=request["keep"])
    asked = Request(request["verb"], request["job"], 1, request["args"])
    _forget_peak()
    started = time.monotonic()
    told: dict[str, Any]
    try:
        told = {"code": "", "detail": "", "result": main.load(asked.verb)(asked, io)}
    except (StoppedError, RefusedError, HostError) as error:
        told = {"code": error.code, "detail": error.detail, "result": None}
    except Exception:  # noqa: BLE001 - whatever else it is, it is a bug
        told = {"code": protocol.BUG, "detail": traceback.format_exc(), "result": None}
    return {
        **told,
        "events": io.events,
        "seconds": time.monotonic() - started,
        "peak_bytes": _of_this_process("VmHWM"),
        "tools_peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * _KIB,
    }


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): reset the peak resident set size


def _of_this_process(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == what:
            return int(value.split()[0]) * _KIB
    raise LookupError(what)


if __name__ == "__main__":
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    # An agent that a hostile image makes grow must not take the machine with it; the tests tell what it may take.
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
    # How long a swap waits for those who come late is another test's matter.
    moment.GRACE = 0.0
    # What the own tools of LVM, ZFS and Ceph open, where they are installed, and where a recovery looks for what killed
    # agents have left of an appliance, has nothing to do with what is looked for here.
    vars(scan)["BACKENDS"] = ()
    vars(aside_volume)["BACKENDS"] = {}
    vars(thin)["release_left"] = lambda _: None
    vars(appliance)["clear"] = lambda: None
    if "no-appliance" in sys.argv:
        vars(appliance)["on"] = no_appliance
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()
