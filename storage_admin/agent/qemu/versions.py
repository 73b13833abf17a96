"""Which qemu-img a host has, and what it can."""

from __future__ import annotations

import os
import re

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import HostError

_VERSION = re.compile(rb"qemu-img version ([0-9]+)\.([0-9]+)")
#: What was asked of a qemu-img already, by its device, inode and time of last modification: an upgrade is another one.
_known_versions: dict[tuple[int, int, int], tuple[int, int]] = {}
_known_zstd: dict[tuple[int, int, int], bool] = {}


def version(io: AgentIO) -> tuple[int, int]:
    """Major and minor version of this host's qemu-img; asked once for each.

    Raises:
        RefusedError: ``tool_missing``.
        HostError: it does not say.
    """
    program = _program()
    if program not in _known_versions:
        done = tools.run(["qemu-img", "--version"], io)
        found = _VERSION.search(done.stdout)
        if done.exit_code or found is None:
            raise HostError(f"qemu-img does not say its version: {done.words()}")
        _known_versions[program] = int(found.group(1)), int(found.group(2))
    return _known_versions[program]


def supports_zstd(io: AgentIO) -> bool:
    """Whether this host's qemu-img can compress with zstd: since 5.1, where it was built with it; asked once."""
    program = _program()
    if program not in _known_zstd:
        asked = ["qemu-img", "measure", "-O", "qcow2", "-o", "compression_type=zstd", "--size", "1M"]
        _known_zstd[program] = version(io) >= (5, 1) and tools.run(asked, io).exit_code == 0
    return _known_zstd[program]


def _program() -> tuple[int, int, int]:
    status = os.stat(tools.find("qemu-img"))
    return status.st_dev, status.st_ino, status.st_mtime_ns
