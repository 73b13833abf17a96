"""Files that look like a job's own, written by somebody else, lead neither an undo nor a recovery out of the pool."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.protocol import b64
from tests.agent.every_verb import CLEAN, PLANTED, UNDOES, Crew, plant_undo, pool_request, request
from tests.agent.hostile import Hostile, qcow2
from tests.agent.stranger import CANARY, Scene, fingerprints
from tests.chance import seed

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

#: Journals with random damage, beside those that are known to be wrong.
DAMAGED = 60

Plant = Callable[[Path, Path, Path], object]


def test_no_file_of_a_job_that_somebody_else_wrote_leads_out_of_the_pool(tmp_path: Path) -> None:
    chance = random.Random(seed())
    scene = Scene(tmp_path)
    image = scene.place(0, Hostile("sound", "qcow2", qcow2()))
    outcomes: dict[str, int] = {}
    with Crew(tmp_path / "trace") as crew:
        for what, plant in [*KNOWN.items(), *((f"damaged {number}", _damaged(chance)) for number in range(DAMAGED))]:
            for verb in (*UNDOES, "recover"):
                _lay_out(scene, image, plant)
                asked = request(verb, bytes(image), scene.pool, "qcow2") if verb in UNDOES else None
                before = fingerprints(image.parent)
                answer = crew.ask(*(asked or ("recover", pool_request("recover", scene.pool))))
                outcomes[answer.code or "done"] = outcomes.get(answer.code or "done", 0) + 1
                assert answer.code in CLEAN | {""}, (what, verb, answer.detail)
                assert CANARY.decode() not in answer.text()
                after = fingerprints(image.parent)
                touched = {name for name in before if before[name] != after.get(name)} - _own()
                allowed = {b"vm.qcow2"} if verb == "undo" and not answer.code else set()
                assert touched <= allowed, (what, verb, touched)
                assert after.keys() - before.keys() == set(), (what, verb)
                scene.check_outside()
    print(outcomes)
    scene.check_outside(tmp_path / "trace")
    assert outcomes["done"] > len(KNOWN)
    assert outcomes["undo_missing"] > len(KNOWN)


def _own() -> set[bytes]:
    return {f".sa-{PLANTED}.{kind}".encode() for kind in ("journal", "orig", "new")}


def _lay_out(scene: Scene, image: Path, plant: Plant) -> None:
    for name in _own():
        path = image.parent / os.fsdecode(name)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    image.write_bytes(qcow2())
    copy = plant_undo(bytes(image), qcow2())
    plant(copy.with_suffix(".journal"), copy, scene.outside / "shadow")


def _as_link(journal: Path, copy: Path, secret: Path) -> None:
    journal.unlink()
    journal.symlink_to(secret)


def _hard_linked(journal: Path, copy: Path, secret: Path) -> None:
    journal.unlink()
    copy.unlink()
    os.link(secret, copy)
    os.link(secret, copy.with_suffix(".new"))


def _copy_as_link(journal: Path, copy: Path, secret: Path) -> None:
    copy.unlink()
    copy.symlink_to(secret)
    copy.with_suffix(".new").symlink_to(secret)


def _as(make: Callable[[Path], Any], which: int = 0) -> Plant:
    """Make something else of the journal, or of the undo copy."""

    def plant(*places: Path) -> None:
        places[which].unlink()
        make(places[which])

    return plant


def _rewritten(change: Callable[[list[dict[str, Any]]], Any]) -> Plant:
    def plant(journal: Path, copy: Path, secret: Path) -> None:
        records = [json.loads(line) for line in journal.read_text().splitlines()]
        change(records)
        journal.write_text("".join(json.dumps(record) + "\n" for record in records))

    return plant


def _named(name: bytes) -> Plant:
    return _rewritten(lambda records: records[0].update(name_b64=b64(name)))


def _written(content: bytes) -> Plant:
    return lambda journal, copy, secret: journal.write_bytes(content)


def _damaged(chance: random.Random) -> Plant:
    def plant(journal: Path, copy: Path, secret: Path) -> None:
        content = bytearray(journal.read_bytes())
        for _ in range(chance.choice((1, 2, 8))):
            at = chance.randrange(len(content))
            content[at : at + chance.choice((0, 1, 40))] = chance.choice(
                (b"", b"9", b'"', b"\n", b"[", b"null", b"-", b"\xff")
            )
        journal.write_bytes(content)

    return plant


NO_NAMES = [
    *(b"../../outside/shadow", b"/etc/passwd", b"..", b".", b"", b"link-to-shadow", b"linked-folder/shadow", b"a\0b"),
    *(b".sa-planted.orig", b".sa-planted.journal", b"fifo", b"device", b"x" * 300, b"\xff", b"a-folder"),
]
KNOWN: dict[str, Plant] = {
    "as it should be": lambda journal, copy, secret: None,
    "a link to what is outside": _as_link,
    "an undo copy that is a link": _copy_as_link,
    "an undo copy that is a file outside": _hard_linked,
    "a pipe": _as(os.mkfifo),
    "a folder": _as(lambda path: path.mkdir()),
    "a pipe as undo copy": _as(os.mkfifo, 1),
    "a folder as undo copy": _as(lambda path: path.mkdir(), 1),
    "somebody else's": lambda journal, copy, secret: os.chown(journal, 1000, 1000),
    "writable for all": lambda journal, copy, secret: journal.chmod(0o666),
    "empty": _written(b""),
    "no JSON": _written(b"\xff\0" * 1000),
    "2 MiB": _written(b'{"step":"started"}\n' * 110_000),
    "one long line": _written(b"1" * (1 << 20)),
    "no objects": _written(b"1\n[]\nnull\n"),
    **{f"of {name!r}": _named(name) for name in NO_NAMES},
    "of two names": _rewritten(lambda records: records[0].update(old_name_b64=b64(b"../../outside/shadow"))),
    "of an old name that is a link": _rewritten(lambda records: records[0].update(old_name_b64=b64(b"link-to-shadow"))),
    "without stamps": _rewritten(lambda records: [record.pop("new", None) for record in records]),
    "with huge numbers": _rewritten(lambda records: records[0]["original"].update(inode=1 << 80, allocated_size=-1)),
    "of another job": _rewritten(lambda records: records[0].update(job="other")),
    "of an undo that goes on": _rewritten(lambda records: records.append({"step": "undo", "job": "../../x"})),
    "of endless undo copies": _rewritten(lambda records: records[0].update(undo_hours=[[]])),
    "of unknown steps": _rewritten(lambda records: records.insert(1, {"step": "format", "name_b64": b64(b"/")})),
    "backwards": _rewritten(lambda records: records.reverse()),
}
