"""A host with OpenVZ, and what happens between two commands on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from storage_admin.hosts.openvz import PrioritySet, set_priority
from storage_admin.hosts.shells import Done, Shell
from tests.harness.openvz import OpenVZHost


@dataclass
class WatchedShell:
    """A shell that says what was run, and lets something happen before a command.

    Args:
        before: what happens before the first command whose words hold this one.
    """

    inner: Shell
    before: dict[str, Callable[[], object]] = field(default_factory=dict)
    ran: list[tuple[str, ...]] = field(default_factory=list)

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float = 30.0) -> Done:
        for word in [word for word in self.before if any(word in one for one in argv)]:
            self.before.pop(word)()
        self.ran.append(tuple(argv))
        return self.inner.run(argv, stdin=stdin, seconds=seconds)


@pytest.fixture
def host(tmp_path: Path) -> OpenVZHost:
    return OpenVZHost(tmp_path / "host")


@pytest.fixture
def bare(host: OpenVZHost) -> OpenVZHost:
    """Without vzctl and vzlist."""
    host.remove("vzctl", "vzlist")
    return host


def give(host: OpenVZHost, ctid: str, priority: int | str, shell: Shell | None = None) -> PrioritySet:
    """Sets a priority and waits for nothing."""
    return set_priority(shell or host.shell, ctid, priority, folders=host.folders, pause=lambda _: None)
