"""The journal of one replacement: what is going on beside an image, in a file that outlives the agent.

``.sa-<job>.journal`` holds one JSON object a line, each synced before the step that it announces (or after the one
that it records). An exclusive ``flock`` says that an agent is at work on it; the kernel drops it with the agent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
from dataclasses import asdict, dataclass, replace
from typing import Any

from storage_admin.agent.folders.pools import JOB, fits_in_folder, held, is_possible
from storage_admin.agent.protocol import SQUASHED, RefusedError, unb64

#: The steps, in order. ``UNDO`` and ``UNDO_REVERTED`` may follow ``DONE``, which comes once more on NFS when the files
#: have lost their last names.
STARTED, READY, DONE, UNDO, UNDO_REVERTED = "started", "ready", "done", "undo", "undo_reverted"
#: After ``STARTED``: the new file is there, still empty; by its inode it is known from then on.
CREATED = "created"
#: After ``READY`` or ``UNDO``: from now on names may have been exchanged.
EXCHANGING = "exchanging"
#: Before an undo copy is removed: what the filesystem gets back by that.
DISCARD = "discard"
#: After ``CREATED``: one more file, the next part of what the new one begins, and the name that it will have.
PART = "part"
#: After ``STARTED``: the images that the original stands on, and the new one will not.
LEFT = "left"
#: Before ``READY``: what of the new file stays as it is while guests write to it, and when it was whole.
MADE = "made"
#: Of an image that is set aside, instead of the others: it is; it is to be restored, or deleted; that did not happen.
ASIDE, RESTORE, DELETE, STAYED = "aside", "restore", "delete", "stayed"
#: A journal is a few hundred bytes a line; a longer file, or first line, is none of ours.
MAX_BYTES, _FIRST_RECORD = 1 << 20, 16 * 1024

#: By which a file is opened that somebody may have put there.
FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_NAME = re.compile(rb"\.sa-(%s)\.(journal|new|orig|aside|[0-9]{3})" % JOB.encode())


class JournalError(Exception):
    """A journal that says nothing to go by; its argument says why."""


@dataclass(frozen=True)
class Stamp:
    """A file as ``stat`` saw it: sizes in bytes, times in nanoseconds."""

    dev: int
    inode: int
    file_size: int
    allocated_size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """The stamp of a ``stat`` result."""
        return cls(
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_blocks * 512,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )

    @classmethod
    def parse(cls, fields: Any) -> Stamp:
        """The stamp that :func:`dataclasses.asdict` took apart; raises JournalError."""
        names = ("dev", "inode", "file_size", "allocated_size", "mtime_ns", "ctime_ns")
        if not isinstance(fields, dict) or not all(type(fields.get(name)) is int for name in names):
            raise JournalError("a file's stamp is not complete")
        return cls(*(fields[name] for name in names))

    def same_file(self, other: Stamp | None) -> bool:
        """Whether it is the same file, by device and inode."""
        return other is not None and (self.dev, self.inode) == (other.dev, other.inode)


def file_name(job: str, kind: str) -> bytes:
    """The name of a job's file: ``kind`` is ``journal``, ``new``, ``orig``, ``aside``, ``work``, or a part's number."""
    return f".sa-{job}.{kind}".encode("ascii")


def part_name(job: str, place: int) -> bytes:
    """The name that a part has until all are whole; the second one's place is 0."""
    return file_name(job, f"{place + 2:03d}")


def parse_name(name: bytes) -> tuple[str, str] | None:
    """The job and the kind that a file's name says, or ``None`` for a file that is none of ours."""
    match = _NAME.fullmatch(name)
    return (match.group(1).decode("ascii"), match.group(2).decode("ascii")) if match else None


