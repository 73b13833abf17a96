"""The verb ``exclusive``: what each volume of the host's thin pools has alone, while nobody else wants the disk."""

from __future__ import annotations

from typing import Any

from storage_admin.agent.host import thin
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import Arguments, Request
from storage_admin.agent.verbs.sample import be_idle


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Look at the thin pools of this host one by one, at idle priority.

    Args:
        request: without arguments.
        io: the controller; it gets an ``exclusive`` event for each pool: ``group``, ``pool``, ``why`` it could not be
            measured (else empty), ``volumes``: by their names what deleting each would free, in bytes.

    Returns:
        ``measured``: how many pools were; ``skipped``: how many could not be.

    Raises:
        RefusedError: ``invalid``, ``tool_missing``.
        HostError: LVM does not answer.
        StoppedError: the controller stopped the work; what was told stands.
    """
    Arguments(request.args, frozenset())
    be_idle(io)
    thin.release_left(io)
    measured = skipped = 0
    for told in thin.measure(io):
        measured, skipped = measured + (not told["why"]), skipped + bool(told["why"])
        io.progress("measuring", measured + skipped, None, f"{told['group']}/{told['pool']}")
        if told["why"]:
            io.log(f"{told['group']}/{told['pool']} was not measured: {told['why']}", "warning")
        io.emit("exclusive", **told)
    return {"measured": measured, "skipped": skipped}
