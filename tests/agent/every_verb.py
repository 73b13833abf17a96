# ruff: noqa: PTH113, PTH116, PTH118, PTH119, PTH120
# Paths are bytes here: names need not be UTF-8.
"""Every verb of the agent, asked for one image after the other, and what it opened while it answered."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from storage_admin.agent import formats, protocol
from storage_admin.agent.formats import UnreadableError
from storage_admin.agent.protocol import b64
from storage_admin.agent.swap.journal import Stamp
from tests.agent.aside import pool_of
from tests.agent.harness import NO_RESERVE, ROOT, held_open, link, location
from tests.agent.tracing import STRACE
from tests.chance import night

#: Every way that a verb can be asked for one image: verb and what is its own in the arguments.
REWRITES: dict[str, tuple[str, dict[str, Any]]] = {
    "reclaim compress": ("reclaim", {"method": "compress"}),
    "reclaim copy": ("reclaim", {"method": "copy"}),
    "reclaim in_place": ("reclaim", {"method": "in_place"}),
    "flatten rebase": ("flatten", {"method": "rebase"}),
    "flatten convert": ("flatten", {"method": "convert"}),
    "convert": ("convert", {}),
    "convert and replace": ("convert", {"replaces": True}),
    "create an overlay": ("create", {}),
    "export": ("export", {"packing": "ova"}),
    "to_device": ("to_device", {"device_b64": b64(b"/dev/null")}),  # which is none
    "file_to_volume": (
        "file_to_volume",
        {"volume": {"backend": "lvm", "group": "none", "group_id": "none", "name": "n", "pool": ""}},
    ),
    "bitmaps": ("bitmaps", {"names": ["stale"]}),
    "add a passphrase": ("keys", {"secrets": {"passphrase": "a", "new_passphrase": "b"}, "iter_time": 20}),
    "empty a key slot": ("keys", {"secrets": {"passphrase": "a"}, "slot": 0}),
    "look inside": ("inside", {}),
    "look at files": ("files", {}),
    "read a file": ("files", {"do": "read", "device": "/dev/sda", "path": "/"}),
    "trim": ("sparsify", {}),
    **{verb: (verb, {}) for verb in ("grow", "commit", "shrink", "send", "relink")},
    **{f"check {level}": ("check", {"repair": level}) for level in ("none", "leaks", "all")},
}
READS: dict[str, dict[str, Any]] = {
    "analyze sample": {"mode": "sample", "seconds": 0.2},
    "analyze full": {"mode": "full"},
}
UNDOES = {"undo": "undo", "discard_undo": "discard_undo", "discard by force": "discard_undo"}
#: Of these, what starts libguestfs' appliance.
APPLIANCE = frozenset({"look at files", "read a file", "trim"})
#: What is never done: the journal that :func:`plant_undo` makes up says not what its job made; without an appliance;
#: and with no volume or device to write to, LUKS header, lost base, bitmap, or end that nothing in a guest reaches.
_WANTS_MORE = ("to_device", "file_to_volume", "add a passphrase", "empty a key slot", "relink", "bitmaps", "shrink")
NEVER_DONE = frozenset({"discard_undo", *_WANTS_MORE}) | APPLIANCE
#: Verbs that look at a whole pool, or at many images.
POOLS = frozenset({"scan", "look", "sample", "recover", "folder"})
#: Verbs that read nothing of an image, or only what they made, or start a machine, or need a module of the kernel.
_MADE = ("pve", "benchmark", "users", "beneath", "occupied", "unpack")
_NEW = ("from_device", "receive", "upload", "forget_upload")
_ATTACHES = ("attach", "detach", "attached")
_VOLUMES = (
    "exclusive",
    "set_volume_aside",
    "restore_volume",
    "delete_volume",
    "reclaim_volume",
    "analyze_volume",
    "sparsify_rbd",
    "flatten_rbd",
    "promote",
    "volume_to_volume",
    "volume_to_file",
)
NO_IMAGES = frozenset((*_MADE, *_NEW, *_ATTACHES, *_VOLUMES, "space"))
#: Verbs that change an image's name and take nothing from its content.
NAMES = frozenset({"set_aside", "restore_aside", "delete_aside", "drop", "needed"})
#: How work may end that is neither a bug nor a result.
CLEAN = protocol.REFUSALS | {protocol.TOOL_FAILED, protocol.INVALID}
ALL = (*READS, *REWRITES, *UNDOES)
#: What hostile images go through before a merge; at night that is everything.
TRIED = ALL if night() else ("analyze sample", "reclaim copy", "undo", "look at files", "trim")
#: The links that a plan would give at most; deeper ones are refused before anything is opened.
_LONGEST_PLAN = 70


def covered() -> set[str]:
    """The verbs that :data:`ALL` and :data:`POOLS` ask for, and those that need not be."""
    return {"analyze", *POOLS, *UNDOES.values(), *(verb for verb, _ in REWRITES.values()), *NO_IMAGES, *NAMES}


@dataclass
class Answer:
    """What came of one request; ``code`` is empty for a result."""

    code: str
    detail: str
    result: Any
    events: list[dict[str, Any]]
    seconds: float
    peak_bytes: int
    tools_peak_bytes: int

    def text(self) -> str:
        """All that was said."""
        return json.dumps([self.detail, self.result, self.events])


@dataclass
class Crew:
    """The process that does the requests.

    Args:
        trace: where strace writes what it and its tools open, connect to and start; without, nothing is watched.
        limit_seconds: after which a request is cancelled.
        appliance: whether what looks at a guest's files starts the appliance; else it ends there, as ``tool_missing``.
    """

    trace: Path | None = None
    limit_seconds: float = 60.0
    appliance: bool = False
    jobs: int = 0
    last_job: str = field(default="", init=False)

    def __enter__(self) -> Self:
        watched = ["strace", *STRACE, "-o", str(self.trace)] if self.trace is not None else []
        self._process = subprocess.Popen(
            [*watched, sys.executable, "-m", "tests.agent.batch", *([] if self.appliance else ["no-appliance"])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        """Of the process that does the requests."""
        return psutil.Process(self._process.pid).children()[0].pid if self.trace is not None else self._process.pid

    def ask(self, verb: str, args: dict[str, Any], *, limit_seconds: float | None = None, keep: bool = True) -> Answer:
        """Do one request under a job of its own; ``keep`` what a scan says of each image."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.jobs += 1
        self.last_job = f"h{self.jobs}"
        limit = self.limit_seconds if limit_seconds is None else limit_seconds
        request = {"verb": verb, "job": self.last_job, "args": args, "limit_seconds": limit, "keep": keep}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the agent died while it did {verb} {args}"
        return Answer(**json.loads(line))


