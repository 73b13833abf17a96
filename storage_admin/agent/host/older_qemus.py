"""Guests of libvirt that go on with a QEMU which an update has replaced since they were started.

Its file is gone, so that only its log tells which one it is: libvirt writes there with what it starts a guest
(``qemuDomainLogAppendMessage``, "starting up libvirt version: …, qemu version: …").
"""

from __future__ import annotations

import contextlib
import glob
import os
import re

#: What is said of one whose log does not tell.
UNKNOWN = "unknown"
_STARTED = re.compile(rb"starting up libvirt version: .*?, qemu version: (\d+(?:\.\d+)+)([^,\n]*)")
_GONE = " (deleted)"
#: Bytes of a log that are read, from its end: libvirt lets none become larger than 2 MiB.
_LONGEST = 4 << 20


def by_guest(root: str = "/") -> dict[str, str]:
    """The version of each such guest's QEMU, by the guest's name, as an emulator says it: ``7.2.22 (Debian …)``.

    Args:
        root: where ``run``, ``var`` and ``proc`` are looked for.
    """
    found = {}
    for path in glob.glob(os.path.join(glob.escape(root), "run/libvirt/qemu/*.pid")):
        name = os.path.basename(path)[: -len(".pid")]
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            with open(path, encoding="ascii") as file:
                pid = int(file.read())
            if os.readlink(os.path.join(root, "proc", str(pid), "exe")).endswith(_GONE):
                found[name] = _of_log(os.path.join(root, "var/log/libvirt/qemu", f"{name}.log"))
    return found


def _of_log(path: str) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LONGEST))
        if starts := _STARTED.findall(file.read(_LONGEST)):
            number, package = (part.decode("ascii", "replace").strip() for part in starts[-1])
            return f"{number} ({package})" if package else number
    return UNKNOWN
