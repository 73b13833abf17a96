"""What a policy would do now: its next windows, its choice, and everything that is left out with the reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from images.models import Image
from images.policies import rules as choosing
from images.policies.planned import Planned, planned
from images.policies.reasons import NOT_MEANT, Skip, word_of
from images.policies.shape import Rules
from images.policies.windows import Window
from images.space import Admitted

#: So many are planned as if all before them were taken too; on later pages each page is planned by itself.
PLANNED_TOGETHER = 200
WINDOWS = 5


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
        skipped: this page of those that a rule leaves out, by name.
        predicted_bytes: what all candidates would win together, by their estimates; ``None`` where nothing is won.
    """

    windows: list[Window]
    chosen: list[Planned]
    chosen_count: int
    skipped: list[Skip]
    skipped_count: int
    left_out: list[LeftOut]
    predicted_bytes: int | None

    @property
    def accepted(self) -> list[Planned]:
        """Those of this page whose jobs would be submitted."""
        return [one for one in self.chosen if one.refusal is None]

    @property
    def refused(self) -> list[Planned]:
        """Those of this page that their plans refuse."""
        return [one for one in self.chosen if one.refusal is not None]

    @property
    def accepted_count(self) -> int:
        """How many would get a job, of all: plans of other pages are not made yet and may still refuse."""
        return self.chosen_count - len(self.refused)

    @property
    def expected_bytes(self) -> int | None:
        """What all candidates would win together without those of this page that their plans refuse."""
        if self.predicted_bytes is None:
            return None
        return self.predicted_bytes - sum(one.candidate.gain or 0 for one in self.refused)

    @property
    def accepted_bytes(self) -> int:
        """What those of this page would win whose jobs would be submitted."""
        return sum(one.won_bytes or 0 for one in self.accepted)


def preview(
    rules: Rules, now: datetime, *, limit: int, chosen_from: int = 0, skipped_from: int = 0, code: str = ""
) -> Preview:
    """What a policy with these rules would do now.

    Args:
        limit: of each list, on this page.
        chosen_from, skipped_from: where this page of each list begins.
        code: only those skips, where it is given.
    """
    choice = choosing.choose(rules, now)
    windows = rules.schedule.next(now, WINDOWS)
    skips = [skip for skip in choice.skips if skip.code == code] if code else choice.skips
    begin = 0 if chosen_from < PLANNED_TOGETHER else chosen_from
    length = windows[0].closes - windows[0].opens if windows else rules.schedule.by_hand(now).closes - now
    found = planned(
        rules, choice.chosen[begin : chosen_from + limit], Admitted(), until=now + length, now=now
    )[chosen_from - begin :]  # fmt: skip
    meant = [LeftOut(name, word_of(name), count, meant=True) for name, count in choice.skipped_by_code]
    others = [LeftOut(name, NOT_MEANT[name], count, meant=False) for name, count in choice.not_meant.most_common()]
    gains = [one.gain for one in choice.chosen if one.gain is not None]
    return Preview(
        windows, found, len(choice.chosen), skips[skipped_from : skipped_from + limit], len(skips), [*meant, *others],
        sum(gains) if gains else None,
    )  # fmt: skip


def not_meant(rules: Rules, code: str, begin: int, limit: int) -> Sequence[Image]:
    """A page of the images that a policy is not for, by the code of why, by name.

    Raises:
        KeyError: there is no such code.
    """
    if code not in NOT_MEANT:
        raise KeyError(code)
    found = choosing.not_meant(rules, code)
    rows = Image.objects.select_related("host", "pool").order_by("name", "pk")
    if isinstance(found, list):
        return list(rows.filter(pk__in=found[begin : begin + limit]))
    return list(rows.filter(pk__in=found.values("pk"))[begin : begin + limit])
