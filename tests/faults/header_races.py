"""The owner of a pool's folder, who is not root: he rewrites his image's header while a verb works on it."""

import ctypes
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.agent.every_verb import Answer, Crew, request, target_of
from tests.agent.harness import make_image, qemu_img, write
from tests.agent.hostile import vmdk_text
from tests.agent.stranger import CANARY, fingerprints, holds_canary
from tests.faults.swapper import Watch

#: Who that is.
OWNER = 65534
SIZE = "8M"
_BYTES = 8 << 20
#: inotify(7), as in :mod:`tests.faults.swapper`.
_OPENED, _CREATED = 0x20, 0x100
_LONGEST_ATTACK = 60.0
_DIE_WITH_PARENT = 1


class Ground:
    """What the races begin with: a secret of root's, images, and the same images as their owner rewrites them.

    Args:
        folder: of this module's own.
    """

    def __init__(self, folder: Path) -> None:
        self.outside, self.made = folder / "outside", folder / "made"
        for place in (self.outside, self.made):
            place.mkdir()
        self.secret = self.outside / "secret"
        self._hide()
        make_image(self.made / "base")
        qemu_img("create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", self.made / "overlay.qcow2", cwd=self.made)
        write(self.made / "overlay.qcow2", 0x44, "1M", "2M")
        make_image(self.made / "alone.qcow2")
        for name, base in (("alone.qcow2", []), ("overlay.qcow2", ["-b", "base", "-F", "qcow2"])):
            self._with_data_file(self.made / f"evil-{name}", base)
        qemu_img("convert", "-f", "qcow2", "-O", "vmdk", self.made / "alone.qcow2", self.made / "alone.vmdk")
        flat = vmdk_text(b'RW %d FLAT "%s" 0' % (_BYTES // 512, bytes(self.secret)))
        (self.made / "evil-alone.vmdk").write_bytes(flat.ljust(4096, b"\n"))
        self._before = fingerprints(self.outside)

    def _hide(self) -> None:
        self.secret.write_bytes(CANARY.ljust(512, b"x") * (_BYTES // 512))
        self.secret.chmod(0o600)

    def _with_data_file(self, path: Path, base: list[str]) -> None:
        """An image whose data is in the secret, made by qemu-img with a file whose name is as long."""
        other = self.secret.with_name("others")
        options = f"data_file={other}"
        qemu_img("create", "-q", "-f", "qcow2", "-o", options, *base, path, SIZE, cwd=self.made)
        write(path, 0x55, "0", "4M")
        content = path.read_bytes()
        assert content.count(bytes(other)) == 1
        path.write_bytes(content.replace(bytes(other), bytes(self.secret)))
        other.unlink()

    def race(self, crew: Crew, chance: random.Random, pool: Path, how: str, name: str) -> str:
        """One of them.

        Args:
            pool: a folder that is made for it.
            how: the verb, as in ``every_verb.request``.
            name: of the image, in :attr:`made`.

        Returns:
            How it ended.
        """
        self._hide()
        pool.mkdir()
        for one in ("base", name):
            shutil.copy(self.made / one, pool / one)
        for path in (pool, pool / "base", pool / name):
            os.chown(path, OWNER, OWNER)
        verb, args = request(how, bytes(pool / name), pool, name.rpartition(".")[2])
        with closing(Watch(self.outside)) as watch:
            with attacked(pool, name, (self.made / f"evil-{name}").read_bytes(), Attack.by(chance)):
                answer = crew.ask(verb, args)
            self._judge(watch, pool, answer)
        Path(os.fsdecode(target_of(bytes(pool / name)))).unlink(missing_ok=True)
        shutil.rmtree(pool)
        return answer.code or "done"

    def _judge(self, watch: Watch, pool: Path, answer: Answer) -> None:
        seen = watch.seen()
        assert fingerprints(self.outside) == self._before, f"root's file was written to: {answer}"
        told = [path.name for path in pool.iterdir() if path.is_file() and holds_canary(path)]
        assert not told, f"{told} hold what is in root's file: {answer}"
        assert CANARY.decode() not in answer.text()
        assert seen == [], f"root's file was opened: {answer}"


@dataclass(frozen=True)
class Attack:
    """When he writes.

    Args:
        at_new: once the job's new file is there; else once the image was opened ``opens`` times.
        delay: seconds from then on.
        back: seconds after which he writes back what was there, with its times; negative for never.
    """

    at_new: bool
    opens: int
    delay: float
    back: float

    @classmethod
    def by(cls, chance: random.Random) -> "Attack":
        """A random one."""
        delay = chance.choice((0.0, chance.uniform(0, 0.004), chance.uniform(0, 0.03)))
        back = chance.choice((-1.0, chance.uniform(0.02, 0.2)))
        return cls(chance.random() < 0.5, chance.randrange(1, 9), delay, back)


@contextmanager
def attacked(pool: Path, name: str, evil: bytes, attack: Attack) -> Iterator[None]:
    """Somebody without root's rights is at work in the pool while this is entered."""
    child = os.fork()
    if child == 0:
        try:
            _attack(pool, name, evil, attack)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _attack(pool: Path, name: str, evil: bytes, attack: Attack) -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    os.chdir(pool)  # which he could not come to by its path, below a folder of pytest's
    os.setgroups([])
    os.setgid(OWNER)
    os.setuid(OWNER)
    image, opens, watch = Path(name), 0, Watch(Path())
    until = time.monotonic() + _LONGEST_ATTACK
    while time.monotonic() < until:
        for event in watch.seen():
            mask, _, which = event.partition(" ")
            if attack.at_new:
                due = bool(int(mask, 16) & _CREATED) and ".new" in which
            else:
                opens += bool(int(mask, 16) & _OPENED) and name in which
                due = opens == attack.opens
            if due:
                time.sleep(attack.delay)
                _write(image, evil, attack.back)
                return
        time.sleep(0.0001)


def _write(image: Path, evil: bytes, back: float) -> None:
    """Never longer than it takes: who has the image open makes the agent refuse it."""
    was, times = image.read_bytes(), image.stat()
    with image.open("r+b") as file:
        file.write(evil)
    if back >= 0:
        time.sleep(back)
        with image.open("r+b") as file:
            file.write(was)
        os.utime(image, ns=(times.st_atime_ns, times.st_mtime_ns))
