"""What a job is asked to do (its options), what it would do, and what its agent says while it works.

The latter is written to the job's row at most twice a second.
"""

import logging
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import jsonschema
from django.db import InterfaceError, OperationalError, connection, transaction
from django.utils import timezone
from django.utils.translation import gettext

from storage_admin.agent.protocol import RefusedError, display
from storage_admin.errors import of_fields
from storage_admin.jobs.models import Job, JobLog


@dataclass(frozen=True)
class Refusal:
    """Why a job would not be done: a code, and a sentence that says what to do."""

    code: str
    detail: str


def refuse(found: Iterable[Refusal]) -> None:
    """Refuses what a plan would refuse by now.

    Raises:
        RefusedError: the first of these, if there is any.
    """
    for refusal in found:
        raise RefusedError(refusal.code, refusal.detail)


@dataclass(frozen=True)
class Cause:
    """Why space that a guest frees does not become free on its host.

    Args:
        code: of it, for programs.
        sentence: what is so, and what that means.
        mend: what to do about it.
        disk: target of the disk that it is about; empty for the whole guest.
        stops: whether nothing at all becomes free because of it.
    """

    code: str
    sentence: str
    mend: str
    disk: str = ""
    stops: bool = False


@dataclass(frozen=True)
class Affected:
    """An image or a guest that the job touches or depends on."""

    id: int
    name: str
    how: str = ""


@dataclass(frozen=True)
class LastBackup:
    """The newest backup of a guest that is known and can be used.

    Args:
        guest: its name and number, or the number alone of one that is gone.
        at: when it was made; ``None`` where none is known.
        volume: the storage's own name for it; empty where none is known.
        included: whether the disk in question (of a guest: each of its disks) is in it; ``None`` where nobody tells.
        detail: in sentences, why none is known, or what that one may lack.
    """

    guest: str
    at: datetime | None = None
    volume: str = ""
    included: bool | None = None
    detail: str = ""

    @property
    def storage(self) -> str:
        """The storage that it is on."""
        return self.volume.partition(":")[0]


@dataclass(frozen=True)
class Plan:
    """What a job would do. Sizes are bytes on the host; ``None`` means that it is not known yet.

    ``facts_at`` is the age of what the plan rests on: the last scan of the image's pool.
    ``won_bytes`` is what it would free, of a job that is for that; other files may share what it lets go of.
    ``scratch_bytes`` is what the work takes at most beside the original, in the pool of the id ``scratch_pool``, and
    ``lasting_bytes`` how much of that is still taken when the job has ended.
    ``by_hand`` says why no policy may choose it, while a user may: each stands among the warnings, too.
    ``undo_bytes`` is what the undo copy would hold, and so keep from being free, until its window closes.
    ``causes`` are why less than what a running guest frees becomes free, or nothing.
    ``backups`` are the last ones of the guests whose data it deletes or rewrites, those that help least first.
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
    causes: tuple[Cause, ...] = ()
    affected_images: tuple[Affected, ...] = ()
    affected_guests: tuple[Affected, ...] = ()
    backups: tuple[LastBackup, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The plan as the API and the job's row carry it."""
        plan = asdict(self)
        plan["facts_at"] = _moment(self.facts_at)
        plan["backups"] = [asdict(one) | {"at": _moment(one.at)} for one in self.backups]
        return plan


def _moment(at: datetime | None) -> str | None:
    return at.isoformat().replace("+00:00", "Z") if at else None


logger = logging.getLogger(__name__)

INTERVAL = 0.5
#: By how much a tool may be over its limit in a short time.
_OVER = 1.1
#: Lines that are kept while the database is away.
LONGEST_WAIT = 10_000


