"""Rewrites on NFS while another machine uses the same images: no byte that a guest was told is safe is ever lost."""

import contextlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent import protocol
from storage_admin.agent.protocol import b64
from tests.faults.figures import trials_of
from tests.faults.trials import Trials
from tests.harness.processes import wait_until
from tests.machines.lab import Machine, machines
from tests.machines.nfs import EXPORTED, LENGTH, MOUNTED, PATTERN, PLACE, Export, load_agents
from tests.machines.nfs_verbs import place

pytestmark = pytest.mark.machines

#: So many trials at once, each on an image of its own.
TOGETHER = 10
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
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Machine]]:
    with machines() as running:
        for machine in running:
            load_agents(machine, tmp_path_factory.mktemp("agent"))
        yield running


@pytest.fixture(scope="module", params=["3", "4.2"])
def export(request: pytest.FixtureRequest, both: tuple[Machine, Machine]) -> Export:
    return Export(both, request.param)


def hold(what: str, version: str, single: Callable[[random.Random, str], str], part: float = 1) -> None:
    """All trials: ``single`` gets random numbers and a job's id, and returns in a few words what came of it."""
    together = min(TOGETHER, trials_of("nfs", part))
    for trial in Trials("nfs", f"{what}, NFS {version}", part=part, worth=together):
        with trial, ThreadPoolExecutor(together) as pool:
            rngs = [random.Random(trial.rng.random()) for _ in range(together)]
            done = [pool.submit(single, rng, str(next(_numbers))) for rng in rngs]
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


def test_a_guest_that_starts_elsewhere_around_the_swap_loses_nothing(export: Export) -> None:
    def single(rng: random.Random, job: str) -> str:
        path, stays = export.image(job), rng.choice(["stays", "stays", "passes", "passes", "tries"])
        step, delay = rng.choice([("ready", rng.uniform(0, 2)), ("exchanging", rng.uniform(0, 1.5))])
        journal = f"{EXPORTED}/.sa-{job}.journal"
        with export.inside("guest", path, journal, step, delay, stays) as guest, export.agent() as agent:
            agent.request("reclaim", export.reclaim(path, undo_hours=24 if stays == "tries" else 0), job)
            answer = agent.answer()
            came = json.loads(guest.says())
        wrote = came.get("wrote", False)
        assert came.get("named", True), (came, answer)
        assert wrote == came["let_in"]
        assert export.holds(job, written=wrote), (came, answer)
        assert answer.get("swapped") or answer["code"] in {"image_in_use", "stale_plan"}, answer
        print(f"{export.version} {job} {step} {delay:.2f} {stays} {came} {answer.get('code')} {answer.get('detail')}")
        fell = "nameless" if came["nameless"] else "fell in" if came["fell"] else "beside"
        end = "swapped" if answer.get("swapped") else str(answer["code"])
        return f"{fell}: {end}, {'let in' if wrote else 'refused'}"

    hold("starts elsewhere", export.version, single)


def _image(export: Export, job: str, path: str) -> tuple[str, str, dict[str, Any], str, str]:
    return "late", "reclaim", export.reclaim(path), f"{MOUNTED}/.sa-{job}.orig", "image_in_use"


def _base(export: Export, _: str, path: str) -> tuple[str, str, dict[str, Any], str, str]:
    export.client.run(f"qemu-img create -q -f qcow2 -F raw -b {path} {path}.qcow2")
    args = export.reclaim(f"{path}.qcow2", format="qcow2", chain=[export.link(path)], method="convert")
    return "last look", "flatten", args, path, "stale_plan"


def _set_aside(export: Export, job: str, path: str) -> tuple[str, str, dict[str, Any], str, str]:
    image = export.link(path)
    del image["format"]
    export.ask("set_aside", image | {"children_known": True, "pools": []}, job)
    args = {name: image[name] for name in ("path_b64", "pool_path_b64", "inode")} | {"aside_job": job, "pools": []}
    return "door", "delete_aside", args, f"{MOUNTED}/.sa-{job}.aside", "stale_plan"


