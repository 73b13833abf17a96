"""I/O limits of drives: exact in both directions, and nothing else of the drive touched."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.proxmox import limits
from storage_admin.hosts.proxmox.drives import Drive
from tests.harness.proxmox import schema
from tests.working import refused_as

PLAIN = Drive.parse("store:100/vm-100-disk-0.qcow2,discard=on,size=32G")


@given(st.integers(limits.SMALLEST_BYTES, limits.LARGEST), st.integers(1, limits.LARGEST))
def test_a_limit_is_read_as_it_was_set(rate: int, operations: int) -> None:
    made = limits.changed(PLAIN, {"read_bytes_sec": rate, "write_iops_sec": operations})
    assert limits.of(Drive.parse(str(made))) == {"read_bytes_sec": rate, "write_iops_sec": operations}
    # Proxmox VE takes it for a number, and multiplies it as a float.
    assert schema.properties("vm:scsi", str(made))["mbps_rd"] == made.option("mbps_rd")
    if rate < 1 << 53:
        assert int(float(made.option("mbps_rd")) * 1024 * 1024) == rate


def test_taking_limits_away_leaves_the_drive_as_it_was() -> None:
    made = limits.changed(PLAIN, {"read_bytes_sec": 1 << 20, "write_bytes_sec": 5000, "read_iops_sec": 7})
    assert str(made) == f"{PLAIN},mbps_rd=1,mbps_wr=0.00476837158203125,iops_rd=7"
    assert limits.changed(made, dict.fromkeys(limits.KEYS)) == PLAIN
    assert limits.changed(made, {"read_bytes_sec": 0}) == limits.changed(
        PLAIN, {"write_bytes_sec": 5000, "read_iops_sec": 7}
    )


def test_what_is_not_named_stays() -> None:
    made = limits.changed(Drive.parse("a:1/x.raw,mbps_rd=12.5,mbps_rd_max=20,iops_wr=300"), {"read_iops_sec": 9})
    assert str(made) == "a:1/x.raw,mbps_rd=12.5,mbps_rd_max=20,iops_wr=300,iops_rd=9"


def test_a_burst_goes_with_its_limit() -> None:
    drive = Drive.parse(
        "a:1/x.raw,mbps_rd=10,mbps_rd_max=20,bps_rd_max_length=3,iops_rd=5,iops_rd_max=9,iops_rd_length=2"
    )
    assert str(limits.changed(drive, {"read_bytes_sec": 0})) == "a:1/x.raw,iops_rd=5,iops_rd_max=9,iops_rd_length=2"
    assert str(limits.changed(drive, dict.fromkeys(limits.KEYS))) == "a:1/x.raw"
    with pytest.raises(RefusedError, match="burst"):
        limits.changed(drive, {"read_bytes_sec": 21 << 20})


def test_a_limit_for_both_ways_together_excludes_ours() -> None:
    drive = Drive.parse("a:1/x.raw,mbps=10")
    with pytest.raises(RefusedError, match="combined limit for reading and writing"):
        limits.changed(drive, {"write_bytes_sec": 1 << 20})
    assert str(limits.changed(drive, {"write_iops_sec": 5, "write_bytes_sec": 0})) == "a:1/x.raw,mbps=10,iops_wr=5"


def test_the_key_without_effect_goes_where_ours_comes() -> None:
    drive = Drive.parse("a:1/x.raw,bps_rd=1000000")
    assert limits.of(drive) == {}
    assert str(limits.changed(drive, {"read_bytes_sec": 1 << 20})) == "a:1/x.raw,mbps_rd=1"


@pytest.mark.parametrize(
    "wanted",
    [
        {"read_bytes_sec": -1}, {"read_bytes_sec": 1}, {"read_iops_sec": 10**16}, {"read_iops_sec": True},
        {"read_iops_sec": "5"}, {"read_iops_sec": 1.5}, {"reads": 5},
    ],
)  # fmt: skip
def test_what_is_no_limit_is_refused(wanted: dict[str, int]) -> None:
    assert refused_as(limits.changed, PLAIN, wanted) == "invalid"


@pytest.mark.parametrize("value", ["0", "-5", "nan", "inf", "1e400", "x", ""])
def test_what_limits_nothing_is_no_limit(value: str) -> None:
    text = f"a:1/x.raw,mbps_rd={value}" if value else "a:1/x.raw"
    assert limits.of(Drive.parse(text)) == {}
