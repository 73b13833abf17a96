"""What every parser gives, and how it says that it cannot."""

from collections.abc import Mapping
from dataclasses import dataclass, field

TOO_QUICK = "too quick to measure"


@dataclass(frozen=True)
class Reading:
    """One figure out of a tool's output.

    Args:
        metric: its name, as in ``seq_write_rate``.
        unit: ``B/s``, ``1/s``, ``s``, ``B`` or ``%``.
        value: in that unit; ``None`` where the tool gives none, and ``note`` says why.
        setting: what distinguishes it from other readings of the same output, beside the step's own setting.
    """

    metric: str
    unit: str
    value: float | None
    note: str = ""
    setting: Mapping[str, str | int] = field(default_factory=dict)


class UnreadableError(ValueError):
    """A tool's output is not what it should be. The argument is a sentence for the admin."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


def quoted(text: str, most: int = 60) -> str:
    """The beginning of a text as it can stand in a sentence."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text[: most * 4]).split())
    return f"“{line[:most]}{'…' if len(line) > most else ''}”"
