"""Rewrites on NFS while another machine uses the same images: no byte that a guest was told is safe is ever lost."""

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage_admin.agent import protocol
from storage_admin.agent.protocol import b64
from tests.faults.trials import Trials
from tests.harness.processes import wait_until
from tests.machines.lab import Machine, machines
from tests.machines.nfs import LENGTH, MOUNTED, PATTERN, PLACE, Export, Passing

pytestmark = [pytest.mark.machines, pytest.mark.night]

#: So many trials at once, each on an image of its own.
TOGETHER = 5
_numbers = itertools.count(1)
_AWAY: dict[str, tuple[Callable[[Export], object], Callable[[Export], object]]] = {
    "cut off": (
        lambda export: export.server.monitor("set_link wire off"),
        lambda export: export.server.monitor("set_link wire on"),
    ),
    "stopped": (
        lambda export: export.server.run("systemctl stop nfs-server"),
        lambda export: export.server.run("systemctl start nfs-server"),
    ),
}


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Machine, Machine]]:
    with machines() as running:
        yield running


@pytest.fixture(scope="module", params=["3", "4.2"])
def export(
    request: pytest.FixtureRequest, both: tuple[Machine, Machine], tmp_path_factory: pytest.TempPathFactory
) -> Export:
    return Export(both, request.param, tmp_path_factory.mktemp("agent"))


def hold(what: str, version: str, single: Callable[[random.Random, str], str]) -> None:
    """All trials: ``single`` gets random numbers and a job's id, and returns in a few words what came of it."""
    for trial in Trials("nfs", f"{what}, NFS {version}", worth=TOGETHER):
        with trial, ThreadPoolExecutor(TOGETHER) as pool:
            rngs = [random.Random(trial.rng.random()) for _ in range(TOGETHER)]
            done = [pool.submit(single, rng, f"n{next(_numbers)}") for rng in rngs]
            trial.note(*(one.result() for one in done))


def test_an_image_that_another_machine_has_open_keeps_what_is_written_there(export: Export) -> None:
    def single(rng: random.Random, job: str) -> str:
        path = export.image(job)
        at_server, early = rng.random() < 0.3, rng.random() < 0.5
        with export.writer(job, at_server=at_server) as guest:
            if early:
                guest.write(PATTERN, str(PLACE), str(LENGTH))
            answer = export.ask("reclaim", export.reclaim(path), job)
            if not early:
                guest.write(PATTERN, str(PLACE), str(LENGTH))
        assert not answer.get("swapped")
        assert answer["code"] in {"image_in_use", "stale_plan"}
        assert export.holds(job, written=True)
        assert export.left(job) == []
        return str(answer["code"])

    hold("open elsewhere", export.version, single)


def test_a_guest_that_starts_elsewhere_in_the_moment_of_the_swap_loses_nothing(export: Export) -> None:
    def single(rng: random.Random, job: str) -> str:
        path, kept = export.image(job), rng.random() < 0.2
        with export.agent() as agent:
            agent.request("reclaim", export.reclaim(path, undo_hours=24 if kept else 0), job)
            agent.until(protocol.READY)
            guest = Passing(export, path, rng.uniform(0, 4), tries=100 if kept else 1)
            time.sleep(rng.uniform(0, 2))
            agent.say(protocol.GO, generation=1)
            answer = agent.answer()
        guest.join()
        assert guest.wrong == ""
        assert export.holds(job, written=guest.acknowledged)
        assert answer.get("swapped") or answer["code"] in {"image_in_use", "stale_plan"}, answer
        return (
            f"{'swapped' if answer.get('swapped') else answer['code']}, {'let in' if guest.acknowledged else 'refused'}"
        )

    hold("starts elsewhere", export.version, single)


def test_what_nobody_uses_is_swapped(export: Export) -> None:
    def single(rng: random.Random, job: str) -> str:
        path, hours = export.image(job), rng.choice([0, 0, 0, 24])
        answer = export.ask("reclaim", export.reclaim(path, undo_hours=hours), job)
        assert answer.get("swapped"), answer
        assert export.holds(job, written=False)
        assert len(export.left(job)) == (2 if hours else 0)
        return f"kept for {hours} hours"

    hold("used by nobody", export.version, single)


def test_a_kill_in_the_instant_without_a_name_is_put_right(export: Export) -> None:
    script = Path(__file__).with_name("kill_nameless.py").read_bytes()
    export.client.run("cat >/root/kill_nameless.py", script)

    def single(rng: random.Random, job: str) -> str:
        path, where = export.image(job), rng.choice(["", "back"])
        with export.agent(program=f"/root/kill_nameless.py /root/agent.pyz {where}") as agent:
            agent.request("reclaim", export.reclaim(path, undo_hours=24), job)
            agent.until(protocol.READY)
            agent.say(protocol.GO, generation=1)
            while agent.next() is not None:
                pass
        assert export.names(job) == []
        machine = rng.choice([export.server, export.client])

        def is_put_right() -> bool:
            rows = {row["job"]: row["outcome"] for row in export.recover(machine)}
            assert rows.get(job, "reverted") in {"reverted", "busy"}, rows
            return rows.get(job) != "busy"  # another trial's recovery is at it

        wait_until(is_put_right, 300, "a recovery has put it right")
        assert export.holds(job, written=False)
        assert export.left(job) == []
        return "recovered by the " + ("server" if machine is export.server else "client")

    hold("killed without a name", export.version, single)


def test_a_server_that_goes_away_while_images_are_copied_costs_time_and_nothing_else(export: Export) -> None:
    for trial in Trials("nfs", f"server away, NFS {export.version}", worth=TOGETHER):
        with trial, contextlib.ExitStack() as stack:
            jobs = {}
            for job in (f"n{next(_numbers)}" for _ in range(TOGETHER)):
                jobs[job] = stack.enter_context(export.agent())
                jobs[job].request("reclaim", export.reclaim(export.image(job), bandwidth_bytes_sec=25 << 10), job)
            for agent in jobs.values():
                agent.until(protocol.PROGRESS, stage="copying")
            how = trial.rng.choice(["cut off", "stopped"])
            trial.note(how)
            begin, end = _AWAY[how]
            begin(export)
            try:
                for agent in jobs.values():
                    agent.until(protocol.STORAGE, silent=[b64(MOUNTED.encode())])
                cancelled = {job for job in jobs if trial.rng.random() < 0.3}
                for job in cancelled:
                    jobs[job].say(protocol.CANCEL)
            finally:
                end(export)
            for job, agent in jobs.items():
                if any(event["event"] == protocol.READY for event in agent.events):
                    agent.say(protocol.GO, generation=1)
                answer = agent.answer()
                came = "swapped" if answer.get("swapped") else str(answer.get("code"))
                trial.note(came)
                assert came == ("cancelled" if job in cancelled else "swapped"), answer
                assert export.holds(job, written=False)
                assert export.left(job) == []
