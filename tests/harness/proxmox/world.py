"""What the test server serves: nodes, storages, volumes, guests, tasks, tokens; and the traps that can be set."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.harness.proxmox import confs
from tests.harness.proxmox.confs import Conf
from tests.harness.proxmox.schema import DATA

TOKEN_ID, SECRET = "dashboard@pve!storage-admin", "0f5a1d2c-1111-4222-8333-a1b2c3d4e5f6"
ALL = (
    "Sys.Audit", "Datastore.Audit", "Datastore.AllocateSpace", "VM.Audit", "VM.Config.Disk",
    "VM.GuestAgent.FileSystemMgmt", "VM.Snapshot", "VM.Backup",
)  # fmt: skip
#: What Proxmox VE's own PVEAuditor has of these.
AUDITOR = ("Sys.Audit", "Datastore.Audit", "VM.Audit", "VM.GuestAgent.Audit")
#: A VM with two disks and an optical drive that nothing is at work on.
FREE_VM = (
    "agent: 1\nide2: none,media=cdrom\nscsi0: store:120/vm-120-disk-0.qcow2,discard=on,size=8G\n"
    "scsi1: local-lvm:vm-120-disk-1,size=1G\nunused0: store:120/vm-120-disk-7.qcow2\n"
)
TOPS = ("/", "/access", "/access/groups", "/nodes", "/pool", "/sdn", "/storage", "/vms")


class ApiDeathError(Exception):
    """A request ends in an error; ``fields`` for those of parameters."""

    def __init__(self, status: int, message: str, fields: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.fields = fields


@dataclass
class Guest:
    """A guest of the node. ``text`` is its file, which is the truth."""

    kind: str
    vmid: int
    text: str
    running: bool = False
    qmp: str = ""
    hotplug: bool = True
    #: The version of QEMU that it was started with; empty where the node does not say.
    qemu: str = ""
    #: What its guest agent says to fstrim; ``None`` where there is no agent.
    trims: list[dict[str, Any]] | None = None

    @property
    def conf(self) -> Conf:
        return confs.parse_vm(self.text) if self.kind == "vm" else confs.parse_container(self.text)

    @property
    def name(self) -> str:
        return self.conf.now.get("name" if self.kind == "vm" else "hostname", "")


@dataclass
class Task:
    """A task: one more of its log's lines at every look, then its end, and what it does then."""

    upid: str
    lines: list[str]
    effect: Any
    exit_status: str = "OK"
    shown: int = 0
    ended: bool = False

    def step(self) -> None:
        if self.ended:
            return
        self.shown += 1
        if self.shown >= len(self.lines):
            self.end()

    def end(self) -> None:
        self.shown, self.ended = len(self.lines), True
        if self.exit_status == "OK":
            try:
                self.effect()
            except ApiDeathError as death:
                self.exit_status = death.message.strip()
        self.lines.append("TASK OK" if self.exit_status == "OK" else f"TASK ERROR: {self.exit_status}")
        self.shown += 1


@dataclass
class World:
    """All of it.

    Args:
        rights: of the token, by path.
        broken: storages whose listing dies, with these words; no words for a 596.
        task_fails: the next task ends with these words.
        snapshot_fails: deletions of snapshots end with these words, and leave the VM locked.
        delay: seconds before a bad token is refused.
        root: whether root itself asks, by ``pvesh``.
        after_put: called with the guest when it was changed.
        before_put: called with the guest when a change comes in, before it is looked at.
        before_read: called with kind and number before a guest is looked at.
    """

    node: str = "pve1"
    rights: dict[str, dict[str, int]] = field(default_factory=dict)
    guests: dict[tuple[str, int], Guest] = field(default_factory=dict)
    storages: list[dict[str, Any]] = field(default_factory=list)
    statuses: list[dict[str, Any]] = field(default_factory=list)
    volumes: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    cluster_status: list[dict[str, Any]] = field(default_factory=list)
    version: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    task_fails: str = ""
    snapshot_fails: str = ""
    delay: float = 0.0
    root: bool = False
    after_put: Callable[[Guest], None] | None = None
    before_put: Callable[[Guest], None] | None = None
    before_read: Callable[[str, int], None] | None = None

    def allow(self, *rights: str) -> None:
        """Gives the token these rights everywhere, and no others."""
        self.rights = {path: dict.fromkeys(rights, 1) for path in TOPS}

    def has(self, path: str, rights: str) -> bool:
        """Whether the token has one of these, ``a|b``, on a path: by the nearest rule above, if that counts below."""
        above = path
        while True:
            if above in self.rights:
                found = self.rights[above]
                return any(found.get(right, -1) >= (0 if above == path else 1) for right in rights.split("|"))
            if above == "/":
                return False
            above = above.rpartition("/")[0] or "/"

    def demand(self, path: str, rights: str) -> None:
        if not self.has(path, rights):
            raise ApiDeathError(403, f"Permission check failed ({path}, {rights})\n")

    def guest(self, kind: str, vmid: int) -> Guest:
        if self.before_read is not None:
            self.before_read(kind, vmid)
        if (kind, vmid) not in self.guests:
            folder = "qemu-server" if kind == "vm" else "lxc"
            raise ApiDeathError(500, f"Configuration file 'nodes/{self.node}/{folder}/{vmid}.conf' does not exist\n")
        return self.guests[kind, vmid]

    def begin(self, kind: str, about: str, lines: list[str], effect: Any) -> str:
        """A new task's id."""
        upid = f"UPID:{self.node}:0000726F:0004C69B:{0x6B002BEB + len(self.tasks):08X}:{kind}:{about}:{TOKEN_ID}:"
        self.tasks[upid] = Task(upid, lines, effect)
        if self.task_fails:
            self.tasks[upid].exit_status, self.task_fails = self.task_fails, ""
        return upid

    def used_names(self) -> str:
        """All files' texts, to look for a name that is taken."""
        return "\n".join(guest.text for guest in self.guests.values())


def files() -> dict[str, bytes]:
    """The tree of ``/etc/pve`` in the tests' data, by name."""
    root = DATA / "pve"
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def recorded() -> dict[str, Any]:
    """What Proxmox VE's own code answered."""
    found: dict[str, Any] = json.loads((DATA / "recorded.json").read_text())
    return found


def lab() -> World:
    """The node of the tests' data, with a token that has all that the dashboard needs."""
    known, world = recorded(), World()
    world.allow(*ALL)
    for name, content in files().items():
        found = re.fullmatch(r"nodes/pve1/(qemu-server|lxc)/(\d+)\.conf", name)
        if found:
            kind = "vm" if found[1] == "qemu-server" else "container"
            world.guests[kind, int(found[2])] = Guest(kind, int(found[2]), content.decode())
    world.storages = _storages(files()["storage.cfg"].decode())
    store = next(one for one in known["statuses"] if one["storage"] == "store")
    world.statuses = [*known["statuses"], {**store, "storage": "s2", "content": "images"}]
    world.volumes = {"store": known["volumes"]}
    world.nodes, world.version = known["nodes"], known["version"]
    world.cluster_status = known["cluster status"]
    return world


def _storages(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in text.split("\n"):
        if re.match(r"\w", line):
            kind, _, name = line.partition(": ")
            found.append({"type": kind, "storage": name, "digest": "0" * 40})
        elif line.strip():
            key, _, value = line.strip().partition(" ")
            found[-1][key] = int(value or "1") if (value or "1").isdigit() else value
    return found