class Journal:
    """An open journal under this process's lock. Use :meth:`create` or :meth:`open`; close it in the end."""

    def __init__(self, folder: int, job: str, fd: int) -> None:
        self.folder = folder
        self.job = job
        self._fd = fd

    @classmethod
    def create(cls, folder: int, job: str, **first: Any) -> Journal:
        """A new journal with its first record on the disk.

        Args:
            folder: descriptor of the folder.
            job: the job's id.
            first: the fields of the ``started`` record.

        Raises:
            FileExistsError: the job has one.
            RefusedError: ``immutable``: what root makes there is somebody else's.
            OSError: it cannot be written; nothing of it is left then.
        """
        name = file_name(job, "journal")
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600, dir_fd=folder)
        journal = cls(folder, job, fd)
        try:
            journal._take(name)
        except BaseException:
            os.close(fd)  # whoever took it first finds it empty and removes it
            raise
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                raise RefusedError("immutable", SQUASHED)  # by no later agent it would be taken for ours
            journal.append(STARTED, job=job, **first)
            os.fsync(folder)
        except BaseException:
            _unlink(folder, name)
            os.close(fd)
            raise
        return journal

    @classmethod
    def open(cls, folder: int, job: str) -> Journal:
        """The journal that a job left.

        Raises:
            FileNotFoundError: there is none.
            RefusedError: ``busy``, while an agent is at work on it.
            JournalError: the file of that name is none that this program wrote.
        """
        name = file_name(job, "journal")
        try:
            fd = os.open(name, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.EISDIR, errno.ENXIO}:
                raise JournalError("it is not a regular file") from error
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise JournalError("it is not a regular file of the agent")
            journal = cls(folder, job, fd)
            journal._take(name)
        except BaseException:
            os.close(fd)
            raise
        return journal

    def _take(self, name: bytes) -> None:
        """Lock it, and be sure that what is locked still has its name: whoever had it may have removed it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine, named = os.fstat(self._fd), os.stat(name, dir_fd=self.folder, follow_symlinks=False)
        except OSError as error:
            # ESTALE: another machine has just removed it, says NFS.
            if error.errno in {errno.EWOULDBLOCK, errno.ESTALE}:
                raise RefusedError("busy", f"another agent is working on job {self.job}") from error
            raise
        if (named.st_dev, named.st_ino) != (mine.st_dev, mine.st_ino):
            raise FileNotFoundError(errno.ENOENT, "the journal was removed while the job ran")

    def append(self, step: str, **fields: Any) -> None:
        """Add a record and have it on the disk before returning."""
        plain = {key: asdict(value) if isinstance(value, Stamp) else value for key, value in fields.items()}
        line = json.dumps({"step": step, **plain}, separators=(",", ":")).encode("ascii") + b"\n"
        # A record that a crash cut off has no newline: the next one must not become part of it.
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(self._fd, line) != len(line):
            raise OSError(errno.ENOSPC, "the journal could not be written completely")
        os.fsync(self._fd)

    def records(self) -> list[dict[str, Any]]:
        """All whole records, the oldest first; what a crash cut off is left out.

        Raises:
            JournalError: the first record is no ``started`` of this job.
        """
        content = os.pread(self._fd, MAX_BYTES + 1, 0)
        if len(content) > MAX_BYTES:
            raise JournalError("it is too long")
        found = []
        for line in content.split(b"\n")[:-1]:
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(fields, dict) and isinstance(fields.get("step"), str):
                found.append(fields)
        if not found or found[0]["step"] != STARTED or found[0].get("job") != self.job:
            raise JournalError("its first record is missing")
        return found

    def remove(self) -> None:
        """Take the journal away, as the last of a job's files, and be sure that it is."""
        _unlink(self.folder, file_name(self.job, "journal"))
        os.fsync(self.folder)

    def close(self) -> None:
        """Let go of it; its lock ends."""
        os.close(self._fd)


