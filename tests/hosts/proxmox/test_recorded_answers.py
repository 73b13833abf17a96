"""Every answer that is recorded of Proxmox VE's own code is read as what it says, each on its own."""

import json
from typing import Any

import pytest

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.proxmox import conffiles, permissions, reader, storages, tasks, volumes
from storage_admin.hosts.proxmox.config import Config, GuestRef, read_config, read_snapshots
from storage_admin.hosts.proxmox.drives import CONTAINER, VM, Drive, is_drive
from storage_admin.hosts.proxmox.errors import ApiError, DeniedError, NoAnswerError, NotKnownError, NotThereError
from storage_admin.hosts.proxmox.permissions import Permissions
from storage_admin.hosts.proxmox.pvesh import Pvesh
from storage_admin.hosts.proxmox.storages import StorageFacts
from storage_admin.hosts.shells import Done
from tests.harness.proxmox import schema
from tests.harness.proxmox.recordings import Answer, Replayed, Said, answers, said

GOOD = [one for one in answers() if one.status == 200]
BAD = [one for one in answers() if one.status != 200]
#: Whatever the token may do.
ALL = Permissions({"/storage": {"Datastore.Allocate": 1, "Datastore.Audit": 1}, "/vms": {"VM.Config.Disk": 1}})


def of(call: str) -> list[Answer]:
    return [one for one in GOOD if one.call == call]


def rows(call: str) -> list[Any]:
    return [pytest.param(row, id=f"{one.file}-{_named(row)}") for one in of(call) for row in one.data]


def _named(row: dict[str, Any]) -> str:
    return str(row.get("volid") or row.get("storage") or row.get("vmid") or row.get("name"))


DEFINED = {row["storage"]: row for one in of("GET /storage") for row in one.data}
CONFIGS = [one for one in GOOD if one.path.endswith("/config")]
CONTENT = "GET /nodes/{node}/storage/{storage}/content"


@pytest.mark.parametrize("answer", [one for one in GOOD if one.call], ids=str)
def test_it_passes_the_schema(answer: Answer) -> None:
    wanted = {"digest": "0" * 40} if answer.path.endswith("/config") else {}
    data = answer.data | wanted if isinstance(answer.data, dict) else answer.data
    assert schema.wrong_answer(answer.call, data) == []
    assert set(answer.params) <= schema.parameters(answer.call).keys()


@pytest.mark.parametrize("answer", BAD, ids=str)
def test_an_error_is_the_one_that_it_is(answer: Answer) -> None:
    kind, code = _expected(answer)
    with pytest.raises((HostError, RefusedError)) as raised:
        Replayed(answer).get("version")
    error: Any = raised.value
    assert (type(error), error.code) == (kind, code)
    assert "\n" not in error.detail
    for words in (answer.fields or {"": answer.message if kind is not DeniedError else ""}).values():
        assert " ".join(words.split()).rstrip(".")[:400] in error.detail
    if kind is DeniedError:
        path, rights = answer.message.strip()[25:-1].split(", ", 1)
        assert error.detail.endswith(f" lacks {rights.replace('|', ' or ')} on {path}.")


def _expected(answer: Answer) -> tuple[type[Exception], str]:
    by_status = {
        403: (DeniedError, "right_missing"), 501: (NotKnownError, "tool_failed"),
        596: (NoAnswerError, "host_unreachable"),
    }  # fmt: skip
    gone = {
        "GET /nodes/pve1/qemu/103/config", "GET /nodes/pve1/lxc/100/config", "GET /nodes/pve1/storage/nosuch/content",
        "GET /nodes/pve1/qemu/100/config?snapshot=nope",
    }  # fmt: skip
    return (
        (NotThereError, "not_found")
        if answer.request in gone
        else by_status.get(answer.status, (ApiError, "tool_failed"))
    )


@pytest.mark.parametrize("answer", [one for one in BAD if one.call == CONTENT], ids=str)
def test_a_storage_that_cannot_be_listed_is_not_an_empty_one(answer: Answer) -> None:
    found = reader.list_volumes(Replayed(answer), "pve1", StorageFacts("store", "dir"), ALL)  # type: ignore[arg-type]
    assert (found.volumes, found.why_incomplete != "") == ((), True)


@pytest.mark.parametrize("answer", CONFIGS, ids=str)
def test_a_configuration_loses_nothing(answer: Answer) -> None:
    config = read_config(Replayed(answer), GuestRef("pve1", 100, VM if "/qemu/" in answer.path else CONTAINER))
    assert config.now == {name: str(value) for name, value in answer.data.items() if name != "lxc"}


DRIVES = [
    pytest.param(kind, key, str(value), id=f"{one.path.rpartition('/')[0][6:]}-{key}-{number}")
    for number, one in enumerate(CONFIGS)
    for kind in (VM if "/qemu/" in one.path else CONTAINER,)
    for key, value in one.data.items()
    if is_drive(key, kind) and key != "vmstate"
]


