"""A guest that QEMU switches over while libvirtd is dead, and that ends then: nobody deletes what it has written."""

import json
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from images.live import delete_snapshots, follow
from images.models import Image
from storage_admin.agent.protocol import HostError
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt.block_jobs import Ended, Wanted
from storage_admin.hosts.live_facts import GuestNow
from storage_admin.jobs import services
from storage_admin.jobs.kinds import BEGUN
from storage_admin.jobs.models import Job
from tests.harness import libvirtd as daemons
from tests.harness.guests import Domains, LibvirtGuest
from tests.live.chains import at_stage, definition_of, kill_qemu, pid_of
from tests.live.conftest import OnChain
from tests.live.test_faults import begun
from tests.live.writer import acknowledged, begin, check, wait_for_writes
from tests.working import OPERATOR, image_at, run, scan

COPY = Wanted("", "vda", "copy", ["a", "b"], 0, None, 0, {"path": "c", "format": "raw"})


@pytest.mark.parametrize(
    ("wanted", "stage", "ended", "unseen"),
    [
        (COPY, "pivoting", Ended(active=False, chain=[], later="a"), True),
        (COPY, "pivoting", Ended(active=True, chain=["a", "b"], later="a"), True),
        (COPY, "pivoting", Ended(active=True, chain=["c"], later="c"), False),
        (COPY, "pivoting", Ended(active=False, chain=[], later="c"), False),
        (COPY, "pivoting", Ended(active=False, chain=[], later=None), True),
        (COPY, "ready", Ended(active=False, chain=[], later="a"), True),
        (COPY, "ready", Ended(active=True, chain=["a", "b"], later="a"), False),
        (COPY, "mirroring", Ended(active=False, chain=[], later="a"), False),
        (COPY, "aborting", Ended(active=True, chain=["a", "b"], later="a"), False),
        (Wanted("", "vda", "commit", ["a", "b"], 0, 1), "pivoting", Ended(active=False, chain=[], later="a"), True),
    ],
)
def test_a_switch_may_be_unseen_where_it_was_ordered_and_the_image_before_is_used(
    wanted: Wanted, stage: str, ended: Ended, unseen: bool
) -> None:
    assert follow.unseen_switch(Job(kept={BEGUN: {"stage": stage}}), wanted, ended) is unseen


@pytest.mark.parametrize(
    ("run", "cpu_ns", "is_another"),
    [(3, 9, False), (3, 10, False), (0, 0, True), (4, 2, True), (3, 2, True)],
    ids=["no time passed", "the same run", "off", "another number", "the number came again"],
)
def test_a_guest_that_was_written_to_in_another_run_is_told_from_one_that_ran_on(
    run: int, cpu_ns: int, is_another: bool
) -> None:
    begun = {"name": "one", "run": 3, "cpu_ns": 9, "over": [["disk.one", "disk.qcow2"]]}
    now = GuestNow("running" if run else "shut off", run=run, cpu_ns=cpu_ns)
    with pytest.raises(HostError) if is_another else nullcontext():
        delete_snapshots._refuse_unseen(Guest(name="guest"), now, begun)


def asked(guest: LibvirtGuest, *commands: Callable[[Any], dict[str, Any]]) -> Any:
    """What a guest's QEMU answers to the last of some commands; each is made from the answer before."""
    [folder] = Path("/var/lib/libvirt/qemu").glob(f"domain-*-{guest.name[:20]}")
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(30)
        line.connect(str(folder / "monitor.sock"))
        file, answer = line.makefile("rw"), None
        for command in (lambda _: {"execute": "qmp_capabilities"}, *commands):
            file.write(json.dumps(command(answer)) + "\n")
            file.flush()
            while "return" not in (told := json.loads(file.readline())):
                assert "error" not in told, told
            answer = told["return"]
        return answer


@pytest.mark.guest
@pytest.mark.services
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("quiet", "libvirtd")
@pytest.mark.parametrize("operation", ["copy", "active commit"])
def test_what_a_guest_has_written_after_a_switch_that_libvirt_never_knew_of_is_kept(
    on_chain: OnChain, domains: Domains, chain: list[Path], operation: str
) -> None:
    guest, row, folder = on_chain
    job, after = begun(operation, row, folder)
    qemu, last = pid_of(guest), list[int]()

    def unseen() -> None:
        daemons.kill()
        asked(
            guest,
            lambda _: {"execute": "query-block-jobs"},
            lambda jobs: {"execute": "job-complete", "arguments": {"id": jobs[0]["device"]}},
        )
        wait_for_writes(guest, 80)
        last.append(acknowledged(guest))
        kill_qemu(qemu)
        daemons.restart()

    begin(guest)
    with at_stage("ready", unseen):
        run(job)
    domains.reconnect(guest)
    assert (job.state, job.error_code, definition_of(guest)) == ("failed", follow.GUEST_ENDED, "top.qcow2")
    assert after[0] in job.error_detail
    scan(job.host)
    plan = services.plan(OPERATOR, "commit", image_at(chain[0]).pk, {})
    assert [one.code for one in plan.by_hand] == [follow.GUEST_ENDED]  # which policies leave alone
    assert [image.name for image in Image.objects.filter(host=job.host, orphan=True)] == []
    if operation == "copy":
        check(folder / after[0], last[0])
