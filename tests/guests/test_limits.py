"""How some of a disk's limits change without the others: by libvirt's own rules, which a real libvirtd then checks."""

from hypothesis import given
from hypothesis import strategies as st

from storage_admin.hosts.libvirt.limits import SETTABLE, merged

UNITS, WAYS, SUFFIXES = ("bytes", "iops"), ("total", "read", "write"), ("", "_max", "_max_length")


def after(known: dict[str, int], asked: dict[str, int]) -> dict[str, int]:
    """What is there when libvirt was given that; nothing of what is 0."""
    return {name: value for name, value in (known | merged(known, asked)).items() if value}


def test_one_direction_changes_alone() -> None:
    known = {"read_bytes_sec": 10, "write_bytes_sec": 20, "read_iops_sec": 30}
    assert after(known, {"write_bytes_sec": 5}) == {"read_bytes_sec": 10, "write_bytes_sec": 5, "read_iops_sec": 30}
    assert after(known, {"read_bytes_sec": 0}) == {"write_bytes_sec": 20, "read_iops_sec": 30}


def test_a_limit_of_both_directions_becomes_that_of_the_other_one() -> None:
    known = {"total_bytes_sec": 20, "total_iops_sec": 7}
    assert after(known, {"read_bytes_sec": 5}) == {"read_bytes_sec": 5, "write_bytes_sec": 20, "total_iops_sec": 7}
    assert after(known, {"read_bytes_sec": 0, "write_bytes_sec": 0}) == {"total_iops_sec": 7}


def test_a_burst_stays_as_long_as_it_can() -> None:
    known = {"read_iops_sec": 10, "read_iops_sec_max": 50, "read_iops_sec_max_length": 3}
    assert after(known, {"read_iops_sec": 50}) == known | {"read_iops_sec": 50}
    assert after(known, {"read_iops_sec": 51}) == {"read_iops_sec": 51}
    assert after(known, {"read_iops_sec": 0}) == {}
    total = {"total_iops_sec": 10, "total_iops_sec_max": 50}
    assert after(total, {"read_iops_sec": 60}) == {
        "read_iops_sec": 60, "write_iops_sec": 10, "write_iops_sec_max": 50,
    }  # fmt: skip


def test_what_nothing_is_asked_of_is_not_given() -> None:
    assert merged({"read_iops_sec": 5, "group_name": "g", "size_iops_sec": 4096}, {}) == {}
    given = merged({"read_iops_sec": 5, "group_name": "g", "size_iops_sec": 4096}, {"read_bytes_sec": 1})
    assert given == {"read_bytes_sec": 1, "write_bytes_sec": 0, "total_bytes_sec": 0}


@st.composite
def families(draw: st.DrawFn) -> dict[str, int]:
    """What libvirt may hold of a disk."""
    known: dict[str, int] = {}
    for unit in UNITS:
        ways = draw(st.sampled_from([("total",), ("read", "write"), ("read",), ("write",), ()]))
        for way in ways:
            limit = draw(st.integers(1, 100))
            known[f"{way}_{unit}_sec"] = limit
            if draw(st.booleans()):
                known[f"{way}_{unit}_sec_max"] = draw(st.integers(limit, 200))
                known[f"{way}_{unit}_sec_max_length"] = draw(st.integers(0, 9))
    return known


@given(families(), st.dictionaries(st.sampled_from(SETTABLE), st.integers(0, 150)))
def test_whatever_was_there_libvirt_can_take_it_and_nothing_becomes_quicker(
    known: dict[str, int], asked: dict[str, int]
) -> None:
    now = after(known, asked)
    for unit in UNITS:
        assert not (f"total_{unit}_sec" in now and (f"read_{unit}_sec" in now or f"write_{unit}_sec" in now))
        for way in WAYS:
            limit, burst = now.get(f"{way}_{unit}_sec", 0), now.get(f"{way}_{unit}_sec_max", 0)
            assert not burst or burst >= limit > 0
            assert burst or f"{way}_{unit}_sec_max_length" not in now
        for way in ("read", "write"):
            name = f"{way}_{unit}_sec"
            if name in asked:
                assert now.get(name, 0) == asked[name]
            else:
                before = known.get(name) or known.get(f"total_{unit}_sec") or 0
                assert (now.get(name) or now.get(f"total_{unit}_sec") or 0) == before
