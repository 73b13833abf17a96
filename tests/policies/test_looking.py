"""A run plans each image on facts of now, also those far behind in its order."""

from collections.abc import Iterable

import pytest

from images.models import Image
from images.policies import looking
from tests.policies.test_runs import at_work, night, picks

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]
COUNT = 50
#: The guests of all of these were started after the choice.
STARTED = {f"disk{number}" for number in range(COUNT - 2)}


class Host:
    """What a host tells of images that are looked at, as soon as the run's choice is made."""

    def __init__(self, most: int = COUNT) -> None:
        self.looks: list[set[str]] = []
        self.asked = 0
        self._most = most

    def at(self, rows: Iterable[Image]) -> frozenset[int]:
        found = list(rows)
        self.asked += 1
        if len(found) < COUNT:
            if len(self.looks) == self._most:
                return frozenset()
            self.looks.append({row.name for row in found})
            asked = Image.objects.filter(pk__in=[row.pk for row in found], name__in=STARTED)
            asked.update(in_use=True, in_use_detail="guest web is running")
        return frozenset(row.host_id for row in found)


def test_whoever_is_behind_those_that_cannot_be_done_is_looked_at_before_it_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host()
    monkeypatch.setattr("images.scan.look.at", host.at)
    run = night(COUNT)
    assert at_work() == [f"disk{COUNT - 2}"]
    assert {code for label, _state, code in picks(run) if label in STARTED} == {"guest_running"}
    assert sum(map(len, host.looks)) == len(set().union(*host.looks)), "each image is looked at once"


def test_a_host_that_stops_answering_is_not_asked_again_in_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(most=1)
    monkeypatch.setattr("images.scan.look.at", host.at)
    monkeypatch.setattr("images.policies.submitting._take", lambda *_args: 0)
    night(COUNT)
    assert host.asked == 3, "for the choice, for the first images, and once in vain"


def test_the_looks_of_a_step_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    monkeypatch.setattr("images.scan.look.at", host.at)
    monkeypatch.setattr(looking, "STEP_SECONDS", 0.0)
    night(COUNT)
    assert len(host.looks) == 1
