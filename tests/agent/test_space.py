"""What has to stay free."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_admin.agent.host.space import Reserve, require, space, watch
from tests.agent.harness import held_open
from tests.working import refused_as


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    with held_open(tmp_path) as descriptor:
        yield descriptor


def test_says_what_an_ordinary_user_may_still_write(fd: int, tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    assert space(fd).capacity_bytes == status.f_blocks * status.f_frsize
    assert abs(space(fd).available_bytes - status.f_bavail * status.f_frsize) < 1 << 30


@pytest.mark.parametrize(
    ("percent", "minimum", "capacity", "reserve"), [(5, 100, 10_000, 500), (5, 600, 10_000, 600), (0, 0, 10_000, 0)]
)
def test_the_reserve_is_the_larger_of_both(percent: float, minimum: int, capacity: int, reserve: int) -> None:
    assert Reserve(percent, minimum).of(capacity) == reserve


def test_counts_the_work_the_reserve_and_other_jobs(fd: int) -> None:
    free = space(fd).available_bytes
    third, slack = free // 3, 1 << 30
    require(fd, third - slack, Reserve(0, third - slack), third - slack)
    for needed, kept, elsewhere in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        reserve = Reserve(0, kept * third)
        assert refused_as(require, fd, needed * third, reserve, elsewhere * third) == "not_enough_space"


def test_stops_work_that_reaches_the_reserve(fd: int) -> None:
    watch(fd, Reserve(0, 0))
    assert refused_as(watch, fd, Reserve(0, space(fd).available_bytes + (1 << 30))) == "not_enough_space"
