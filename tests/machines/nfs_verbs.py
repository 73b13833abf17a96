"""Every verb that writes to a storage: how it is asked for over NFS, and whether all is well afterwards."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage_admin.agent import protocol
from storage_admin.agent.protocol import b64
from tests.agent.harness import NO_RESERVE
from tests.harness.processes import wait_until
from tests.machines.nfs import EXPORTED, MOUNTED, PATTERN, SIZE, Export, Pinged

#: So slow that the data of an image takes seconds; else a server would be back before anything was missed.
SLOW = {"bandwidth_bytes_sec": 8 << 10}
#: Of those that copy: they are met while they do, or when they wait for leave to put the result in its place.
COPYING = ("reclaim", "convert", "flatten", "export", "unpack", "create", "from_device")
VERBS = (*COPYING, "set_aside", "restore_aside", "delete_aside", "undo", "discard_undo", "grow", "receive")
PIECE = b"u" * (64 << 10)
#: Of the names of new files.
_ENDINGS = {
    "convert": "qcow2", "export": "gz", "unpack": "raw", "create": "new.raw", "receive": "up.raw",
    "from_device": "device.raw",
}  # fmt: skip


@dataclass
class Work:
    """One verb at work.

    Args:
        name: of the image, which is the number of the job that made it what it is.
        job: the number of the verb's own job.
        large: bytes of what is created, or grows by a merge.
    """

    export: Export
    verb: str
    name: str
    job: str
    large: int = SIZE

    @property
    def path(self) -> str:
        """Of the image, where the agent works."""
        return f"{MOUNTED}/{self.name}"

    @property
    def made(self) -> str:
        """The name of the new file."""
        return f"{self.name}.{_ENDINGS[self.verb]}"

    def args(self) -> dict[str, Any]:
        """What is asked; what has to be there before is made."""
        export, path = self.export, self.export.image(self.name)
        target = {"pool_path_b64": b64(MOUNTED.encode())}
        if self.verb in _ENDINGS:
            target["path_b64"] = b64(f"{MOUNTED}/{self.made}".encode())
        plain = export.reclaim(path) | SLOW
        del plain["method"]
        match self.verb:
            case "reclaim":
                return plain | {"method": "copy"}
            case "convert":
                return plain | {"target": target | {"format": "qcow2"}}
            case "flatten":
                export.client.run(f"qemu-img create -q -f qcow2 -F raw -b {path} {path}.qcow2")
                top = export.link(f"{path}.qcow2", "qcow2")
                return plain | top | {"chain": [export.link(path)], "method": "convert"}
            case "export":
                return plain | {"target": target, "packing": "gzip"}
            case "unpack" | "create" | "from_device":
                return {name: plain[name] for name in ("reserve", "idle_io", "bandwidth_bytes_sec")} | self._new(target)
            case "commit":
                return plain | self._overlay(path)
            case "receive":
                return {"target": target, "size": export.size, "offset": 0, "reserve": NO_RESERVE}
            case "grow":
                return plain | {"size": 2 * export.size}
            case "set_aside":
                return aside_args(export, path)
            case "restore_aside" | "delete_aside":
                self._before("set_aside", aside_args(export, path))
                inode = {} if self.verb == "restore_aside" else {"inode": self._inode("aside"), "pools": []}
                return place(path) | {"aside_job": self.name} | inode
            case _:
                self._before("reclaim", export.reclaim(path, undo_hours=24))
                return place(path) | {"undo_job": self.name, **({} if self.verb == "undo" else {"force": True})}

    def _new(self, target: dict[str, str]) -> dict[str, Any]:
        """Of what is made from no image of the storage's."""
        if self.verb == "unpack":
            packed = f"{self.name}.packed.gz"
            self.export.server.run(f"gzip -c /root/image >{EXPORTED}/{packed}")
            source = {"pool_path_b64": target["pool_path_b64"], "path_b64": b64(f"{MOUNTED}/{packed}".encode())}
            return {"source": source, "target": target | {"format": "raw"}}
        if self.verb == "create":
            made = target | {"format": "raw", "options": {"preallocation": "full"}}
            return {"target": made, "virtual_size": self.large}
        device = self.export.client.run("losetup -f --show -r /root/image").strip()
        return {"device_b64": b64(device.encode()), "target": target | {"format": "raw"}}

    def _overlay(self, path: str) -> dict[str, Any]:
        """Of a merge of an overlay into the image, which has no room yet for what that holds."""
        self.export.server.run(f"truncate -s {self.large} {EXPORTED}/{self.name}; stat {path}")
        self.export.client.run(
            f"qemu-img create -q -f qcow2 -F raw -b {path} {path}.qcow2 && "
            f"qemu-io -c 'write -P {PATTERN} {self._added}' {path}.qcow2"
        )
        top = self.export.link(f"{path}.qcow2", "qcow2")
        return top | {"chain": [self.export.link(path)], "virtual_size": self.large, "pools": []}

    @property
    def merge(self) -> dict[str, str]:
        """The same merge, as a recovery is told of it."""
        base = f"{MOUNTED}/{self.name}".encode()
        return {"job": self.job, "overlay_b64": b64(base + b".qcow2"), "base_b64": b64(base)}

    @property
    def _added(self) -> str:
        """Place and length of what a merge adds to the image."""
        return f"{self.export.size} {self.large - self.export.size}"

    def _before(self, verb: str, args: dict[str, Any]) -> None:
        answer = self.export.ask(verb, args, self.name, how="soon")
        assert "code" not in answer, answer

    def _inode(self, what: str) -> int:
        return int(self.export.client.run(f"stat -c %i {MOUNTED}/.sa-{self.name}.{what}"))

    def check(self, answer: dict[str, Any]) -> None:
        """What the image and the new file hold now, and what is left, fits what was answered.

        Raises:
            AssertionError: it does not.
        """
        run, there, succeeded = self.export.server.run, f"{EXPORTED}/{self.name}", "code" not in answer
        aside = f"{EXPORTED}/.sa-{self.job if self.verb == 'set_aside' else self.name}.aside"
        if self.verb.endswith("aside"):
            found = run(f"ls {there} {aside} 2>/dev/null || true").split()
            gone = self.verb == "delete_aside" and (succeeded or not found)
            assert len(found) == (0 if gone else 1), (self, answer, found)
            there = found[0] if found else "/root/image"
        assert run(f"head -c {self.export.size} {there} | cmp - /root/image && echo same").strip() == "same", (
            self,
            answer,
        )
        if self.verb in {"delete_aside", "undo", "discard_undo"} and succeeded:
            assert answer["freed_bytes"], (self, answer)
        if self.verb == "commit":
            run(f"qemu-io -r -c 'read -q -P {PATTERN} {self._added}' {MOUNTED}/{self.name}.qcow2")
        if self.verb == "flatten":
            run(f"qemu-img compare -q -f qcow2 -F raw {there}.qcow2 /root/image")
        if self.verb in _ENDINGS and self.verb != "receive":
            self._check_made(succeeded)
        left = [*self.export.left(self.name), *self.export.left(self.job)]
        kept = {"undo": "orig", "discard_undo": "orig"}.get(self.verb, "aside" if "aside" in self.verb else "part")
        stray = [name for name in left if name.rpartition(".")[2] not in {kept, "journal"}]
        assert not stray, (self, answer, left)
        assert not left or self.verb not in COPYING, (self, answer, left)

    def _check_made(self, succeeded: bool) -> None:
        made = f"{EXPORTED}/{self.made}"
        holds = {
            "convert": f"qemu-img compare -q -f qcow2 -F raw {made} /root/image",
            "export": f"gzip -dc {made} | cmp - /root/image",
            "unpack": f"cmp {made} /root/image",
            "create": f"cmp -n {self.large} {made} /dev/zero",
            "from_device": f"cmp {made} /root/image",
        }[self.verb]
        is_there = self.export.server.run(f"test -e {made} && echo yes || true").strip() == "yes"
        assert is_there or not succeeded, (self, "not there")
        if is_there:
            self.export.server.run(holds)


