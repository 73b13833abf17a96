"""The verb ``pve``: Proxmox VE's files as they stand, nothing else, and which guests run."""

import os
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.protocol import Request, unb64
from storage_admin.agent.verbs import pve
from storage_admin.hosts.proxmox import conffiles
from tests.agent.harness import ask
from tests.agent.recording import RecordingIO
from tests.harness.filesystems import new_file, new_folder
from tests.harness.proxmox.schema import DATA
from tests.harness.proxmox.world import files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine's root with the tests' configuration files."""
    for name, content in files().items():
        path = tmp_path / "etc/pve" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "etc/pve/local").symlink_to("nodes/pve1")
    (tmp_path / "etc/pve/qemu-server").symlink_to("nodes/pve1/qemu-server")
    (tmp_path / "run/qemu-server").mkdir(parents=True)
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/unix").write_text("Num RefCount Protocol Flags Type St Inode Path\n")
    return tmp_path


def asked(root: Path) -> dict[str, Any]:
    args = {"etc_pve": str(root / "etc/pve"), "root": str(root)}
    return pve.run(Request("pve", "j1", 1, args), RecordingIO())


def runs(root: Path, vmid: int, pid: int, argv: list[str]) -> None:
    (root / f"run/qemu-server/{vmid}.pid").write_text(f"{pid}\n")
    (root / f"proc/{pid}").mkdir()
    (root / f"proc/{pid}/cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in argv))


def test_all_files_come_as_they_stand(root: Path) -> None:
    answer = asked(root)
    assert {one["name"]: unb64(one["content_b64"]) for one in answer["files"]} == files()
    assert (answer["proxmox"], answer["node"], answer["failed"]) == (True, "pve1", [])


def test_the_real_agent_answers_what_the_dashboard_reads(root: Path) -> None:
    facts = conffiles.read(ask("pve", {"etc_pve": str(root / "etc/pve"), "root": str(root)}))
    assert facts == conffiles.of_files(files(), node="pve1", running={"vm": _off(root), "container": {"300": False}})
    assert len(facts.guests) == 8


def _off(root: Path) -> dict[str, bool]:
    return {path.stem: False for path in (DATA / "pve/nodes/pve1/qemu-server").iterdir()}


def test_a_machine_without_proxmox_says_so(tmp_path: Path) -> None:
    answer = ask("pve", {"etc_pve": str(tmp_path / "none"), "root": str(tmp_path)})
    assert answer == {"proxmox": False, "node": "", "files": [], "failed": [], "running": {}}
    assert ask("pve", {"nonsense": 1})["code"] == "invalid"
    assert ask("pve", {"etc_pve": 7})["code"] == "invalid"


def test_running_guests_are_told_from_the_others(root: Path) -> None:
    runs(root, 100, 4100, ["/usr/bin/kvm", "-id", "100", "-name", "db1"])
    runs(root, 101, 4101, ["/usr/bin/kvm", "-id", "1010", "-name", "x"])  # the number went to another process
    (root / "run/qemu-server/102.pid").write_text("4102\n")  # it has ended
    (root / "run/qemu-server/105.pid").write_text("nonsense")
    with (root / "proc/net/unix").open("a") as table:
        table.write("ffff: 00000002 00000000 00010000 0001 01 20 @/var/lib/lxc/300/command\n")
        table.write("ffff: 00000002 00000000 00010000 0001 01 21 @/var/lib/lxc/3000/commands\n")
    running = asked(root)["running"]
    assert running["vm"] == {
        "100": True, "101": False, "102": False, "105": None, "106": False, "107": False, "110": False,
    }  # fmt: skip
    assert running["container"] == {"300": True}


def test_what_cannot_be_seen_of_the_kernel_is_not_known(root: Path) -> None:
    (root / "proc/net/unix").unlink()
    (root / "run/qemu-server/100.pid").mkdir()
    running = asked(root)["running"]
    assert running["container"] == {"300": None}
    assert running["vm"]["100"] is None


def test_guests_of_other_nodes_are_read_and_nothing_said_of_their_state(root: Path) -> None:
    other = new_folder(root / "etc/pve/nodes/pve2/qemu-server", parents=True)
    (other / "500.conf").write_text("name: far\nscsi0: store:500/x.raw\n")
    answer = asked(root)
    assert "nodes/pve2/qemu-server/500.conf" in [one["name"] for one in answer["files"]]
    assert "500" not in answer["running"]["vm"]
    far = next(guest for guest in conffiles.read(answer).guests if guest.vmid == 500)
    assert (far.node, far.facts.state) == ("pve2", "unknown")


def test_no_link_is_followed_and_nothing_else_is_read(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    secret = new_file(tmp_path_factory.mktemp("elsewhere") / "secret", "canary")
    guests = root / "etc/pve/nodes/pve1/qemu-server"
    (guests / "900.conf").symlink_to(secret)
    (guests / "901.conf").mkdir()
    os.mkfifo(guests / "902.conf")
    for name in ("x.conf", "0.conf", "100.conf.tmp", "1234567890.conf", "\uff19\uff10\uff10.conf", "-1.conf"):
        (guests / name).write_text("canary")
    (root / "etc/pve/priv").mkdir()
    (root / "etc/pve/priv/token.cfg").write_text("canary")
    (root / "etc/pve/nodes/evil").symlink_to(secret.parent)
    (root / "etc/pve/nodes/..x").mkdir()
    (root / "etc/pve/nodes/pve3").mkdir()
    (root / "etc/pve/nodes/pve3/lxc").symlink_to(secret.parent)
    (secret.parent / "1.conf").write_text("canary")
    answer = asked(root)
    assert {one["name"] for one in answer["files"]} == files().keys()
    assert b"canary" not in b"".join(unb64(one["content_b64"]) for one in answer["files"])
    assert {one["name"]: one["why"] for one in answer["failed"]}.keys() == {
        "nodes/pve1/qemu-server/900.conf", "nodes/pve1/qemu-server/901.conf", "nodes/pve1/qemu-server/902.conf",
        "nodes/pve3/lxc", "nodes/evil",
    }  # fmt: skip
    assert len(conffiles.read(answer).unknown) == 5


def test_what_is_too_much_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "etc/pve/nodes/pve1/qemu-server/100.conf").write_bytes(b"#" * (pve.MAX_FILE + 1))
    failed = {one["name"]: one["why"] for one in asked(root)["failed"]}
    assert failed == {"nodes/pve1/qemu-server/100.conf": f"it is larger than {pve.MAX_FILE} bytes"}
    monkeypatch.setattr(pve, "MAX_FILES", 4)
    answer = asked(root)
    assert len(answer["files"]) == 4
    assert {one["why"] for one in answer["failed"]} >= {"there are more files than are read at once"}
    # Whether they run is told of them all the same.
    assert answer["running"]["container"] == {"300": False}
    monkeypatch.setattr(pve, "MAX_TOTAL", 100)
    assert len(asked(root)["files"]) == 1


def test_a_node_without_a_name_has_the_hosts(root: Path) -> None:
    (root / "etc/pve/local").unlink()
    assert asked(root)["node"]
    (root / "etc/pve/local").symlink_to("nodes/../../x y")
    assert "/" not in asked(root)["node"]
