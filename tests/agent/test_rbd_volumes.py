"""Images of Ceph, set aside, restored and deleted on a stand-in; ``machines/test_rbd_orphans.py`` has the real one."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import Arguments, HostError, Request, b64
from storage_admin.agent.swap import rbd_volumes
from storage_admin.agent.verbs import aside_volume
from tests.agent import rbd_pool
from tests.agent.rbd_pool import FSID
from tests.agent.recording import RecordingIO
from tests.working import code_of, refused_as

NAME, ASIDE = "vm-900-disk-0", ".sa-j1.aside"
WHERE = {"backend": "rbd", "group": "vms", "group_id": FSID, "name": NAME, "id": "1a"}
WAITS = WHERE | {"aside_job": "j1"}


class Pool(RecordingIO):
    """The pool, and a controller that says go, after ``meanwhile`` was done to the image."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, dict[str, Any]] = {
            "directory": {NAME: "1a"},
            "ids": {NAME: "1a"},
            "images": {"1a": rbd_pool.image("1a")},
        }
        self.meanwhile: dict[str, Any] = {}

    def run(self, argv: Sequence[str], *_: object) -> tools.Finished:
        told = rbd_pool.answer(argv, self.state)
        if isinstance(told, bytes):
            return tools.Finished(0, told, b"")
        code, text = (told, "") if isinstance(told, int) else (0, json.dumps(told))
        return tools.Finished(code, text.encode(), b"")

    def change(self, **changes: Any) -> None:
        self.state["images"]["1a"] |= changes

    def wait_for_go(self, generation: int, **made: int | str) -> None:
        self.change(**self.meanwhile)

    def names(self) -> tuple[list[str], list[str], list[str]]:
        """What the directory has, all names, and the image's journal."""
        journal = self.state["images"].get("1a", {"meta": {}})["meta"]
        return list(self.state["directory"]), sorted(self.state["ids"]), list(journal.values())

    def ask(self, verb: str, job: str = "j1") -> dict[str, Any]:
        does = {"aside": aside_volume.set_aside, "restore": aside_volume.restore, "delete": aside_volume.delete}
        return does[verb](Request(verb, job, 1, WHERE if verb == "aside" else WAITS, {}), self)

    def code(self, verb: str, job: str = "j1") -> str:
        return refused_as(self.ask, verb, job)

    def recover(self, *, is_aside: bool) -> list[tuple[str, str]]:
        row = WAITS | {"inode": "7", "path_b64": b64(b"rbd:vms/vm-900-disk-0")}
        args: dict[str, Any] = {"volumes": [row] if is_aside else [], "volumes_cut_off": [] if is_aside else [WHERE]}
        found, _ = aside_volume.recover(Arguments(args, frozenset(args)), frozenset(), set(), self)
        return [(one["job"], one["outcome"]) for one in found]


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pool:
    (tmp_path / "storage.cfg").write_text("rbd: ceph\n\tpool vms\n\tmonhost 192.0.2.1\n")
    one = Pool()
    monkeypatch.setattr(tools, "run_to_end", one.run)
    monkeypatch.setattr(rbd_volumes, "ETC_PVE", str(tmp_path))
    monkeypatch.setattr(rbd_volumes, "_ARRIVES", 0.0)
    monkeypatch.setattr(rbd_volumes, "_SUMMED", 0.0)
    monkeypatch.setattr(aside_volume, "BACKENDS", {"rbd": rbd_volumes})
    return one


def test_an_image_is_set_aside_restored_and_deleted(pool: Pool) -> None:
    before = copy.deepcopy(pool.state)
    assert pool.ask("aside")["held_bytes"] == 3 << 22
    assert pool.names() == ([ASIDE], [ASIDE], [f"j1.1a.a.{NAME}"])
    assert pool.recover(is_aside=True) == [("j1", "kept")]
    assert pool.ask("restore", "j2")["after_bytes"] == 3 << 22
    assert pool.state == before
    pool.ask("aside")
    assert pool.ask("delete", "j3")["freed_bytes"] == 3 << 22
    assert pool.names() == ([], [], [])
    assert pool.recover(is_aside=True) == [("j1", "lost")]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize(
    ("changes", "code"),
    [({"watchers": ["192.0.2.9:0/1"]}, "image_in_use"), ({"locks": ["client.1"]}, "image_in_use"),
     ({"snapshots": ["s1"]}, "has_overlays"), ({"op_features": ["group"]}, "unsupported_pool"),
     ({"meta": {"storage-admin:aside": f"j9.1a.a.{NAME}"}}, "busy")],
)  # fmt: skip
def test_an_image_that_is_used_stays(pool: Pool, changes: dict[str, Any], code: str, when: str) -> None:
    if when == "before":
        pool.change(**changes)
    pool.meanwhile = changes
    assert pool.code("aside") == code
    assert pool.names()[:2] == ([NAME], [NAME])


def test_a_journal_that_came_with_a_copy_counts_for_nothing(pool: Pool) -> None:
    pool.change(meta={"storage-admin:aside": f"j9.ff.a.{NAME}"})
    pool.ask("aside")
    assert pool.names()[0] == [ASIDE]