@pytest.mark.parametrize(("kind", "key", "text"), DRIVES)
def test_a_drive_is_taken_apart_as_the_schema_says_and_stays_what_it_was(kind: str, key: str, text: str) -> None:
    stem = key.rstrip("0123456789")
    form = next(name for name in (f"vm-now:{stem}", f"ct:{stem}") if name.startswith("vm" if kind == VM else "ct"))
    wanted = schema.properties(form, text)
    drive = Drive.parse(text)
    assert str(drive) == text
    assert drive.volume == wanted.pop("file" if kind == VM or stem == "unused" else "volume")
    assert {name: drive.option(name) for name in wanted} == wanted


@pytest.mark.parametrize("row", rows(CONTENT))
def test_a_volume_is_whose_and_what_proxmox_says(row: dict[str, Any]) -> None:
    storage = _storage(row["volid"].partition(":")[0])
    volume = volumes.parse(row["volid"], storage)
    assert volume is not None
    assert volume.vmid == row.get("vmid")
    if row["content"] == "import" and row["format"] == "ova":
        assert volume.content == "import"
    elif row["format"] not in ("invalid", "iso", "txt", "tzst", "vma.zst", "tgz", "snippet"):
        assert volume.format == row["format"]
    name = row["volid"].rpartition("/")[2]
    if row["content"] in ("images", "rootdir"):
        assert volumes.path(row["volid"], {storage.name: storage}) == f"{storage.path}/images/{row['vmid']}/{name}"
        base = volumes.base_id(row["volid"], storage).rpartition("/")[2]
        assert not base or str(row["parent"]).endswith("/" + base)


def _storage(name: str) -> StorageFacts:
    return storages.of_definition(DEFINED.get(name, {"storage": name, "type": "dir", "path": f"/mnt/pve/{name}"}))


@pytest.mark.parametrize("answer", of(CONTENT), ids=str)
def test_a_list_of_volumes_is_whole(answer: Answer) -> None:
    storage = _storage(answer.path.split("/")[4])
    found = reader.list_volumes(Replayed(answer), "pve1", storage, ALL)  # type: ignore[arg-type]
    wanted = [row for row in answer.data if row["content"] in ("images", "rootdir")]
    assert found.why_incomplete == ""
    assert [
        (one.volume, one.content, one.format, one.size_bytes, one.used_bytes, one.vmid, one.parent)
        for one in found.volumes
    ] == [
        (*(row[key] for key in ("volid", "content", "format", "size", "used", "vmid")), row["parent"] or "")
        for row in wanted
    ]


@pytest.mark.parametrize("row", rows("GET /storage"))
def test_a_definition_is_read_and_written_as_in_the_file(row: dict[str, Any]) -> None:
    facts = storages.of_definition(row)
    assert (facts.name, facts.type) == (row["storage"], row["type"])
    assert set(facts.content) == set(filter(None, row.get("content", "").split(",")))
    if facts.is_folder:
        assert facts.path == row.get("path", f"/mnt/pve/{row['storage']}")
    assert facts.is_mountpoint == (str(row.get("is_mountpoint", "0")) != "0")
    assert facts.nodes == tuple(sorted(filter(None, row.get("nodes", "").split(","))))
    assert facts.enabled == (not row.get("disable"))
    lines = [f"\t{name} {value}" for name, value in row.items() if name not in ("type", "storage")]
    text = "\n".join([f"{row['type']}: {row['storage']}", *lines, ""])
    parsed, unread = storages.parse_file(text)
    assert (next(one for one in parsed if one.name == facts.name), unread) == (facts, ())


@pytest.mark.parametrize("row", rows("GET /nodes/{node}/storage"))
def test_a_storages_space_is_unknown_where_it_is_not_active(row: dict[str, Any]) -> None:
    facts = storages.with_status(StorageFacts(row["storage"], ""), row)
    assert (facts.type, facts.active, facts.enabled) == (row["type"], row["active"] == 1, row["enabled"] == 1)
    assert facts.shared == (row["shared"] == 1)
    sizes = (facts.total_bytes, facts.used_bytes, facts.available_bytes)
    assert sizes == ((row["total"], row["used"], row["avail"]) if row["active"] else (None, None, None))


@pytest.mark.parametrize("kind", ["qemu", "lxc"])
def test_a_list_of_guests_says_their_names_states_and_locks(kind: str) -> None:
    for answer in of(f"GET /nodes/{{node}}/{kind}"):
        found = reader.read_states(Replayed(answer), "pve1")  # type: ignore[arg-type]
        told = [one for one in found if one.facts.kind == (VM if kind == "qemu" else CONTAINER)]
        assert [(one.vmid, one.facts.name, one.facts.state, one.facts.lock) for one in told] == [
            (row["vmid"], row["name"], "shut off", row.get("lock", "")) for row in answer.data
        ]


@pytest.mark.parametrize("answer", of("GET /nodes/{node}/qemu/{vmid}/snapshot"), ids=str)
def test_snapshots_are_those_with_a_time(answer: Answer) -> None:
    class Twice(Replayed):
        def fields(self, *path: str | int, params: Any = None) -> dict[str, Any]:
            return {"name": params["snapshot"]}

    config = _config()
    found = dict(read_snapshots(Twice(answer), config))
    assert list(found) == [row["name"] for row in answer.data if "snaptime" in row]


