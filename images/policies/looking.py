"""A look at what a policy is about to choose, on all its hosts at the same time: a guest may be off since the scan."""

import time
from collections.abc import Collection, Iterable
from datetime import datetime

from images.models import Image
from images.policies import rules as choosing
from images.policies.rules import Choice
from images.policies.shape import ALONE, Rules
from images.scan import look

#: Why an image may be left out for what has passed since.
PASSING = frozenset({"guest_running", str(Image.State.CHAIN_BROKEN), str(Image.State.UNREADABLE)})
#: So many images of all hosts are looked at for one choice, those that come first.
MOST = 5000
#: For so long one step of a run looks, on all of its hosts.
STEP_SECONDS = 5.0


def choose(rules: Rules, now: datetime, hosts: frozenset[int] | None = None) -> Choice:
    """Today's choice as :func:`images.policies.rules.choose` makes it, after a look at what it rests on."""
    choice = choosing.choose(rules, now, hosts)
    passing = [skip.id for skip in choice.skips if skip.code in PASSING]
    first = [candidate.id for candidate in choice.chosen]
    return choosing.choose(rules, now, hosts) if again(rules, [*first, *passing][:MOST]) else choice


def again(rules: Rules, ids: Collection[int]) -> frozenset[int]:
    """Looks at images, where the policy's jobs need them for themselves; ids of the hosts that have told of them."""
    if rules.kind not in ALONE:
        return frozenset()
    return look.at(Image.objects.filter(pk__in=ids).select_related("host").defer("header", "estimate"))


class Looks:
    """The looks of one step of a run: at what comes first on all hosts at the same time, and at what is planned later.

    A host that has left one without an answer gets no further ones in this step, and all of them together end after
    ``STEP_SECONDS``: what is planned then rests on the rows as they are.
    """

    def __init__(self, rules: Rules, first: Collection[int]) -> None:
        """Looks at the first images."""
        self._rules, self._until, self._done = rules, time.monotonic() + STEP_SECONDS, set(first)
        self._answering = set(again(rules, first))

    def also(self, host_id: int, ids: Iterable[int | None]) -> None:
        """Looks at images of a host that this step has not looked at."""
        new = {pk for pk in ids if pk is not None} - self._done
        if new and host_id in self._answering and time.monotonic() < self._until:
            self._done |= new
            self._answering -= {host_id} - again(self._rules, new)
