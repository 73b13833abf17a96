"""The nights themselves: what is set up once, a night with its fault, a day, and what has to be true afterwards."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from django.db import connection
from django.test import Client

from images import tasks
from images.models import Image, Policy, PolicyPick, PolicyRun
from images.rewrite import holding, refusals
from storage_admin.accounts.models import SYSTEM, Actor, Role, User
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts import secrets
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.services import add_pool, ensure_local_host
from storage_admin.jobs import reaper, services
from storage_admin.jobs.models import Job
from tests.nights import faults
from tests.nights.disks import allocated_bytes
from tests.nights.site import Place, Site

BERLIN = ZoneInfo("Europe/Berlin")
#: Seconds that a night may take here before it counts as stuck.
PATIENCE = 600
#: Between the first of a night's windows and the moment at which all are open, at most.
EVENING = timedelta(hours=4)
#: Nights that may follow for faults which came when all work was done: on few images a night is short.
MORE_NIGHTS = 3
#: What goes wrong in which night; the first is a quiet one.
FAULTS: tuple[tuple[faults.Fault, ...], ...] = (
    (),
    (faults.kill_worker,),
    (faults.flush_redis, faults.guests_start),
    (faults.host_away,),
    (faults.disk_full,),
    (faults.guests_start, faults.kill_agents),
    (faults.restart_redis, faults.kill_worker),
    (faults.host_away, faults.disk_full),
    (faults.kill_agents, faults.flush_redis, faults.kill_worker, faults.guests_start),
    (),
)
#: For a few nights, in which the same has to be seen; what takes longest comes last.
FEW: tuple[tuple[faults.Fault, ...], ...] = (
    (faults.kill_worker, faults.guests_start),
    (faults.flush_redis, faults.host_away),
)
#: The slugs of the hosts that each is for, and what it says.
POLICIES: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("local", "north"),
        # With what grew back, so that every night has work; the next one leaves that out.
        {"name": "nightly compaction", "options": {"method": "auto", "undo_hours": 20}, "max_jobs_per_host": 2,
         "include_decayed": True},
    ),
    # Needs scratch space and keeps both files, where hardly any is left.
    (
        ("south",),
        {"name": "the full pool", "options": {"method": "compress", "undo_hours": 20}, "max_jobs_per_host": 2},
    ),
    (
        ("local", "north", "south"),
        {"name": "short chains", "kind": "flatten", "options": {"undo_hours": 4}, "min_chain_depth": 3,
         "cron": "30 23 * * *"},
    ),
)  # fmt: skip


def run(site: Site, count: int) -> int:
    """All nights, and the end: every undo copy is gone, and the sums are compared."""
    began = {place.slug: allocated_bytes(place.pool) for place in site.places}
    struck: Counter[str] = Counter()
    plan = FEW if count <= len(FEW) else FAULTS
    client = _client()
    hosts = _register(site)
    evening = (site.clock.now().astimezone(BERLIN) + timedelta(days=1)).replace(hour=20, minute=0, second=0)
    number = 0
    late: tuple[faults.Fault, ...] = ()
    while number < count or (late and number < count + MORE_NIGHTS):
        site.move_to(evening + timedelta(days=number))
        site.start_worker()
        if number:
            for place in site.places:
                place.disks.day(0.15)
            site.places[0].disks.added()
        _scan(site, hosts)
        _decide()
        if not number:
            _policies(client, hosts)
        # Windows open at 22:00 and at 23:30.
        site.move_to(evening.replace(hour=23, minute=30, second=5) + timedelta(days=number))
        tonight = late + (plan[number % len(plan)] if number < count else ())
        struck += _night(site, tonight, site.clock.now())
        _truths(site, number, evening)
        late = tuple(fault for fault in tonight if fault.__name__ not in struck)
        number += 1
    print(f"struck while images were rewritten: {dict(struck)}", flush=True)
    assert not late, f"never struck while an image was rewritten: {late}"
    refused = PolicyPick.objects.filter(host__slug=site.places[-1].slug, code="not_enough_space")
    assert refused.exists(), "everything fitted into the full pool, every night"
    return _balance(site, hosts, began)


def _client() -> Client:
    admin = User.objects.create_user("ada", password="x", role="admin")
    client = Client(raise_request_exception=True)
    client.force_login(admin)
    return client


def _register(site: Site) -> list[Host]:
    hosts = []
    for place in site.places:
        if place.server is None:
            host = ensure_local_host()
            host.pools.all().delete()
        else:
            host = Host.objects.create(
                slug=place.slug, name=place.slug, kind=Host.Kind.SSH, transport=Host.Transport.SSH, max_jobs=2,
                address="127.0.0.1", port=place.server.port, user="root", host_key=place.server.host_key,
                private_key_locked=secrets.lock(place.server.private_key),
            )  # fmt: skip
        add_pool(host, bytes(place.pool), StoragePool.Source.ADMIN)
        hosts.append(host)
    return hosts


def _policies(client: Client, hosts: list[Host]) -> None:
    ids = {host.slug: host.pk for host in hosts}
    for slugs, fields in POLICIES:
        body = {
            "hosts": [ids[slug] for slug in slugs], "min_reclaimable_bytes": 64 << 10,
            "cron": "0 22 * * *", "timezone": "Europe/Berlin", "window_minutes": 360,
        } | fields  # fmt: skip
        answer = client.post("/api/v1/policies/", body, content_type="application/json")
        assert answer.status_code == 201, answer.content


def _scan(site: Site, hosts: list[Host]) -> None:
    """Scans every host until each has answered: a host that was away is back by then, but this machine may be slow."""

    def answered() -> bool:
        if Job.objects.filter(state__in=Job.ACTIVE).exists():
            return False
        silent = [
            host for host in hosts if not Host.objects.filter(pk=host.pk, status="ok", last_seen__gt=begun).exists()
        ]
        for host in silent:
            services.submit(SYSTEM, "scan", host.pk, {})
        return not silent

    begun = site.clock.now()
    _until(site, answered, "every host has answered a scan")


def _night(site: Site, plan: tuple[faults.Fault, ...], opened: datetime) -> Counter[str]:
    """Two schedulers ring all night; the faults come one after the other while jobs are at work.

    Returns:
        How often each fault struck while an image was rewritten, by its name; the others came when all had ended.
    """
    struck: Counter[str] = Counter()

    def over() -> bool:
        """Whether every window of tonight has become a run, and all of them are done."""
        return _settled() and PolicyRun.objects.filter(due__gte=opened - EVENING).count() == len(POLICIES)

    def something_runs() -> bool:
        return Job.objects.filter(state=Job.State.RUNNING, rewrites=True).exists()

    with site.watched(refusals.RESERVE_BYTES):
        ringing = _schedulers()
        try:
            for fault in plan:
                _until(site, something_runs, "a job begins", or_else=over, every=0.05)
                time.sleep(site.rng.uniform(0.0, 1.5))
                _until(site, something_runs, "another job begins", or_else=over, every=0.05)
                struck.update([fault.__name__] if something_runs() else [])
                fault(site)
            _until(site, over, f"the end of the night of {opened}")
        finally:
            ringing()
    return struck


def _settled() -> bool:
    active = Job.objects.filter(state__in=Job.ACTIVE).exists() or Job.objects.filter(needs_recovery=True).exists()
    return not active and not PolicyRun.objects.filter(state="running").exists()


def _schedulers() -> Callable[[], None]:
    """Two that ring at the same time; the answer ends them, and raises what they raised."""
    stop, raised = threading.Event(), []

    def ring() -> None:
        try:
            while not stop.is_set():
                _tick()
                stop.wait(0.5)
        except BaseException as error:  # noqa: BLE001 (told by who waits for it)
            raised.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=ring, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()

    def end() -> None:
        stop.set()
        for thread in threads:
            thread.join()
        if raised:
            raise raised[0]

    return end


def _tick() -> None:
    tasks.advance_policies()
    tasks.expire_undo()
    reaper.reap()
    reaper.recover_hosts()
    reaper.sweep()


def _until(
    site: Site, happened: Callable[[], bool], what: str, or_else: Callable[[], bool] | None = None, every: float = 0.25
) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        if or_else is not None and or_else():
            return
        if time.monotonic() > deadline:
            active = Job.objects.filter(state__in=Job.ACTIVE)
            told = list(active.values_list("id", "kind", "state", "stage", "waiting_for", "host__slug"))
            runs = list(PolicyRun.objects.filter(state="running").values_list("id", "policy__name"))
            raise AssertionError(f"{what}: not within {PATIENCE} s; {told} {runs}\n{site.worker.said()[-3000:]}")
        time.sleep(every)


def _truths(site: Site, number: int, evening: datetime) -> None:
    """What holds after each night."""
    tonight = PolicyRun.objects.filter(due__gte=evening + timedelta(days=number))
    runs = Counter(tonight.values_list("policy_id", flat=True))
    assert set(runs.values()) == {1}, runs
    assert len(runs) == len(POLICIES), runs
    picks = PolicyPick.objects.filter(run__in=tonight)
    mute = picks.filter(state__in=("skipped", "failed"), reason="")
    assert not mute.exists(), list(mute.values_list("label", "state", "code"))
    doubled = Counter(picks.exclude(job=None).values_list("run_id", "image_id"))
    assert not doubled or max(doubled.values()) == 1, doubled
    # A job that no run knows would be one that a second scheduler submitted.
    known = set(PolicyPick.objects.exclude(job=None).values_list("job_id", flat=True))
    strays = Job.objects.filter(created_by__startswith="policy ").exclude(pk__in=known)
    assert not strays.exists(), list(strays.values_list("id", "kind", "target_label", "state"))
    assert not picks.filter(state__in=("chosen", "submitted")).exists()
    for place in site.places:
        place.disks.verify()
        _only_what_is_known(place)
    full = site.places[-1]
    assert not full.overdrawn, _who_took_it(full)
    states = Counter(picks.values_list("state", flat=True))
    reasons = Counter(picks.exclude(code="").values_list("code", flat=True))
    print(f"night {number + 1}: {dict(states)}; {dict(reasons)}", flush=True)


def _who_took_it(place: Place) -> str:
    """The jobs of the pool in the order in which they began, with what each was to need and took."""
    rows = Job.objects.filter(host__slug=place.slug, rewrites=True).exclude(started=None).order_by("started")
    lines = [
        f"{job.started:%H:%M:%S.%f} to {job.finished:%H:%M:%S.%f} {job.kind} {job.target_label} {job.state} "
        f"{job.error_code}: planned {job.plan.get('scratch_bytes')}, {job.before_bytes} before, {job.after_bytes} after"
        for job in rows
    ]
    return "\n".join([f"{place.overdrawn} bytes below what is to be left, at {place.overdrawn_at}", *lines])


def _only_what_is_known(place: Place) -> None:
    """Nothing of ours lies there but undo copies that are still wanted."""
    wanted = set(Job.objects.filter(undo_state="available").values_list("uid", flat=True))
    for path in place.pool.glob(".sa-*"):
        uid, _, what = path.name.removeprefix(".sa-").rpartition(".")
        assert uid in wanted, (path.name, list(Job.objects.filter(uid=uid).values_list("id", "state", "error_detail")))
        assert what in {"orig", "journal"}, path.name


def _decide() -> bool:
    """An admin looks at the copies that may be the last good ones: images were written to by nobody who is known."""
    for job, _why in holding.kept(1000):
        with contextlib.suppress(RefusedError):
            services.discard_undo(Actor("ada", Role.ADMIN), job, force=True)
    return True


def _balance(site: Site, hosts: list[Host], began: dict[str, int]) -> int:
    """Three days later no undo copy is left, and what the ledger says was won is what the disks say."""
    site.move_to(site.clock.now() + timedelta(days=3))
    site.start_worker()
    Policy.objects.update(enabled=False)
    _scan(site, hosts)
    stop = _schedulers()
    try:
        _until(
            site,
            lambda: _settled() and _decide() and not Job.objects.filter(undo_state="available").exists(),
            "undo copies go",
        )
    finally:
        stop()
    wrong = 0
    for place, host in zip(site.places, hosts, strict=True):
        place.disks.verify()
        assert not list(place.pool.glob(".sa-*"))
        changed = began[place.slug] + place.disks.by_others - allocated_bytes(place.pool)
        told = _freed(host)
        print(f"{place.slug}: the ledger says {told:,} bytes were freed, the disk says {changed:,}", flush=True)
        wrong += told != changed
    print(f"images {Image.objects.count()}, jobs {Job.objects.count()}, runs {PolicyRun.objects.count()}")
    return int(bool(wrong))


def _freed(host: Host) -> int:
    """As the ledger's summary tells it over REST."""
    client = _viewer()
    answer = client.get("/api/v1/ledger/summary/", {"host": host.pk})
    assert answer.status_code == 200, answer.content
    return int(answer.json()["freed_bytes"])


def _viewer() -> Client:
    user, _made = User.objects.get_or_create(username="vera", defaults={"role": "viewer"})
    client = Client()
    client.force_login(user)
    return client
