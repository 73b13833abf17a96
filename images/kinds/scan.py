"""The job kind ``scan``: a host's pools, guests and images as they are now."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from django.db.models import Exists, OuterRef, QuerySet
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.models import Image
from images.rewrite import refusals, space
from images.rewrite import wait_for_guests as waiting
from images.scan import from_libvirt, from_proxmox, hypervisors, known
from images.scan import run as scanning
from images.scan.run import ScanRun
from storage_admin.accounts.models import SYSTEM
from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError, StoppedError, b64
from storage_admin.guests import backups
from storage_admin.guests import services as guests
from storage_admin.hosts import transport
from storage_admin.hosts.libvirt import pools as libvirt_pools
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.libvirt.reader import LibvirtFacts
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.kinds import HostKind
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Recorder


class Scan(HostKind):
    """Walks the pools of a host, reads the headers of what is new or changed, and asks libvirt for guests."""

    name = "scan"
    title = _("Scan")
    description = _("Reads the current images and guests of the host. Changes nothing on the host.")
    verb = "scan"
    looks = True
    single = True
    share = 0.8
    progress_in_bytes = False

    def __init__(self) -> None:
        self._runs: dict[int, ScanRun] = {}

    def request(self, job: Job) -> dict[str, Any]:
        libvirt, error = self._ask_libvirt(job.host)
        rows = libvirt_pools.sync(job.host, libvirt.pools) if libvirt is not None else {}
        others = hypervisors.ask(job.host)
        for one in others:
            if one.proxmox is not None:
                scanning.add_storages(job.host, one.proxmox)
        pools = {pool.pk: pool for pool in StoragePool.objects.filter(host=job.host)}
        told = [*(libvirt.domains if libvirt is not None else ()), *(guest for one in others for guest in one.guests)]
        named = guests.disk_paths(told)
        asked = list(dict.fromkeys([*named, *known.probe_paths(job.host)]))
        run = self._runs[job.pk] = ScanRun(job, pools, libvirt, error, asked, others)
        if libvirt is not None:
            for event in from_libvirt.beside_an_agent(job.host, libvirt, rows):
                run.hold(event)
        self._take_volumes(job, run, run.hold)
        return {
            "pools": [
                {
                    "id": pool.pk,
                    "path_b64": b64(bytes(pool.path_bytes)),
                    "kind": layout(pool),
                    "known_b64": known.known_fingerprints(pool),
                }
                for pool in pools.values()
                if pool.kind in refusals.FOLDERS and pool.path_bytes
            ],
            "named_b64": [b64(path) for path in named],
            "probe_b64": [b64(path) for path in asked],
            "programs": job.host.capabilities.get("programs"),
        }

    def _start(self, job: Job, run: ScanRun) -> ScanRun:
        self._runs[job.pk] = run
        return run

    @staticmethod
    def _take_volumes(job: Job, run: ScanRun, take: Callable[[dict[str, Any]], None]) -> None:
        """Takes what the API of Proxmox VE told of volumes that no agent reads."""
        for told in run.others:
            if told.answered and told.proxmox is not None:
                for event in from_proxmox.events(job.host, told.proxmox, job.pk):
                    take(event)

    @staticmethod
    def _ask_libvirt(host: Host) -> tuple[LibvirtFacts | None, str]:
        try:
            return reader.read(host), ""
        except HostError as error:
            if error.code == "host_unreachable" and transport.by_ssh(host):
                raise  # whoever else is asked there would cost the same time once more
            return None, error.detail

    def in_controller(self, job: Job) -> bool:
        host = job.host
        return transport.by_libvirt_alone(host) or host.transport == Host.Transport.PLAIN or host.by_api_alone

    def work(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        """A scan of a host on which no agent runs."""
        if job.host.transport == Host.Transport.PLAIN:
            recorder.progress({"stage": "asking vzlist"})
            recorder.tick()
            self._runs[job.pk] = ScanRun(job, {}, None, "", [], [hypervisors.containers_of(job.host)])
            return {}
        if job.host.by_api_alone:
            recorder.progress({"stage": "querying the API"})
            recorder.tick()
            told = hypervisors.guests_by_api(job.host)
            shown = {pool.pk: pool for pool in from_proxmox.shown_pools(job.host)}
            run = self._start(job, ScanRun(job, shown, None, "", [], [told]))
            self._take_volumes(job, run, run.take)
            return {}
        recorder.progress({"stage": "asking libvirt"})
        recorder.tick()
        facts = from_libvirt.facts_of(job.host)
        rows = libvirt_pools.sync(job.host, facts.pools)
        pools = {pool.pk: pool for pool in StoragePool.objects.filter(host=job.host)}
        run = self._runs[job.pk] = ScanRun(job, pools, facts, "", [])
        for event in from_libvirt.without_an_agent(job.host, facts, rows):
            run.take(event)
            recorder.tick()
            if recorder.cancel_requested:
                raise StoppedError(protocol.CANCELLED, gettext("Cancelled. The results of the previous scan are kept."))
        return {}

    def on_event(self, job: Job, event: dict[str, Any]) -> None:
        self._runs[job.pk].take(event)

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002 (events told everything)
        run = self._runs[job.pk]
        done = run.finish()
        for told in run.others:
            if told.proxmox is not None:
                backups.record(job.host, told.proxmox, run.at)
        return done

    def ended(self, job: Job) -> None:
        run = self._runs.pop(job.pk, None)
        job.refresh_from_db(fields=["state"])
        if run is None or job.state != Job.State.SUCCEEDED:
            return
        if run.new_pools:
            services.submit(SYSTEM, "scan", job.host_id, {})
        if (run.leftovers and run.leftovers > self._waiting_copies(job)) or self._copies_are_missing(job, run):
            services.submit(SYSTEM, "recover", job.host_id, {})
        if not self.in_controller(job) and space.due_for_estimates(job.host_id).exists():
            services.submit(SYSTEM, "sample", job.host_id, {})
        if space.due_for_exclusive_sizes(job.host_id):
            services.submit(SYSTEM, "exclusive", job.host_id, {})
        waiting.look(job.host_id, starts=False)

    @staticmethod
    def _waiting_copies(job: Job) -> int:
        """How many journals are as they should be: of undo copies and images set aside that wait, of jobs at work."""
        jobs = Job.objects.filter(host=job.host_id)
        at_work = jobs.filter(state=Job.State.RUNNING, rewrites=True).count()
        aside = Image.objects.filter(host=job.host_id, aside_since__isnull=False).count()
        return jobs.filter(undo_state=Job.UndoState.AVAILABLE).count() + aside + at_work

    @staticmethod
    def _copies_are_missing(job: Job, run: ScanRun) -> bool:
        """Whether a pool holds fewer undo copies, or images set aside, than it should; a recovery then tells which."""
        jobs = Job.objects.filter(host=job.host_id, undo_state=Job.UndoState.AVAILABLE, target_kind="image")
        # What was kept, or given up, while the scan walked may have been counted or not: the next scan sees it.
        jobs = jobs.filter(finished__lt=job.started or job.created)
        at_it = Job.objects.filter(target_kind="job", target_id=OuterRef("pk"), state__in=Job.ACTIVE)
        ids = list(jobs.exclude(Exists(at_it)).values_list("target_id", flat=True))
        pools = dict(Image.every.filter(pk__in=ids).values_list("pk", "pool_id"))
        expected = Counter(pools[image] for image in ids if image in pools)
        found = run.counted("undo_copies")
        aside = Image.objects.filter(host=job.host_id, aside_since__lt=job.started or job.created)
        waiting = Counter(aside.exclude(Exists(_at_work_on(OuterRef("pk")))).values_list("pool_id", flat=True))
        return any(
            there[pool] < count
            for wanted, there in ((expected, found), (waiting, run.counted("asides")))
            for pool, count in wanted.items()
            if pool in there
        )


def _at_work_on(image: OuterRef) -> QuerySet[Job]:
    return Job.objects.filter(target_kind="image", target_id=image, state__in=Job.ACTIVE)


def layout(pool: StoragePool) -> str:
    """How the agent walks a pool: which of its folders and files may be images."""
    match pool.source:
        case StoragePool.Source.LIBVIRT | StoragePool.Source.STANDARD:
            return "libvirt"
        case StoragePool.Source.PROXMOX:
            return "proxmox"
        case _:
            return "dir"
