"""Lines of the ledger for jobs that ended before there was one, from what their results say."""

from datetime import datetime, timezone

from django.db import migrations

#: Rows that are written at once.
PART = 500
COLUMNS = [
    "before_bytes", "after_bytes", "freed_bytes", "freed_at", "freed_month", "predicted_bytes", "space_pool", "host_name",
    "pool_name",
]


def line_of(job):
    """What a job's result says of space: pool's id, before, after, freed (bytes), when; ``None`` where it says nothing.

    The plan says which pool the new file came into. A conversion beside its original takes what the new file occupies.
    """
    result, plan = job.result or {}, job.plan or {}
    before, after = result.get("before_bytes"), result.get("after_bytes")
    if not isinstance(before, int) or not isinstance(after, int):
        return None
    pool = result.get("pool") or plan.get("scratch_pool")
    if job.kind == "convert" and not job.options.get("replace"):
        return pool, 0, after, -after, job.finished
    if not result.get("swapped") and before == after:
        return None
    if job.undo_state in {"available", "undone"}:
        return pool, before, after, 0, None
    freed = result.get("freed_bytes")
    at = datetime.fromisoformat(result["freed_at"]) if result.get("freed_at") else job.finished
    return pool, before, after, freed if isinstance(freed, int) else before - after, at


def write_lines(apps, schema_editor):
    jobs, pools = apps.get_model("jobs", "Job"), apps.get_model("hosts", "StoragePool")
    names = dict(pools.objects.values_list("pk", "name"))
    ended = jobs.objects.filter(state="succeeded", rewrites=True, result__isnull=False, freed_bytes__isnull=True)
    ended = ended.exclude(kind__in=["undo", "discard_undo"]).select_related("host").order_by("pk")
    last = 0
    while part := list(ended.filter(pk__gt=last)[:PART]):
        last = part[-1].pk
        told = []
        for job in part:
            if (line := line_of(job)) is None:
                continue
            pool, job.before_bytes, job.after_bytes, job.freed_bytes, job.freed_at = line
            predicted, before = (job.plan or {}).get("predicted_after_bytes"), (job.plan or {}).get("before_bytes")
            if isinstance(predicted, int) and isinstance(before, int):
                job.predicted_bytes = before - predicted
            job.space_pool_id = pool if pool in names else None
            job.host_name, job.pool_name = job.host.name, names.get(pool, "")
            job.freed_month = job.freed_at.astimezone(timezone.utc).strftime("%Y-%m") if job.freed_at else ""
            told.append(job)
        jobs.objects.bulk_update(
            told,
            COLUMNS,
        )


class Migration(migrations.Migration):
    dependencies = [
        ("jobs", "0006_ledger"),
    ]

    operations = [
        migrations.RunPython(write_lines, migrations.RunPython.noop),
    ]
