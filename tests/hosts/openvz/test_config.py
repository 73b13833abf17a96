"""A container's configuration: what vzctl makes of it, and what an edit leaves of it."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from storage_admin.hosts.openvz import config
from tests.harness.openvz import doubles

LONG_AGO = b'# made by vzctl\nONBOOT="yes"\n\nHOSTNAME="ct.example.org"\nIP_ADDRESS="10.0.0.1"\n'


@pytest.mark.parametrize(
    ("content", "priority"),
    [
        (b'IOPRIO="4"\n', 4), (b"IOPRIO=4\n", 4), (b' \tIOPRIO="4" \r\n', 4), (b'IOPRIO="007"\n', 7),
        (b'IOPRIO="+2"\n', 2), (b'IOPRIO=" 2"\n', 2), (b'IOPRIO="-0"\n', 0), (b'IOPRIO="0"\n', 0),
        (b'IOPRIO="3" # was 5\n', 3), (b'\\IOPRIO=\\"6\\"\n', 6),
        (b'IOPRIO=""\n', 0), (b"IOPRIO=\n", 0),
        (b"", None), (LONG_AGO, None), (b'#IOPRIO="4"\n', None), (b' # IOPRIO="4"\n', None),
        (b'IOPRIO ="4"\n', None), (b'ioprio="4"\n', None), (b'XIOPRIO="4"\n', None), (b'IOPRIO="4\n', None),
        (b"IOPRIO='4'\n", None), (b'IOPRIO="4 "\n', None), (b'IOPRIO="4" "5"\n', None), (b"IOPRIO=+\n", None),
        (b'IOPRIO="8"\n', None), (b'IOPRIO="-1"\n', None), (b'IOPRIO="four"\n', None),
        (b'A="\0"\nB="\0IOPRIO=4"\n', None), (b'IOPRIO="4\0"\n', None),
        (b'IOPRIO="4"', None), (b"IOPRIO=4", 0), (b'A="1"\nIOPRIO="4"', 4),
        (b'IOPRIO="18446744073709551620"\n', None), (b'IOPRIO="4294967300"\n', None),
        (b'IOPRIO="' + b"0" * 5000 + b'5"\n', 5), (b'IOPRIO="' + b"9" * 5000 + b'"\n', None),
    ],
)  # fmt: skip
def test_a_line_is_read_as_vzctl_reads_it(content: bytes, priority: int | None) -> None:
    assert config.recorded(content).priority == priority


@pytest.mark.parametrize(
    ("values", "priority"),
    [
        ((b"3", b"6"), 6), ((b"6", b"3"), 3), ((b"3", b"x"), 3), ((b"3", b"9"), None), ((b"9", b"3"), 3),
        ((b"3", b""), 0), ((b"3", b"99999999999"), 3), ((b"", b"x"), 0),
    ],
)  # fmt: skip
def test_of_several_lines_the_last_that_is_a_number_counts(values: tuple[bytes, ...], priority: int | None) -> None:
    content = b"".join(b'IOPRIO="%s"\nONBOOT="no"\n' % value for value in values)
    assert config.recorded(content).priority == priority
    assert len(config.recorded(content).lines) == len(values)


def test_what_stands_there_is_told_without_control_characters() -> None:
    assert config.recorded(b' IOPRIO="\x1b[31m5"\r\n').lines == ('IOPRIO="\\x1b[31m5"',)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'IOPRIO="4"\n', b'IOPRIO="7"\n'),
        (b"IOPRIO=4\n", b"IOPRIO=7\n"),
        (b'A="1"\n\tIOPRIO="4" \r\nB="2"\n', b'A="1"\n\tIOPRIO="7" \r\nB="2"\n'),
        (b'IOPRIO="4" # ours\n', b'IOPRIO="7" # ours\n'),
        (b'IOPRIO=""\n', b'IOPRIO="7"\n'),
        (b"IOPRIO='4'\n", b'IOPRIO="7"\n'),
        (b'IOPRIO="4\n', b'IOPRIO="7"\n'),
        (b'IOPRIO="4"\nA="1"\nIOPRIO="2"\n', b'IOPRIO="7"\nA="1"\nIOPRIO="7"\n'),
        (b'#IOPRIO="4"\n', b'#IOPRIO="4"\nIOPRIO="7"\n'),
        (LONG_AGO, LONG_AGO + b'IOPRIO="7"\n'),
        (b'A="1"', b'A="1"\nIOPRIO="7"\n'),
        (b"", b'IOPRIO="7"\n'),
        (b"IOPRIO=4", b"IOPRIO=7\n"),
    ],
)
def test_an_edit_changes_the_value_and_nothing_else(before: bytes, after: bytes) -> None:
    assert config.with_priority(before, 7) == after


def sets_it(line: bytes) -> bool:
    """Whether vzctl takes a line for one that sets the priority; said another way than the code under test does."""
    kept = re.sub(rb"\\(.|$)", rb"\1", line.split(b"\0")[0])
    return re.match(rb"[ \t\n\r\v\f]*IOPRIO=", kept) is not None


_values = st.one_of(st.sampled_from([b'"3"', b"3", b'""', b'"9"', b'"x"', b"'4'", b'"5', b' "6"', b"-1"]), st.binary())
_ours = st.builds(
    lambda before, value, after: before + b"IOPRIO=" + value + after,
    st.sampled_from([b"", b" ", b"\t", b"\\", b"#"]), _values, st.sampled_from([b"", b" ", b"\r", b" # x", b'"']),
)  # fmt: skip
_lines = st.one_of(_ours, st.binary(max_size=40), st.sampled_from(LONG_AGO.split(b"\n"))).map(
    lambda line: line.replace(b"\n", b"").replace(b"\0", b"")
)


@given(lines=st.lists(_lines, max_size=8), last=_lines, priority=st.integers(0, 7))
@example(lines=[], last=b"IOPRIO=3", priority=5)
@example(lines=[b'IOPRIO="9"', b"", b'IOPRIO="3"'], last=b'A="\\', priority=0)
def test_whatever_was_there_other_lines_stay_and_the_value_is_as_asked(
    lines: list[bytes], last: bytes, priority: int
) -> None:
    before = b"".join(line + b"\n" for line in lines) + last
    after = config.with_priority(before, priority)
    assert config.recorded(after).priority == priority
    assert doubles.facts("200", after)["ioprio"] == b"%d" % priority
    others = [line for line in (*lines, *([last] if last else [])) if not sets_it(line)]
    assert [line for line in after.removesuffix(b"\n").split(b"\n") if not sets_it(line)] == others
    assert config.with_priority(after, priority) == after


@given(st.lists(_lines, max_size=8).map(b"\n".join))
def test_reads_what_the_double_reads(content: bytes) -> None:
    shown = doubles.facts("200", content)["ioprio"]
    assert config.recorded(content).priority == (None if shown is None else int(shown))


def test_a_key_has_its_last_value() -> None:
    content = b'HOSTNAME="a"\nVE_PRIVATE="/vz/private/$VEID"\nHOSTNAME="b c"\nBROKEN\n'
    assert config.value(content, b"HOSTNAME") == b"b c"
    assert config.value(content, b"VE_PRIVATE") == b"/vz/private/$VEID"
    assert config.value(content, b"VE_ROOT") is None
