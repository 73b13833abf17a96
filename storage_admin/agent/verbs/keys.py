"""Add a passphrase to an encrypted image, or empty one of its key slots."""

from __future__ import annotations

from typing import Any

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, Request
from storage_admin.agent.qemu.keys import Keys, iter_time
from storage_admin.agent.rewrite.base import COMMON, Rewrite, Wish, opened
from storage_admin.agent.rewrite.key_slots import KeySlots


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Change an image's key slots by protocol P; what a guest reads stays the same.

    Args:
        request: its ``args`` are :data:`base.COMMON`; ``secrets`` with ``passphrase``, and ``new_passphrase`` where one
            is added; ``slot``, which is to be emptied otherwise; ``must_open``: passphrases that have to open the image
            afterwards; ``iter_time``: milliseconds that trying the new one is to take.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`, with ``key_slots``: those that hold a key.

    Raises:
        RefusedError: ``wrong_passphrase``; as any rewrite.
        HostError, StoppedError: the image is as it was.
    """
    args = Arguments(request.args, COMMON | {"secrets", "slot", "must_open", "iter_time"})
    slot, given, others = args.maybe("slot", int), args.take("secrets", dict), args.get("must_open", list, [])
    if set(given) != {"passphrase", *(["new_passphrase"] if slot is None else [])}:
        raise RefusedError(INVALID, "a passphrase is needed, and a new one or the slot that is to be emptied")
    if not all(isinstance(one, str) for one in [*given.values(), *others]):
        raise RefusedError(INVALID, "a passphrase is text")
    wish = Wish.parse(request.args, args)
    recipe = KeySlots(Keys.of(**given), slot, tuple(others), iter_time(args))
    with opened(wish) as chain:
        return Rewrite(request, io, wish, recipe, chain).run()
