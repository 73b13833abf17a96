"""Exclusive sizes of thin volumes: what was said is what deleting frees, and no snapshot of metadata is left behind."""

from collections.abc import Iterator

import pytest

from images.models import Image
from storage_admin.hosts.models import Host as Row
from tests.agent.harness import Agent
from tests.harness.processes import wait_until
from tests.machines.host import Host, host
from tests.machines.test_lvm import group, row
from tests.working import scan, work

__all__ = ["group", "host", "row"]

pytestmark = [pytest.mark.machines, pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

POOL = "vg-pool-tpool"


def status(host: Host) -> list[str]:
    return host.run(f"dmsetup status --noflush {POOL}").split()


def used(host: Host) -> int:
    """Bytes of the pool's data that are used, by the device mapper's own count of its blocks of 64 KiB."""
    sectors = int(host.run(f"dmsetup table {POOL}").split()[5])
    return int(status(host)[5].split("/")[0]) * sectors * 512


def test_what_deleting_a_thin_volume_frees_is_what_was_measured(group: Host, row: Row) -> None:
    write = "dd if=/dev/urandom of=/dev/vg/{} bs=1M count={} seek={} conv=notrunc oflag=direct status=none"
    group.run(f"{write.format('thin', 2, 0)}; {write.format('kept', 3, 20)}; sync")
    scan(row)
    for name in ("kept", "away", "thin"):
        assert work("exclusive", row.pk).result == {"measured": 1, "skipped": []}
        told = Image.objects.get(name=name, missing_since=None)
        assert told.alone_at is not None
        before = used(group)
        group.run(f"lvremove -q -f vg/{name}")
        assert before - used(group) == told.deletion_frees, name
        assert told.deletion_frees is not None
        scan(row)
    assert status(group)[6] == "-"


def test_a_snapshot_of_metadata_that_somebody_else_holds_stays(group: Host, row: Row) -> None:
    scan(row)
    group.run(f"dmsetup message {POOL} 0 reserve_metadata_snap")
    held = status(group)[6]
    result = work("exclusive", row.pk).result or {}
    assert [one["pool"] for one in result["skipped"]] == ["vg/pool"]
    work("recover", row.pk)
    assert status(group)[6] == held != "-"
    assert set(Image.objects.values_list("alone_bytes", flat=True)) == {None}
    group.run(f"dmsetup message {POOL} 0 release_metadata_snap")


@pytest.fixture
def halfway(group: Host, row: Row) -> Iterator[Agent]:
    """An agent that waits for a thin_ls without an end, while the pool has the snapshot of its metadata."""
    scan(row)
    tool = "/usr/sbin/thin_ls"
    group.run(f"mv {tool} {tool}.real; printf '#!/bin/sh\nexec sleep 600\n' >{tool}; chmod +x {tool}")
    agent = group.agent()
    agent.request("exclusive", {})
    wait_until(lambda: group.run("pgrep -fx 'sleep 600' || true"), 60, "thin_ls is at work")
    group.run(f"mv {tool}.real {tool}")
    yield agent
    agent.close()


@pytest.mark.parametrize("clears", ["recover", "exclusive"])
def test_a_snapshot_of_metadata_that_a_killed_agent_left_is_released(
    group: Host, row: Row, halfway: Agent, clears: str
) -> None:
    group.run("kill -KILL $(ps -o ppid= -p $(pgrep -fx 'sleep 600'))")
    wait_until(lambda: not group.run("pgrep -fx 'sleep 600' || true"), 30, "its tool has gone with it")
    assert status(group)[6] != "-"
    work(clears, row.pk)
    assert status(group)[6] == "-"


def test_a_cancel_releases_the_snapshot_of_metadata(group: Host, halfway: Agent) -> None:
    assert status(group)[6] != "-"
    halfway.say("cancel")
    assert halfway.answer()["code"] == "cancelled"
    assert status(group)[6] == "-"