def _unlink(folder: int, name: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def image_name(folder: int, name: bytes) -> str | None:
    """The name of the image that a journal is about, as base64; ``None`` where it does not say. Nothing is locked.

    Args:
        folder: descriptor of the journal's folder.
        name: of the journal.
    """
    try:
        with held(os.open(name, FLAGS, dir_fd=folder)) as fd:
            told = json.loads(os.pread(fd, _FIRST_RECORD, 0).split(b"\n")[0])["name_b64"]
        return told if fits_in_folder(unb64(told)) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def is_commit(records: list[dict[str, Any]]) -> bool:
    """Whether a journal is that of an overlay whose data is written into its base."""
    return records[0].get("commit") is True


def is_aside(records: list[dict[str, Any]]) -> bool:
    """Whether a journal is that of an image that is set aside."""
    return records[0].get("aside") is True


def told_name(
    record: dict[str, Any], field: str = "name_b64", missing: str = "it does not say which image it belongs to"
) -> bytes:
    """The name of an image, which is none of a job's own, that a record tells; raises JournalError."""
    try:
        name = unb64(record[field])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise JournalError(missing) from error
    if not is_possible(name) or parse_name(name):
        raise JournalError("it names something that is not an image")
    return name


@dataclass(frozen=True)
class Story:
    """A journal's records, read into one.

    Args:
        name: of the image, in the journal's folder.
        original: the image before the swap.
        keep_undo: whether the original is kept after it; also until other hosts were asked who uses it.
        records_created: whether the journal says which file was created; that of an older agent does not.
        created: the new file when it was empty; ``None`` before that.
        ready: the new file, finished and synced; ``None`` before that.
        done: the new file under the image's name; ``None`` before that.
        copy: the original as undo copy, where the agent that swapped could still write it down, and no undo has moved
            its names since: what differs from it is somebody else's doing.
        late: the times of change in ``done`` and ``copy`` tell nothing: their files' last names went later (NFS).
        undo_job: the undo that has begun, if any.
        undone: the new file as it was when that undo began.
        old_name: that the image had before, where the job gave it another one; else ``None``.
        parts: name and inode of each further file that follows the new one; ``parts_bytes`` is what they occupy.
        left: path and stamp of each image that the original stands on, and the new one does not.
        discarded_bytes: what the filesystem gets back by the removal of the undo copy, where that has begun.
        goes_shared, made_shared, undone_shared: as in :class:`Settled`; 0 in journals of older agents.
        exchanging: whether a swap or an undo had come to its names when the journal ended.
    """

    name: bytes
    original: Stamp
    keep_undo: bool
    records_created: bool = False
    created: Stamp | None = None
    ready: Stamp | None = None
    done: Stamp | None = None
    copy: Stamp | None = None
    late: bool = False
    undo_job: str | None = None
    undone: Stamp | None = None
    old_name: bytes | None = None
    parts: tuple[tuple[bytes, int], ...] = ()
    parts_bytes: int = 0
    left: tuple[tuple[bytes, Stamp], ...] = ()
    discarded_bytes: int | None = None
    exchanging: bool = False
    goes_shared: int = 0
    made_shared: int = 0
    undone_shared: int = 0

    @property
    def made(self) -> frozenset[int]:
        """Inodes of files that the job has made."""
        return frozenset(one.inode for one in (self.created, self.ready, self.done, self.undone) if one is not None)

    def is_touched(self, copy: Stamp) -> bool:
        """Whether somebody changed the undo copy in any way: its time of change tells, also where others were set back.

        It does so of a new owner, mode or name, too; and nothing where :attr:`copy` is not known, or :attr:`late`.
        """
        return self.copy is not None and not self.late and copy.ctime_ns != self.copy.ctime_ns

    def is_written_to(self, new: Stamp) -> bool:
        """Whether somebody changed the new file since it got its name: content, or anything else of it."""
        if self.done is None or (new.file_size, new.mtime_ns) != (self.done.file_size, self.done.mtime_ns):
            return True
        return not self.late and new.ctime_ns != self.done.ctime_ns

    @property
    def name_before(self) -> bytes:
        """The name under which the original was found."""
        return self.old_name or self.name

    @classmethod
    def of(cls, records: list[dict[str, Any]]) -> Story:
        """The story that a journal's records tell; raises JournalError."""
        first = records[0]
        name = told_name(first)
        old_name = told_name(first, "old_name_b64") if "old_name_b64" in first else None
        if "undo_hours" not in first:
            raise JournalError("it does not say for how long the original is kept")
        if name == old_name:
            raise JournalError("it names something that is not an image")
        keep_undo = bool(first["undo_hours"])
        recorded = first.get("records_created") is True
        parts = tuple(
            (told_name(record, missing="a further part has no name"), Stamp.parse(record.get("new")).inode)
            for record in records[1:]
            if record["step"] == PART
        )
        original = Stamp.parse(first.get("original"))
        story = cls(name, original, keep_undo, recorded, old_name=old_name, parts=parts)
        for record in records[1:]:
            if record["step"] == LEFT:
                story = replace(story, left=_left(record))
            elif record["step"] == CREATED:
                story = replace(story, created=Stamp.parse(record.get("new")))
            elif record["step"] == EXCHANGING:
                story = replace(story, exchanging=True, keep_undo=story.keep_undo or record.get("keeps") is True)
                story = story if story.undo_job is None else replace(story, copy=None)
            elif record["step"] == READY:
                goes, made = _bytes(record.get("goes_shared")), _bytes(record.get("made_shared"))
                story = replace(story, ready=Stamp.parse(record.get("new")), goes_shared=goes, made_shared=made)
                story = replace(story, parts_bytes=_bytes(record.get("parts_bytes")))
            elif record["step"] == DONE:
                # Of a copy the agent writes that swapped, and asked all; a recovery does not.
                copy = Stamp.parse(record["undo"]) if "undo" in record else None
                keep = bool(first["undo_hours"]) if copy is not None else story.keep_undo
                story = replace(story, done=Stamp.parse(record.get("new")), copy=copy, keep_undo=keep, exchanging=False)
                story = replace(story, late=record.get("late") is True)
            elif record["step"] == UNDO:
                undone = Stamp.parse(record["new"]) if "new" in record else None
                story = replace(story, undo_job=str(record.get("job")), undone=undone, exchanging=False)
                story = replace(story, undone_shared=_bytes(record.get("goes_shared")))
            elif record["step"] == UNDO_REVERTED:
                story = replace(story, undo_job=None, exchanging=False)
            elif record["step"] == DISCARD:
                freed = record.get("freed_bytes")
                story = replace(story, discarded_bytes=freed if type(freed) is int else None)
        return story


def _bytes(told: Any) -> int:
    return told if type(told) is int and told > 0 else 0


def _left(record: dict[str, Any]) -> tuple[tuple[bytes, Stamp], ...]:
    try:
        return tuple((unb64(one["path_b64"]), Stamp.parse(one["stamp"])) for one in record["bases"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise JournalError("it does not name the backing files of the original") from error
