"""A guest's lock as Proxmox VE itself treats it: what it was recorded to say to whoever asks, and our double too."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from storage_admin.agent.protocol import HELD_LOCK, HostError, RefusedError
from storage_admin.hosts.proxmox.errors import NotThereError
from storage_admin.hosts.proxmox.pvesh import Pvesh
from storage_admin.hosts.shells import Done
from tests.harness.proxmox import changes
from tests.harness.proxmox.schema import DATA
from tests.harness.proxmox.world import ApiDeathError, lab

RECORDED: dict[str, Any] = json.loads((DATA / "guest_lock.json").read_text())


class Replay:
    """A node that says what was recorded."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.said = said
        self.argv: list[str] = []

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float = 30.0) -> Done:
        self.argv = list(argv)
        return Done(self.said["exit"], self.said["stdout"].encode(), self.said["stderr"].encode())


def params_of(said: dict[str, Any]) -> dict[str, str]:
    rest = said["argv"][2:]
    return dict(zip([name[2:] for name in rest[::2]], rest[1::2], strict=True))


def by_pvesh(said: dict[str, Any]) -> str:
    """What our way to pvesh makes of it: a code, or nothing where it was done."""
    verb, path, node = said["argv"][0], said["argv"][1].strip("/").split("/"), Replay(said)
    try:
        api = Pvesh(node, "pve1")
        api.put(*path, params=params_of(said)) if verb == "set" else api.get(*path)
    except NotThereError:
        return "not there"
    except (RefusedError, HostError) as error:
        return error.code
    finally:
        assert node.argv[2:] == ["pvesh", *said["argv"], "--output-format", "json"]
    return ""


def test_what_pvesh_says_is_understood() -> None:
    assert [by_pvesh(said) for said in RECORDED["pvesh"]] == [
        "", "guest_locked", "guest_locked", "guest_locked", "stale_plan", "", "tool_failed", "stale_plan", "not there",
        "tool_failed",
    ]  # fmt: skip


def test_a_lock_is_taken_once_and_given_back_by_root_alone() -> None:
    world, locked = lab(), []
    world.root = True
    guest = world.guests["vm", 100]
    for said in RECORDED["pvesh"]:
        if said["argv"][0] != "set" or "/310/" not in said["argv"][1] or "nonsense" in said["argv"]:
            continue  # what the schema says is looked at before that
        try:
            changes.update(world, guest, params_of(said))
            words = ""
        except ApiDeathError as death:
            words = death.message
        assert words == said["stderr"], said["argv"]
        assert (guest.conf.now.get("lock") == HELD_LOCK) == said["locked"], said["argv"]
        locked.append(said["locked"])
    assert set(locked) == {True, False}


@pytest.mark.parametrize("said", RECORDED["token"], ids=lambda said: " ".join(said["params"]))
def test_a_token_can_do_neither(said: dict[str, Any]) -> None:
    world = lab()
    guest = world.guests["vm", 100]
    before = guest.text
    with pytest.raises(ApiDeathError) as death:
        changes.update(world, guest, said["params"])
    told = death.value
    assert (told.status, told.message, told.fields) == (said["status"], said["message"], said.get("errors"))
    assert guest.text == before
