"""One container's I/O priority: set, read again, and said since when it counts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.openvz import config
from storage_admin.hosts.openvz.commands import CommandRun, Commands
from storage_admin.hosts.openvz.files import FOLDERS, ConfigFile, Looked, look, replace
from storage_admin.hosts.openvz.ids import checked_ctid, checked_priority
from storage_admin.hosts.openvz.listing import UNKNOWN, vzlist
from storage_admin.hosts.openvz.outcome import Effect, NotSetError, PrioritySet
from storage_admin.hosts.openvz.vzctl import (
    NOT_BY_KERNEL,
    WAITS,
    Target,
    Tried,
    raise_cut_short,
    raise_for,
    read_again,
    set_by_vzctl,
)
from storage_admin.hosts.shells import Done, Shell

#: In these nothing of the container runs that a kernel could prefer: what is configured counts once it starts.
_AT_REST = frozenset({"shut off", "mounted", "suspended"})
_AT_WORK = frozenset({"running", "paused"})


@dataclass(frozen=True)
class _Seen:
    """What vzlist says of one container."""

    state: str = UNKNOWN
    priority: int | None = None
    told: bool = False
    note: str = ""


def set_priority(
    shell: Shell,
    ctid: str,
    priority: int | str,
    *,
    folders: Sequence[str] = FOLDERS,
    told: Callable[[CommandRun], None] | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> PrioritySet:
    """Gives a container an I/O priority that stays: by vzctl, or in its configuration where vzctl is missing.

    Whatever vzctl exits with, the configuration and vzlist are read again and have the last word.

    Args:
        ctid: a number, or a UUID.
        priority: 0 to 7; the higher, the more of the disks' time, relative to other containers.
        folders: where configurations are.
        told: hears of each command as it ends, also where an error is raised in the end.
        pause: waits so many seconds between attempts.

    Returns:
        What was asked for, done.

    Raises:
        RefusedError: the priority was not changed. ``invalid``: id or priority, before any command is run;
            ``stale_plan``: there is no such configuration, or it was changed meanwhile; ``guest_locked``: another
            vzctl works on it; ``not_enough_space``: vzctl would cut the configuration off; ``tool_missing``: the
            kernel is none of OpenVZ's; ``hard_linked``, ``immutable``, ``dirty_or_corrupt``: the configuration cannot
            be edited.
        NotSetError: what was read again is not what was asked for; ``outcome`` says what it is.
        HostError: the host failed; the sentence says what is known.
    """
    target = Target(Commands(shell, told), checked_ctid(ctid), checked_priority(priority), folders)
    there, file = _there(target)
    before = _seen(target, there)
    tried = set_by_vzctl(target, file, pause) if there.has_vzctl else None
    now = tried.now if tried else _edited(target, file, pause)
    done, notes = (tried.done, tried.notes) if tried else (None, ())
    after = _seen(target, there)
    others = config.without_priority(file.content), config.without_priority(now.content)
    if others[0] != others[1]:
        notes = (*notes, _("Another program changed other lines of {path} in the meantime.").format(path=now.path))
    outcome = PrioritySet(
        ctid=ctid, priority=target.priority, path=now.path, by="file" if done is None else "vzctl",
        before=config.recorded(file.content), now=config.recorded(now.content),
        state=after.state, listed=after.priority, was_listed=after.told,
        effect=_effect(done, before.state, after.state), commands=tuple(target.commands.ran),
        notes=tuple(note for note in (*notes, after.note) if note),
    )  # fmt: skip
    if tried is not None:
        _expect_it_saved(tried, outcome, file, was_running=before.state in _AT_WORK)
    if not outcome.as_asked:
        listed = (
            f" vzlist reports {'none' if outcome.listed is None else outcome.listed}." if outcome.was_listed else ""
        )
        raise NotSetError(f"{outcome.words}{listed} {' '.join(outcome.notes)}".strip(), outcome)
    return outcome


def _expect_it_saved(tried: Tried, outcome: PrioritySet, before: ConfigFile, *, was_running: bool) -> None:
    if tried.cut_short:
        raise_cut_short(tried.done, outcome, before, was_running=was_running)
    if any(config.without_priority(before.content)) and not any(config.without_priority(tried.now.content)):
        sentence = _(
            "Container {ctid}: {path} now contains only the priority. Another program removed or emptied the "
            "file while the priority was set, and vzctl created it again. The previous content is in the "
            "log. Check that the container still exists before you restore the file."
        )
        raise NotSetError(sentence.format(ctid=outcome.ctid, path=outcome.path), outcome, before.content)
    if tried.done.exit_code:
        raise_for(tried.done, outcome, was_running=was_running)


def _there(target: Target) -> tuple[Looked, ConfigFile]:
    """vzctl would make a configuration for a container that does not exist, and call that a success."""
    there = look(target.commands, target.ctid, target.folders)
    if there.file is None:
        raise RefusedError(
            "stale_plan",
            _(
                "Container {ctid} has no configuration on this host ({folders}). It does not exist, or is on "
                "another node. Scan the host again."
            ).format(ctid=target.ctid, folders=_(" or ").join(target.folders)),
        )
    return there, there.file


def _edited(target: Target, file: ConfigFile, pause: Callable[[float], None]) -> ConfigFile:
    content = config.with_priority(file.content, target.priority)
    for wait in (*WAITS, None):
        try:
            if content != file.content:
                replace(target.commands, file, content)
            break
        except RefusedError as error:
            if wait is None or error.code != "guest_locked":
                raise
            pause(wait)
    return read_again(target, "The configuration was edited")


def _seen(target: Target, there: Looked) -> _Seen:
    if not there.has_vzlist:
        return _Seen()
    try:
        guests = vzlist(target.commands, target.ctid).guests
    except HostError as error:
        return _Seen(note=f"vzlist gave no answer. {error.detail}")
    for guest in guests:
        if guest.uid.lower() == target.ctid.lower() and not guest.unread:
            return _Seen(guest.state, guest.io_priority, told=True)
    return _Seen()


def _effect(done: Done | None, before: str, after: str) -> Effect:
    if done is None:
        return Effect.NEXT_START  # nobody has told the kernel
    if NOT_BY_KERNEL in done.stdout + done.stderr:
        return Effect.UNSUPPORTED
    if before in _AT_WORK and after in _AT_WORK:
        return Effect.NOW
    if before in _AT_REST and after in _AT_REST:
        return Effect.NEXT_START
    return Effect.UNKNOWN