def _config() -> Config:
    return read_config(Replayed(of("GET /nodes/{node}/qemu/{vmid}/config")[0]), GuestRef("pve1", 100))


@pytest.mark.parametrize("answer", of("GET /access/permissions"), ids=str)
def test_an_auditor_lacks_all_that_changes_something(answer: Answer) -> None:
    may = permissions.read(Replayed(answer))
    lacking = {right.feature for right in may.all_missing()}
    assert {"images", "limits", "flatten", "move", "resize", "trim"} <= lacking
    assert "guests" not in lacking


@pytest.mark.parametrize("answer", of("GET /nodes") + of("GET /cluster/status"), ids=str)
def test_nodes_are_those_that_are_listed(answer: Answer) -> None:
    found = reader.cluster(Replayed(answer))  # type: ignore[arg-type]
    assert [one.name for one in found.nodes] == [row.get("node") for row in answer.data if "node" in row] or (
        answer.call == "GET /cluster/status"
    )


def test_how_a_task_ended_is_in_its_status_alone() -> None:
    status = of("GET /nodes/{node}/tasks/{upid}/status")[0].data
    assert tasks.node_of(status["upid"]) == status["node"]
    log = of("GET /nodes/{node}/tasks/{upid}/log")[0].data

    class Both(Replayed):
        def rows(self, *path: str | int, params: Any = None) -> list[dict[str, Any]]:
            return log[params["start"] :] if path[-1] == "log" else []

    lines: list[str] = []
    warnings = tasks.follow(
        Both(of("GET /nodes/{node}/tasks/{upid}/status")[0]), status["upid"], log=lines.append  # type: ignore[arg-type]
    )  # fmt: skip
    assert (warnings, lines) == (0, [row["t"] for row in log])


@pytest.mark.parametrize("row", next(one for one in GOOD if one.path == "/nodes/pve1/tasks").data)
def test_a_task_that_was_refused_has_failed(row: dict[str, Any]) -> None:
    status = {"status": "stopped", "exitstatus": row["status"]}

    class Ended(Replayed):
        def rows(self, *path: str | int, params: Any = None) -> list[dict[str, Any]]:
            return []

    with pytest.raises(HostError) as raised:
        tasks.follow(Ended(Answer("", "", status)), row["upid"])  # type: ignore[arg-type]
    assert row["status"] in raised.value.detail


class Shell:
    """A node on which pvesh says what it said."""

    def __init__(self, one: Said) -> None:
        self._done = Done(one.exit_code, one.stdout.encode(), one.stderr.encode())

    def run(self, argv: Any, *, stdin: bytes = b"", seconds: float = 30.0) -> Done:
        return self._done


@pytest.mark.parametrize(
    "one", said(), ids=lambda one: f"{one.file}-{' '.join(one.argv) or 'in another language'}"[:90]
)
def test_pvesh_succeeds_where_it_ended_with_0_alone(one: Said) -> None:
    api, code, found = Pvesh(Shell(one), "pve1"), "", None
    read = one.argv[:1] == ("get",)
    try:
        found = api.get("version") if read else api.put("version")
    except (HostError, RefusedError) as error:
        code = error.code
    assert code == (_code(one.stderr) if one.exit_code else "")
    assert found == (json.loads(one.stdout) if read and not one.exit_code else None)


def _code(stderr: str) -> str:
    words = {
        "VM is locked": "guest_locked", "checksum mismatch": "stale_plan", "Configuration file": "not_found",
        "snapshot 'never'": "not_found",
    }  # fmt: skip
    return next((code for said, code in words.items() if said in stderr), "tool_failed")


@pytest.mark.parametrize("one", [one for one in said() if one.exit_code == 0], ids=lambda one: " ".join(one.argv)[:90])
def test_what_pvesh_took_passes_the_schema(one: Said) -> None:
    verb = {"get": "GET", "set": "PUT"}[one.argv[0]]
    found = schema.match(verb, one.argv[1])
    if found is None:
        assert one.argv[1].endswith("/status"), "the one call that the product does not make"
        return
    given = [part for part in one.argv[2:] if part not in ("--output-format", "json")]
    options = {name[2:]: value for name, value in zip(given[::2], given[1::2], strict=True)}
    assert schema.wrong(found[0], options, found[1]) == {}


def test_the_files_and_the_api_tell_the_same_storages() -> None:
    text = (schema.DATA / "pve" / "storage.cfg").read_text()
    for facts in storages.parse_file(text)[0]:
        if facts.name in DEFINED and facts.name != "local":
            told = storages.of_definition(DEFINED[facts.name])
            assert (facts.type, facts.path, facts.nodes, facts.shared, facts.enabled) == (
                told.type, told.path, told.nodes, told.shared, told.enabled,
            )  # fmt: skip
    assert conffiles.of_files({"storage.cfg": text.encode()}, node="pve1").unknown == ()
