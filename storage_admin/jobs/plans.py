"""What a job would do, predicted from the database before anything is touched."""

from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """Why a job would not be done: a code, and a sentence that says what to do."""

    code: str
    detail: str


@dataclass(frozen=True)
class Affected:
    """An image or a guest that the job touches or depends on."""

    id: int
    name: str
    how: str = ""


@dataclass(frozen=True)
class Plan:
    """What a job would do. Sizes are bytes on the host; ``None`` means that it is not known yet.

    ``facts_at`` is the age of what the plan rests on: the last scan of the image's pool.
    ``won_bytes`` is what it would free, of a job that is for that; other files may share what it lets go of.
    ``scratch_bytes`` is what the work takes at most beside the original, in the pool of the id ``scratch_pool``, and
    ``lasting_bytes`` how much of that is still taken when the job has ended.
    ``by_hand`` says why no policy may choose it, while a user may: each stands among the warnings, too.
    ``undo_bytes`` is what the undo copy would hold, and so keep from being free, until its window closes.
    """

    method: str = ""
    reason: str = ""
    commands: tuple[str, ...] = ()
    facts_at: datetime | None = None
    before_bytes: int | None = None
    predicted_after_bytes: int | None = None
    predicted_low: int | None = None
    predicted_high: int | None = None
    won_bytes: int | None = None
    predicted_seconds: int | None = None
    predicted_seconds_low: int | None = None
    predicted_seconds_high: int | None = None
    scratch_bytes: int | None = None
    scratch_pool: int | None = None
    lasting_bytes: int | None = None
    undo_bytes: int | None = None
    refusals: tuple[Refusal, ...] = ()
    by_hand: tuple[Refusal, ...] = ()
    warnings: tuple[str, ...] = ()
    affected_images: tuple[Affected, ...] = ()
    affected_guests: tuple[Affected, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The plan as the API and the job's row carry it."""
        plan = asdict(self)
        plan["facts_at"] = self.facts_at.isoformat().replace("+00:00", "Z") if self.facts_at else None
        return plan
