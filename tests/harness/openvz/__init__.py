"""A host with OpenVZ in a folder: its containers' configurations, and doubles of vzctl and vzlist to put on PATH."""

import json
import os
import sys
from pathlib import Path

from storage_admin.hosts.shells import LocalShell

DOUBLES = Path(__file__).with_name("doubles.py")
TOOLS = ("vzctl", "vzlist")


class OpenVZHost:
    """The host.

    Args:
        folder: empty; everything of the host is in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin, self.conf = folder / "bin", folder / "conf"
        for name in ("bin", "conf", "private", "states", "switches", "kernel"):
            (folder / name).mkdir(parents=True)
        for tool in TOOLS:
            script = self.bin / tool
            where = f"OPENVZ_DOUBLE=${{OPENVZ_DOUBLE:-{folder}}}"
            script.write_text(f'#!/bin/sh\n{where} exec {sys.executable} -I -S {DOUBLES} {tool} "$@"\n')
            script.chmod(0o755)

    @property
    def folders(self) -> tuple[str, str]:
        """Where configurations are: OpenVZ's own folder, and Proxmox's, which is not there unless a test makes it."""
        return str(self.conf), str(self.folder / "pve")

    @property
    def shell(self) -> LocalShell:
        """Commands on the host."""
        return LocalShell({"PATH": f"{self.bin}:{os.defpath}"})

    def add(self, ctid: str, content: str | bytes = 'HOSTNAME="ct"\n', state: str = "stopped") -> Path:
        """A container; its configuration."""
        (self.folder / "private" / ctid).mkdir()
        self.state(ctid, state)
        path = self.conf / f"{ctid}.conf"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(0o644)
        return path

    def state(self, ctid: str, state: str) -> None:
        """Makes a container running, stopped, mounted or suspended."""
        (self.folder / "states" / ctid).write_text(state)

    def switch(self, name: str, value: str = "") -> None:
        """Turns a trap on; ``doubles.py`` says which there are."""
        (self.folder / "switches" / name).write_text(value)

    def remove(self, *tools: str) -> None:
        """Takes vzctl or vzlist away."""
        for tool in tools:
            (self.bin / tool).unlink()

    def in_kernel(self, ctid: str) -> int | None:
        """The priority that the kernel was told."""
        path = self.folder / "kernel" / ctid
        return int(path.read_text()) if path.exists() else None

    def calls(self, tool: str) -> list[list[str]]:
        """The arguments of each call of a tool."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [words[1:] for words in map(json.loads, lines) if words[0] == tool]
