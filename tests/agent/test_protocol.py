"""Lines as they travel."""

import pytest

from storage_admin.agent import protocol

GOOD = [protocol.encode("image", inode=number).rstrip() for number in range(3)]


def test_many_lines_are_decoded_as_each_would_be() -> None:
    assert list(protocol.decode_all(GOOD)) == [protocol.decode(line) for line in GOOD]
    assert list(protocol.decode_all([])) == []


@pytest.mark.parametrize(
    "bad",
    [
        [b"Killed"],
        [b""],
        [b"[]"],
        [b'{"inode":1}'],
        [b'{"event":7}'],
        [b'{"event":"a"},{"event":"b"}'],  # one line is one event
        [b'{"event":"a"', b'"inode":1}'],  # and no event takes two
        [b'{"event":"a"},{"event":"b"', b'"inode":1}'],
    ],
)
def test_a_line_that_is_no_event_is_an_error_after_those_before_it(bad: list[bytes]) -> None:
    events = protocol.decode_all([*GOOD, *bad, *GOOD])
    assert [next(events)["inode"] for _ in GOOD] == [0, 1, 2]
    with pytest.raises(ValueError):  # noqa: PT011 (json's own, or ours)
        next(events)
