"""All that is recorded of Proxmox VE's own code in ``tests/data/proxmox``, as answers to requests; none is left out."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from storage_admin.hosts.proxmox import errors
from storage_admin.hosts.proxmox.client import Api, Params
from tests.harness.proxmox import schema
from tests.harness.proxmox.answers import CALLS
from tests.harness.proxmox.schema import DATA
from tests.harness.proxmox.world import ApiDeathError, World


@dataclass(frozen=True)
class Answer:
    """What was answered to a request such as ``GET /nodes/pve1/qemu/100/config?current=1``."""

    file: str
    request: str
    data: Any = None
    status: int = 200
    reason: str = ""
    message: str = ""
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.request.partition(" ")[2].partition(" ")[0].partition("?")[0]

    @property
    def call(self) -> str:
        """Of the schema; empty for one that the client does not make."""
        found = schema.match(self.request.partition(" ")[0], self.path)
        return found[0] if found else ""

    @property
    def params(self) -> dict[str, str]:
        return dict(parse_qsl(self.request.partition("?")[2]))

    def __str__(self) -> str:
        return f"{self.file}: {self.request} {self.status}"


@dataclass(frozen=True)
class Said:
    """What a command of a node printed."""

    file: str
    argv: tuple[str, ...]
    exit_code: int
    stdout: str
    stderr: str


def answers() -> list[Answer]:
    """Every answer of the API that is recorded."""
    return [one for name, content in _files() for one in _READERS[name](name, content) if isinstance(one, Answer)]


def said() -> list[Said]:
    """What pvesh printed each time that it was recorded."""
    return [one for name, content in _files() for one in _READERS[name](name, content) if isinstance(one, Said)]


def _files() -> list[tuple[str, dict[str, Any]]]:
    return [(path.name, json.loads(path.read_text())) for path in sorted(DATA.glob("*.json")) if path.stem != "schema"]


def _recorded(file: str, content: dict[str, Any]) -> Iterator[Answer]:
    node, store = "GET /nodes/pve1", "GET /nodes/pve1/storage/store/content"
    requests = {
        "permissions of an auditor": "GET /access/permissions", "snapshots of 100": f"{node}/qemu/100/snapshot",
        "statuses": f"{node}/storage", "volumes": store, "volumes for an auditor": store,
        "chain": f"{node}/storage/chain/content", "invalid": f"{node}/storage/b-garbage/content", "nodes": "GET /nodes",
        "version": "GET /version", "cluster status": "GET /cluster/status", "container": f"{node}/lxc/300/config",
    }  # fmt: skip
    for name, data in content.items():
        if name in requests:
            yield Answer(file, requests[name], data)
        elif name == "config":
            for which, values in data.items():
                vmid, _, how = which.partition(" ")
                query = {"": "", "current": "?current=1"}.get(how, f"?snapshot={how.partition(' ')[2]}")
                yield Answer(file, f"{node}/qemu/{vmid}/config{query}", values)
        elif name == "errors":
            broken = {"broken header": f"{node}/storage/b-badversion/content", "fifo": f"{node}/storage/b-fifo/content"}
            for request, told in data.items():
                status, _, reason = told["status"].partition(" ")
                body = told["body"] or {}
                yield Answer(
                    file, broken.get(request, request), None, int(status), reason, body.get("message", ""),
                    body.get("errors", {}),
                )  # fmt: skip
        elif name == "tasks":
            yield Answer(file, f"{node}/tasks/{data['status']['upid']}/status", data["status"])
            yield Answer(file, f"{node}/tasks/{data['status']['upid']}/log", data["log"])
            yield Answer(file, f"{node}/tasks", [data["refused delete"]])
        else:
            assert name == "source", f"{file}: {name} is used by no test"


def _more(file: str, content: dict[str, Any]) -> Iterator[Answer]:
    assert content.keys() == {"source", "answers"}
    for one in content["answers"]:
        yield Answer(file, **{"fields" if name == "errors" else name: value for name, value in one.items()})


def _chains(file: str, content: dict[str, Any]) -> Iterator[Answer]:
    for name, data in content.items():
        if name == "storage":
            yield Answer(file, "GET /storage", [data])
        elif name == "content":
            yield Answer(file, "GET /nodes/pve1/storage/chain/content", data)
        elif name == "snapshots":
            for vmid, rows in data.items():
                yield Answer(file, f"GET /nodes/pve1/qemu/{vmid}/snapshot", rows)
        elif name == "snapshot configs":
            for which, values in data.items():
                vmid, _, snapshot = which.partition(" ")
                yield Answer(file, f"GET /nodes/pve1/qemu/{vmid}/config?snapshot={snapshot}", values)
        else:  # files, which test_volume_chain.py reads
            assert name in {"source", "storage.cfg", "configurations", "files"}, f"{file}: {name} is used by no test"


def _pvesh(file: str, content: dict[str, Any]) -> Iterator[Said]:
    assert content.keys() == {"source", "said"}
    for one in content["said"]:
        yield Said(file, tuple(one["argv"][1:]), one["exit_code"], one["stdout"], one["stderr"])


def _locks(file: str, content: dict[str, Any]) -> Iterator[Answer | Said]:
    assert content.keys() == {"about", "pvesh", "token"}
    for one in content["pvesh"]:
        yield Said(file, tuple(one["argv"]), one["exit"], one["stdout"], one["stderr"])
    for one in content["token"]:
        query = "&".join(f"{name}={value}" for name, value in one["params"].items())
        request = f"PUT /nodes/pve1/qemu/310/config?{query}"
        yield Answer(file, request, None, one["status"], one["message"], one["message"], one.get("errors", {}))


#: A file without one is used by no test.
_READERS: dict[str, Any] = {
    "answers.json": _more, "guest_lock.json": _locks, "pvesh.json": _pvesh, "recorded.json": _recorded,
    "volume_chain.json": _chains,
}  # fmt: skip


class Replayed(Api):
    """Answers whatever it is asked as was recorded once."""

    who = "Proxmox VE"

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def _call(self, verb: str, path: tuple[str | int, ...], params: Params | None) -> Any:
        one = self._answer
        if one.status == 200:
            return one.data
        raise errors.of_answer(self.who, one.status, one.reason, one.message, one.fields or None)


@dataclass(frozen=True)
class Request:
    """A request that our client made."""

    call: str
    given: dict[str, str]
    in_path: dict[str, str]


class Recorder(Api):
    """The node of the tests' data without a network between, which keeps what it is asked."""

    who = "Proxmox VE"

    def __init__(self, world: World) -> None:
        self.world, self.made = world, list[Request]()

    def _call(self, verb: str, path: tuple[str | int, ...], params: Params | None) -> Any:
        given = {
            name: str(int(value) if isinstance(value, bool) else value)
            for name, value in (params or {}).items()
            if value is not None
        }
        found = schema.match(verb.upper(), "/" + "/".join(map(str, path)))
        assert found is not None, f"{verb} {path} is no call of the schema"
        call, in_path = found
        self.made.append(Request(call, given, in_path))
        check = schema.load()["calls"][call].get("check")
        try:
            if check and not self.world.root:
                self.world.demand(check[0].format(**in_path), check[1])
            return CALLS[call](self.world, in_path | given)
        except ApiDeathError as death:
            told = death
        raise errors.of_answer(self.who, told.status, told.message, told.message, told.fields)