def _undo_copy(export: Export, job: str, path: str) -> tuple[str, str, dict[str, Any], str, str]:
    args = export.reclaim(path, undo_hours=24)
    assert export.ask("reclaim", args, job).get("swapped")
    args = {name: args[name] for name in ("path_b64", "pool_path_b64")} | {"undo_job": job, "force": True}
    return "door", "discard_undo", args, f"{MOUNTED}/.sa-{job}.orig", "undo_written_to"


@pytest.mark.parametrize("which", [_image, _base, _set_aside, _undo_copy])
def test_what_is_written_elsewhere_without_locks_in_the_last_moment_is_seen(export: Export, which: Any) -> None:
    """A client of NFS remembers files' times for seconds, also of those that it has open."""

    def single(_: random.Random, job: str) -> str:
        path, later = export.image(job), str(next(_numbers))
        how, verb, args, written, code = which(export, job, path)
        later = job if which is _image else later
        with export.inside("stranger", written, later) as stranger:
            assert stranger.says() == "ready"
            answer = export.ask(verb, args, later, how=how)
            assert stranger.says() == "written", answer
        assert answer.get("code") == code, answer
        assert export.server.run(f"cat {written} {path} 2>/dev/null | head -c 4") == "ssss"
        return str(code)

    hold(f"written to late:{which.__name__}", export.version, single, 0.2)


def test_what_nobody_uses_is_swapped(export: Export) -> None:
    def single(rng: random.Random, job: str) -> str:
        path, hours = export.image(job), rng.choice([0, 0, 0, 24])
        answer = export.ask("reclaim", export.reclaim(path, undo_hours=hours), job)
        assert answer.get("swapped"), answer
        assert export.holds(job, written=False)
        assert len(export.left(job)) == (2 if hours else 0)
        return f"kept for {hours} hours"

    hold("used by nobody", export.version, single)


def test_an_undo_copy_goes_by_itself_unless_a_file_was_changed_whatever_its_times_say(export: Export) -> None:
    codes = [("", None), (MOUNTED + "/{}", "undo_kept"), (MOUNTED + "/.sa-{}.orig", "undo_written_to")]

    def single(_: random.Random, job: str) -> str:
        path, (changed, code) = export.image(job), codes[int(job) % 3]
        answer = export.ask("reclaim", export.reclaim(path, undo_hours=1e-4), job, how="soon")
        assert answer.get("swapped"), answer
        if changed:
            file, times = changed.format(job), f"/root/times-{job}"
            export.server.run("echo 2 >/proc/sys/vm/drop_caches")  # it looks up anew which file has the name by now
            export.server.run(
                f"touch -r {file} {times}; printf s | dd of={file} conv=notrunc status=none; touch -r {times} {file}"
            )
        args = place(path) | {"undo_job": job, "format": "raw", "by_itself": True, "used": [], "seen": []}
        for _again in range(20):  # a server gives no delegation of a file for some time after it took one back
            answer = export.ask("discard_undo", args, str(next(_numbers)), how="soon")
            if answer.get("code") != "image_in_use":
                break
            time.sleep(5)
        assert answer.get("code") == code, answer
        assert len(export.left(job)) == (2 if changed else 0)
        return str(code)

    hold("undo copies go", export.version, single, 0.6)


def _killed(export: Export, how: str, job: str) -> bool:
    """Whether an agent was killed in the instant without a name; else it has refused, and left all as it was.

    A server gives no delegation of a file for some time after it took one back, nor of some others: nobody can tell
    then who has the file open, and the agent says that somebody may.
    """
    path = export.image(job)
    with export.agent(how=how) as agent:
        agent.request("reclaim", export.reclaim(path, undo_hours=24), job)
        while (event := agent.next()) is not None:
            if event["event"] == protocol.READY:
                agent.say(protocol.GO, generation=1)
            elif event["event"] == protocol.ERROR:
                assert event["code"] == "image_in_use", event
                assert export.holds(job, written=False)
                assert export.left(job) == []
                return False
    return True  # whether it has a name again by now is up to the recoveries of other trials


