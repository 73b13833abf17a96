"""Numbers of the work for ``/metrics``: jobs, the ledger, policies, alerts, deliveries.

No question reads more than the newest ``RECENT_ROWS`` jobs in full; the others are answered from indexes.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from itertools import accumulate
from statistics import median

from django.db.models import Count, Min, Sum
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from images.ledger.selectors import HELD, lines, unindexed
from images.models import Policy, PolicyRun
from images.policies.selectors import last_runs
from storage_admin.accounts.models import SYSTEM
from storage_admin.events.models import Alert, Delivery
from storage_admin.events.services import KINDS as ALERT_KINDS
from storage_admin.jobs import automation
from storage_admin.jobs.models import Job
from storage_admin.spans import Milliseconds

#: How far back “recent” jobs go, and how many rows are looked at for them at most.
RECENT = timedelta(hours=24)
RECENT_ROWS = 5_000
KIND = unindexed("kind")
#: Upper bounds of the histogram, in seconds: from a small image's copy to half a day.
BUCKETS = (1, 5, 15, 60, 300, 900, 3_600, 14_400, 43_200)


def work(now: datetime) -> Iterable[Metric]:
    """All of them, as of now."""
    yield _jobs()
    yield from _queue(now)
    yield from _recent(now)
    yield _durations()
    yield from _ledger()
    yield from _policies()
    yield from _alerts()
    yield from _deliveries(now)


def _jobs() -> Metric:
    gauge = GaugeMetricFamily("storage_admin_jobs", "Jobs by state", labels=["state"])
    counts = dict(Job.objects.order_by().values_list("state").annotate(Count("id")))
    for state in Job.State.values:
        gauge.add_metric([state], counts.get(state, 0))
    return gauge


def _queue(now: datetime) -> Iterable[Metric]:
    """Who waits for a guest to be shut down waits for people; how old that is says nothing of the queue."""
    active = GaugeMetricFamily("storage_admin_jobs_active", "Queued and running jobs", labels=["host", "kind", "state"])
    parked = GaugeMetricFamily(
        "storage_admin_jobs_parked", "Queued jobs that wait for a guest to shut down", labels=["host", "kind"]
    )
    oldest = GaugeMetricFamily(
        "storage_admin_queue_oldest_age_seconds",
        "Age of the oldest queued job that does not wait for a guest, a file or a passphrase",
        labels=["host", "kind"],
    )
    rows = Job.objects.filter(state__in=Job.ACTIVE).order_by()
    for host, kind, state, count in rows.values_list("host__slug", "kind", "state").annotate(Count("id")):
        active.add_metric([host, kind, state], count)
    queued = rows.filter(state=Job.State.QUEUED)
    waiting = queued.filter(parked_at__isnull=False, parked_for=Job.ParkedFor.GUESTS)
    for host, kind, count in waiting.values_list("host__slug", "kind").annotate(Count("id")):
        parked.add_metric([host, kind], count)
    free = queued.filter(parked_at__isnull=True)
    for host, kind, since in free.values_list("host__slug", "kind").annotate(Min("created")):
        oldest.add_metric([host, kind], max((now - since).total_seconds(), 0.0))
    return active, parked, oldest


def _recent(now: datetime) -> Iterable[Metric]:
    """Jobs that were submitted in the last day and have ended, by kind and state."""
    ended = GaugeMetricFamily(
        "storage_admin_recent_jobs_ended",
        "Jobs submitted within storage_admin_recent_window_seconds that have ended",
        labels=["kind", "state"],
    )
    middle = GaugeMetricFamily(
        "storage_admin_recent_jobs_median_seconds", "Median run time of the recent jobs", labels=["kind"]
    )
    longest = GaugeMetricFamily(
        "storage_admin_recent_jobs_longest_seconds", "Longest run time of the recent jobs", labels=["kind"]
    )
    window = GaugeMetricFamily(
        "storage_admin_recent_window_seconds",
        f"Period of the recent jobs: a day, or less if more than {RECENT_ROWS} jobs were submitted in it",
    )
    newest = Job.objects.order_by("-id").values_list("kind", "state", "created", "started", "finished")[:RECENT_ROWS]
    begin, looked_at, oldest = now - RECENT, 0, now
    counts: Counter[tuple[str, str]] = Counter()
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    # Ids and times rise together: what follows an older one is older still, and is not read.
    for kind, state, created, started, finished in newest.iterator(chunk_size=500):
        if created < begin:
            break
        looked_at, oldest = looked_at + 1, created
        if finished is None:
            continue
        counts[kind, state] += 1
        if started is not None:
            seconds[kind].append((finished - started).total_seconds())
    for (kind, state), count in sorted(counts.items()):
        ended.add_metric([kind, state], count)
    for kind, took in sorted(seconds.items()):
        middle.add_metric([kind], median(took))
        longest.add_metric([kind], max(took))
    if looked_at == RECENT_ROWS:
        begin = oldest
    window.add_metric([], (now - begin).total_seconds())
    return ended, middle, longest, window


def _durations() -> Metric:
    """Of the ledger's jobs: their rows are never deleted, so this only counts up, whichever process is asked."""
    histogram = HistogramMetricFamily(
        "storage_admin_job_duration_seconds", "Run time of jobs that freed or consumed space (those in the ledger)",
        labels=["kind"],
    )  # fmt: skip
    took = Milliseconds("finished", "started")
    # Whole seconds, rounded up: the buckets' bounds are whole, so that no job comes into another bucket.
    seconds = (took + 999) / 1000
    groups = lines(Job.objects.all()).order_by().filter(started__isnull=False, finished__isnull=False)
    found: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for kind, *group in groups.values_list(KIND, seconds).annotate(jobs=Count("id"), took=Sum(took)):
        found[kind].append((*group,))
    for kind, ended in sorted(found.items()):
        counts = [0] * (len(BUCKETS) + 1)
        for whole, count, _ in ended:
            counts[bisect_left(BUCKETS, whole)] += count
        bounds = [*map(str, map(float, BUCKETS)), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(counts)), strict=True))
        histogram.add_metric([kind], buckets, sum(milliseconds for _, _, milliseconds in ended) / 1000)
    return histogram


