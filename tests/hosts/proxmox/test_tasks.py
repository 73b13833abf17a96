"""Tasks: a 200 is the beginning, the task's own end is the end."""

from collections.abc import Callable

import pytest

from storage_admin.agent.protocol import HostError, StoppedError
from storage_admin.hosts.proxmox import tasks
from storage_admin.hosts.proxmox.actions import move_disk
from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.config import GuestRef, read_config
from tests.harness.proxmox.server import ProxmoxServer
from tests.harness.proxmox.world import recorded
from tests.working import fails_as, refused_as

REF = GuestRef("pve1", 101)


def moving(client: Client) -> str:
    return move_disk(client, read_config(client, REF), "scsi0", "s2")


def test_a_task_is_followed_with_its_log_and_its_progress(client: Client) -> None:
    percents: list[float] = []
    lines: list[str] = []
    warnings = tasks.follow(client, moving(client), progress=percents.append, log=lines.append, interval=0)
    assert percents == [0.0, 25.0, 50.0, 75.0, 100.0]
    assert lines[0].startswith("create full clone of drive scsi0")
    assert lines[-1] == "TASK OK"
    assert len(lines) == len(set(lines)) == 7
    assert warnings == 0


def test_a_long_log_is_read_to_its_end_and_no_line_twice(server: ProxmoxServer, client: Client) -> None:
    upid = moving(client)
    server.world.tasks[upid].lines[:] = [f"line {i}" for i in range(1200)]
    server.world.tasks[upid].shown = 1100
    lines: list[str] = []
    with pytest.raises(StoppedError):
        tasks.follow(client, upid, log=lines.append, check=_stop_after(3), interval=0)
    assert lines[:1100] == [f"line {i}" for i in range(1100)]
    assert len(lines) == len(set(lines))
    assert lines[-1] == "TASK ERROR: interrupted by signal"


def _stop_after(looks: int) -> Callable[[], None]:
    left = [looks]

    def check() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StoppedError("cancelled", "the user cancelled it")

    return check


def test_a_task_that_fails_after_a_200_is_a_failure(server: ProxmoxServer, client: Client) -> None:
    server.world.task_fails = "storage migration failed: no space left on device"
    before = server.world.guests["vm", 101].text
    with pytest.raises(HostError, match=r"task failed: storage migration failed: no space left on device"):
        tasks.follow(client, moving(client), interval=0)
    assert server.world.guests["vm", 101].text == before


def test_warnings_are_no_failure(server: ProxmoxServer, client: Client) -> None:
    upid = moving(client)
    server.world.tasks[upid].exit_status = "WARNINGS: 2"
    assert tasks.follow(client, upid, interval=0) == 2


@pytest.mark.parametrize("words", ["unexpected status", "interrupted by signal", "WARNINGS: x", "ok", ""])
def test_whatever_is_not_ok_is_a_failure(server: ProxmoxServer, client: Client, words: str) -> None:
    upid = moving(client)
    server.world.tasks[upid].exit_status = words
    with pytest.raises(HostError, match="task failed"):
        tasks.follow(client, upid, interval=0)


@pytest.mark.parametrize(
    ("words", "code"),
    [("VM is locked (backup)", "guest_locked"), ("checksum mismatch (file change by other user?)", "stale_plan")],
)
def test_what_a_task_finds_in_its_way_is_a_refusal(
    server: ProxmoxServer, client: Client, words: str, code: str
) -> None:
    upid = moving(client)
    server.world.tasks[upid].exit_status = words
    assert refused_as(tasks.follow, client, upid, interval=0) == code


def test_a_refused_delete_is_read_from_its_task() -> None:
    """As recorded: 200 with a task's id, and the refusal in the task."""
    refused = recorded()["tasks"]["refused delete"]
    assert tasks.node_of(refused["upid"]) == "pve1"
    assert refused["status"] != "OK"


def test_a_cancelled_task_has_ended_when_that_is_said(server: ProxmoxServer, client: Client) -> None:
    upid = moving(client)
    before = server.world.guests["vm", 101].text
    with pytest.raises(StoppedError) as stopped:
        tasks.follow(client, upid, check=_stop_after(2), interval=0)
    assert stopped.value.code == "cancelled"
    assert server.world.tasks[upid].ended
    assert server.world.guests["vm", 101].text == before
    assert server.verbs()[-1].startswith("DELETE /nodes/pve1/tasks/UPID:pve1:")


def test_an_api_that_is_away_for_a_moment_loses_no_task(server: ProxmoxServer, client: Client) -> None:
    upid = moving(client)
    server.wire += [b"", b"HTTP/1.1 596 Connection timed out\r\nContent-Length: 0\r\n\r\n"]
    lines: list[str] = []
    tasks.follow(client, upid, log=lines.append, interval=0)
    assert lines[-1] == "TASK OK"


def test_an_api_that_stays_away_is_told_with_the_task(server: ProxmoxServer, client: Client) -> None:
    upid = moving(client)
    server.wire += [b""] * 50
    with fails_as(HostError, "host_unreachable", r"may still be running there\.") as error:
        tasks.follow(client, upid, interval=0.01, patience=0.1)
    assert upid in error.value.detail


def test_an_error_about_the_task_is_not_waited_out(server: ProxmoxServer, client: Client) -> None:
    upid = moving(client)
    server.world.tasks.clear()
    with pytest.raises(HostError, match="no such task"):
        tasks.follow(client, upid, interval=0)


@pytest.mark.parametrize(
    "upid", ["", "UPID:", "UPID:pve1/../x:0000726F:0004C69B:6B002BEB:a:b:c:", "x", "UPID:pve1:1:2:3:a:b:c:", None]
)
def test_what_is_no_task_is_not_asked_for(server: ProxmoxServer, client: Client, upid: str) -> None:
    with pytest.raises(HostError, match="is not a task ID"):
        tasks.follow(client, upid, interval=0)
    assert server.seen == []