def request(how: str, path: bytes, pool: Path, form: str) -> tuple[str, dict[str, Any]]:
    """The verb and its arguments for one image as it is now, as a plan would give them.

    Args:
        how: of :data:`ALL`; an undo is of the job that :func:`plant_undo` made up.
        path: of the image.
        pool: the registered pool's folder.
        form: the declared format.
    """
    place = location(path, pool)
    if how in UNDOES:
        force = {"force": True} if how == "discard by force" else {}
        return UNDOES[how], {**place, "undo_job": PLANTED, **force}
    if how in NAMES:
        return how, _names_request(how, path, pool)
    status = os.stat(path, follow_symlinks=False)
    if how in READS:
        image = {**place, "format": form, "dev": status.st_dev, "inode": status.st_ino}
        # As if it were its own base: its tables are looked through from both sides.
        return "analyze", {**image, **({"base": image} if form in {"raw", "qcow2"} else {}), **READS[how]}
    verb, own = REWRITES[how]
    if verb == "convert":
        form_of_target = "raw" if form == "qcow2" else "qcow2"
        own = {"target": {**place, "path_b64": b64(target_of(path, form)), "format": form_of_target, **own}}
    size, below = _plan(path, form)
    if verb == "create":
        overlay = location(os.path.dirname(path) + b"/converted.qcow2", pool) | {"format": "qcow2"}
        return verb, {
            "target": overlay,
            "virtual_size": max(size - size % 512, 512),
            "base": link(path, pool, form),
            "chain": [link(base, pool, base_form) for base, base_form in below],
            "reserve": NO_RESERVE,
        }
    if verb == "send":
        # Without what it stands on; no byte is asked for, so that all is looked at but none travels.
        own, below = {"length": 0}, []
    if verb == "export":
        own = own | {"target": location(os.path.dirname(path) + b"/converted.ova", pool)}
    if verb == "relink":
        # Whose base is lost has no chain; the image itself is offered as what it stands on.
        own, below = {"onto": [link(path, pool, form)]}, []
    own = {"size": size - size % 512 + (1 << 20)} if verb == "grow" else own
    return verb, {
        **link(path, pool, form),
        "virtual_size": size,
        "chain": [link(base, pool, base_form) for base, base_form in below],
        "children_known": True,
        "idle_io": False,
        "reserve": NO_RESERVE,
        **own,
    }


