"""Which versions the programs of a host say they are.

To say it, some load a hundred libraries, which takes longer than all else that a scan of unchanged images does. So one
is asked once, and again when its file is another one.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterable
from typing import Any

from storage_admin.agent.protocol import HostError

#: Seconds for an answer.
LIMIT = 10.0
_MOST = 4096
_TOOL_VERSION = re.compile(rb"(?:fio-|ersion:? |coreutils\) )([0-9]+\.[0-9][0-9a-z.]*)")
_EMULATOR_VERSION = re.compile(rb"QEMU emulator version (\d[ -~]{0,100})")
_QEMU_IMG_VERSION = re.compile(rb"version (\d+\.\d+(?:\.\d+)*)")


class Programs:
    """Programs of this host, by their paths. All are started at once, and answer while something else is done.

    Args:
        paths: of those that will be asked about; ``None`` for one that is not installed.
        known: what :attr:`told` was the last time, as the controller has it.
    """

    def __init__(self, paths: Iterable[str | None], known: Any = None) -> None:
        self._known = known if isinstance(known, dict) else {}
        #: By path, what tells one file from another, and the version that this one says.
        self.told: dict[str, list[str]] = {}
        self._asked: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        for path in paths:
            if path is not None:
                self._ask(path)

    def tool(self, path: str | None) -> str | None:
        """The version of a tool that storage is measured with; ``None`` where it is not installed, or says none."""
        return self._version(path, _TOOL_VERSION)

    def emulator(self, path: str | None) -> str | None:
        """That of what runs guests, with the revision of its package: ``7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)``."""
        return self._version(path, _EMULATOR_VERSION)

    def qemu_img(self, path: str | None) -> str | None:
        """Such as ``7.2.22``; ``None`` where qemu-img is not installed.

        Raises:
            HostError: it is, and does not answer as expected.
        """
        return self._version(path, _QEMU_IMG_VERSION, must=True)

    def _ask(self, path: str) -> None:
        stamp, before = _stamp(path), self._known.get(path)
        if stamp and isinstance(before, list) and before[:1] == [stamp] and isinstance(before[-1], str):
            self.told[path] = [stamp, before[-1]]
            return
        with contextlib.suppress(OSError):
            # bonnie++ has no such option, and says its version with how it is used.
            self._asked[path] = (
                stamp,
                subprocess.Popen(
                    [path, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                ),
            )

    def _version(self, path: str | None, pattern: re.Pattern[bytes], *, must: bool = False) -> str | None:
        if path is None or path in self.told:
            return None if path is None else self.told[path][1]
        stamp, process = self._asked.pop(path, ("", None))
        code, said, beside = _answer(process)
        found = pattern.search(said[:_MOST]) or (None if must else pattern.search(beside[:_MOST]))
        if must and (code or found is None):
            words = (beside or said)[:200].decode("utf-8", "backslashreplace")
            raise HostError(f"{os.path.basename(path)} --version ended with {code}: {words}")
        if found is None:
            return None
        version = found[1].decode("ascii")
        if stamp:
            self.told[path] = [stamp, version]
        return version


def tool_versions(paths: dict[str, str | None]) -> dict[str, str | None]:
    """What versions some tools that storage is measured with say they are, by their names."""
    programs = Programs(paths.values())
    return {name: programs.tool(path) for name, path in paths.items()}


def _answer(process: subprocess.Popen[bytes] | None) -> tuple[str, bytes, bytes]:
    """How it ended, empty where well, and what it said on standard output and beside it."""
    if process is None:
        return "no start", b"", b""
    try:
        said, beside = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "no answer", b"", b""
    return f"exit code {process.returncode}" if process.returncode else "", said, beside


def _stamp(path: str) -> str:
    """What is another for each file; empty for one that cannot be told, and for a script, which may start any other."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        status = os.fstat(fd)
        if os.pread(fd, 4, 0) != b"\x7fELF":
            return ""
    except OSError:
        return ""
    finally:
        os.close(fd)
    return ":".join(map(str, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)))
