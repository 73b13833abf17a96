"""What became of a priority that was to be set."""

from dataclasses import dataclass
from enum import StrEnum

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError
from storage_admin.hosts.openvz.commands import CommandRun
from storage_admin.hosts.openvz.config import Recorded


class Effect(StrEnum):
    """From when on a priority that stands in the configuration counts."""

    NOW = "now"
    NEXT_START = "next_start"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"

    @property
    def words(self) -> str:
        """For a sentence."""
        return _WORDS[self]


_WORDS = {
    Effect.NOW: "in effect now",
    Effect.NEXT_START: "takes effect at next start",
    Effect.UNSUPPORTED: "saved, but not in effect: this kernel does not support I/O priorities for containers",
    Effect.UNKNOWN: "saved; whether it is in effect is unknown",
}


@dataclass(frozen=True)
class PrioritySet:
    """What was there, what is there, and since when it counts.

    Args:
        priority: that was asked for.
        path: the configuration.
        by: ``vzctl``, or ``file`` where the configuration was edited without it.
        before, now: what the configuration said, and says as it was read again.
        state: of the container after it, in libvirt's words, or ``unknown``.
        listed: what vzlist says now; ``None`` where it says that none is set, and where it did not say.
        was_listed: whether vzlist told of the container.
        notes: what else an admin should know, as sentences.
    """

    ctid: str
    priority: int
    path: str
    by: str
    before: Recorded
    now: Recorded
    state: str
    listed: int | None
    was_listed: bool
    effect: Effect
    commands: tuple[CommandRun, ...]
    notes: tuple[str, ...] = ()

    @property
    def as_asked(self) -> bool:
        """Whether all that was read again says what was asked for."""
        return self.now.priority == self.priority and (not self.was_listed or self.listed == self.priority)

    @property
    def words(self) -> str:
        """In a sentence."""
        said = f"Container {self.ctid}: {self.before.words} before, {self.now.words} now"
        return (
            _("{said}; {words}.").format(said=said, words=self.effect.words)
            if self.as_asked
            else _("{said}; {priority} was requested.").format(said=said, priority=self.priority)
        )


class NotSetError(HostError):
    """The host did something, and it is not what was asked for.

    Args:
        outcome: what is there now.
        lost: what the configuration said before, where that does not stand anywhere on the host any more.
    """

    def __init__(self, detail: str, outcome: PrioritySet, lost: bytes = b"") -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.lost = lost