class Recorder:
    """Keeps the last progress and the new log lines of a job until the next write."""

    def __init__(
        self, job: Job, stages: Mapping[str, tuple[float, float]], *, in_bytes: bool = True, at_most: int | None = None
    ) -> None:
        """Args:

        stages: from where to where each stage brings the whole job, in percent.
        in_bytes: whether progress is counted in bytes; else in something of which only the share is shown.
        at_most: bytes a second that the job may move; what passes quicker was holes, which nobody moved.
        """
        self._job = job
        self._stages = stages
        self._in_bytes = in_bytes
        self._fastest = None if at_most is None else at_most * _OVER
        self._progress: dict[str, Any] = {}
        self._lines: list[JobLog] = []
        self._tried = False
        self._commands: list[dict[str, Any]] = list(job.commands)
        self._commands_changed = False
        self._written = 0.0
        self._reached: tuple[object, ...] = ()
        # When it came further, as long as the row does not say so.
        self._progressed: datetime | None = None
        self._stage_began: tuple[str, float, int] = ("", 0.0, 0)
        self.cancel_requested = False
        #: Whether the agent was left to itself: what it does then, a recovery tells.
        self.agent_left = False

    def progress(self, event: dict[str, Any]) -> None:
        """Takes a ``progress`` event; ``percent`` in it is of the whole job, where that is all that is known."""
        done, total, stage = event.get("done"), event.get("total"), str(event.get("stage", ""))
        rate, eta = self._rate(stage, done, total)
        if (reached := (stage, done, event.get("percent"))) != self._reached:
            self._reached, self._progressed = reached, timezone.now()
        self._progress = {
            "stage": stage[:40],
            "message": plain(str(event.get("message", ""))),
            "progress": event["percent"] if "percent" in event else self._percent(stage, done, total),
            "done_bytes": done if self._in_bytes else None,
            "total_bytes": total if self._in_bytes else None,
            "bytes_per_sec": rate if self._in_bytes else None,
            "eta_seconds": eta,
        }

    def _rate(self, stage: str, done: int | None, total: int | None) -> tuple[int | None, int | None]:
        now = time.monotonic()
        name, began, at_start = self._stage_began
        if stage != name or done is None:
            self._stage_began = (stage, now, done or 0)
            return None, None
        seconds, moved = now - began, done - at_start
        if seconds < 1 or moved <= 0:
            return None, None
        rate = moved / seconds
        if self._fastest is not None and rate > self._fastest:
            return None, None
        return int(rate), int((total - done) / rate) if total is not None else None

    def _percent(self, stage: str, done: int | None, total: int | None) -> float:
        begin, end = self._stages.get(stage, (0.0, 0.0) if self._stages else (0.0, 100.0))
        share = min(1.0, done / total) if done is not None and total else 0.0
        return round(begin + (end - begin) * share, 1)

    def log(self, text: str, level: str = JobLog.Level.INFO) -> None:
        """Takes a line for the log."""
        if len(self._lines) < LONGEST_WAIT or level == JobLog.Level.ERROR:
            self._lines.append(JobLog(job=self._job, level=level[:8], text=plain(text)))

    def command(self, event: dict[str, Any]) -> None:
        """Takes a ``command`` event: what was run, and how it ended."""
        argv, ended = [plain(str(word)) for word in event.get("argv", [])], event.get("exit_code")
        self._commands.append({"argv": argv, "exit_code": ended})
        self._commands_changed, self._progressed = True, timezone.now()
        suffix = "" if ended is None else f"  (exit code {ended})"
        self.log(shlex.join(argv) + suffix, JobLog.Level.COMMAND)

    def tick(self) -> None:
        """Writes if it is time to, and looks whether somebody wants the job cancelled.

        A database that is away does not end the work: what has gathered waits, and the lease decides.
        """
        if time.monotonic() - self._written < INTERVAL:
            return
        try:
            self.flush()
        except (OperationalError, InterfaceError) as error:
            logger.warning("job %s goes on without the database: %s", self._job.pk, error)
            connection.close()

    def flush(self) -> None:
        """Writes what has gathered. Call it outside of a transaction: what was not written stays for the next time."""
        self._written = time.monotonic()
        columns = dict(self._progress)
        if self._commands_changed:
            columns["commands"] = self._commands
        if self._progressed is not None:
            columns["progressed"] = self._progressed
        lines = self._unwritten()
        with transaction.atomic():
            if columns:
                self._job.ours().update(**columns)
            JobLog.objects.bulk_create(lines)
        self._progress, self._progressed = {}, None
        self._lines, self._commands_changed, self._tried = [], False, False
        self.cancel_requested = not self._job.ours().filter(cancel_requested=False).exists()

    def _unwritten(self) -> list[JobLog]:
        """Rows for the lines that are not in the log yet.

        They are made anew each time: a key from an attempt that came to nothing may be somebody else's by now. And a
        database that went away in the middle of a commit may have kept what it did not answer for.
        """
        if self._tried and self._lines:
            since = JobLog.objects.filter(job=self._job, at__gte=min(line.at for line in self._lines))
            known = set(since.values_list("at", "text"))
            self._lines = [line for line in self._lines if (line.at, line.text) not in known]
        self._tried = True
        return [JobLog(job=self._job, at=line.at, level=line.level, text=line.text) for line in self._lines]


def plain(text: str) -> str:
    """Text as every database takes it: a tool's words may hold anything, and PostgreSQL takes no NUL."""
    lines = text.split("\n")
    return "\n".join(
        line if line.isprintable() else display(line.encode("utf-8", "backslashreplace")) for line in lines
    )


def _is_whole(_checker: jsonschema.TypeChecker, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


#: Where a whole number is wanted, 4.0 is none: JSON Schema alone would take it.
StrictValidator = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_whole),
)


def cleaned(
    kind: str, schema: dict[str, Any], options: Any, wrong: Callable[[dict[str, Any]], dict[str, str]]
) -> dict[str, Any]:
    """The options with the defaults of those that were not given.

    Args:
        wrong: says what else is wrong with them, by their names.

    Raises:
        InvalidError: an option is unknown or out of range; it names each.
    """
    properties: dict[str, dict[str, Any]] = schema["properties"]
    fields: dict[str, str] = {}
    for error in StrictValidator(schema).iter_errors(options):
        if error.validator == "additionalProperties":
            unknown = sorted(set(options) - set(properties))
            known = ", ".join(sorted(properties)) or "none"
            told = gettext("{name} has no such option. Its options: {known}.").format(name=kind, known=known)
            fields |= dict.fromkeys(unknown, told)
        elif error.validator == "required":
            missing = [name for name in error.validator_value if name not in options]
            fields |= dict.fromkeys(missing, gettext("required."))
        else:
            fields[str(error.path[0]) if error.path else "options"] = _sentence(error)
    if fields:
        raise of_fields(fields)
    defaults = {name: one["default"] for name, one in properties.items() if "default" in one}
    found = deepcopy(defaults) | {name: _shortest(value) for name, value in options.items()}
    if fields := {name: why for name, why in wrong(found).items() if why}:
        raise of_fields(fields)
    return found


def _shortest(value: Any) -> Any:
    """Where any number may be given, 24.0 hours are 24: the same request has one digest."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _sentence(error: jsonschema.ValidationError) -> str:
    wanted: Any = error.validator_value
    if error.validator == "enum":
        return gettext("choose one of {path}.").format(path=", ".join(map(str, wanted)))
    if error.validator == "minimum":
        return gettext("at least {wanted}.").format(wanted=wanted)
    if error.validator == "maximum":
        return gettext("at most {wanted}.").format(wanted=wanted)
    if error.validator == "type":
        return f"must be of type {wanted if isinstance(wanted, str) else ' or '.join(wanted)}."
    return error.message
