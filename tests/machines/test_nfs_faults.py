"""A server that starts again, exports anew, or has no room any more, in the middle of each verb that writes there.

The storage is a small filesystem of the server's own. All verbs are in the middle of their work when the fault comes.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from storage_admin.agent import protocol
from tests.agent.every_verb import CLEAN
from tests.faults.trials import Trials
from tests.harness.processes import wait_until
from tests.machines.lab import Machine, machines
from tests.machines.nfs import EXPORTED, MOUNTED, Export, Pinged, load_agents
from tests.machines.nfs_verbs import COPYING, VERBS, Work, end, recovered

pytestmark = pytest.mark.machines

_numbers = itertools.count(1)
OPTIONS = "rw,sync,no_root_squash,no_subtree_check"
CLIENTS = "10.9.0.0/24"

OVER = {protocol.RESULT, protocol.ERROR}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Machine]]:
    with machines() as running:
        for machine in running:
            load_agents(machine, tmp_path_factory.mktemp("agent"))
        running[0].run(
            f"truncate -s 64M /var/small.img; mkfs.ext4 -q -F /var/small.img; mount -o loop /var/small.img {EXPORTED}; "
            f"echo '{EXPORTED} {CLIENTS}({OPTIONS},fsid=5)' >/etc/exports; exportfs -ra"
        )
        yield running


@pytest.fixture(params=["3", "4.2"])
def export(request: pytest.FixtureRequest, both: tuple[Machine, Machine]) -> Export:
    return Export(both, request.param, EXPORTED)


class Fault(ABC):
    """What happens to the server, and how it is over."""

    def __init__(self, export: Export) -> None:
        self.server, self.export = export.server, export

    @abstractmethod
    def strike(self) -> None:
        """It happens."""

    def heal(self) -> None:  # noqa: B027 (most are over by themselves)
        """By itself."""


class Restart(Fault):
    """The server is started again: it forgets who had what open, and asks for it."""

    def strike(self) -> None:
        self.server.run("systemctl restart nfs-server")


class TakenBack(Fault):
    """The export is gone, and made again as it was when all have ended."""

    def strike(self) -> None:
        self.server.run("exportfs -ua; exportfs -f")

    def heal(self) -> None:
        self.server.run("exportfs -ra")
        self.forget_locks()

    def forget_locks(self) -> None:
        """Over 3 nobody could give a lock back meanwhile, and the server keeps it for good (lockd: "unlock status 7").

        Its start takes them away, unless it has itself mounted something over 3, as here.
        """
        if self.export.version == "3":
            told = {row["detail"] != "" for row in self.export.recover(self.export.client) if row["outcome"] == "busy"}
            assert told == {True}, "who waits for a recovery learns why it takes so long"
            self.server.run(f"echo {EXPORTED} >/proc/fs/nfsd/unlock_filesystem")


class MadeAnew(TakenBack):
    """The export is made again with another number at once: what was mounted before is stale for good."""

    def strike(self) -> None:
        super().strike()
        self.server.run(f"exportfs -o {OPTIONS},fsid=6 {CLIENTS}:{EXPORTED}")

    def heal(self) -> None:
        self.server.run("exportfs -ua; exportfs -f; exportfs -ra")
        for machine in (self.export.server, self.export.client):
            machine.run(
                f"umount -l {MOUNTED}; mount -t nfs -o vers={self.export.version},hard 10.9.0.1:{EXPORTED} {MOUNTED}"
            )
        self.forget_locks()


class Full(Fault):
    """Somebody else has taken all the room."""

    def strike(self) -> None:
        self.server.run(f"cat /dev/zero >{EXPORTED}/filling 2>/dev/null || true; sync")

    def heal(self) -> None:
        self.server.run(f"rm {EXPORTED}/filling; sync")


@pytest.mark.parametrize("fault", [Restart, TakenBack, MadeAnew, Full])
def test_a_fault_of_the_server_in_the_middle_of_each_verb_loses_nothing(export: Export, fault: type[Fault]) -> None:
    for trial in Trials("nfs faults", f"{fault.__name__}, NFS {export.version}", worth=len(VERBS)):
        with trial, ExitStack() as stack:
            export.server.run(f"rm -rf {EXPORTED}/[0-9]* {EXPORTED}/.sa-*")
            works = [Work(export, verb, str(next(_numbers)), str(next(_numbers))) for verb in VERBS]
            with ThreadPoolExecutor(len(works)) as pool:
                asked = list(pool.map(Work.args, works))
            # Who waits for leave has written all that takes room.
            in_the_middle = {verb for verb in COPYING if fault is Full or trial.rng.random() < 0.5}
            agents = list[Pinged]()
            for work, args in zip(works, asked, strict=True):
                agents.append(stack.enter_context(export.agent(how="soon")))
                agents[-1].request(work.verb, args, work.job)
            with ThreadPoolExecutor(len(works)) as pool:
                list(pool.map(_wait, agents, (work.verb in in_the_middle for work in works)))
            early = [work.verb for work, agent in zip(works, agents, strict=True) if agent.events[-1]["event"] in OVER]
            print("over before:", early)
            happens = fault(export)
            happens.strike()
            try:
                with ThreadPoolExecutor(len(works)) as pool:
                    answers = list(pool.map(end, agents))
            finally:
                happens.heal()
            wait_until(
                lambda: export.client.run(f"ls {MOUNTED} >/dev/null && echo yes || true") != "", 120, "it is back"
            )
            recovered(export)
            export.server.run(f"sync; ls {MOUNTED} >/dev/null")
            wrong = []
            for work, answer in zip(works, answers, strict=True):
                code = str(answer.get("code", "done"))
                print(export.version, fault.__name__, work.verb, work.verb in in_the_middle, answer)
                trial.note(f"{work.verb}: {code}")
                try:
                    assert code == "done" or code in CLEAN, code
                    work.check(answer)
                except AssertionError as error:
                    wrong.append(f"{work.verb} ({code}): {error}")
            assert not wrong, "\n".join(wrong)


def _wait(agent: Pinged, in_the_middle: bool) -> None:
    """Until an agent copies, or waits for leave to go on; or has ended."""
    while (event := agent.next()) is not None:
        if event["event"] in {protocol.READY, protocol.MORE, protocol.RESULT, protocol.ERROR}:
            return
        if in_the_middle and event["event"] == protocol.PROGRESS and event.get("done"):
            return
