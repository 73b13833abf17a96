"""Work on images of Ceph: what is asked before it, and what is refused; stand-ins answer as a real cluster did."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.protocol import HostError, RefusedError, b64
from storage_admin.agent.verbs import rbd_image
from tests.agent.harness import refusal_of
from tests.agent.recording import GoIO, request
from tests.agent.test_rbd import MIB, Says, ceph

__all__ = ["ceph"]

IMAGE, CLONE = "vm-100-disk-0", "vm-102-disk-0"
#: The cluster is one of Pacific; nobody has anything open; what is changed, the stand-in only notes.
QUIET = """case "$*" in
*"osd dump"*) echo '{"require_osd_release":"pacific"}'; exit ;;
*" status "*) echo '{"watchers":[]}'; exit ;;
*sparsify*|*flatten*) exit 0 ;;
esac
"""


def work(etc: Path, verb: str, name: str = IMAGE, **more: Any) -> dict[str, Any]:
    args = {"pool": "vms", "name_b64": b64(name.encode()), "size": 64 * MIB, "etc_pve": str(etc)} | more
    return getattr(rbd_image, verb)(request(verb, **args), GoIO())  # type: ignore[no-any-return]


def code(etc: Path, verb: str, name: str = IMAGE, **more: Any) -> str:
    return refusal_of(partial(work, etc, verb, name, **more), error=(HostError, RefusedError))


def changed(tmp_path: Path) -> list[str]:
    """The commands that change an image, as they were run."""
    asked = (tmp_path / "bin/rbd.asked").read_text().splitlines()
    return [line for line in asked if "sparsify" in line or "flatten" in line]


def test_zeros_are_given_back_as_the_storage_is_asked_and_told_in_whole_objects(ceph: Says, tmp_path: Path) -> None:
    result = work(ceph(QUIET), "sparsify")
    assert (result["before_bytes"], result["after_bytes"], result["freed_bytes"]) == (8 * MIB, 8 * MIB, 0)
    (line,) = changed(tmp_path)
    assert line.endswith("--pool=vms sparsify --no-progress --image=vm-100-disk-0")
    assert "--id=vm --mon-host=192.0.2.1,192.0.2.2" in line


@pytest.mark.parametrize(
    ("says", "more", "wanted"),
    [
        ("""case "$*" in *"osd dump"*) echo '{"require_osd_release":"mimic"}'; exit ;; esac""", {}, "unsupported_pool"),
        ("""case "$*" in *"osd dump"*) echo '{}'; exit ;; esac""", {}, "unsupported_pool"),
        (
            """case "$*" in *" status "*) echo '{"watchers":[{"address":"192.0.2.7"}]}'; exit ;; esac""",
            {},
            "image_in_use",
        ),
        ("", {"size": 32 * MIB}, "stale_plan"),
        ("", {"id": "made anew"}, "stale_plan"),
        ("", {"pool": "gone"}, "stale_plan"),
        ("", {"name_b64": b64(b"a@b")}, "invalid"),
        ("""case "$*" in *sparsify*) exit 30 ;; esac""", {}, "tool_failed"),
        ("""case "$*" in *" status "*) echo no; exit ;; esac""", {}, "tool_failed"),
    ],
)
def test_what_is_not_as_planned_or_open_anywhere_is_left_alone(
    ceph: Says, tmp_path: Path, says: str, more: dict[str, Any], wanted: str
) -> None:
    etc = ceph(says + "\n" + QUIET)
    assert code(etc, "sparsify", **more) == wanted
    if "sparsify" not in says and (tmp_path / "bin/rbd.asked").exists():
        assert changed(tmp_path) == []


def test_one_that_is_opened_before_the_go_or_is_another_one_by_then_is_left_alone(ceph: Says, tmp_path: Path) -> None:
    second = '[ -f "$0.once" ] && {0}; case "$*" in *" du "*) touch "$0.once" ;; esac\n'
    for answer, wanted in (('"watchers":[{"address":"192.0.2.7"}]', "image_in_use"), ('"id":"other"', "stale_plan")):
        known = f'echo \'{{"size":67108864,"watchers":[],{answer}}}\''
        when = "status" if "watchers" in answer else "info"
        etc = ceph(second.format(f'case "$*" in *" {when} "*) {known}; exit ;; esac') + QUIET)
        (tmp_path / "bin/rbd.once").unlink(missing_ok=True)
        assert code(etc, "sparsify") == wanted
    assert changed(tmp_path) == []


def test_only_a_clone_whose_pool_has_room_is_flattened(ceph: Says, tmp_path: Path) -> None:
    assert code(ceph(QUIET), "flatten") == "stale_plan"
    full = """case "$*" in *" df "*) echo '{"pools":[{"name":"vms","stats":{"max_avail":52428800}}]}'; exit ;; esac\n"""
    assert code(ceph(full + QUIET), "flatten", CLONE) == "not_enough_space"
    assert changed(tmp_path) == []
    # Of one that has its parent afterwards nobody says that it is flat.
    assert code(ceph(QUIET), "flatten", CLONE) == "tool_failed"
    (line,) = changed(tmp_path)
    assert line.endswith("flatten --no-progress --image=vm-102-disk-0")


@pytest.mark.parametrize(
    ("used", "available", "fits"),
    [(0, 15, False), (0, 17, True), (48, 15, False), (48, 17, True), (60, 3, False), (60, 5, True), (64, 0, True)],
)
def test_what_a_clone_has_behind_the_end_of_its_parent_makes_no_room_for_what_it_reads_of_it(
    ceph: Says, used: int, available: int, fits: bool
) -> None:
    info = {"id": "1", "size": 64 * MIB, "features": [], "parent": {"overlap": 16 * MIB}}
    answers = {
        "info": info, "du": {"images": [{"name": CLONE, "used_size": used * MIB}]},
        "df": {"pools": [{"name": "vms", "stats": {"max_avail": available * MIB * 100 // 95}}]},
    }  # fmt: skip
    says = [
        f"""case "$*" in *" {verb} "*) echo '{json.dumps(told)}'; exit ;; esac\n""" for verb, told in answers.items()
    ]
    # That it has its parent still is what the stand-in says after it was flattened.
    assert code(ceph(QUIET + "".join(says)), "flatten", CLONE) == ("tool_failed" if fits else "not_enough_space")