def test_a_kill_in_the_instant_without_a_name_is_put_right(export: Export) -> None:
    def single(rng: random.Random, job: str) -> str:
        tries = 1
        while not _killed(export, rng.choice(["die", "die back"]), job):
            tries, job = tries + 1, str(next(_numbers))
            assert tries <= 5, "refused again and again"
        machine = rng.choice([export.server, export.client])

        def is_put_right() -> bool:
            row = next((row for row in export.recover(machine) if row["job"] == job), {"outcome": "reverted"})
            assert row["outcome"] in {"reverted", "busy"}, row
            return row["outcome"] != "busy"  # another trial's recovery is at it

        wait_until(is_put_right, 300, "a recovery has put it right")
        assert export.holds(job, written=False)
        assert export.left(job) == []
        return f"recovered by the {'server' if machine is export.server else 'client'}, try {tries}"

    hold("killed without a name", export.version, single)


#: Has a journal open and remembers its name, and takes it once the file ``sys.argv[3]`` is there.
TAKING = """
import errno, os, sys, time
sys.path.insert(0, "/root/agent.pyz")
from storage_admin.agent.protocol import RefusedError
from storage_admin.agent.swap.journal import Journal, file_name
folder, job, begin = os.open(sys.argv[1], os.O_RDONLY), sys.argv[2], sys.argv[3]
name = file_name(job, "journal")
journal = Journal(folder, job, os.open(name, os.O_RDWR, dir_fd=folder))
os.stat(name, dir_fd=folder)
print("open", flush=True)
while not os.path.exists(begin):
    time.sleep(0.02)
try:
    journal._take(name)
except RefusedError as error:
    print(error.code)
except OSError as error:
    print(errno.errorcode[error.errno])
else:
    print("taken")
"""


def test_a_journal_that_another_machine_has_removed_is_not_taken(export: Export) -> None:
    def single(_: random.Random, job: str) -> str:
        export.server.run(f"echo x > {EXPORTED}/.sa-{job}.journal")
        export.client.run("cat >/root/taking.py", TAKING.encode())
        taking = f"python3 /root/taking.py {MOUNTED} {job} /root/begin-{job}"
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(export.client.run, f"{taking} | tee /root/taking-{job}")
            wait_until(lambda: "open" in export.client.run(f"cat /root/taking-{job} || true"), 60, "it has it open")
            export.server.run(f"rm {EXPORTED}/.sa-{job}.journal")
            export.client.run(f"touch /root/begin-{job}")
            outcome = told.result().split()[-1]
        assert outcome in {"ENOENT", "busy"}, outcome
        return outcome

    hold("journal removed", export.version, single, 0.2)


def test_a_server_that_goes_away_while_images_are_copied_costs_time_and_nothing_else(export: Export) -> None:
    for trial in Trials("nfs", f"server away, NFS {export.version}", worth=TOGETHER):
        with trial, contextlib.ExitStack() as stack:
            jobs = {}
            for job in (str(next(_numbers)) for _ in range(TOGETHER)):
                jobs[job] = stack.enter_context(export.agent())
                jobs[job].request("reclaim", export.reclaim(export.image(job), bandwidth_bytes_sec=25 << 10), job)
            for agent in jobs.values():
                agent.until(protocol.PROGRESS, stage="copying")
            how = trial.rng.choice(["cut off", "stopped"])
            trial.note(how)
            begin, end = _AWAY[how]
            begin(export)
            began = time.monotonic()
            try:
                for agent in jobs.values():
                    agent.until(protocol.STORAGE, silent=[b64(MOUNTED.encode())])
                print(f"all of them said so after {time.monotonic() - began:.1f} s")
                beside = f"{MOUNTED.replace('libvirt/images', 'vz')}/{next(_numbers)}"
                export.client.run(f"mkdir -p {Path(beside).parent}; cp /root/image {beside}")
                done = export.ask("reclaim", export.reclaim(beside), Path(beside).name)
                assert done.get("swapped"), done
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
