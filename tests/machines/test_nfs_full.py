"""The server's storage fills up by others' data, or its quota is used up, half-way through each verb that writes there.

Each ends with the right code, the image is whole, a recovery leaves nothing of it, and it works once there is room.
"""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from storage_admin.agent import protocol
from storage_admin.agent.protocol import b64
from tests.machines.lab import Machine
from tests.machines.nfs import EXPORTED, MOUNTED, Export, Pinged
from tests.machines.nfs_verbs import COPYING, PIECE, Work, end, recovered
from tests.machines.test_nfs import both

__all__ = ["both"]

pytestmark = pytest.mark.machines

_numbers = itertools.count(1)
#: Of an image, and of the data in it. qemu-img begins with 2 MiB, however slow it is to be.
SIZE, DATA = 8 << 20, 6 << 20
SPEED = 24 << 10
#: Of what nothing slows.
LARGE = 64 << 20
#: The storage is full when so many bytes of each verb have reached it.
SOME = 512 << 10
SLOW = tuple(verb for verb in COPYING if verb != "create")
_MADE = {
    "full": "truncate -s 512M /var/{0}.img; mkfs.ext4 -q -F /var/{0}.img; mount -o loop /var/{0}.img {1}",
    # Quotas of ext4 do not hold for root, who writes here; those of a dataset hold for everybody.
    "quota": "modprobe zfs; echo 1 >/sys/module/zfs/parameters/zfs_txg_timeout; truncate -s 512M /var/{0}.img; "
    "zpool create -O mountpoint=none {0} /var/{0}.img; zfs create -o mountpoint={1} {0}/images",
}
_STRUCK = {
    "full": "fallocate -l $(df -B1 --output=avail {1} | tail -n 1) {1}/filling; "
    "cat /dev/zero >>{1}/filling 2>/dev/null || sync",
    "quota": "until zfs set quota=$(zfs get -Hp -o value used {0}/images) {0}/images; do :; done",
}
_OVER = {"full": "rm {1}/filling; sync", "quota": "zfs set quota=none {0}/images"}


class Storage:
    """A storage of the server's, which somebody else can fill."""

    def __init__(self, how: str, version: str, both: tuple[Machine, Machine]) -> None:
        self._how, self._name = how, f"{how}{next(_numbers)}"
        server = both[0]
        server.run(self._said(_MADE))
        self._server, self._number = server, next(_numbers)
        self.share("no_root_squash")
        self.export = Export(both, version, EXPORTED, SIZE)
        # Data that cannot be packed.
        data = server.run(
            f"dd if=/dev/urandom of=/root/image bs={DATA} count=1 conv=notrunc status=none; base64 /root/image"
        )
        both[1].run("base64 -d >/root/image", data.encode())

    def share(self, option: str) -> None:
        """Exports it, with that option, and nothing else."""
        line = f"{EXPORTED} 10.9.0.0/24(rw,sync,no_subtree_check,fsid={self._number},{option})"
        self._server.run(f"echo '{line}' >/etc/exports; exportfs -ra")

    def _said(self, among: dict[str, str]) -> str:
        return among[self._how].format(self._name, EXPORTED)

    def fill(self, when: str = "true") -> None:
        """Takes all the room, once a line of shell succeeds there; a tool that nothing slows stands still meanwhile."""
        server, client = self.export.server, self.export.client
        server.run(f"cd {EXPORTED}; timeout 200 sh -c 'until {when}; do sleep 0.05; done'")
        client.run("pkill -STOP -x qemu-img || true")
        server.run(self._said(_STRUCK))
        client.run("pkill -CONT -x qemu-img || true")

    def make_room(self) -> None:
        """Gives it back."""
        self.export.server.run(self._said(_OVER))


@pytest.fixture
def storage(request: pytest.FixtureRequest, both: tuple[Machine, Machine]) -> Iterator[Storage]:
    how, version = request.param
    yield Storage(how, version, both)
    for machine in reversed(both):
        machine.run(f"umount -l {MOUNTED}")
    both[0].run(f"exportfs -ua; exportfs -f; umount -l {EXPORTED}")