def end(agent: Pinged, sent: int = 0, size: int = SIZE) -> dict[str, Any]:
    """What comes of a request: leave is given, and what is uploaded goes on after so many bytes, up to a size."""
    event = agent.events[-1] if agent.events else agent.next()
    while event is not None:
        if event["event"] == protocol.RESULT:
            return dict(event["data"])
        if event["event"] == protocol.ERROR:
            return event
        if event["event"] == protocol.READY:
            agent.say(protocol.GO, generation=agent.generation)
        if event["event"] == protocol.MORE:
            agent.say(protocol.DATA, b64=b64(PIECE if sent < size else b""))
            sent += len(PIECE)
        event = agent.next()
    raise AssertionError((agent.events[-5:], agent.stderr()))


def recovered(export: Export, *merges: dict[str, str]) -> None:
    """Until no job is at work any more, and those merges are done."""

    def is_over() -> bool:
        return all(row["outcome"] != "busy" for row in export.recover(export.client, *merges))

    wait_until(is_over, 180, "all is recovered")


def place(path: str) -> dict[str, str]:
    """Where an image is."""
    return {"path_b64": b64(path.encode()), "pool_path_b64": b64(bytes(Path(path).parent))}


def aside_args(export: Export, path: str) -> dict[str, Any]:
    """What setting an image aside asks."""
    image = export.link(path)
    del image["format"]
    return image | {"children_known": True, "pools": []}
