"""vzctl, which sets an I/O priority, and what it says and leaves behind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.hosts.openvz import config
from storage_admin.hosts.openvz.commands import Commands, is_missing, plain
from storage_admin.hosts.openvz.files import ConfigFile, look, replace, restore_mode
from storage_admin.hosts.openvz.outcome import NotSetError, PrioritySet
from storage_admin.hosts.shells import Done

#: Seconds between attempts while another vzctl holds the container.
WAITS = (1.0, 2.0, 4.0, 8.0)
SECONDS = 60.0

#: What vzctl exits with (its vzerror.h).
BAD_KERNEL, LOCKED, BAD_VALUE, NOT_APPLIED = 5, 9, 21, 148
#: What it says where the kernel answered that it knows no such thing. It saves, and exits with 0.
NOT_BY_KERNEL = b"not supported by the kernel"


@dataclass(frozen=True)
class Target:
    """One container, and the priority that it is to have."""

    commands: Commands
    ctid: str
    priority: int
    folders: Sequence[str]


def set_by_vzctl(
    target: Target, before: ConfigFile, pause: Callable[[float], None]
) -> tuple[Done, ConfigFile, tuple[str, ...]]:
    """Asks vzctl to set it, again while the container is locked, and puts right what it leaves wrong.

    Returns:
        What vzctl said, the configuration as it is now, and notes.

    Raises:
        HostError: the host fell silent; the sentence says what is known.
    """
    done = _asked(target, pause)
    now = read_again(target, f"vzctl ended with exit code {done.exit_code}")
    if done.exit_code:
        return done, now, ()
    notes = _mended(target, before, now)
    return done, read_again(target, "vzctl ended with exit code 0") if notes else now, notes


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
        raise HostError(f"{after}, but what is there now could not be read: {error.detail}") from error
    if file is None:
        raise HostError(f"{after}, but the configuration of container {target.ctid} is gone: was it removed?")
    return file


def raise_for(done: Done, outcome: PrioritySet) -> None:
    """Says what vzctl's exit code means, where it is not 0.

    Raises:
        RefusedError: nothing was changed, and an admin can do something about it.
        NotSetError: it failed otherwise, or changed something all the same.
    """
    said, ctid, left = plain(done.stderr or done.stdout), outcome.ctid, f"{outcome.path} was left as it was."
    if outcome.now != outcome.before:
        left = f"All the same {outcome.path} says {outcome.now.words} now, and said {outcome.before.words} before."
    elif done.exit_code == LOCKED:
        raise RefusedError(
            "guest_locked",
            f"Another vzctl has held container {ctid} for {sum(WAITS):.0f} s. Set it again once that is done. {left}",
        )
    elif done.exit_code == BAD_KERNEL:
        raise RefusedError(
            "tool_missing",
            f"This host does not run OpenVZ's kernel ({said}). Boot it and set it again, or save it for the next "
            f"start by hand: vzctl set {ctid} --ioprio {outcome.priority} --save --force. {left}",
        )
    elif done.exit_code == BAD_VALUE:
        raise RefusedError(INVALID, f"This vzctl does not take {outcome.priority} for container {ctid}: {said}. {left}")
    elif done.exit_code == NOT_APPLIED:
        raise NotSetError(
            f"The kernel did not take it for container {ctid}, so vzctl did not save it: {said}. {left} "
            "Set it while the container is stopped.",
            outcome,
        )
    raise NotSetError(f"vzctl failed with exit code {done.exit_code}: {said}. {left}", outcome)


def _asked(target: Target, pause: Callable[[float], None]) -> Done:
    try:
        done = _once(target)
        for wait in WAITS:
            if done.exit_code != LOCKED:
                break
            pause(wait)
            done = _once(target)
    except HostError as error:
        raise HostError(
            f"{error.detail} Whether container {target.ctid} was changed is not known: scan the host."
        ) from error
    return done


def _once(target: Target) -> Done:
    words = ["set", target.ctid, "--ioprio", str(target.priority), "--save"]
    done = target.commands.run(["vzctl", *words], seconds=SECONDS)
    return target.commands.run(["/usr/sbin/vzctl", *words], seconds=SECONDS) if is_missing(done) else done


def _mended(target: Target, before: ConfigFile, now: ConfigFile) -> tuple[str, ...]:
    """Of several lines vzctl changes the first, and the last one counts; its new file may be read by everybody."""
    notes, said = [], config.recorded(now.content)
    if said.priority != target.priority and len(said.lines) > 1:
        several = f"{now.path} sets it {len(said.lines)} times, and vzctl changed only the first"
        try:
            replace(target.commands, now, config.with_priority(now.content, target.priority))
            notes.append(f"{several}: all of them say it now.")
        except (HostError, RefusedError) as error:
            notes.append(f"{several}, while the last one counts. {error.detail}")
    if now.mode != before.mode:
        left = restore_mode(target.commands, before)
        notes.append(left or f"vzctl gave {now.path} mode {now.mode}; it has {before.mode} again.")
    return tuple(notes)
