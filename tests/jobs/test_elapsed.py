"""The time that has surely passed, as several processes of a dashboard count it together."""

import pytest

from storage_admin.jobs.models import Elapsed
from tests.jobs.test_claims import at_once

pytestmark = pytest.mark.sql


@pytest.mark.django_db(transaction=True)
def test_processes_that_begin_to_count_at_once_after_a_boot_share_one_count() -> None:
    for _round in range(50):
        Elapsed.objects.all().delete()
        answers = at_once(4, lambda _number: Elapsed.tick())
        assert [type(answer) for answer in answers] == [float] * 4, answers
        assert Elapsed.objects.count() == 1
