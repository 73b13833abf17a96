"""What a kill left in the moment of a swap: finished where nobody has touched the file that went, else taken back."""

from __future__ import annotations

import os

from storage_admin.agent.folders.pools import held
from storage_admin.agent.swap import moment
from storage_admin.agent.swap.exchange import OtherName, StrangerError, TakeOver
from storage_admin.agent.swap.journal import FLAGS, Stamp
from storage_admin.agent.swap.outcome import same_content, stat_in


def straighten(moves: TakeOver, went: Stamp, came: Stamp) -> None:
    """Bring every file under the one name that it should have, whatever step was the last.

    Args:
        moves: the steps.
        went: the file that goes, before that.
        came: the file that comes, likewise.
    """
    if moves.inode(moves.going) is None and moves.inode(moves.coming) is None:
        return  # all is done, or all was put back
    if moves.is_in:
        hidden = moves.going if moves.inode(moves.going) == moves.goes else moves.coming
        # Whoever found the file that went under its name and was let in when the agent died.
        if is_free(moves.folder, hidden, went) or not is_free(moves.folder, moves.name, came):
            moves.finish()
        else:
            moves.back()
    elif isinstance(moves, OtherName) and moves.is_half:
        if is_free(moves.folder, moves.name_out, went):
            try:
                moves.retire()
            except StrangerError:
                return
            moves.finish()
    else:
        moves.back()


def is_free(folder: int, name: bytes, before: Stamp) -> bool:
    """Whether nobody has written to a file since, and nobody has it open as far as can be seen."""
    named = stat_in(folder, name)
    if named is None or named.inode != before.inode:
        return False
    with held(os.open(name, FLAGS, dir_fd=folder)) as fd:
        return same_content(Stamp.of(os.fstat(fd)), before) and moment.user(fd) is None
