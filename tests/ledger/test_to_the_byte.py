"""The ledger against the disk: after any jobs, hands and deaths it says by how much files shrank, to the byte."""

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from images.ledger.selectors import freed_of
from images.models import Image
from storage_admin.accounts.models import SYSTEM
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.models import Host
from storage_admin.hosts.session import AgentSession
from storage_admin.jobs import reaper, runner, services
from storage_admin.jobs.models import Job
from tests.agent.harness import leftovers, qemu_img, write
from tests.agent.test_check import leak
from tests.chance import seed
from tests.harness.patching import do_before, raising
from tests.working import ADMIN, create, register, reread, run, said, scan, this_machine

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]

#: Steps of a sequence. More of them, or another seed, find more: LEDGER_STEPS and LEDGER_SEED say so.
STEPS = int(os.environ.get("LEDGER_STEPS", "14"))
FORMATS = ("qcow2", "raw", "vmdk", "vdi", "vhdx", "vpc")
SUFFIX = {"vpc": "vhd"}


class World:
    """Two pools with a dozen images, what was there in the beginning, and what was no job's doing since."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.pools = [folder / "one", folder / "two"]
        for pool in self.pools:
            pool.mkdir()
        self._make()
        self.host: Host = this_machine(self.pools[0])
        register(self.host, self.pools[1])
        os.sync()
        scan(self.host)
        self.began = self.allocated()
        #: By how much others have changed what the files occupy.
        self.others = 0
        self.count = 0
        self.told: list[str] = []

    def _make(self) -> None:
        one, two = self.pools
        for number, options in enumerate(("", "cluster_size=4k", "compat=0.10", "extended_l2=on,cluster_size=128k")):
            self._fill(create(one / f"a{number}.qcow2", "6M", *(["-o", options] if options else [])), "qcow2")
        for name, base in (("b0.qcow2", None), ("b1.qcow2", "b0.qcow2"), ("b2.qcow2", "b1.qcow2")):
            self._fill(create(two / name, "6M", base=base), "qcow2")
        for number, form in enumerate(("raw", "vdi", "vmdk")):
            self._fill(create(two / f"c{number}.{form}", "6M", form=form), form)
        self._fill(create(one / "d.raw", "6M", form="raw"), "raw")
        (one / "empty.raw").touch()
        os.truncate(one / "empty.raw", 3 << 20)  # not a single block

    def _fill(self, path: Path, form: str) -> None:
        for byte in (0x61, 0, self.chance.randrange(256)):
            write(path, byte, f"{self.chance.randrange(5)}M", f"{self.chance.randrange(1, 9) * 100}k", form)

    # What is there

    def files(self) -> list[Path]:
        return [path for pool in self.pools for path in pool.iterdir() if path.is_file()]

    def allocated(self) -> int:
        """What the pools' files occupy, each once, without the journals of jobs whose undo copies wait."""
        found = {path.stat().st_ino: path.stat().st_blocks * 512 for path in self.files() if path.suffix != ".journal"}
        return sum(found.values())

    def images(self) -> list[Image]:
        return list(Image.objects.filter(state="ok").exclude(name__contains="kept").order_by("path"))

    def undoable(self) -> list[Job]:
        return list(Job.objects.filter(undo_state="available").order_by("pk"))

    def copy_of(self, job: Job) -> Path:
        return next(path for path in self.files() if path.name == f".sa-{job.uid}.orig")

    # What the ledger says

    def check(self) -> None:
        """An undo copy that waits makes its job look as if it had taken what its new file occupies."""
        waiting = sum(job.after_bytes or 0 for job in self.undoable())
        freed = freed_of(Job.objects.all())
        told = "\n".join(self.told)
        assert self.allocated() == self.began + self.others - freed.freed_bytes + waiting, told
        assert freed.held_bytes == sum(self.copy_of(job).stat().st_blocks * 512 for job in self.undoable()), told

    # What happens

    def step(self) -> None:
        happen = [self.rewrite] * 6 + [self.guest_writes] * 2 + [self.undo] * 2
        happen += [self.dies, self.is_killed, self.copy_is_touched, self.original_is_deleted, self.scrub]
        self.chance.choice(happen)()
        self.settle()
        self.check()

    def settle(self) -> None:
        """Scans and recoveries that were asked for; those they ask for too."""
        while (
            job := Job.objects.filter(state="queued", kind__in=["scan", "recover"]).order_by("-kind").first()
        ) is not None:
            assert run(job).state != "queued"
        Job.objects.filter(state="queued").delete()

    def submit(self) -> Job | None:
        """A rewriting job, queued; nothing where it is refused."""
        image, chance = self.chance.choice(self.images()), self.chance
        self.count += 1
        hours: dict[str, Any] = {"undo_hours": chance.choice([0, 24, 24])}
        form = chance.choice(FORMATS)
        beside = {"format": form, "target_name": f"n{self.count}.{SUFFIX.get(form, form)}"}
        kind, options = chance.choice(
            [
                ("reclaim", {"method": chance.choice(["auto", "compress", "copy"])} | hours),
                ("reclaim", {"method": "in_place"}),
                ("flatten", {"method": chance.choice(["rebase", "convert"])} | hours),
                ("convert", beside | {"target_pool": self.chance.choice(list(self.host.pools.all())).pk}),
                ("convert", {"format": form, "replace": True} | hours),
                ("convert", beside | {"format_options": {"preallocation": "falloc"}} if form == "raw" else beside),
            ]
        )
        self.told.append(f"{kind} {options} of {image.name}")
        try:
            return services.submit(ADMIN, kind, image.pk, options)
        except RefusedError as error:
            self.told.append(f"  refused: {error.code}")
            return None

    def rewrite(self) -> None:
        if (job := self.submit()) is not None:
            self._ended(run(job))

    def scrub(self) -> None:
        """A repair: a copy of the file, changed, takes its place."""
        images = [image for image in self.images() if image.declared_format == "qcow2" and not image.snapshots]
        image = self.chance.choice(images)
        with self.somebody_else(f"leaks in {image.name}"), contextlib.suppress(AssertionError):
            leak(Path(image.path))
        scan(self.host)
        try:
            job = services.submit(ADMIN, "check", image.pk, {"repair": "leaks"})
        except RefusedError as error:
            self.told.append(f"  refused: {error.code}")
            return
        self._ended(run(job))

    def _ended(self, job: Job) -> None:
        self.told.append(f"  job {job.pk}: {job.state} {job.error_code} {job.result}")
        assert job.error_code not in {"bug", "tool_failed"}, (job.error_detail, said(job), self.told)

    @contextlib.contextmanager
    def somebody_else(self, what: str) -> Iterator[None]:
        """What is changed in here is no job's doing."""
        self.told.append(what)
        before = self.allocated()
        yield
        os.sync()
        self.others += self.allocated() - before

    def guest_writes(self) -> None:
        image = self.chance.choice(self.images())
        if image.overlays_count or image.header.get("subformat") == "streamOptimized":
            return
        with self.somebody_else(f"a guest writes to {image.name}"):
            byte, at = self.chance.choice([0, 7]), self.chance.randrange(2)
            write(Path(image.path), byte, f"{at}M", "700k", image.declared_format)
        scan(self.host)

    def undo(self) -> None:
        for job in self.chance.sample(self.undoable(), len(self.undoable()))[:1]:
            force = self.chance.random() < 0.7
            self.told.append(f"undo of {job.pk} {'forced' if force else ''}")
            try:
                self._ended(run(services.undo(ADMIN, job, force=force)))
            except RefusedError as error:
                self.told.append(f"  refused: {error.code}")

    def copy_is_touched(self) -> None:
        """Somebody deletes an undo copy, moves it, gives it a second name, or puts it back."""
        for job in self.undoable()[:1]:
            copy, image = self.copy_of(job), Image.objects.filter(pk=job.target_id).first()
            what = self.chance.choice(["delete", "move", "link", "put back"])
            self.told.append(f"copy of {job.pk}: {what}")
            name = copy.parent / f"kept{len(self.told)}.{'raw' if image is None else image.declared_format}"
            if what == "delete":
                copy.unlink()
            elif what == "move":
                copy.rename(name)
            elif what == "link":
                os.link(copy, name)
            elif image is not None and job.kind != "convert":
                # What the image has grown by since, goes by somebody's hand.
                self.others += (job.after_bytes or 0) - Path(image.path).stat().st_blocks * 512
                copy.rename(image.path)
            scan(self.host)

    def original_is_deleted(self) -> None:
        """Somebody removes an image, as one does that was converted."""
        images = [image for image in self.images() if not image.overlays_count and not image.uses.exists()]
        kept = Job.objects.filter(undo_state="available", target_id__in=[image.pk for image in images])
        images = [image for image in images if image.pk not in set(kept.values_list("target_id", flat=True))]
        if len(images) > 6:
            image = self.chance.choice(images)
            with self.somebody_else(f"{image.name} is deleted"):
                Path(image.path).unlink()
            scan(self.host)

    def is_killed(self) -> None:
        """The agent dies at any moment of a job."""
        if (job := self.submit()) is None:
            return
        delay = self.chance.uniform(0.05, 0.8)
        timers: list[threading.Timer] = []

        def and_kill(session: AgentSession, _: Any) -> None:
            timers.append(threading.Timer(delay, session._process.kill))
            timers[0].start()

        with pytest.MonkeyPatch.context() as patched:
            do_before(patched, AgentSession, "send", and_kill)
            self._ended(run(job))
        for timer in timers:
            timer.cancel()
        self._recover()

    def dies(self) -> None:
        """The worker dies when the agent has done its work, also that of an undo or a removal."""
        undoable = self.undoable()
        chosen = self.chance.choice(["rewrite", "undo", "discard"]) if undoable else "rewrite"
        try:
            if chosen == "rewrite":
                job = self.submit()
            elif chosen == "undo":
                job = services.undo(ADMIN, self.chance.choice(undoable), force=True)
            else:
                job = services.discard_undo(ADMIN, self.chance.choice(undoable))
        except RefusedError:
            return
        if job is None:
            return
        self.told.append(f"{chosen} {job.pk} (job {job.target_id}) is not recorded")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(runner, "_end_well", raising(SystemExit()))
            with contextlib.suppress(SystemExit):
                run(job)
        Job.objects.filter(pk=job.pk, state="running").update(heartbeat=timezone.now() - timedelta(minutes=5))
        reaper.reap()
        self._recover()
        self._ended(reread(job))

    def _recover(self) -> None:
        """Until nothing is at work any more on what was cut off."""
        self.settle()
        until = time.monotonic() + 30
        while Job.objects.filter(needs_recovery=True).exists():
            assert time.monotonic() < until, self.told
            services.submit(SYSTEM, "recover", self.host.pk, {})
            self.settle()


#: Which run of several seeds this is; the seed itself is no parameter: processes that share the tests would differ.
SEEDS = os.environ.get("LEDGER_SEED", "any").split(",")


@pytest.mark.fuzz
@pytest.mark.parametrize("given", SEEDS)
def test_the_sum_of_what_was_freed_is_the_change_on_the_disk(tmp_path: Path, given: str) -> None:
    start = seed() if given == "any" else int(given)
    print(f"LEDGER_SEED={start} LEDGER_STEPS={STEPS}")
    world = World(tmp_path, start)
    for _ in range(STEPS):
        world.step()
    for job in world.undoable():
        removal = run(services.discard_undo(ADMIN, job))
        if removal.error_code == "undo_kept":  # of an image that a guest nobody knows wrote to since
            removal = run(services.discard_undo(ADMIN, job, force=True))
        assert removal.state == "succeeded", (removal.error_detail, world.told)
    world.settle()
    print("\n".join(world.told))
    assert not Job.objects.filter(undo_state="available").exists()
    assert [name for pool in world.pools for name in leftovers(pool)] == [], world.told
    freed = freed_of(Job.objects.all()).freed_bytes
    assert freed == world.began + world.others - world.allocated(), world.told
    assert qemu_img("--version")