def test_another_cluster_or_image_of_the_same_name_is_not_the_plans(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = pool.state
    pool.state = {"directory": {NAME: "2b"}, "ids": {NAME: "2b"}, "images": {"2b": rbd_pool.image("2b")}}
    assert pool.code("aside") == "stale_plan"
    pool.state = state
    monkeypatch.setitem(WHERE, "group_id", "other")
    assert pool.code("aside") == "stale_plan"


def test_a_deletion_that_ceph_refuses_leaves_the_image_whole(pool: Pool) -> None:
    pool.ask("aside")
    pool.meanwhile = {"watchers": ["192.0.2.9:0/1"]}
    assert pool.code("delete", "j2") == "image_in_use"
    assert pool.names()[2] == [f"j1.1a.a.{NAME}"]
    pool.change(watchers=[])
    pool.meanwhile = {}
    pool.ask("restore", "j3")
    assert pool.names() == ([NAME], [NAME], [])


@pytest.mark.parametrize(
    ("directory", "names", "is_aside", "outcome", "after"),
    [
        (NAME, [NAME], False, "reverted", NAME),
        (NAME, [NAME, ASIDE], False, "reverted", NAME),  # a rename was cut off before the directory knew
        (ASIDE, [NAME, ASIDE], False, "kept", ASIDE),  # and after that
        (ASIDE, [NAME, ASIDE], True, "kept", ASIDE),
        (NAME, [NAME, ASIDE], True, "lost", NAME),  # of a restore
    ],
)
def test_what_a_rename_has_left_is_settled_by_the_directory(
    pool: Pool, directory: str, names: list[str], is_aside: bool, outcome: str, after: str
) -> None:
    made = rbd_pool.image("1a", meta={"storage-admin:aside": f"j1.1a.a.{NAME}"})
    pool.state = {"directory": {directory: "1a"}, "ids": dict.fromkeys(names, "1a"), "images": {"1a": made}}
    assert pool.recover(is_aside=is_aside) == [("j1", outcome)]
    assert pool.names()[:2] == ([after], [after])


@pytest.mark.parametrize("is_there", [True, False])
def test_a_deletion_that_was_started_is_finished_and_not_undone(pool: Pool, is_there: bool) -> None:
    made = {"1a": rbd_pool.image("1a", meta={"storage-admin:aside": f"j1.1a.d.{NAME}"})} if is_there else {}
    pool.state = {"directory": {ASIDE: "1a"}, "ids": {ASIDE: "1a"}, "images": made}
    assert pool.code("restore", "j2") == "aside_missing"
    assert pool.recover(is_aside=True) == [("j1", "lost")]
    assert pool.names() == ([], [], [])


@pytest.mark.parametrize("letter", ["a", "d"])
def test_a_clone_that_ceph_does_not_open_because_its_parent_is_gone_stays(pool: Pool, letter: str) -> None:
    pool.ask("aside")
    pool.change(orphaned=True, meta={"storage-admin:aside": f"j1.1a.{letter}.{NAME}"})
    assert pool.recover(is_aside=True) == [("j1", "kept")]
    assert {pool.code(verb, "j2") for verb in ("restore", "delete")} == {"aside_missing"}
    assert (pool.names()[:2], list(pool.state["images"])) == (([ASIDE], [ASIDE]), ["1a"])


def test_what_a_deletion_has_begun_to_take_away_is_never_called_whole_again(pool: Pool) -> None:
    """The client that was killed in it is a watcher for half a minute more, and Ceph removes no image that has one."""
    pool.ask("aside")
    pool.change(meta={"storage-admin:aside": f"j1.1a.d.{NAME}"}, watchers=["192.0.2.9:0/1"])
    assert pool.recover(is_aside=True) == [("j1", "busy")]
    pool.change(watchers=[])
    assert pool.code("restore", "j2") == "aside_missing"
    assert pool.recover(is_aside=True) == [("j1", "lost")]
    assert pool.names() == ([], [], [])


def test_a_deletion_that_fails_half_way_is_owed_a_recovery_which_finishes_it(pool: Pool) -> None:
    pool.ask("aside")
    pool.state["broken"] = {"rm": True}
    assert code_of(HostError, pool.ask, "delete", "j2") == "interrupted"
    assert pool.recover(is_aside=True) == [("j1", "busy")]
    del pool.state["broken"]
    assert pool.recover(is_aside=True) == [("j1", "lost")]
    assert pool.names() == ([], [], [])


def test_a_pool_that_the_host_names_no_more_keeps_no_other_one_from_being_recovered(pool: Pool) -> None:
    pool.ask("aside")
    shown = {"inode": "7", "path_b64": b64(b"rbd:vms/vm-900-disk-0")}
    gone = WAITS | shown | {"group": "gone", "aside_job": "j9"}
    args: dict[str, Any] = {"volumes": [gone, WAITS | shown]}
    silent = set[str]()
    found, _ = aside_volume.recover(Arguments(args, frozenset(args)), frozenset(), silent, pool)
    assert [(one["job"], one["outcome"]) for one in found] == [("j1", "kept")]
    assert silent == set()
