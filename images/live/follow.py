"""Follows a block job of QEMU to its end, whatever goes away meanwhile, and says what came of it.

What is kept on the job's row (:data:`BEGUN`) is written before anything is begun: by it the next worker finds the
block job, in QEMU or by its effect on the chain, and goes on.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone
from django.utils.translation import gettext, gettext_lazy

from images.live.kind import OFF
from images.scan import shared_storages
from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError, RefusedError, StoppedError
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt import block_jobs, running
from storage_admin.hosts.libvirt.block_jobs import Ended, LostError, Program, Wanted
from storage_admin.hosts.models import Host
from storage_admin.hosts.names import display
from storage_admin.jobs import runner
from storage_admin.jobs.kinds import BEGUN, OVER, GoesOnError, in_doubt
from storage_admin.jobs.models import Job, JobLog
from storage_admin.jobs.plan_and_progress import Recorder, Refusal

GUEST_ENDED = protocol.GUEST_ENDED
#: The stage from which on the guest may have been switched over.
PIVOTING = "pivoting"
#: For so long a guest's images are doubted after that, where nobody knows which one it wrote to last.
DOUBTED = timedelta(days=30)
#: How often libvirt may refuse to switch a guest over before the block job is given up.
REFUSED = 5
#: Seconds between two looks at a guest whose snapshot is deleted, and how many may find it off.
LOOKS, HANGS = 20.0, 2
#: Seconds between two looks at the room that is left where QEMU writes.
WATCH = 5.0
_LOST = gettext_lazy(
    "Cancelled while libvirt does not answer: the block job of {guest} may go on. When libvirt is back, look with "
    "virsh blockjob."
)


def keep(job: Job, stage: str, wanted: Wanted, before: int | None) -> None:
    """Keeps with a running job what is begun, and how far it is.

    Args:
        before: bytes that the image occupied which grows.
    """
    keep_begun(job, {"stage": stage, "before": before, OVER: _over(wanted, stage), **asdict(wanted)})


def _over(wanted: Wanted, stage: str) -> list[list[str]]:
    over = [wanted.chain[0], wanted.result[0]] if wanted.chain else []
    return [over] if stage == PIVOTING and len(set(over)) == 2 else []


def keep_begun(job: Job, begun: Mapping[str, Any]) -> None:
    """Keeps with a running job what the next worker has to know of what is begun."""
    job.kept = job.kept | {BEGUN: dict(begun)}
    job.ours().update(kept=job.kept)


def settle(job: Job) -> None:
    """Writes down that it is known in which image the guest has gone on."""
    if in_doubt(job):
        keep_begun(job, job.kept[BEGUN] | {OVER: []})


def tell_lost(recorder: Recorder, error: Exception, why: str = "does not answer") -> None:
    """Says that a job goes on asking libvirt, and why."""
    recorder.progress({"stage": "lost", "message": f"libvirt {why}; it is asked again: {error}"})


def kept(job: Job) -> tuple[Wanted, int | None]:
    """What was kept: the block job, and the size before."""
    begun: Mapping[str, Any] = job.kept[BEGUN]
    fields = {name: value for name, value in begun.items() if name not in {"stage", "before", OVER}}
    return Wanted(**fields), begun["before"]


class Follower:
    """Follows a block job to its end, whatever goes away meanwhile."""

    def __init__(
        self,
        job: Job,
        recorder: Recorder,
        program: Program,
        wanted: Wanted,
        *,
        against: Callable[[], str],
        watch: Callable[[], str],
    ) -> None:
        """Args:

        against: asked once as soon as QEMU writes: why the guest must not be switched over; empty for nothing.
        watch: asked every :data:`WATCH` seconds while QEMU copies: why there is no room to go on; empty for nothing.
        """
        self._job, self._recorder, self._program, self._wanted = job, recorder, program, wanted
        self._against: Callable[[], str] | None = against
        self._watch, self._watched, self._pivots_refused = watch, time.monotonic(), 0
        self.refused: HostError | None = None

    def run(self, *, taken_over: bool) -> Ended:
        """Starts it, or takes over what another worker has begun."""
        if taken_over:
            self._recorder.log("taken over from the worker before")
        started = taken_over and self._job.kept[BEGUN]["stage"] != "planned"
        look_first = taken_over
        while True:
            try:
                if look_first:
                    ended = self._follow(start=False)
                    # What was only planned and is not there was never begun, or ended without any effect.
                    if (
                        started
                        or not ended.active
                        or ended.chain != self._wanted.chain
                        or self._recorder.cancel_requested
                    ):
                        return ended
                return self._follow(start=True)
            except LostError as lost:
                look_first, started = True, self._job.kept[BEGUN]["stage"] != "planned"
                tell_lost(self._recorder, lost)
                until = time.monotonic() + block_jobs.AGAIN
                while time.monotonic() < until:
                    if self._order("lost") == "abort":
                        raise StoppedError(protocol.INTERRUPTED, _LOST.format(guest=self._job.target_label)) from lost
                    time.sleep(block_jobs.AGAIN / 4)

    def _follow(self, *, start: bool) -> Ended:
        return self._program.follow(self._wanted, start=start, told=self._told, order=self._order)

    def _told(self, document: dict[str, Any]) -> None:
        stage, kept = document["stage"], self._job.kept[BEGUN]["stage"]
        # What was said to be ready before the order came is no news, unless libvirt has refused that.
        if stage != kept and (stage != "ready" or kept != PIVOTING or document.get("against")):
            self._keep(stage)
        if why := document.get("against"):
            self._pivots_refused += 1
            self._recorder.log(f"libvirt refuses to switch over: {why}", JobLog.Level.WARNING)
            if self._pivots_refused == REFUSED:
                sentence = gettext("libvirt refuses to switch {guest} over: {why}.")
                self.refused = HostError(sentence.format(guest=self._job.target_label, why=why.rstrip(".")))
        self._recorder.progress({"stage": stage, "done": document.get("done"), "total": document.get("total")})

    def _keep(self, stage: str) -> None:
        keep(self._job, stage, self._wanted, self._job.kept[BEGUN]["before"])
        self._recorder.log(stage)

    def _order(self, stage: str) -> str:
        self._recorder.tick()
        if runner.stopping.is_set():
            raise GoesOnError("this worker was told to end")
        if self._recorder.cancel_requested:
            if not self._job.ours().exists():
                raise GoesOnError("another worker has it")
            return "abort"
        if stage in {"mirroring", "ready"} and self.refused is None:
            self._look(stage)
        if self.refused is not None:
            return "abort"
        if stage != "ready" or not self._job.ours().filter(cancel_requested=False).exists():
            return ""
        if self._job.kept[BEGUN]["stage"] != PIVOTING:  # before it is ordered: whoever takes over has to know
            self._keep(PIVOTING)
        return "pivot"

    def _look(self, stage: str) -> None:
        if self._against is not None and (why := self._against()):
            self.refused = HostError(why)
        elif stage == "mirroring" and time.monotonic() > self._watched + WATCH:
            self._watched = time.monotonic()
            if why := self._watch():
                self.refused = HostError(why, "not_enough_space")
        self._against = None


def until_it_hangs(guest: Guest, tick: Callable[[], None]) -> Callable[[], None]:
    """A tick that also ends the waiting where a guest that ran has ended, and libvirt waits on all the same.

    libvirt 9.0 may wait forever for the block job of a guest that is killed in the wrong moment (virDomainObjWait below
    qemuSnapshotDelete).

    Raises:
        HostError: ``guest_ended``.
    """
    looked, looks = time.monotonic(), 0

    def waits() -> None:
        nonlocal looked, looks
        tick()
        if time.monotonic() < looked + LOOKS:
            return
        with contextlib.suppress(RefusedError, HostError):
            looks = looks + 1 if running.look(guest.host, guest.uid).state == OFF else 0
        looked = time.monotonic()
        if looks > HANGS:
            sentence = gettext(
                "{guest} has ended, and libvirt on {host} still waits for its block job. Restart libvirt there "
                "(systemctl restart libvirtd), scan the host, and delete the snapshot again."
            )
            raise HostError(sentence.format(guest=guest.name, host=guest.host.name), GUEST_ENDED)

    return waits


def unseen_switch(job: Job, wanted: Wanted, ended: Ended) -> bool:
    """Whether a guest may have gone on in the other image, and ended, while libvirt did not see it: libvirtd was away
    when QEMU switched it over, and the guest has the image before at its next start, or already again.
    """
    stage, before, after = job.kept[BEGUN]["stage"], wanted.chain[0], wanted.result[0]
    over = stage == PIVOTING or (stage == "ready" and not ended.active)
    as_before = ended.chain[:1] == [before] if ended.active else ended.later != after
    return over and before != after and as_before


def doubts(guests: Iterable[int], paths: Sequence[str]) -> list[Refusal]:
    """What keeps policies from images for a month, and a user should know before one is written into another: after
    which jobs nobody knew whether a guest had gone on in another one.

    Args:
        guests: their ids.
        paths: of the images, those of a chain from above.
    """
    jobs = _doubted().filter(target_id__in=guests).order_by("-pk")
    return [Refusal(GUEST_ENDED, _told(job)) for job in jobs if any(_is_open(pair, paths) for pair in in_doubt(job))]


def _is_open(pair: Sequence[str], paths: Sequence[str]) -> bool:
    """Whether a guest that has images may have gone on in another; in one that stands above, it has."""
    before, after = pair
    return before in paths and after not in paths[: paths.index(before)]


def doubted(host: Host) -> dict[str, str]:
    """Shown paths on a host of the images of which, for a month, nobody knows whether a guest's last writes are in them
    alone, each with a sentence; also where another host that shares their storage has the guest.
    """
    pairs = shared_storages.shared(host)
    found = dict[str, str]()
    jobs = _doubted().filter(host__in={host.pk, *(pair.other.host_id for pair in pairs)})
    for job in jobs.order_by("pk"):
        for path in [os.fsencode(path) for over in in_doubt(job) for path in over]:
            here = [pair.here(path) for pair in pairs if pair.other.host_id == job.host_id]
            told = gettext("A guest of another host may have its last writes in it.")  # who reads may not know it
            if job.host_id == host.pk:
                here, told = [path, *here], _told(job)
            found |= dict.fromkeys([display(one) for one in here if one is not None], told)
    return found


def _doubted() -> QuerySet[Job]:
    ended = Job.objects.filter(target_kind="guest", kept__has_key=BEGUN, finished__gt=timezone.now() - DOUBTED)
    return ended.exclude(state=Job.State.SUCCEEDED).only("error_detail", "kept", "host")


def _told(job: Job) -> str:
    return gettext("Job {job} said: {detail}").format(job=job.pk, detail=job.error_detail)


def ended_unseen(guest: Guest, over: Iterable[Sequence[str]]) -> HostError:
    """What is said where a guest may have gone on in another image, and nobody knows.

    Args:
        over: pairs of paths, of an image and of the other one.
    """
    sentence = gettext(
        "libvirt does not know whether {guest} was switched over ({over}): the guest has ended, or runs on without "
        "libvirt. Its last writes may be in the second file alone. All files are kept. Before the guest is started, "
        "look who has them open (lsof), and check which of them was written to last."
    )
    told = "; ".join(gettext("from {before} to {after}").format(before=one, after=other) for one, other in over)
    return HostError(sentence.format(guest=guest.name, over=told), GUEST_ENDED)


def settled(guest: Guest, wanted: Wanted, ended: Ended, *, cancelled: bool) -> dict[str, Any]:
    """What came of it, by what the disk stands on now.

    Raises:
        StoppedError: it was cancelled, and stands as before.
        HostError: it stands as before, or on something else; or the guest has ended.
    """
    told = {"disk": wanted.disk, "before": {"chain": wanted.chain}, "now": {"chain": ended.chain}, "chain": ended.chain}
    if not ended.active:
        sentence = gettext(
            "{guest} has ended, and nobody saw the end of the block job. No data of the guest is lost: its disk "
            "has the chain that the headers name."
        )
        raise HostError(sentence.format(guest=guest.name), GUEST_ENDED)
    if ended.chain == wanted.result:
        if ended.later is not None and ended.later != ended.chain[0]:
            sentence = gettext(
                "{disk} of {guest} runs on {now} now, and its definition names {later} for the next start: mend "
                "that with virsh edit before the guest is shut down."
            )
            raise HostError(
                sentence.format(
                    disk=wanted.disk, guest=guest.name, now=ended.chain[0], later=ended.later or gettext("nothing")
                )
            )
        words = (
            f"{wanted.disk} of {guest.name} had {len(wanted.chain) - 1} images below its own, and has "
            f"{len(ended.chain) - 1} now."
        )
        if wanted.target is not None:
            words = f"{wanted.disk} of {guest.name} is {ended.chain[0]} now; {wanted.chain[0]} stays as it was then."
        return told | {"words": words}
    if ended.chain == wanted.chain:
        if cancelled:
            raise StoppedError(
                protocol.CANCELLED,
                gettext("Cancelled: QEMU gave the block job up, and the disk has the same chain as before."),
            )
        raise HostError(
            gettext(
                "QEMU ended the block job before it was done: another program aborted it, or a read or a write failed "
                "(see the guest's log on its host). The disk has the same chain as before."
            )
        )
    sentence = gettext("{disk} of {guest} has another chain than planned: {chain}. Scan the host and look.")
    raise HostError(
        sentence.format(disk=wanted.disk, guest=guest.name, chain=", ".join(ended.chain) or gettext("none"))
    )
