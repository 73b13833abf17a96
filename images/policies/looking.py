"""A look at what a policy is about to choose, on all its hosts at the same time: a guest may be off since the scan."""

from collections.abc import Collection
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


def choose(rules: Rules, now: datetime, hosts: frozenset[int] | None = None) -> Choice:
    """Today's choice as :func:`images.policies.rules.choose` makes it, after a look at what it rests on."""
    choice = choosing.choose(rules, now, hosts)
    passing = [skip.id for skip in choice.skips if skip.code in PASSING]
    first = [candidate.id for candidate in choice.chosen]
    return choosing.choose(rules, now, hosts) if again(rules, [*first, *passing][:MOST]) else choice


def again(rules: Rules, ids: Collection[int]) -> bool:
    """Looks at images, where the policy's jobs need them for themselves; whether any host has told of them."""
    if rules.kind not in ALONE or rules.on_pools:
        return False
    rows = Image.objects.filter(pk__in=ids).select_related("host").defer("header", "estimate")
    return bool(look.at(rows))