def _names_request(how: str, path: bytes, pool: Path) -> dict[str, Any]:
    """One of :data:`NAMES`; an image that is set aside is so by the job that :func:`plant_aside` made up."""
    looked_at = [pool_of(pool)]
    if how == "set_aside":
        wanted = link(path, pool)
        del wanted["format"]
        return {**wanted, "children_known": True, "pools": looked_at}
    where = location(path, pool)
    if how == "drop":
        return {**where, "since": 0}
    if how == "needed":
        return {"images": [where], "first": 0, "pools": looked_at}
    place = {**where, "aside_job": PLANTED}
    if how == "restore_aside":
        return place
    waiting = os.path.join(os.path.dirname(path), f".sa-{PLANTED}.aside".encode())
    return {**place, "inode": os.stat(waiting).st_ino, "pools": looked_at}


def target_of(path: bytes, form: str = "qcow2") -> bytes:
    """Where a conversion of an image of that format is put."""
    return os.path.join(os.path.dirname(path), b"converted.raw" if form == "qcow2" else b"converted.qcow2")


def _plan(path: bytes, form: str) -> tuple[int, list[tuple[bytes, str]]]:
    """The virtual size, and the images below with their formats, as far as the headers lead to files."""
    first, size, below = path, 0, list[tuple[bytes, str]]()
    while len(below) < _LONGEST_PLAN:
        facts = _facts(path, form)
        if facts is None:
            break
        size = size if below else facts.virtual_size
        name = facts.backing_file
        if name is None or b"\0" in name:
            break
        path = os.path.join(os.path.dirname(path), name)
        if not os.path.isfile(path) or not os.access(path, os.R_OK) or path.startswith(b"/proc/"):
            break
        form = facts.backing_format or _looks_like(path)
        below.append((path, form))
        if path in (first, *(base for base, _ in below[:-1])):
            break  # it goes round in a circle
    return size, below


def _facts(path: bytes, form: str) -> formats.Facts | None:
    with held_open(path) as fd, contextlib.suppress(UnreadableError):
        return formats.read(fd, os.fstat(fd).st_size, os.path.basename(path), form)
    return None


def _looks_like(path: bytes) -> str:
    with held_open(path) as fd:
        return formats.probe(formats.Reader(fd, os.fstat(fd).st_size))


#: The job whose undo copy :func:`plant_undo` leaves.
PLANTED = "planted"


def plant_undo(path: bytes, content: bytes) -> Path:
    """Leave what a finished replacement of an image leaves: the journal, and an undo copy with that content."""
    folder = Path(os.fsdecode(os.path.dirname(path)))
    copy, journal = folder / f".sa-{PLANTED}.orig", folder / f".sa-{PLANTED}.journal"
    copy.write_bytes(content)
    new, old = (vars(Stamp.of(os.stat(one, follow_symlinks=False))) for one in (path, copy))
    name = b64(os.path.basename(path))
    started = {"step": "started", "job": PLANTED, "generation": 1, "name_b64": name, "original": old, "undo_hours": 24}
    _write_journal(journal, [started, {"step": "ready", "new": new}, {"step": "done", "new": new, "undo": old}])
    return copy


def plant_aside(path: bytes) -> Path:
    """Leave what setting an image aside leaves: its other name, and the journal."""
    folder, name = Path(os.fsdecode(os.path.dirname(path))), b64(os.path.basename(path))
    aside, stamp = folder / f".sa-{PLANTED}.aside", vars(Stamp.of(os.stat(path, follow_symlinks=False)))
    Path(os.fsdecode(path)).rename(aside)
    now = vars(Stamp.of(aside.stat()))
    started = {"step": "started", "job": PLANTED, "generation": 1, "name_b64": name, "original": stamp, "aside": True}
    _write_journal(folder / f".sa-{PLANTED}.journal", [started, {"step": "aside", "aside": now}])
    return aside


def _write_journal(journal: Path, records: list[dict[str, Any]]) -> None:
    journal.touch(0o600)
    journal.write_text("".join(json.dumps(record) + "\n" for record in records))
    journal.chmod(0o600)


def pool_request(verb: str, pool: Path, images: Sequence[tuple[bytes, str]] = ()) -> dict[str, Any]:
    """The arguments of a verb of :data:`POOLS`; ``images`` are those to sample, with their formats."""
    if verb == "sample":
        asked = [request("analyze sample", path, pool, form)[1] for path, form in images]
        for number, fields in enumerate(asked):
            del fields["seconds"], fields["mode"]
            fields["id"] = number
        return {"images": asked, "seconds": 0.05}
    if verb == "folder":
        return {"path_b64": b64(os.fsencode(pool))}
    described = {"id": 1, "path_b64": b64(os.fsencode(pool)), "kind": "dir"}
    return {"pools": [described], **({"jobs_active": []} if verb == "recover" else {})}
