"""Other agents of this very program on this machine: one that samples an image while another one is to rewrite it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator


def fellow_agents() -> Iterator[int]:
    """Process ids of all agents that run the same file as the same user, this one among them."""
    for name in os.listdir("/proc"):
        if name.isdigit() and is_fellow(name):
            yield int(name)


def is_fellow(pid: str) -> bool:
    """Whether a process is an agent that runs the same file as the same user."""
    program = os.fsencode(sys.argv[0])
    if not program.endswith(b".pyz"):
        return False  # it runs from a folder, as in development
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
        return program in words[:4] and os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return False  # the process has ended


def only_reads(pid: str, descriptor: str) -> bool:
    """Whether a process has a descriptor open for reading alone (proc_pid_fdinfo(5), "flags", in octal)."""
    try:
        with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii") as file:
            for line in file:
                if line.startswith("flags:"):
                    return int(line.split()[1], 8) & os.O_ACCMODE == os.O_RDONLY
    except (OSError, ValueError, IndexError):
        return False
    return False
