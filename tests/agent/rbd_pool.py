"""A stand-in for ``rbd``, ``rados`` and ``ceph``: one pool, whose answers are those of Ceph 16.2.15.

Exit codes included. Names are kept as Ceph keeps them: the pool's directory beside an entry for each name.
"""

from collections.abc import Sequence
from typing import Any

FSID = "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
MISSING, EXISTS, BUSY, NOT_EMPTY, BROKEN = 2, 17, 16, 39, 5


def image(number: str, **more: Any) -> dict[str, Any]:
    usual = {"id": number, "meta": {}, "watchers": [], "locks": [], "snapshots": [], "objects": 3, "op_features": []}
    return usual | more


def answer(argv: Sequence[str], state: dict[str, Any]) -> Any:
    """What one of these tools says to its arguments, or its exit code where it says nothing."""
    tool, *words = argv
    given = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    plain = [word for word in words if not word.startswith("--")]
    if tool == "ceph":
        stored = sum(one["objects"] for one in state["images"].values()) << 22
        return {"fsid": FSID} if plain == ["fsid"] else {"pools": [{"name": "vms", "stats": {"stored": stored}}]}
    if tool == "rados" and plain[0] == "get":
        number = state["ids"].get(plain[1].removeprefix("rbd_id."))
        return MISSING if number is None else len(number).to_bytes(4, "little") + number.encode()
    if tool == "rados" and plain[0] == "stat":
        return 0 if plain[1].removeprefix("rbd_header.") in state["images"] else MISSING
    if tool == "rados":
        return 0 if state["ids"].pop(plain[1].removeprefix("rbd_id."), None) else MISSING
    if plain == ["ls"]:
        return sorted(state["directory"])
    name, one = given["image"], state["images"].get(state["ids"].get(given["image"]))
    if plain == ["rm"] and state.get("broken"):
        return BROKEN
    if plain == ["rm"]:
        return _removed(name, one, state)
    if one is None or one.get("orphaned"):
        return MISSING
    if plain == ["rename"]:
        return _renamed(name, given["dest"], state)
    if plain[0] == "image-meta":
        return _metadata(plain[1:], one["meta"])
    return {
        "info": {"id": one["id"], "features": ["fast-diff"], "flags": [], "op_features": one["op_features"]},
        "du": {"images": [{"name": name, "used_size": one["objects"] << 22}]},
        "status": {"watchers": [{"address": who} for who in one["watchers"]]},
        "lock": [{"locker": who} for who in one["locks"]],
        "snap": [{"name": each} for each in one["snapshots"]],
    }[plain[0]]


def _metadata(words: list[str], known: dict[str, str]) -> Any:
    if words == ["list"]:
        return known or 0  # it says nothing of no metadata
    known.pop(words[1], None)
    if words[0] == "set":
        known[words[1]] = words[2]
    return 0


def _renamed(name: str, to: str, state: dict[str, Any]) -> int:
    if to in state["ids"]:
        return EXISTS
    state["ids"][to] = state["directory"][to] = state["directory"].pop(name)
    state["ids"].pop(name)
    return 0


def _removed(name: str, one: dict[str, Any] | None, state: dict[str, Any]) -> int:
    if one is not None and (one["watchers"] or one["snapshots"]):
        return BUSY if one["watchers"] else NOT_EMPTY
    state["images"].pop(state["ids"].pop(name), None)
    state["directory"].pop(name)
    return 0
