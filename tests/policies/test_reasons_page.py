"""docs/policies.md lists every reason, in the order in which the rules are asked."""

import re
from datetime import timedelta
from pathlib import Path

import pytest

from images.models import Image
from images.policies.reasons import _SENTENCES, NOT_MEANT, WORDS
from storage_admin.jobs.models import Job
from tests.factories import GIB, JobFactory, PolicyFactory
from tests.policies.test_rules import NOW, code_of, image, reclaimed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "policies.md"


def tables() -> list[list[str]]:
    """The codes of each table of codes, from top to bottom."""
    found: list[list[str]] = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| code |"):
            found.append([])
        elif found and re.match(r"\| `", line):
            found[-1] += re.findall(r"`(\w+)`", line.split("|")[1])
    return found


def test_the_page_lists_every_reason_once_in_its_order() -> None:
    not_meant, left_out, turn = tables()
    assert not_meant == list(NOT_MEANT)
    assert left_out == list(_SENTENCES)
    assert len(set(turn)) == len(turn)
    assert {*not_meant, *left_out, *turn} == {*_SENTENCES, *WORDS, "not_enough_space"}


@pytest.mark.django_db
def test_the_rules_are_asked_in_the_order_of_the_page() -> None:
    one = image(
        state="unreadable", state_detail="It cannot be read.", declared_format="", encrypted=True, in_use=True,
        in_use_detail="guest web is running", chain_depth=2, reclaimable_bytes=None, allocated_size=4 * GIB,
    )  # fmt: skip
    policy = PolicyFactory.create(min_chain_depth=3, min_age_hours=1000, min_reclaimable_bytes=GIB)
    last = reclaimed(one, days_ago=1, before=4 * GIB, after=GIB)
    job = JobFactory.create(target=one, kind="reclaim", state="running")
    codes = [code_of(policy, one)]

    def then(**columns: object) -> None:
        Image.objects.filter(pk=one.pk).update(**columns)
        codes.append(code_of(policy, one))

    then(state="ok")
    then(declared_format="qcow2")
    then(encrypted=False)
    Job.objects.filter(pk=job.pk).update(state="failed")
    then()
    then(in_use=False)
    then(chain_depth=3)
    then(allocated_size=GIB)
    Job.objects.filter(pk=last.pk).update(finished=NOW - timedelta(days=100))
    then()
    then(reclaimable_bytes=1)
    then(reclaimable_bytes=GIB)
    assert codes == [
        "unreadable", "format_undeclared", "encrypted", "busy", "guest_running", "chain_too_short", "decayed",
        "too_young", "not_analyzed", "too_little", "",
    ]  # fmt: skip
    order = list(_SENTENCES)
    assert [order.index(code) for code in codes[:-1]] == sorted(order.index(code) for code in codes[:-1])
