"""A job that waits for its guest, through a real dashboard: REST, worker, scheduler, libvirt."""

import time
from pathlib import Path

import pytest

from tests.e2e.rest import Rest
from tests.harness.guests import Disk, Domains
from tests.harness.processes import wait_until
from tests.harness.services import running_dashboard
from tests.working import create

pytestmark = [pytest.mark.guest, pytest.mark.services]


def test_a_job_goes_on_when_its_guest_is_shut_down_and_starts_it_again(domains: Domains, shared_folder: Path) -> None:
    pool = shared_folder / "pool"
    pool.mkdir(mode=0o755)
    disk = create(pool / "disk.qcow2", "64M")
    guest = domains.run([Disk(disk)])
    guest.write(1, 20, 0x61)
    guest.write(1, 20, 0)
    with running_dashboard(shared_folder / "data") as dashboard:
        rest = Rest(dashboard)
        host = rest.get("hosts/")["results"][0]["id"]
        rest.post("pools/", {"host": host, "path": str(pool)}, expect=201)
        rest.scan()
        image = next(row for row in rest.get("images/", limit=1000)["results"] if row["path"] == str(disk))
        body = {"kind": "reclaim", "image": image["id"]}
        assert rest.post("jobs/", body, expect=409)["code"] == "guest_running"
        job = rest.post("jobs/", body | {"options": {"when_running": "wait", "start_after": True}})
        wait_until(lambda: guest.name in rest.get(f"jobs/{job['id']}/")["waiting_for"], 30, "it waits for its guest")
        time.sleep(12)  # a look of the scheduler, and rounds of the sweeper, that change nothing
        assert rest.get(f"jobs/{job['id']}/")["state"] == "queued"
        guest.stop()
        ended = rest.finished(rest.get(f"jobs/{job['id']}/"))
        assert (ended["state"], ended["error"]) == ("succeeded", None)
        assert ended["result"]["after_bytes"] < ended["result"]["before_bytes"]
        wait_until(guest.domain.isActive, 30, "the guest is started again")
