"""pvesh on a node, by what Proxmox VE's own printed: an answer, chatter beside it, an error in words alone."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.proxmox.errors import ApiError, NotKnownError, NotThereError
from storage_admin.hosts.proxmox.pvesh import Pvesh
from storage_admin.hosts.shells import Done
from tests.harness.proxmox.schema import DATA
from tests.working import fails_as

SAID: dict[str, dict[str, Any]] = {
    one["what"]: one for one in json.loads((DATA / "pvesh.json").read_text(encoding="utf-8"))["said"]
}
PUT = ("nodes", "pve1", "qemu", 106, "config")


class Said:
    """A shell on which one command was run before, as it ended."""

    def __init__(self, stdout: str, stderr: str = "", exit_code: int = 0) -> None:
        self._done = Done(exit_code, stdout.encode(), stderr.encode())
        self.ran: list[str] = []

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float = 30.0) -> Done:
        self.ran = list(argv)
        return self._done


def by(what: str) -> Pvesh:
    one = SAID[what]
    return Pvesh(Said(one["stdout"], one["stderr"], one["exit_code"]), "pve")


@pytest.mark.parametrize("what", [name for name, one in SAID.items() if one["stdout"].startswith("update VM")])
def test_a_change_that_is_told_in_words_has_succeeded(what: str) -> None:
    assert by(what).put(*PUT, params={"description": "hello"}) is None


@pytest.mark.parametrize("after", ["null\n", '"UPID:pve1:0000726F:0004C69B:6B002BEB:qmmove:106:root@pam:"\n', "[1,2]"])
def test_words_before_the_answer_of_a_change_are_passed_over(after: str) -> None:
    shell = Said("update VM 106: -description hello\nmore words {\n" + after)
    assert Pvesh(shell, "pve").put(*PUT, params={"description": "hello"}) == json.loads(after)


def test_the_command_is_the_one_that_was_recorded_in_the_language_of_its_errors() -> None:
    shell = Said("")
    Pvesh(shell, "pve").put(*PUT, params={"description": "hello", "digest": "7238eba1e41e8a7587194a71ac98d80694e1bcf9"})
    assert shell.ran[-11:] == ["env", "LC_ALL=C", *SAID["a configuration is changed"]["argv"]]


@pytest.mark.parametrize("what", [name for name, one in SAID.items() if one["argv"][1:2] == ["get"]])
def test_what_is_read_is_what_was_printed(what: str) -> None:
    if SAID[what]["exit_code"]:
        with pytest.raises(HostError):
            by(what).get("version")
    else:
        assert by(what).get("version") == json.loads(SAID[what]["stdout"])


@pytest.mark.parametrize("text", ["", "update VM 106: -description hello\n", '{"release": "9.2"', "no JSON\n{}"])
def test_an_answer_that_is_none_is_no_success_where_something_is_read(text: str) -> None:
    with pytest.raises(ApiError, match="sent a"):
        Pvesh(Said(text), "pve").fields("version")


@pytest.mark.parametrize(
    ("what", "error", "code"),
    [
        ("it was changed meanwhile", RefusedError, "stale_plan"),
        ("a locked VM", RefusedError, "guest_locked"),
        ("a locked VM, where the terminal's language is not installed", RefusedError, "guest_locked"),
        ("no such VM", NotThereError, "not_found"),
        ("no such snapshot", NotThereError, "not_found"),
        ("no such call", NotKnownError, "tool_failed"),
        ("a parameter that is none", ApiError, "tool_failed"),
        ("a storage whose server is away", ApiError, "tool_failed"),
    ],
)
def test_what_it_says_of_an_error_is_the_same_error_as_over_https(
    what: str, error: type[HostError | RefusedError], code: str
) -> None:
    with pytest.raises(error) as raised:
        by(what).put(*PUT, params={"description": "hello"})
    told: Any = raised.value
    assert (type(told), told.code) == (error, code)


def test_an_error_after_warnings_keeps_its_status() -> None:
    words = "vm 111 - unable to parse value of 'scsi31' - unknown setting 'scsi31'\n"
    denied = "403 Permission check failed (/vms/106, VM.Config.Disk)\n"
    with fails_as(HostError, "right_missing"):
        Pvesh(Said("", words + denied, 255), "pve").put(*PUT, params={"description": "hello"})
