"""Images that claim to be enormous: every verb ends, by itself or when it is told to, and the agent stays small."""

import time
from pathlib import Path

import pytest

from storage_admin.agent import protocol
from tests.agent.bombs import Bomb, bombs
from tests.agent.every_verb import ALL, CLEAN, PLANTED, TRIED, UNDOES, Answer, Crew, plant_undo, pool_request, request
from tests.agent.hostile import qcow2
from tests.harness.filesystems import new_folder

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

AT_LEAST = 50
#: More than what it takes for an image that is none, in bytes.
MOST_GROWTH = 100 << 20
#: Under which queries run.
MOST_OF_A_TOOL = 2 << 30
#: Seconds after which a request is cancelled, and that it may take until it has ended.
TOLD_TO_STOP, STOPS_WITHIN = 0.1, 10.0
#: Bombs that are sampled once more, one after the other.
SAMPLED = 10
#: Seconds for what has to end by itself: a look at a sample of an image, a scan of the pool.
ENDS_BY_ITSELF = 30.0


class Ground:
    """A pool with bombs, and the worst of what came of them."""

    def __init__(self, folder: Path) -> None:
        self.pool, self.scratch = folder / "pool", folder / "scratch"
        self.pool.mkdir()
        self.scratch.mkdir()
        self.outcomes: dict[str, int] = {}
        self.usual = self.worst = self.worst_tool = self.slowest = 0.0

    def each(self, crew: Crew, bomb: Bomb) -> None:
        """Ask every verb for it."""
        folder = new_folder(self.pool / f"{len(list(self.pool.iterdir())):03d}")
        image = folder / f"vm.{bomb.form}"
        bomb.write(image)
        for how in TRIED:
            if how in UNDOES:
                plant_undo(bytes(image), b"")
            before = _stamp(image)
            verb, args = request(how, bytes(image), self.pool, bomb.form)
            # Only a tool that is a query may take longer for a sample; its limits are tested where it is started.
            by_itself = how == "analyze sample" and bomb.form in {"qcow2", "raw"}
            if by_itself:
                args |= {"seconds": 0.02, "samples": 200}
            answer = crew.ask(verb, args, limit_seconds=ENDS_BY_ITSELF if by_itself else TOLD_TO_STOP)
            self.judge(f"{how} of {bomb.what}", answer, ENDS_BY_ITSELF if by_itself else TOLD_TO_STOP + STOPS_WITHIN)
            assert not by_itself or answer.code != protocol.CANCELLED, bomb.what
            if answer.code:
                assert _stamp(image) == before, (how, bomb.what)
                assert {path.name for path in folder.iterdir() if PLANTED not in path.name} == {image.name}
            elif _stamp(image) != before:
                image.unlink(missing_ok=True)
                bomb.write(image)
            for path in folder.iterdir():
                if path != image:
                    path.unlink()

    def judge(self, what: str, answer: Answer, most_seconds: float) -> None:
        """It ended cleanly, in time, and without much memory."""
        growth = answer.peak_bytes - self.usual
        self.worst, self.slowest = max(self.worst, growth), max(self.slowest, answer.seconds)
        self.worst_tool = max(self.worst_tool, answer.tools_peak_bytes)
        self.outcomes[answer.code or "done"] = self.outcomes.get(answer.code or "done", 0) + 1
        assert answer.code in CLEAN | {"", protocol.CANCELLED}, f"{what}: {answer.detail}"
        assert answer.seconds < most_seconds, f"{what} took {answer.seconds:.1f} s"
        assert growth < MOST_GROWTH, f"{what} took {growth / (1 << 20):.0f} MiB"
        assert answer.tools_peak_bytes < MOST_OF_A_TOOL, what


def _stamp(path: Path) -> tuple[int, ...]:
    if not path.exists():
        return ()
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def test_no_bomb_makes_a_verb_endless_or_the_agent_large(tmp_path: Path) -> None:
    began, ground = time.monotonic(), Ground(tmp_path)
    made = bombs(ground.scratch)
    assert len(made) >= AT_LEAST
    with Crew() as crew:
        ground.usual = _warmed_up(crew, tmp_path)
        for bomb in made:
            ground.each(crew, bomb)
        scan = crew.ask("scan", pool_request("scan", ground.pool), keep=False)
        ground.judge("scan", scan, ENDS_BY_ITSELF)
        assert scan.result["images"] == len(made)
        ground.judge("recover", crew.ask("recover", pool_request("recover", ground.pool)), ENDS_BY_ITSELF)
        sampled = [(bytes(path), path.suffix[1:]) for path in sorted(ground.pool.glob("*/vm.qcow2"))[:SAMPLED]]
        sample = crew.ask("sample", pool_request("sample", ground.pool, sampled))
        ground.judge("sample", sample, ENDS_BY_ITSELF * len(sampled))
        print(f"scan {scan.seconds:.1f} s, sample of {len(sampled)} {sample.seconds:.1f} s")
    print(f"{len(made)} bombs, {sum(ground.outcomes.values())} requests in {time.monotonic() - began:.0f} s")
    print(f"agent + {ground.worst / (1 << 20):.0f} MiB at most, tools {ground.worst_tool / (1 << 20):.0f} MiB")
    print(f"slowest {ground.slowest:.1f} s; {ground.outcomes}")


def _warmed_up(crew: Crew, folder: Path) -> float:
    """How large the agent becomes with an image that is none."""
    pool = new_folder(folder / "usual")
    image = pool / "vm.qcow2"
    largest = 0
    for how in ALL:
        if how not in UNDOES:
            image.write_bytes(qcow2())
            answer = crew.ask(*request(how, bytes(image), pool, "qcow2"))
            largest = max(largest, answer.peak_bytes)
            for path in pool.iterdir():
                path.unlink()
    return largest