def _begin(work: Work, agent: Pinged) -> None:
    """Until it copies; half of what is uploaded is sent."""
    while work.verb != "receive":
        event = agent.next()
        assert event is not None, agent.stderr()
        assert event["event"] not in {protocol.RESULT, protocol.ERROR}, event
        if event["event"] == protocol.PROGRESS and event.get("done"):
            return
    for _ in range(SIZE // 2 // len(PIECE)):
        agent.until(protocol.MORE)
        agent.say(protocol.DATA, b64=b64(PIECE))
    agent.until(protocol.MORE)


def _ask(stack: ExitStack, works: list[Work], asked: list[dict[str, Any]], speed: int | None) -> list[Pinged]:
    """All at once, at so many bytes a second where that can be said; their agents."""
    agents = list[Pinged]()
    for work, args in zip(works, asked, strict=True):
        agents.append(stack.enter_context(work.export.agent(how="soon")))
        agents[-1].request(work.verb, args | dict.fromkeys({"bandwidth_bytes_sec"} & args.keys(), speed), work.job)
    return agents


def _has(work: Work) -> str:
    """A line of shell that succeeds once the server has some bytes of what a verb writes."""
    name = {"receive": f".sa-{work.job}.part", "commit": work.name}.get(work.verb, f".sa-{work.job}.new")
    return f"[ $(stat -c %b {name} || echo 0) -ge {SOME // 512} ]"


def _try(storage: Storage, verbs: tuple[str, ...], strike: Callable[[list[Work]], None]) -> set[object]:
    """These at once, while the storage fills up; and again when there is room. With what codes they ended."""
    export = storage.export
    works = [Work(export, verb, str(next(_numbers)), str(next(_numbers)), LARGE) for verb in verbs]
    with ExitStack() as stack, ThreadPoolExecutor(len(works)) as pool:
        asked = list(pool.map(Work.args, works))
        agents = _ask(stack, works, asked, SPEED)
        list(pool.map(_begin, works, agents))
        strike(works)
        answers = [end(agent, SIZE // 2, SIZE) for agent in agents]
    for work, answer in zip(works, answers, strict=True):
        print(export.version, work.verb, answer)
    ended = {answer.get("code") for answer in answers}
    storage.make_room()
    recovered(export, *(work.merge for work in works if work.verb == "commit"))
    for work, answer in zip(works, answers, strict=True):
        work.check(answer)
    # What was uploaded waits for the rest, or for its name.
    assert [name for name in export.named(r"[.]sa-.*") if not name.endswith((".orig", ".part"))] == []
    if verbs == ("commit",):  # which the recovery has finished
        return ended
    for work in works:
        work.job = str(next(_numbers))
    with ExitStack() as stack:
        for work, agent in zip(works, _ask(stack, works, asked, None), strict=True):
            answer = end(agent, 0, SIZE)
            assert "code" not in answer, (work.verb, answer)
            work.check(answer)
    return ended


@pytest.mark.parametrize(
    "storage", [("full", "3"), ("full", "4.2"), ("quota", "3"), ("quota", "4.2")], indirect=True, ids="-".join
)
def test_a_storage_that_fills_up_half_way_ends_each_verb_and_loses_nothing(storage: Storage) -> None:
    client = storage.export.client
    # What is written does not gather there.
    client.run("sysctl -q vm.dirty_writeback_centisecs=20 vm.dirty_expire_centisecs=20 vm.dirty_bytes=1048576")
    ended = _try(storage, SLOW, lambda works: storage.fill(" && ".join(_has(work) for work in works)))
    for verb in ("receive", "commit", "create"):  # each alone: what another one gives back is room
        ended |= _try(storage, (verb,), lambda works: storage.fill(_has(works[0])))
    assert ended == {"not_enough_space"}


@pytest.mark.parametrize("storage", [("full", "3"), ("full", "4.2")], indirect=True, ids="-".join)
def test_a_server_that_says_only_at_the_sync_that_it_was_full_is_heard(storage: Storage) -> None:
    client = storage.export.client
    client.run("sysctl -q vm.dirty_writeback_centisecs=6000 vm.dirty_expire_centisecs=60000 vm.dirty_ratio=20")
    ended = _try(storage, SLOW, lambda _: storage.fill()) | _try(storage, ("receive",), lambda _: storage.fill())
    assert ended == {"not_enough_space"}


@pytest.mark.parametrize("storage", [("full", "3"), ("full", "4.2")], indirect=True, ids="-".join)
def test_a_server_that_gives_to_another_user_what_root_makes_is_refused_before_anything_is_made(
    storage: Storage,
) -> None:
    export = storage.export
    export.server.run(f"chown 1000 {EXPORTED}")
    storage.share("all_squash,anonuid=1000")
    for number, verb in enumerate((*COPYING, "set_aside", "receive")):
        work = Work(export, verb, f"{number}8", f"{number}9")
        answer = export.ask(verb, work.args(), work.job, how="soon")
        assert answer.get("code") == "immutable", (verb, answer)
        assert export.left(work.job) == []
