"""``kill -9`` at every step of the agent while a linked clone is flattened: its VM names it as it is, in the end."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_admin.agent import main
from storage_admin.agent.bundle import Bundle
from storage_admin.hosts.models import Host
from storage_admin.jobs import reaper, runner, services
from storage_admin.jobs.models import Job
from tests.faults import kill_self
from tests.faults.trials import WHEN, steps
from tests.harness.proxmox.server import ProxmoxServer
from tests.images.linked import LINKED, OWN, backing, clone, conf, flatten, holds, host, server, store
from tests.images.node import scanned
from tests.working import OPERATOR, run, said

__all__ = ["clone", "host", "server", "store"]

pytestmark = [
    pytest.mark.faults, pytest.mark.qemu, pytest.mark.django_db, pytest.mark.usefixtures("quiet", "no_reserve"),
]  # fmt: skip


def run_to_death(job: Job, at: int, when: str, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Does a job with an agent that kills itself at that step."""

    @contextlib.contextmanager
    def mortal(_: Host) -> Iterator[list[str]]:
        yield [sys.executable, "-m", kill_self.__name__, str(at), when]

    with monkeypatch.context() as patch:
        patch.setattr(runner, "agent_command", mortal)
        patch.setattr(runner, "agent_bundle", lambda: Bundle(Path(), main.own_hash()))  # from its sources, not packed
        return run(job)


@pytest.mark.parametrize("when", WHEN)
def test_an_agent_that_dies_at_any_step_leaves_an_image_that_its_vm_names_as_it_is(
    server: ProxmoxServer, host: Host, clone: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    outcomes, between = set(), set()
    for at in steps():
        job = run_to_death(flatten(clone), at, when, monkeypatch)
        if job.state == "succeeded":
            break
        assert holds(clone), at
        volume = conf(server)["scsi0"].partition(",")[0]
        assert volume in (LINKED, OWN)
        between.add((volume == OWN, backing(clone) == ""))
        reaper.recover_hosts()
        recovery = Job.objects.get(kind="recover", state="queued")
        assert run(recovery).state == "succeeded", (at, said(recovery))
        job.refresh_from_db()
        flat = backing(clone) == ""
        print(f"step {at} {when}: {'flat' if flat else 'an overlay'}")
        assert (holds(clone), job.repoint_due) == (True, False), (at, said(job))
        assert conf(server) == {"name": "clone", "scsi0": f"{OWN if flat else LINKED},discard=on,size=8M"}, at
        outcomes.add(flat)
        if flat:
            assert run(services.undo(OPERATOR, job)).state == "succeeded"
            assert conf(server)["scsi0"].startswith(LINKED)
        scanned(host)
    else:
        raise AssertionError("no run came to its end")
    assert outcomes == {True, False}
    # It died with the new id and the old file, too; and never the other way round.
    assert (True, False) in between
    assert (False, True) not in between


def test_an_undo_that_dies_at_any_step_leaves_an_image_that_its_vm_names_as_it_is(
    server: ProxmoxServer, host: Host, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes, job = set(), run(flatten(clone))
    for at in steps():
        scanned(host)
        undo = run_to_death(services.undo(OPERATOR, job), at, "after", monkeypatch)
        if undo.state == "succeeded":
            break
        assert holds(clone), at
        reaper.recover_hosts()
        recovery = Job.objects.get(kind="recover", state="queued")
        assert run(recovery).state == "succeeded", (at, said(recovery))
        job.refresh_from_db()
        flat = backing(clone) == ""
        print(f"step {at}: {'flat' if flat else 'an overlay'}")
        assert (holds(clone), job.repoint_due) == (True, False), (at, said(job))
        assert conf(server) == {"name": "clone", "scsi0": f"{OWN if flat else LINKED},discard=on,size=8M"}, at
        outcomes.add(flat)
        if not flat:
            scanned(host)
            job = run(flatten(clone))
            assert job.state == "succeeded", job.error_detail
    else:
        raise AssertionError("no run came to its end")
    assert outcomes == {True, False}
