"""The test server itself is held to what Proxmox VE's own code answered, and to the official schema."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.proxmox.client import Client
from tests.harness.proxmox import confs, schema
from tests.harness.proxmox.answers import CALLS
from tests.harness.proxmox.server import ProxmoxServer, proxmox, reserved
from tests.harness.proxmox.world import AUDITOR, files, lab, recorded


@pytest.mark.parametrize("name", recorded()["config"])
def test_configurations_are_answered_as_recorded(client: Client, name: str) -> None:
    vmid, _, how = name.partition(" ")
    params: dict[str, Any] = {"current": 1} if how == "current" else {}
    if how.startswith("snapshot"):
        params = {"snapshot": how.partition(" ")[2]}
    found = client.fields("nodes", "pve1", "qemu", vmid, "config", params=params)
    assert {key: value for key, value in found.items() if key != "digest"} == recorded()["config"][name]


def test_digests_are_those_of_the_files(client: Client) -> None:
    found = client.fields("nodes", "pve1", "qemu", 101, "config")
    assert found["digest"] == "c648d54bae02033abd852a9e62d820ee5f236e18"  # as recorded


def test_snapshots_are_listed_as_recorded(client: Client) -> None:
    found = client.rows("nodes", "pve1", "qemu", 100, "snapshot")
    wanted = {row["name"]: row for row in recorded()["snapshots of 100"]}
    assert {row["name"] for row in found} == wanted.keys()
    for row in found:
        for key in ("name", "parent", "snaptime", "vmstate", "running"):
            assert row.get(key) == wanted[row["name"]].get(key)


def test_an_auditor_gets_no_images_and_a_200(server: ProxmoxServer, client: Client) -> None:
    server.world.volumes["store"] += recorded()["volumes for an auditor"]
    server.world.allow(*AUDITOR)
    found = client.rows("nodes", "pve1", "storage", "store", "content")
    assert found == recorded()["volumes for an auditor"]
    assert server.seen[-1].status == 200
    tree = client.fields("access", "permissions")
    for path, rights in recorded()["permissions of an auditor"].items():
        assert {right: 1 for right in rights if right in AUDITOR} == tree[path]


@pytest.mark.parametrize("request_line", [name for name in recorded()["errors"] if name.startswith("GET /nodes")])
def test_errors_are_answered_as_recorded(server: ProxmoxServer, client: Client, request_line: str) -> None:
    if request_line.endswith("as vmadmin"):
        server.world.allow("VM.Config.Disk", "VM.Audit")
    path, _, query = request_line.removeprefix("GET /").partition(" ")[0].partition("?")
    with pytest.raises(Exception, match=r".") as raised:
        client.get(*path.split("/"), params=dict([query.split("=")]) if query else None)
    wanted = recorded()["errors"][request_line]
    assert server.seen[-1].status == int(wanted["status"].partition(" ")[0])
    if server.seen[-1].status != 403:  # which is told in words of our own
        for words in (wanted["body"].get("errors") or {"": wanted["body"]["message"]}).values():
            assert " ".join(words.split()).rstrip(".")[:40] in getattr(raised.value, "detail", "")
    server.wrong.clear()  # two of them are what the schema refuses


def test_recorded_answers_pass_the_schema() -> None:
    """The yardstick itself: what Proxmox VE really answers is not found wrong."""
    known = recorded()
    answers = {
        "GET /version": known["version"],
        "GET /nodes": known["nodes"],
        "GET /cluster/status": known["cluster status"],
        "GET /nodes/{node}/storage": known["statuses"],
        "GET /nodes/{node}/storage/{storage}/content": [*known["volumes"], *known["chain"], *known["invalid"]],
        "GET /nodes/{node}/qemu/{vmid}/snapshot": known["snapshots of 100"],
        "GET /nodes/{node}/tasks/{upid}/status": known["tasks"]["status"],
        "GET /nodes/{node}/tasks/{upid}/log": known["tasks"]["log"],
        "GET /nodes/{node}/lxc/{vmid}/config": known["container"] | {"digest": "0" * 40},
    }
    for call, data in answers.items():
        assert schema.wrong_answer(call, data) == [], call
    for values in known["config"].values():
        assert schema.wrong_answer("GET /nodes/{node}/qemu/{vmid}/config", values | {"digest": "0" * 40}) == []


def test_every_call_of_the_schema_is_served() -> None:
    assert CALLS.keys() == schema.load()["calls"].keys()


@pytest.mark.parametrize(
    ("call", "given", "wrong"),
    [
        ("PUT /nodes/{node}/qemu/{vmid}/resize", {"disk": "scsi0", "size": "+1G"}, set()),
        ("PUT /nodes/{node}/qemu/{vmid}/resize", {"disk": "scsi31", "size": "1P"}, {"disk", "size"}),
        ("PUT /nodes/{node}/qemu/{vmid}/resize", {}, {"disk", "size"}),
        ("POST /nodes/{node}/qemu/{vmid}/move_disk", {"disk": "unused255", "delete": "2"}, {"delete"}),
        ("PUT /nodes/{node}/qemu/{vmid}/config", {"scsi0": "st:1/x.raw,nonsense=1"}, {"scsi0"}),
        ("PUT /nodes/{node}/qemu/{vmid}/config", {"scsi0": "st:1/x.raw,cache=none", "digest": "f" * 41}, {"digest"}),
        ("PUT /nodes/{node}/qemu/{vmid}/config", {"scsi31": "st:1/x.raw", "ide4": "none"}, {"scsi31", "ide4"}),
        (
            "PUT /nodes/{node}/qemu/{vmid}/config",
            {"virtio0": "st:1/x.raw,mbps_rd=1e3", "bwlimit": "1"},
            {"virtio0", "bwlimit"},
        ),
        ("GET /nodes/{node}/qemu/{vmid}/config", {"current": "1", "snapshot": "x" * 41}, {"snapshot"}),
    ],
)
def test_requests_are_held_to_the_schema(call: str, given: dict[str, str], wrong: set[str]) -> None:
    assert schema.wrong(call, given, {"node": "pve1", "vmid": "100"}).keys() == wrong


@pytest.mark.parametrize(
    ("given", "is_so"),
    [
        ({"args": "-device x"}, True),
        ({"delete": "scsi1,args"}, True),
        ({"scsi0": "st:1/x.raw", "skiplock": "1"}, True),
        ({"delete": "lock", "skiplock": "1"}, True),
        ({"delete": "lock", "skiplock": "1", "digest": "f"}, False),  # our own lock, unless it was changed since
        ({"scsi0": "st:1/x.raw", "digest": "f"}, False),
    ],
)
def test_what_is_roots_is_wrong_in_every_request(given: dict[str, str], is_so: bool) -> None:
    assert reserved(given) == is_so


def test_a_client_that_asks_for_it_is_told_on(tmp_path: Path) -> None:
    with proxmox(lab(), tmp_path) as server, server.client() as client:
        with contextlib.suppress(HostError, RefusedError):
            client.put("nodes", "pve1", "qemu", 100, "config", params={"args": "-device x"})
        assert len(server.wrong) == 1


def test_answers_are_held_to_the_schema() -> None:
    assert schema.wrong_answer("GET /version", {"release": "9.2", "version": "9.2.11"}) == ["data.repoid is missing"]
    assert schema.wrong_answer("GET /nodes", [{"node": "pve1", "status": "gone"}]) == ["data[0].status is 'gone'"]
    assert schema.wrong_answer("GET /nodes", {}) == ["data is dict, not array"]
    config = {"digest": "0", "cores": "4", "scsi0": 7}
    assert len(schema.wrong_answer("GET /nodes/{node}/qemu/{vmid}/config", config)) == 2


def test_lines_that_cannot_be_read_are_dropped_on_writing() -> None:
    conf = confs.parse_vm(files()["nodes/pve1/qemu-server/106.conf"].decode())
    written = confs.write_vm(conf)
    assert "\nscsi0:" not in written
    assert confs.parse_vm(written).now == conf.now
