"""Give an image another base, or none: what it reads stays the same."""

from __future__ import annotations

import contextlib
from typing import Any

from storage_admin.agent.appliance.relinking import Unproven
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, Request
from storage_admin.agent.rewrite.base import COMMON, Recipe, Rewrite, Wish, opened
from storage_admin.agent.rewrite.chain import Chain, Planned
from storage_admin.agent.rewrite.rebasing import Onto, Rebase, Relink, Standalone

METHODS = frozenset({"rebase", "convert"})


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Make an overlay stand on a lower image, on none, or on one that was not in its chain.

    Args:
        request: its ``args`` are :data:`base.COMMON`; ``method`` (``rebase`` keeps the image's own clusters as they
            are, ``convert`` writes all anew and always makes it stand alone); for ``rebase`` either ``keep`` (number of
            the link that becomes the immediate base, counted from the image's base as 1) or ``onto`` (another base and
            its own chain, from above, each described as the image is), or neither for none.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`.

    Raises:
        RefusedError, HostError, StoppedError: the image is as it was.
    """
    args = Arguments(request.args, COMMON | {"method", "keep", "onto"})
    method, keep = args.choice("method", METHODS, "rebase"), args.maybe("keep", int)
    onto = [Planned.parse(link) for link in args.get("onto", list, [])]
    if method == "convert" and (keep is not None or onto):
        raise RefusedError(INVALID, "convert leaves no backing file; only rebase can keep one")
    if keep is not None and onto:
        raise RefusedError(INVALID, "keep and onto exclude each other")
    wish = Wish.parse(request.args, args)
    with contextlib.ExitStack() as stack:
        chain = stack.enter_context(opened(wish))
        recipe: Recipe = Rebase(keep) if method == "rebase" else Standalone()
        if onto:
            recipe = Onto(stack.enter_context(contextlib.closing(Chain(onto[0], onto[1:]))))
        return Rewrite(request, io, wish, recipe, chain).run()


def relink(request: Request, io: AgentIO) -> dict[str, Any]:
    """Have an image whose base is lost name another one, which whoever asks takes for the lost one, by protocol P.

    Args:
        request: its ``args`` are :data:`base.COMMON` without a chain, and ``onto``: the other base and its own chain,
            from above, each described as the image is; ``force``: also where nothing of the two is alike; or
            ``prove``: only if data and filesystems, which are checked in an appliance, show that it is the lost one.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`, with ``compared`` (blocks of the image) and ``alike`` (that the base has as well); of a
        proof ``filesystems`` (each ``device``, ``type``, ``state``: ``sound``, ``damaged`` or ``unknown``, ``why``).

    Raises:
        RefusedError, HostError, StoppedError: the image is as it was.
    """
    args = Arguments(request.args, COMMON | {"onto", "force", "prove"})
    onto = [Planned.parse(link) for link in args.take("onto", list)]
    wish = Wish.parse(request.args, args)
    if not onto or wish.ancestors:
        raise RefusedError(INVALID, "onto names the backing file, and the image's own chain is empty")
    with opened(wish, base_lost=True) as chain, contextlib.closing(Chain(onto[0], onto[1:])) as base:
        prove = args.get("prove", bool, False)
        recipe = Unproven(base) if prove else Relink(base, args.get("force", bool, False))
        return Rewrite(request, io, wish, recipe, chain).run()