def _ledger() -> Iterable[Metric]:
    freed = GaugeMetricFamily(
        "storage_admin_ledger_freed_bytes",
        "Net space freed by jobs; falls when a job consumes space",
        labels=["kind"],
    )
    for kind, value in lines(Job.objects.all()).order_by().values_list(KIND).annotate(Sum("freed_bytes")):
        freed.add_metric([kind], value or 0)
    held = lines(Job.objects.all()).filter(HELD).order_by().aggregate(held=Sum("undo_bytes"), copies=Count("id"))
    yield freed
    yield GaugeMetricFamily("storage_admin_undo_held_bytes", "Space held by undo copies", value=held["held"] or 0)
    yield GaugeMetricFamily("storage_admin_undo_copies", "Undo copies that have not expired", value=held["copies"])


def _policies() -> Iterable[Metric]:
    enabled = GaugeMetricFamily("storage_admin_policy_enabled", "1 if the policy is enabled", labels=["policy"])
    state = GaugeMetricFamily(
        "storage_admin_policy_last_run_state", "1 for the state of the policy's last run, 0 for the others",
        labels=["policy", "state"],
    )  # fmt: skip
    due = GaugeMetricFamily(
        "storage_admin_policy_last_run_timestamp_seconds", "Time when the policy's last run was due", labels=["policy"]
    )
    policies = list(Policy.objects.order_by("name"))
    last = last_runs(SYSTEM, policies)
    for policy in policies:
        enabled.add_metric([policy.name], float(policy.enabled))
        if policy.pk not in last:
            continue
        run = last[policy.pk]
        due.add_metric([policy.name], run.due.timestamp())
        for name in PolicyRun.State.values:
            state.add_metric([policy.name, name], float(run.state == name))
    paused = float(automation.is_paused())
    yield from (enabled, state, due)
    yield GaugeMetricFamily("storage_admin_automation_paused", "1 if all automation is paused", value=paused)


def _alerts() -> Iterable[Metric]:
    shown = GaugeMetricFamily("storage_admin_alerts_open", "Open alerts", labels=["kind", "severity"])
    unseen = GaugeMetricFamily(
        "storage_admin_alerts_unacknowledged", "Open alerts that are not acknowledged", labels=["kind", "severity"]
    )
    rows = Alert.objects.filter(closed__isnull=True, told_under="").order_by()
    counts = {
        (kind, severity): (count, seen)
        for kind, severity, count, seen in rows.values_list("kind", "severity").annotate(
            Count("id"), Count("acknowledged")
        )
    }
    kinds = sorted({*ALERT_KINDS, *(kind for kind, _ in counts)})
    for kind in kinds:
        for severity in Alert.Severity.values:
            count, seen = counts.get((kind, severity), (0, 0))
            shown.add_metric([kind, severity], count)
            unseen.add_metric([kind, severity], count - seen)
    return shown, unseen


def _deliveries(now: datetime) -> Iterable[Metric]:
    due = Delivery.objects.filter(state=Delivery.State.DUE).order_by()
    found = due.aggregate(count=Count("id"), since=Min("event__at"))
    yield GaugeMetricFamily("storage_admin_deliveries_due", "Pending deliveries", value=found["count"])
    age = (now - found["since"]).total_seconds() if found["since"] else 0.0
    yield GaugeMetricFamily(
        "storage_admin_deliveries_oldest_due_age_seconds",
        "Age of the oldest event with a pending delivery",
        value=max(age, 0),
    )
    given_up = Delivery.objects.filter(state=Delivery.State.GIVEN_UP).count()
    yield GaugeMetricFamily(
        "storage_admin_deliveries_given_up", "Failed deliveries that are no longer retried", value=given_up
    )
