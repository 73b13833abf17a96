"""A new image's name is asked for in one place, and refused with the same codes as ever."""

import pytest

from storage_admin.agent.folders.pools import is_job, is_possible, wrong_name, wrong_name_for
from storage_admin.agent.protocol import b64
from storage_admin.agent.rewrite.conversion import Target
from tests.working import refused_as


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (b"vm.qcow2", ""),
        (b"a" * 249 + b".qcow2", ""),
        (b"VM.QCOW2", ""),
        (b"a" * 250 + b".qcow2", "invalid"),
        (b"", "invalid"),
        (b".sa-7.new", "invalid"),
        (b"a\nb.qcow2", "invalid"),
        (b".hidden.qcow2", "invalid"),
        (b".qcow2", "invalid"),
        (b"vm.raw", "invalid"),
        (b"vm", "invalid"),
        (b".", "invalid"),
        (b"..", "outside_pool"),
        (b"a\0.qcow2", "outside_pool"),
    ],
)
def test_the_agent_refuses_a_name_by_itself(name: bytes, code: str) -> None:
    fields = {"pool_path_b64": b64(b"/pool"), "path_b64": b64(b"/pool/in/" + name), "format": "qcow2"}
    if not code:
        assert Target.parse(fields).path.endswith(name)
        return
    assert refused_as(Target.parse, fields) == code


@pytest.mark.parametrize("name", [b"", b"a/b", b"a\0b", b".", b"..", b"a" * 256])
def test_no_file_of_a_folder_has_such_a_name(name: bytes) -> None:
    assert not is_possible(name)
    assert is_possible(b"a" * 255)


def test_a_name_is_wrong_for_another_format() -> None:
    assert [wrong_name_for(b"vm.img", form) == "" for form in ("raw", "qcow2")] == [True, False]
    assert wrong_name(b"a/b.raw")


@pytest.mark.parametrize(
    ("text", "answer"),
    [("a1B2", True), ("a" * 40, True), ("a" * 41, False), ("", False), ("a-b", False), ("a\n", False)],
)
def test_a_jobs_id(text: str, answer: bool) -> None:
    assert is_job(text) is answer
