"""What errors of a host are called: by what an admin can do about each."""

import errno
import os

import pytest

from storage_admin.agent.protocol import HostError, RefusedError, host_errors, refusal_of_tool

CODES = {
    errno.ENOSPC: "not_enough_space", errno.EDQUOT: "not_enough_space", errno.EPERM: "immutable",
    errno.EROFS: "immutable", errno.EACCES: "immutable", errno.ESTALE: "pool_changed",
}  # fmt: skip


@pytest.mark.parametrize(("number", "code"), CODES.items())
def test_an_error_that_an_admin_can_act_on_is_a_refusal(number: int, code: str) -> None:
    with pytest.raises(RefusedError) as refused, host_errors():
        raise OSError(number, os.strerror(number))
    assert refused.value.code == code


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT])
def test_any_other_error_is_the_hosts(number: int) -> None:
    with pytest.raises(HostError, match=os.strerror(number)), host_errors():
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE])
def test_what_a_tool_prints_is_the_same(number: int) -> None:
    said = b"qemu-img: error while writing at byte 0: " + os.strerror(number).encode()
    told = refusal_of_tool(said)
    assert told is not None
    assert told.code == CODES[number]
    assert refusal_of_tool(b"qemu-img: error while writing at byte 0: Input/output error") is None
