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
from tests.working import OPERATOR, run, said, succeeded

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


def recovered(job: Job, at: int) -> Job:
    """The recovery of the host of a job whose agent has died."""
    reaper.recover_hosts()
    recovery = Job.objects.get(kind="recover", state="queued")
    assert run(recovery).state == "succeeded", (at, said(recovery))
    job.refresh_from_db()
    return recovery


def is_flat(server: ProxmoxServer, clone: Path, job: Job, at: int) -> bool:
    """Whether the clone stands on nothing any more once its host is recovered; its VM names it as it is."""
    recovered(job, at)
    flat = backing(clone) == ""
    print(f"step {at}: {'flat' if flat else 'an overlay'}")
    assert (holds(clone), job.repoint_due) == (True, False), (at, said(job))
    assert conf(server) == {"name": "clone", "scsi0": f"{OWN if flat else LINKED},discard=on,size=8M"}, at
    return flat


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
        flat = is_flat(server, clone, job, at)
        outcomes.add(flat)
        if flat:
            assert run(services.undo(OPERATOR, job)).state == "succeeded"
            assert conf(server)["scsi0"].startswith(LINKED)
        scanned(host)
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
        flat = is_flat(server, clone, job, at)
        outcomes.add(flat)
        if not flat:
            scanned(host)
            job = succeeded(run(flatten(clone)))
    assert outcomes == {True, False}
