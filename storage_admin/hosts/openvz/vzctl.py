"""vzctl, which sets an I/O priority, and what it says and leaves behind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import INVALID, TOOL_FAILED, HostError, RefusedError
from storage_admin.hosts.openvz import config
from storage_admin.hosts.openvz.commands import Commands, plain
from storage_admin.hosts.openvz.files import ConfigFile, look, replace, restore_access
from storage_admin.hosts.openvz.outcome import NotSetError, PrioritySet
from storage_admin.hosts.shells import Done

#: Seconds between attempts while another vzctl holds the container.
WAITS = (1.0, 2.0, 4.0, 8.0)
SECONDS = 60.0

#: What vzctl exits with (its vzerror.h).
BAD_KERNEL, LOCKED, BAD_VALUE, NOT_SAVED, NOT_APPLIED = 5, 9, 21, 139, 148
#: Stands for its exit code where its end was not heard of.
UNHEARD = -1
#: A shell's 128 + signal, where vzctl has no such code of its own; and 139 with these words of the shell.
_SIGNALS = {128 + number: number for number in (1, 2, 6, 9, 15)}
_SEGMENTATION = b"Segmentation fault"
#: Room that has to be left, in bytes, beside two copies of the configuration: vzctl does not look whether what it wrote
#: came to the disk, and answers 0 with a configuration that is empty or cut off.
ROOM = 64 * 1024
#: What it says where the kernel answered that it knows no such thing. It saves, and exits with 0.
NOT_BY_KERNEL = b"not supported by the kernel"


@dataclass(frozen=True)
class Target:
    """One container, and the priority that it is to have."""

    commands: Commands
    ctid: str
    priority: int
    folders: Sequence[str]


@dataclass(frozen=True)
class Tried:
    """What became of it.

    Args:
        done: how vzctl ended; exit code ``UNHEARD`` where that was not heard of.
        now: the configuration as it is, with what could be put right.
        cut_short: it was not saved as a whole.
    """

    done: Done
    now: ConfigFile
    notes: tuple[str, ...]
    cut_short: bool


def set_by_vzctl(target: Target, before: ConfigFile, pause: Callable[[float], None]) -> Tried:
    """Asks vzctl to set it, again while the container is locked, and puts right what it leaves wrong.

    Raises:
        RefusedError: ``not_enough_space``.
        HostError: the host fell silent; the sentence says what is known.
    """
    _expect_room(before)
    done = _asked(target, pause)
    try:
        now = read_again(target, f"vzctl ended with exit code {done.exit_code}")
    except HostError as error:
        if done.exit_code != UNHEARD:
            raise
        said = plain(done.stderr)
        sentence = _("{said} It is unknown whether container {ctid} was changed. Scan the host.")
        raise HostError(sentence.format(said=said, ctid=target.ctid), error.code) from error
    notes = _mended(target, before, now, done)
    left = read_again(target, "The configuration was corrected") if notes else now
    return Tried(done, left, notes, was_cut_short(before.content, now.content))


def _expect_room(file: ConfigFile) -> None:
    needed = 2 * len(file.content) + ROOM
    if file.free is not None and file.free < needed:
        raise RefusedError(
            "not_enough_space",
            _(
                "The filesystem of {path} has only {free:,} bytes free, but {needed:,} are needed. With less, "
                "vzctl may truncate the configuration. Free some space first. Nothing was changed."
            ).format(path=file.path, free=file.free, needed=needed),
        )


def was_cut_short(before: bytes, now: bytes) -> bool:
    """Whether a configuration is the beginning of what it was, as a full filesystem leaves it: whole blocks."""
    if not now:
        return bool(before)
    old, new = config.without_priority(before), config.without_priority(now)
    if not now.endswith(b"\n"):
        new = new[:-1]
    return len(now) % 512 == 0 and len(new) < len(old) and old[: len(new)] == new


def read_again(target: Target, after: str) -> ConfigFile:
    """The configuration after something was done to it.

    Args:
        after: what was done, for a sentence.

    Raises:
        HostError: it cannot be read, or is gone.
    """
    try:
        file = look(target.commands, target.ctid, target.folders).file
    except (HostError, RefusedError) as error:
        code = error.code if isinstance(error, HostError) else TOOL_FAILED
        raise HostError(
            _("{after}, but the result could not be read: {detail}").format(after=after, detail=error.detail),
            code,
        ) from error
    if file is None:
        raise HostError(
            _(
                "{after}, but the configuration of container {ctid} is missing. Check whether the container was "
                "removed."
            ).format(after=after, ctid=target.ctid)
        )
    return file


def raise_for(done: Done, outcome: PrioritySet, *, was_running: bool) -> None:
    """Says what vzctl's exit code means, where it is not 0.

    Args:
        was_running: the container, so that vzctl tells the kernel before it saves.

    Raises:
        RefusedError: nothing was changed, and an admin can do something about it.
        NotSetError: it failed otherwise, or changed something all the same.
    """
    said, ctid = plain(done.stderr or done.stdout), outcome.ctid
    left = " ".join((_left(outcome), *outcome.notes, _kernel(done, outcome) if was_running else "")).strip()
    if outcome.now != outcome.before:
        pass
    elif done.exit_code == LOCKED:
        raise RefusedError(
            "guest_locked",
            _(
                "Container {ctid} has been locked by another vzctl for {seconds:.0f} s ({said}). Set the "
                "priority again when that vzctl has finished. {left}"
            ).format(ctid=ctid, seconds=sum(WAITS), said=said, left=left),
        )
    elif done.exit_code == BAD_KERNEL:
        raise RefusedError(
            "tool_missing",
            _(
                "This host does not run the OpenVZ kernel ({said}). Boot that kernel and set the priority again, "
                "or save it for the next start by hand: vzctl set {ctid} --ioprio {priority} --save --force. "
                "{left}"
            ).format(said=said, ctid=ctid, priority=outcome.priority, left=left),
        )
    elif done.exit_code == BAD_VALUE:
        sentence = _("This version of vzctl does not accept {priority} for container {ctid}: {said}. {left}")
        raise RefusedError(INVALID, sentence.format(priority=outcome.priority, ctid=ctid, said=said, left=left))
    elif done.exit_code == NOT_APPLIED:
        raise NotSetError(
            _(
                "The kernel rejected the priority of container {ctid}, so vzctl did not save it: {said}. {left} "
                "Set the priority while the container is stopped."
            ).format(ctid=ctid, said=said, left=left),
            outcome,
        )
    if done.exit_code == UNHEARD:
        raise NotSetError(f"{said} {left}", outcome)
    signal = ended_by(done)
    how = f"was terminated by signal {signal}" if signal else f"failed with exit code {done.exit_code}"
    raise NotSetError(f"vzctl {how}: {said}. {left}", outcome)


def ended_by(done: Done) -> int | None:
    """The signal that ended vzctl; ``None`` where it ended by itself, and where that was not heard of."""
    if done.exit_code == NOT_SAVED:
        return 11 if _SEGMENTATION in done.stderr else None
    return _SIGNALS.get(done.exit_code)


def _left(outcome: PrioritySet) -> str:
    if outcome.now == outcome.before:
        return _("{path} was not changed.").format(path=outcome.path)
    return _("Nevertheless, {path} has {words} now, and had {before_words} before.").format(
        path=outcome.path, words=outcome.now.words, before_words=outcome.before.words
    )


def _kernel(done: Done, outcome: PrioritySet) -> str:
    if NOT_BY_KERNEL in done.stdout + done.stderr:
        return ""
    if done.exit_code == 0 or (done.exit_code == NOT_SAVED and ended_by(done) is None):
        return _("The container is running, and the kernel already uses {priority} until its next start.").format(
            priority=outcome.priority
        )
    if done.exit_code == UNHEARD or ended_by(done):
        return _("The container is running, and the kernel may already use {priority} until its next start.").format(
            priority=outcome.priority
        )
    return ""


def raise_cut_short(done: Done, outcome: PrioritySet, file: ConfigFile, *, was_running: bool) -> None:
    """Says that vzctl had no room to save.

    Args:
        file: the configuration as it was before.

    Raises:
        NotSetError: always, with the old configuration where it does not stand in its place again.
    """
    kernel = _kernel(done, outcome) if was_running else ""
    text = (
        f"vzctl ended with exit code {done.exit_code} and wrote only a part of {outcome.path}, as on a full "
        f"filesystem. {' '.join(outcome.notes)} {kernel}"
    )
    raise NotSetError(text.strip(), outcome, b"" if outcome.now == outcome.before else file.content)


def _asked(target: Target, pause: Callable[[float], None]) -> Done:
    """The last attempt; what became of one whose end is not heard of, a look tells."""
    try:
        done = _once(target)
        for wait in WAITS:
            if done.exit_code != LOCKED:
                break
            pause(wait)
            done = _once(target)
    except HostError as error:
        return Done(UNHEARD, b"", error.detail.encode())
    return done


def _once(target: Target) -> Done:
    return target.commands.tool(["vzctl", "set", target.ctid, "--ioprio", str(target.priority), "--save"], SECONDS)


def _mended(target: Target, before: ConfigFile, now: ConfigFile, done: Done) -> tuple[str, ...]:
    """Of several lines vzctl changes the first, and the last one counts; its new file is root's, and another one."""
    notes, said = [], config.recorded(now.content)
    if was_cut_short(before.content, now.content):
        notes.append(_put_back(target, before, now))
    elif done.exit_code == 0 and said.priority != target.priority and len(said.lines) > 1:
        several = f"{now.path} sets the priority {len(said.lines)} times, and vzctl changed only the first line"
        try:
            replace(target.commands, now, config.with_priority(now.content, target.priority))
            notes.append(_("{several}. All of these lines now have it.").format(several=several))
        except (HostError, RefusedError) as error:
            notes.append(f"{several}, but the last one applies. {error.detail}")
    notes.append(restore_access(target.commands, before, now))
    if before.names > 1 and now.names == 1:
        others = f"the other {before.names - 1}" if before.names > 2 else "the other one"
        notes.append(
            _(
                "{path} was one of {names} hard links to a file. vzctl created a separate file for it, and "
                "{others} still has the old content."
            ).format(path=now.path, names=before.names, others=others)
        )
    return tuple(note for note in notes if note)


def _put_back(target: Target, before: ConfigFile, now: ConfigFile) -> str:
    try:
        replace(target.commands, _itself(target, now), before.content)
    except (HostError, RefusedError) as error:
        return f"The old configuration could not be restored. Its content is in the log: {error.detail}"
    return _("The old configuration was restored. Free some space, then set the priority again.")


def _itself(target: Target, file: ConfigFile) -> ConfigFile:
    """The file that a link leads to, as OpenVZ 7 has it: vzctl writes that one."""
    if not file.is_link:
        return file
    path = target.commands.run(["readlink", "-f", file.path]).stdout.decode("utf-8", "surrogateescape").strip()
    return changed(file, path=path, is_link=False)
