"""Ids and priorities that are none start nothing."""

from collections.abc import Sequence
from typing import Any

import pytest

from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.openvz import checked_ctid, checked_priority, set_priority
from storage_admin.hosts.shells import Done
from tests.working import fails_as

UUID = "c4d2a8f0-1111-4222-8333-123456789abc"


class Untouched:
    """A host on which nothing may be run."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float = 30.0) -> Done:
        raise AssertionError(f"was run: {argv}")


@pytest.mark.parametrize(
    "ctid",
    [
        "", "0", "00", "0200", "-1", "+1", " 200", "200 ", "200\n", "200\0", "20000000000", "1.5", "1e3", "0x10",
        "200.conf", "../200", "200/../201", "/etc/passwd", "*", "?", "[2]00", "200;id", "200|id", "200&", "$(id)",
        "`id`", "$IFS", "--all", "-200", "200 --force", "200,201", "\u0662\u0660\u0660", "\uff12\uff10\uff10",
        "ct200", "200\x1b[31m", "\r200",
        UUID + "\n", "{" + UUID + "}", UUID[:-1], UUID + "0", UUID.replace("-", ""), UUID.replace("c", "g"),
        f"{UUID}/..", "x" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_id_is_refused_before_anything_runs(ctid: str) -> None:
    with fails_as(RefusedError, "invalid") as refused:
        set_priority(Untouched(), ctid, 4)
    assert refused.value.detail.isprintable()
    assert len(refused.value.detail) < 600


@pytest.mark.parametrize(
    "priority",
    [
        8, -1, 44, 10**30, True, False, None, 4.0, 3.7, "", " ", "8", "-1", "+4", "04", "4 ", " 4", "4\n", "abc",
        "four", "4;id", "$(id)", "--save", "4 --force", "\u0664", "\uff14", "4\0", "4\x1b", "0x4", "1e0",
        [], {}, "4" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_priority_is_refused_before_anything_runs(priority: Any) -> None:
    with fails_as(RefusedError, "invalid") as refused:
        set_priority(Untouched(), "200", priority)
    assert refused.value.detail.isprintable()
    assert len(refused.value.detail) < 600


def test_numbers_uuids_and_0_to_7_are_taken() -> None:
    assert [checked_ctid(ctid) for ctid in ("1", "200", "9999999999", UUID, UUID.upper())]
    assert [checked_priority(priority) for priority in ("0", "7", *range(8))] == [0, 7, *range(8)]
