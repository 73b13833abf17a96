"""What a policy would do now: its next windows, its choice, and everything that is left out with the reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from images.models import Image
from images.policies import looking
from images.policies import rules as choosing
from images.policies.planned import Planned, planned
from images.policies.reasons import NOT_MEANT, WORDS, Skip, word_of
from images.policies.rules import Choice
from images.policies.shape import Rules
from images.policies.windows import Window
from images.rewrite.space import Admitted
from storage_admin.agent.protocol import REFUSALS
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import StoragePool

#: So many are planned as if all before them were taken too, whatever page is asked for: what all of them come to is the
#: same on each page. On later pages each page is planned by itself.
PLANNED_TOGETHER = 200
WINDOWS = 5
_STATES = frozenset(Image.State.values) - {Image.State.OK, *Image.NOT_THERE}
#: Every code by which something may be left out: by a rule, by its state, by its plan.
CODES = frozenset({*WORDS, *REFUSALS, "guest_names_image", "right_missing", "token_refused"}) | _STATES


@dataclass(frozen=True)
class LeftOut:
    """How many one rule leaves out.

    Args:
        meant: whether the policy is for them at all.
    """

    code: str
    word: str
    count: int
    meant: bool


@dataclass(frozen=True)
class Preview:
    """A policy's choice as of now; lists are cut into pages, counts are of all.

    Args:
        chosen: this page of the candidates, in the order of gain, with their plans.
        skipped: this page of those that a rule leaves out, by name; where a code is asked for, only those.
        code: that one; empty for all that the policy is for.
        predicted_bytes: what all candidates would win together, by their estimates; ``None`` where nothing is won.
        refused_count, refused_bytes: of the first candidates, those that their plans refuse, and what these would win.
    """

    windows: list[Window]
    chosen: list[Planned]
    chosen_count: int
    skipped: Sequence[Skip]
    skipped_count: int
    left_out: list[LeftOut]
    predicted_bytes: int | None
    refused_count: int
    refused_bytes: int
    code: str = ""

    @property
    def accepted(self) -> list[Planned]:
        """Those of this page whose jobs would be submitted."""
        return [one for one in self.chosen if one.refusal is None]

    @property
    def planned_count(self) -> int:
        """How many of the first candidates ``refused_count`` is of: the plans of the others may still refuse."""
        return min(self.chosen_count, PLANNED_TOGETHER)

    @property
    def accepted_count(self) -> int:
        """How many would get a job, as far as plans are made."""
        return self.chosen_count - self.refused_count

    @property
    def expected_bytes(self) -> int | None:
        """What all candidates would win together without those that their plans refuse."""
        return None if self.predicted_bytes is None else self.predicted_bytes - self.refused_bytes


def preview(
    rules: Rules,
    now: datetime,
    *,
    limit: int,
    chosen_from: int = 0,
    skipped_from: int = 0,
    code: str = "",
    hosts: frozenset[int] | None = None,
) -> Preview:
    """What a policy with these rules would do now.

    Args:
        limit: of each list, on this page.
        chosen_from, skipped_from: where this page of each list begins.
        code: only those skips, where it is given; with one of ``NOT_MEANT``, those that the policy is not for.
        hosts: of those that the policy is not for, only the ones on these hosts are counted and listed.
    """
    choice = looking.choose(rules, now, hosts)
    windows = rules.schedule.next(now, WINDOWS)
    skips, skipped = _skips(rules, choice, slice(skipped_from, skipped_from + limit), code, hosts)
    length = windows[0].closes - windows[0].opens if windows else rules.schedule.by_hand(now).closes - now

    def plans(begin: int, end: int) -> list[Planned]:
        return planned(rules, choice.chosen[begin:end], Admitted(), until=now + length, now=now)

    end = chosen_from + limit
    is_first = chosen_from < PLANNED_TOGETHER
    first = plans(0, max(PLANNED_TOGETHER, end) if is_first else PLANNED_TOGETHER)
    found = first[chosen_from:end] if is_first else plans(chosen_from, end)
    refused = [one.candidate for one in first[:PLANNED_TOGETHER] if one.refusal is not None]
    meant = [LeftOut(name, word_of(name), count, meant=True) for name, count in choice.skipped_by_code]
    others = [LeftOut(name, str(NOT_MEANT[name]), count, meant=False) for name, count in choice.not_meant.most_common()]
    gains = [one.gain for one in choice.chosen if one.gain is not None]
    return Preview(
        windows, found, len(choice.chosen), skips, skipped, [*meant, *others], sum(gains) if gains else None,
        len(refused), sum(one.gain or 0 for one in refused), code,
    )  # fmt: skip


def _skips(
    rules: Rules, choice: Choice, page: slice, code: str, hosts: frozenset[int] | None
) -> tuple[Sequence[Skip], int]:
    """A page of those that are left out, for that reason where one is given, and how many there are."""
    if code in NOT_MEANT:
        rows, count = _strangers(rules, code, page, hosts)
        return [_skip(row, code) for row in rows], count
    skips = [skip for skip in choice.skips if skip.code == code] if code else choice.skips
    return skips[page], len(skips)


def _skip(row: Image | StoragePool | Guest, code: str) -> Skip:
    pool = row.pool if isinstance(row, Image) else None if isinstance(row, Guest) else row
    where = [row.host.name, *([pool.name] if pool else [])]
    return Skip(row.pk, row.host_id, pool.pk if pool else None, row.name, code, tuple(where))


def _strangers(
    rules: Rules, code: str, page: slice, hosts: frozenset[int] | None
) -> tuple[Sequence[Image | StoragePool | Guest], int]:
    """A page of the images (pools, guests) that a policy is not for, by name, and how many there are."""
    if not rules.on_images:
        others = choosing.others_not_meant(rules, code, hosts)
        return others[page], len(others)
    found = choosing.not_meant(rules, code, hosts)
    rows = Image.objects.select_related("host", "pool").defer("header", "estimate").order_by("name", "pk")
    if isinstance(found, list):
        return list(rows.filter(pk__in=found[page])), len(found)
    return list(rows.filter(pk__in=found.values("pk"))[page]), found.count()
